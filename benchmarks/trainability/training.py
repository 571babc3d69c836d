"""One training by fairseq's own ``main``, its figures, and the store of finished trainings."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional
from unittest import mock

from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as fairseq_train
from runs import Run
from starts import apply_start
from torch import nn

from fairseq_posenc.checkpoints.state_dict_adapter import is_position_parameter
from fairseq_posenc.workbench.running.logs import parse_line


class Recorder(logging.Handler):
    """Takes the figures of one training from fairseq's log while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Optional[nn.Module] = None
        self.first = math.nan
        self.training: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self.clock: list[float] = []
        self.gradients: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line of figures; losses in bits per token."""
        if record.name not in ("train_inner", "valid"):
            return
        entry = parse_line(f"| {record.name} | {record.getMessage()}")
        if entry is None:
            return
        loss = math.log2(entry.perplexity)
        if entry.kind == "valid":
            self.curve.append((entry.updates, round(loss, 4)))
            return
        self.clock.append(time.process_time())
        self.training.append(loss)
        if len(self.training) == 1:
            self.first = loss
            self.gradients = _gradient_sizes(self.model)

    def seconds(self) -> float:
        """Return seconds of processor time per 100 updates: 100 times the median update's."""
        steps = [after - before for before, after in zip(self.clock, self.clock[1:])]
        return 100 * statistics.median(steps) if steps else math.nan


def _gradient_sizes(model: Optional[nn.Module]) -> dict[str, float]:
    """Return root mean squares of the first update's gradients, which are still there."""
    found: dict[str, list[float]] = {"query projections": [], "position parameters": []}
    for name, value in model.named_parameters() if model else ():
        if value.grad is not None:
            size = value.grad.square().mean().sqrt().item()
            if name.endswith("self_attn.q_proj.weight"):
                found["query projections"].append(size)
            if is_position_parameter(name):
                found["position parameters"].append(size)
    return {name: statistics.mean(sizes) for name, sizes in found.items() if sizes}


@contextlib.contextmanager
def _recording(run: Run) -> Iterator[Recorder]:
    """Listen to the log, and change the start of the model that fairseq builds."""
    recorder = Recorder()
    build = models.build_model

    def build_model(*args: Any, **kwargs: Any) -> nn.Module:
        model = build(*args, **kwargs)
        apply_start(model, run)
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


def train(run: Run, data: Path) -> dict[str, Any]:
    """Train one model as ``fairseq-train`` does, and return its figures."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, input_args=run.command(data))
    began, diverged = time.monotonic(), ""
    with _recording(run) as recorder:
        try:
            fairseq_train.main(convert_namespace_to_omegaconf(args))
        except FloatingPointError as error:  # a finding, not a failure of the benchmark
            diverged = str(error).splitlines()[0]
    if recorder.model is None or not (recorder.curve or diverged):
        raise AssertionError(f"nothing was measured in {run}")
    sizes = {name: value.numel() for name, value in recorder.model.named_parameters()}
    return {
        "before": recorder.first,
        "curve": recorder.curve,
        "training": [round(statistics.mean(recorder.training[-20:]), 4)],
        "cpu_seconds_per_100": round(recorder.seconds(), 3),
        "wall_seconds": round(time.monotonic() - began, 1),
        "parameters": sum(sizes.values()),
        "position_parameters": sum(n for name, n in sizes.items() if is_position_parameter(name)),
        "gradients": recorder.gradients,
        "diverged": diverged,
    }


class Store:
    """Finished runs, a JSON line each."""

    def __init__(self, path: Path, data: dict[str, Path]) -> None:
        self._path = path
        self._data = data
        self._known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line cut off by an interruption
                    kept = json.loads(line)
                    self._known[json.dumps(kept["command"])] = kept

    def get(self, run: Run) -> dict[str, Any]:
        """Return the figures of a run, training it if that was not done before."""
        folder = self._data[run.family]
        command = [run.start, *run.command(folder)]
        key = json.dumps(command)
        if key not in self._known:
            figures = {**run._asdict(), **train(run, folder), "command": command}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
            self._known[key] = figures
            end = figures["curve"][-1][1] if figures["curve"] else math.nan
            print(
                f"{run.family}, {run.encoding}, {run.start} {shlex.join(run.extra)} seed "
                f"{run.seed}: {end:.3f} bits after {figures['wall_seconds']:.0f} s",
                flush=True,
            )
        return self._known[key]
