"""Trains a run of GLUE, evaluates its best checkpoint, and predicts the test sets.

Training and evaluation each have a process of their own, on the GPU that the run was assigned;
``python -m fairseq_posenc.workbench.finetuning.glue.worker FOLDER`` evaluates.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq, see there)

# isort: split

import torch
from fairseq import utils
from torch import Tensor

from fairseq_posenc.checkpoints.recovery import BEST, LAST, ensure_last_checkpoint
from fairseq_posenc.checkpoints.safe_loading import open_mapped
from fairseq_posenc.files import write_whole
from fairseq_posenc.tasks.glue import metrics
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.tasks.glue.data import open_data
from fairseq_posenc.tasks.glue.definitions import Task
from fairseq_posenc.workbench.finetuning.glue.report import write_submission
from fairseq_posenc.workbench.finetuning.glue.runs import RESULT, GlueRun, format_override, read_run
from fairseq_posenc.workbench.loading.checkpoints import read_updates, updates_done, write_state
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.exit_codes import run_main, signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import read_json
from fairseq_posenc.workbench.running.jobs import Job, RunContext
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, parse_line
from fairseq_posenc.workbench.running.programs import run_logged

_THIS = "fairseq_posenc.workbench.finetuning.glue.worker"
_SUFFIXES = ("_m", "_mm")  # metrics' suffixes for two development sets
_BATCH = 32
_PAUSE = 15.0  # seconds between two progress lines of a run
_ON_CPU = ["common.cpu=true", "common.fp16=false"]


def build_job(run: GlueRun, out: Path) -> Job:
    """Build the job of a run."""
    step = run.step(out, partial(_work, run, run.folder(out)))
    return Job(run.label, step.folder, (step,), run.max_update)


def _work(run: GlueRun, folder: Path, context: RunContext) -> None:
    """Train a run unless it is trained already, and evaluate it."""
    if updates_done(folder) < run.max_update or not (folder / BEST).exists():
        _train(run, folder, context)
    # By name: it is looked up beside the running Python, and short in the log.
    evaluation = [Path(sys.executable).name, "-m", _THIS, str(folder)]
    run_logged(evaluation, folder / TRAIN_LOG, context.lock, environment=context.environment)
    figures = read_json(folder / RESULT)["metrics"]
    scores = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    context.report(run.max_update, f"{run.label}: finished, {scores}")


def _train(run: GlueRun, folder: Path, context: RunContext) -> None:
    ensure_last_checkpoint(folder)
    updates = updates_done(folder)
    start = f"starting, {run.max_update:,} updates"
    if updates:
        start = f"resuming from update {updates:,}"
    context.report(updates, f"{run.label}: {start}")
    # Decided on the machine that runs, which may be another than the command's.
    devices = [] if choose_device() == "cuda" or _ON_CPU[0] in run.command else _ON_CPU
    if devices:
        context.report(
            updates, f"{run.label}: no GPU here: training on the processor, without fp16"
        )
    # fairseq starts from this checkpoint unless the folder has a last one.
    pretrained = format_override("checkpoint.finetune_from_model", run.checkpoint)
    last = time.monotonic()

    def report_line(text: str) -> None:
        """Report validations, and the number of updates every few seconds."""
        nonlocal last
        line = parse_line(text)
        score = ""
        if line is None:
            return
        if line.kind == "valid" and run.metric in line.figures:
            score = f", {run.metric} {float(line.figures[run.metric]):.2f}"
        elif line.kind != "train_inner" or time.monotonic() - last < _PAUSE:
            return
        last = time.monotonic()
        progress = f"update {line.updates:,} of {run.max_update:,}"
        context.report(line.updates, f"{run.label}: {progress}{score}")

    command = [*run.command, *devices, pretrained]
    run_logged(command, folder / TRAIN_LOG, context.lock, report_line, context.environment)


def evaluate(run: GlueRun, folder: Path) -> None:
    """Write ``submission/`` and ``result.json``, and shrink the checkpoints.

    The model is evaluated in float32. The best checkpoint loses the optimizer's state, two thirds
    of its size, and the last checkpoint is deleted.
    """
    path = folder / BEST
    opened = open_model(path, Path(run.data), option="best checkpoint")
    model = opened.model.to(choose_device())
    data = open_data(opened.data)
    splits = data.task.valid_splits
    figures, collapsed = {}, False
    for suffix, split in zip(_SUFFIXES if len(splits) > 1 else ("",), splits):
        outputs, labels = predict(model, opened.task, split)
        measured = measure(data.task, outputs, labels)
        figures.update({f"{name}{suffix}": value for name, value in measured.items()})
        collapsed |= has_collapsed(data.task, outputs, measured)
    for name, split in zip(data.task.submission, data.task.test_splits):
        if split in data.splits:
            outputs, _ = predict(model, opened.task, split)
            write_submission(folder / "submission", name, data, split, outputs)
    result = {"update": read_updates(opened.state), "metrics": figures, "collapsed": collapsed}
    # Written before the checkpoints shrink, because training cannot continue from shrunk ones.
    write_whole(folder / RESULT, json.dumps(result, indent=1) + "\n")
    write_state({**open_mapped(path), "last_optimizer_state": None}, path)
    (folder / LAST).unlink(missing_ok=True)


@torch.no_grad()
def predict(model: Any, task: Any, split: str) -> tuple[Tensor, Tensor]:
    """Predict a split; return outputs ``(N, C)`` and labels ``(N,)`` in the order of its file."""
    dataset = task.load_dataset(split)
    batches = task.get_batch_iterator(
        dataset, max_sentences=_BATCH, max_positions=task.max_positions()
    ).next_epoch_itr(shuffle=False)
    outputs = [torch.empty(0)] * len(dataset)
    labels = torch.zeros(len(dataset)).double()
    on_gpu = next(model.parameters()).is_cuda
    for sample in batches:
        batch = utils.move_to_cuda(sample) if on_gpu else sample
        logits, _ = model(**batch["net_input"], classification_head_name=HEAD)
        for number, output in zip(sample["id"].tolist(), logits.float().cpu()):
            outputs[number] = output
        if "target" in sample:
            labels[sample["id"]] = sample["target"].view(-1).double()
    return torch.stack(outputs), labels


def measure(task: Task, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute all metrics of a task from outputs ``(N, C)`` and labels ``(N,)``."""
    if task.regression:
        return metrics.regression(outputs.view(-1), labels)
    counts = metrics.confusion(outputs.argmax(-1), labels, len(task.classes))
    return metrics.classification(counts)


def has_collapsed(task: Task, outputs: Tensor, figures: dict[str, float]) -> bool:
    """Check whether a model predicts the same for everything, no number, or not above chance."""
    if task.regression:
        return metrics.is_constant(outputs.view(-1))
    is_constant = len(outputs.argmax(-1).unique()) == 1
    return not outputs.isfinite().all() or is_constant or figures.get("matthews") == 0


def main() -> None:
    """Evaluate the run of the folder in the only argument."""
    folder = Path(sys.argv[1])
    with signals_as_keyboard_interrupt(advice=""):
        evaluate(read_run(folder), folder)


if __name__ == "__main__":
    sys.exit(run_main(main))
