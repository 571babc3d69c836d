"""Evaluates a finished run: metrics of its best checkpoint, and predictions for the test sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from torch import Tensor

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.checkpoints.safe_loading import open_mapped
from fairseq_posenc.tasks.glue import metrics
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.tasks.glue.data import open_data
from fairseq_posenc.tasks.glue.definitions import Task
from fairseq_posenc.workbench.finetuning.glue.plan import RESULT, Run
from fairseq_posenc.workbench.finetuning.glue.submission import write_submission
from fairseq_posenc.workbench.loading.checkpoints import updates_of, write_state
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.files import write_whole

BEST = "checkpoint_best.pt"
_SUFFIXES = ("_m", "_mm")  # of metrics of a task with two development sets
_BATCH = 32


def evaluate(run: Run, folder: Path) -> None:
    """Write ``submission/`` and ``result.json``, and shrink the checkpoints.

    The model runs in float32, whatever the training ran in. The best checkpoint loses the
    optimizer's state, two thirds of its size, and the last checkpoint is deleted.
    """
    path = folder / BEST
    opened = open_model(path, Path(run.data), option="best checkpoint")
    model = opened.model.to(choose_device())
    data = open_data(opened.data)
    splits = data.task.valid_splits
    figures, collapsed = {}, False
    for suffix, split in zip(_SUFFIXES if len(splits) > 1 else ("",), splits):
        outputs, labels = predict(model, opened.task, split)
        found = measure(data.task, outputs, labels)
        figures.update({f"{name}{suffix}": value for name, value in found.items()})
        collapsed |= has_collapsed(data.task, outputs, found)
    for name, split in zip(data.task.submission, data.task.test_splits):
        if split in data.splits:
            outputs, _ = predict(model, opened.task, split)
            write_submission(folder / "submission", name, data, split, outputs)
    result = {"update": updates_of(opened.state), "metrics": figures, "collapsed": collapsed}
    # Before the checkpoints shrink, because the training could not continue from them.
    write_whole(folder / RESULT, json.dumps(result, indent=1) + "\n")
    write_state({**open_mapped(path), "last_optimizer_state": None}, path)
    (folder / LAST).unlink(missing_ok=True)


@torch.no_grad()
def predict(model: Any, task: Any, split: str) -> tuple[Tensor, Tensor]:
    """Predict a split; return outputs, (N, C), and labels, (N,), in the order of its file."""
    dataset = task.load_dataset(split)
    batches = task.get_batch_iterator(
        dataset, max_sentences=_BATCH, max_positions=task.max_positions()
    ).next_epoch_itr(shuffle=False)
    outputs, labels = [torch.empty(0)] * len(dataset), torch.zeros(len(dataset)).double()
    on_gpu = next(model.parameters()).is_cuda
    for sample in batches:
        batch = utils.move_to_cuda(sample) if on_gpu else sample
        found, _ = model(**batch["net_input"], classification_head_name=HEAD)
        for number, output in zip(sample["id"].tolist(), found.float().cpu()):
            outputs[number] = output
        if "target" in sample:
            labels[sample["id"]] = sample["target"].view(-1).double()
    return torch.stack(outputs), labels


def measure(task: Task, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute all metrics of a task from outputs, (N, C), and labels, (N,)."""
    if task.regression:
        return metrics.regression(outputs.view(-1), labels)
    counts = metrics.confusion(outputs.argmax(-1), labels, len(task.classes))
    return metrics.classification(counts)


def has_collapsed(task: Task, outputs: Tensor, figures: dict[str, float]) -> bool:
    """Tell whether a model predicts the same for everything, or no better than chance."""
    if task.regression:
        return metrics.is_constant(outputs.view(-1))
    one_class = len(outputs.argmax(-1).unique()) == 1
    return not outputs.isfinite().all() or one_class or figures.get("matthews") == 0
