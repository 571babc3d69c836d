"""Trains a model with fairseq's own ``main``, and keeps its figures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import shlex
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest import mock

from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as fairseq_train
from starts import apply_start
from torch import nn

from fairseq_posenc.host.divergence import find_divergence
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.experiments.text_experiment import LEARNING_RATE, TRAIN_OPTIONS
from fairseq_posenc.workbench.experiments.variants import MASKED
from fairseq_posenc.workbench.running.jobs import RunContext, Step
from fairseq_posenc.workbench.running.logs import parse_line

_UPDATES = "--warmup-updates 100 --max-tokens 2048"
_ADAM = (
    f"--optimizer adam --adam-betas '(0.9, 0.98)' --lr {LEARNING_RATE} --lr-scheduler inverse_sqrt "
    f"{_UPDATES} --dropout 0 --criterion cross_entropy --required-batch-size-multiple 1"
)
# Options of `fairseq-train` by family; of a repeated option, the last value counts.
FAMILIES: dict[str, list[str]] = {
    "masked LM": [*TRAIN_OPTIONS[MASKED], *shlex.split(f"--lr {LEARNING_RATE} {_UPDATES}")],
    "translation": shlex.split(
        f"--task translation --arch transformer_none_tiny {_ADAM} --encoder-embed-dim 128 "
        "--encoder-ffn-embed-dim 512 --share-all-embeddings --skip-invalid-size-inputs-valid-test "
        "--max-tokens 1024 --max-source-positions 128 --max-target-positions 128"
    ),
    "causal LM": shlex.split(
        f"--task language_modeling --arch transformer_lm_none_tiny {_ADAM} --decoder-embed-dim 128 "
        "--decoder-input-dim 128 --decoder-output-dim 128 --decoder-ffn-embed-dim 512 "
        "--share-decoder-input-output-embed --sample-break-mode none --tokens-per-sample 64 "
        "--max-target-positions 64"
    ),
}


class TrainingRun(NamedTuple):
    """One training."""

    family: str  # a key of ``FAMILIES``
    encoding: str  # a spec
    seed: int  # of initial weights, order of the data, and masks
    updates: int  # number of training updates
    start: str = "plain"  # a key of ``STARTS``: how tables of ``m4m`` are drawn
    extra: tuple[str, ...] = ()  # options added to the family's

    def command(self, data: Path) -> list[str]:
        """List the options of ``fairseq-train``."""
        words = [str(data), *FAMILIES[self.family], "--position-encoding", self.encoding]
        # Validates every 50 updates, and never at the end of an epoch.
        words += shlex.split(
            f"--max-update {self.updates} --seed {self.seed} --no-save --validate-interval-updates "
            "50 --validate-interval 1000000000 --log-format json --log-interval 1 --num-workers 0 "
            "--cpu"
        )
        words += ["--save-dir", str(data.parent / "unused"), "--distributed-world-size", "1"]
        return [*words, *self.extra]


class Recorder(logging.Handler):
    """Takes the figures of one training from fairseq's log while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Optional[nn.Module] = None
        self.training: list[float] = []  # loss of each update
        self.curve: list[tuple[int, float]] = []  # updates and validation loss
        self.clock: list[float] = []  # processor time after each update
        self.gradients: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line of figures; losses in bits per token."""
        if record.name not in ("train_inner", "valid"):
            return
        entry = parse_line(f"| {record.name} | {record.getMessage()}")  # as in a log file
        if entry is None:
            return
        loss = math.log2(entry.perplexity)
        if entry.kind == "valid":
            self.curve.append((entry.updates, round(loss, 4)))
            return
        self.clock.append(time.process_time())
        self.training.append(loss)
        if len(self.training) == 1:
            self.gradients = _measure_gradients(self.model)

    def seconds(self) -> float:
        """Compute seconds of processor time per 100 updates: 100 times the median update's."""
        steps = [after - before for before, after in zip(self.clock, self.clock[1:])]
        return 100 * statistics.median(steps) if steps else math.nan


def _measure_gradients(model: Optional[nn.Module]) -> dict[str, float]:
    """Compute root mean squares of the gradients of the first update."""
    sizes: dict[str, list[float]] = {"query projections": [], "position parameters": []}
    for name, value in model.named_parameters() if model else ():
        if value.grad is not None:
            size = value.grad.square().mean().sqrt().item()
            if name.endswith("self_attn.q_proj.weight"):
                sizes["query projections"].append(size)
            if is_position_parameter(name):
                sizes["position parameters"].append(size)
    return {name: statistics.mean(values) for name, values in sizes.items() if values}


@contextlib.contextmanager
def _record_training(run: TrainingRun) -> Iterator[Recorder]:
    """Record the log; draw M4M's tables, in the model that fairseq builds, as ``start`` says."""
    recorder = Recorder()
    build = models.build_model

    def build_model(*args: Any, **kwargs: Any) -> nn.Module:
        model = build(*args, **kwargs)
        apply_start(model, run.start, run.seed)
        recorder.model = model
        return model

    root = logging.getLogger()
    root.addHandler(recorder)
    root.setLevel(logging.INFO)
    try:
        with mock.patch.object(models, "build_model", build_model):
            yield recorder
    finally:
        root.removeHandler(recorder)


def train(run: TrainingRun, data: Path) -> dict[str, Any]:
    """Train one model as ``fairseq-train`` does, and collect its figures."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=run.command(data))
    began = time.monotonic()
    diverged = ""
    with _record_training(run) as recorder:
        try:
            fairseq_train.main(convert_namespace_to_omegaconf(args))
        except Exception as error:
            divergence = find_divergence(error)  # a finding, not a failure of the benchmark
            if divergence is None:
                raise
            diverged = str(divergence).splitlines()[0]
    if recorder.model is None or not (recorder.curve or diverged):
        raise AssertionError(f"nothing was measured in {run}")
    seconds = time.monotonic() - began
    _, end = recorder.curve[-1] if recorder.curve else (0, math.nan)
    print(
        f"{run.family}, {run.encoding}, {run.start} {shlex.join(run.extra)} seed {run.seed}: "
        f"{end:.3f} bits after {seconds:.0f} s",
        flush=True,
    )
    return {
        "before": recorder.training[0] if recorder.training else math.nan,
        "curve": recorder.curve,
        "cpu_seconds_per_100": round(recorder.seconds(), 3),
        "gradients": recorder.gradients,
        "diverged": diverged,
    }


class Store:
    """Finished runs, each in a folder of its own below ``out``."""

    def __init__(self, out: Path, data: dict[str, Path]) -> None:
        self._out, self._data = out, data

    def get(self, run: TrainingRun) -> dict[str, Any]:
        """Look up the figures of a run; train it if it has none."""
        data = self._data[run.family]
        command = [run.start, *run.command(data)]
        name = hashlib.sha256(json.dumps(command).encode()).hexdigest()[:16]

        def work(_: RunContext) -> dict[str, Any]:
            return {**run._asdict(), **train(run, data)}

        return Step(self._out / name, {"command": command}, work).do()
