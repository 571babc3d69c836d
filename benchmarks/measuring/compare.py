"""Compares the time and memory of stock, of stock again, and of each contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from measuring import timing
from measuring.contenders import STOCK, Contender, contenders
from measuring.families import Case
from measuring.scopes import SCOPES

TOGETHER = 5  # models that are measured together: each has weights, gradients, Adam's means


class AttentionRow(NamedTuple):
    """Figures of an encoding on a backend; ratios are to fairseq's own attention."""

    scope: str  # ``op``, ``layer`` or ``model``
    device: str  # ``cpu`` or ``cuda``
    mode: str  # ``forward`` (evaluation) or ``training``
    encoding: str  # its spec, or ``stock``: fairseq's own again, which shows the noise
    backend: str  # name of the backend
    length: int  # n, tokens of a sentence
    batch: int  # sentences
    dropout: float  # probability
    dtype: str  # type of the numbers
    seconds: float  # of a pass, median
    memory: int  # peak of a pass's own allocations in bytes
    ratio: float  # of times, the median over rounds
    ratio_to_none: float  # the same, to our attention without positions on the same backend
    memory_ratio: float  # of peaks


def compare(
    scope: str,
    case: Case,
    encodings: Sequence[str],
    backends: Sequence[str],
    rounds: int,
    seconds: float,
) -> list[AttentionRow]:
    """Measure the rows of a case in one of :data:`SCOPES`, stock first.

    All passes take turns, up to a number of rounds or seconds (:func:`timing.interleaved`).
    """
    group = contenders(encodings, backends, case.dims, case.call)
    groups = chunks(group) if scope == "model" else [group]
    rows: dict[tuple[str, str], AttentionRow] = {}
    for some in groups:
        for row in _measure_rows(scope, case, [STOCK, STOCK, *some], rounds, seconds):
            rows.setdefault((row.encoding, row.backend), row)
    return list(rows.values())


def chunks(group: list[Contender]) -> list[list[Contender]]:
    """Split contenders into groups that fit into memory, with ``none`` on each one's backends."""
    plain = [result for result in group if result.encoding == "none"]
    others = [result for result in group if result.encoding != "none"]
    parts = [others[start : start + TOGETHER] for start in range(0, len(others), TOGETHER)]
    with_plain = []
    for part in parts:
        used = {result.backend for result in part}
        with_plain.append([*(result for result in plain if result.backend in used), *part])
    return with_plain or [plain]


def _measure_rows(
    scope: str, case: Case, everyone: list[Contender], rounds: int, seconds: float
) -> list[AttentionRow]:
    """Measure all contenders after the first one, stock, with which they are compared."""
    passes = [SCOPES[scope](contender, case) for contender in everyone]
    times = timing.interleaved(passes, case.device, rounds, seconds)
    memory = [timing.peak(run, case.device) for run in passes]
    rows = []
    for index, contender in enumerate(everyone):
        none = Contender("none", contender.backend)
        plain = everyone.index(none) if none in everyone else 0  # for stock itself
        rows.append(
            AttentionRow(
                scope=scope,
                device=case.device.type,
                mode=case.mode,
                encoding=contender.encoding,
                backend=contender.backend,
                length=case.length,
                batch=case.batch,
                dropout=case.dropout,
                dtype=str(case.dtype).removeprefix("torch."),
                seconds=timing.median(times, index),
                memory=memory[index],
                ratio=timing.ratio(times, index, 0),
                ratio_to_none=timing.ratio(times, index, plain),
                memory_ratio=memory[index] / max(memory[0], 1),
            )
        )
    if case.device.type == "cuda":
        del passes
        torch.cuda.empty_cache()
    return rows[1:]
