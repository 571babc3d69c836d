"""Compares the time and memory of stock, of stock again, and of each contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from measuring import timing
from measuring.contenders import STOCK, Contender, contenders
from measuring.families import Case
from measuring.page import Rows
from measuring.scopes import SCOPES

MODELS_TOGETHER = 5  # in memory, each with weights, gradients and Adam's moments


def compare(
    scope: str,
    case: Case,
    encodings: Sequence[str],
    backends: Sequence[str],
    rounds: int,
    seconds: float,
) -> Rows:
    """Measure the rows of a case in one of :data:`SCOPES`.

    The first row is stock again, and shows the noise. All passes take turns, up to a number of
    rounds or seconds (:func:`timing.interleaved`).
    """
    ours = contenders(encodings, backends, case.dims, case.call)

    def measure(group: list[Contender]) -> Rows:
        return _measure_rows(scope, case, [STOCK, STOCK, *group], rounds, seconds)

    return measure_in_groups(ours, measure) if scope == "model" else measure(ours)


def measure_in_groups(ours: list[Contender], measure: Callable[[list[Contender]], Rows]) -> Rows:
    """Measure groups of models that fit into memory; a row keeps its first group's figures."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for group in split_into_groups(ours):
        for row in measure(group):
            rows.setdefault((row["encoding"], row["backend"]), row)
    return list(rows.values())


def split_into_groups(ours: list[Contender]) -> list[list[Contender]]:
    """Split contenders into groups that fit into memory, each with ``none`` on its backends."""
    plain = [contender for contender in ours if contender.encoding == "none"]
    others = [contender for contender in ours if contender.encoding != "none"]
    groups = []
    for start in range(0, len(others), MODELS_TOGETHER):
        part = others[start : start + MODELS_TOGETHER]
        used = {contender.backend for contender in part}
        groups.append([*(none for none in plain if none.backend in used), *part])
    return groups or [plain]


def _measure_rows(
    scope: str, case: Case, group: list[Contender], rounds: int, seconds: float
) -> Rows:
    """Measure all contenders beside the first one, stock, with which they are compared."""
    passes = [SCOPES[scope](contender, case) for contender in group]
    times = timing.interleaved(passes, case.device, rounds, seconds)
    memory = [timing.peak(run, case.device) for run in passes]
    rows = []
    for index, contender in enumerate(group):
        none = Contender("none", contender.backend)
        none_index = group.index(none) if none in group else 0  # 0 is stock
        rows.append(
            {
                "scope": scope,
                "device": case.device.type,
                "mode": case.mode,
                "encoding": contender.encoding,
                "backend": contender.backend,
                "length": case.length,
                "dropout": case.dropout,
                "ratio": timing.ratio(times, index, 0),  # of times, to stock
                "memory_ratio": memory[index] / max(memory[0], 1),  # to stock
                "batch": case.batch,
                "dtype": str(case.dtype).removeprefix("torch."),
                "seconds": timing.median(times, index),
                "memory": memory[index],  # peak of a pass's own allocations, in bytes
                "ratio_to_none": timing.ratio(times, index, none_index),
            }
        )
    if case.device.type == "cuda":  # else the next case would have less memory
        del passes
        torch.cuda.empty_cache()
    return rows[1:]  # the first compares stock with itself
