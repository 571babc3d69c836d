"""Trains a run of GLUE, evaluates its best checkpoint, and predicts the test sets.

Training and evaluation each have a process of their own, on the GPU that the run was assigned;
``python -m fairseq_posenc.workbench.finetuning.glue.worker FOLDER`` evaluates.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from torch import Tensor

from fairseq_posenc.checkpoints.recovery import BEST, LAST, ensure_last_checkpoint
from fairseq_posenc.checkpoints.safe_loading import open_whole
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import lock_folder, read_json
from fairseq_posenc.tasks.glue import metrics
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import Task
from fairseq_posenc.user_dir import import_user_dir
from fairseq_posenc.workbench.finetuning.glue.report import format_predictions, write_predictions
from fairseq_posenc.workbench.finetuning.glue.runs import RESULT, GlueRun
from fairseq_posenc.workbench.finetuning.recipes import train
from fairseq_posenc.workbench.loading.checkpoints import read_updates, updates_done, write_state
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running import devices, exit_codes, logs, programs
from fairseq_posenc.workbench.running.progress import say

_BATCH_SIZE = 32  # sentences, in evaluation


def fine_tune(run: GlueRun, out: Path, environment: programs.Environment) -> None:
    """Train a run, or continue, and evaluate it in a process of its own; skip a finished one.

    Args:
        run: the run; its folder was claimed for it (:func:`.runs.claim`).
        out: folder of all runs.
        environment: variables that select its GPU.
    """
    folder = run.folder(out)
    with lock_folder(folder) as lock:  # its programs inherit it: one may outlive this process
        if run.is_finished(out):  # its checkpoints are shrunk, too
            return
        if not (folder / RESULT).exists():  # else a kill came before they were shrunk
            ensure_last_checkpoint(folder)  # a kill may have left it torn or missing
            if updates_done(folder) < run.max_update or not (folder / BEST).exists():
                train(run.command, folder, lock, run.label, run.max_update, run.metric, environment)
            # A bare name, as messages show it; `run_logged` finds it beside the running Python.
            evaluation = [Path(sys.executable).name, "-m", __name__, str(folder)]
            programs.run_logged(evaluation, folder / logs.TRAIN_LOG, lock, environment=environment)
        # After the result: training cannot continue from what is left of the checkpoints.
        weights = {**open_whole(folder / BEST), "last_optimizer_state": None}  # a third of the file
        write_state(weights, folder / BEST)  # replaced as a whole: a kill leaves the old or the new
        (folder / LAST).unlink(missing_ok=True)
    figures = read_json(folder / RESULT)["metrics"]
    scores = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
    say(f"{run.label}: finished, {scores}")


def evaluate(folder: Path) -> None:
    """Write ``submission/`` and ``result.json`` of a trained run, evaluated in float32."""
    path = folder / BEST
    import_user_dir(Path(open_whole(path)["cfg"]["common"]["user_dir"]))  # ours, or the user's
    opened = open_model(path, option="best checkpoint")  # as messages call it; evaluation mode
    model = opened.model.to(devices.choose_device())
    data = open_glue_data(opened.data)  # its `task` is the definition of CoLA, MNLI, ...
    splits = data.task.valid_splits
    suffixes = ("_m", "_mm") if len(splits) > 1 else ("",)  # only MNLI has two sets
    figures: dict[str, float] = {}
    collapsed = False
    for suffix, split in zip(suffixes, splits):  # MNLI's matched set is the first
        outputs, labels = predict(model, opened.task, split)
        metrics_of_split = measure(data.task, outputs, labels)
        figures.update({f"{name}{suffix}": value for name, value in metrics_of_split.items()})
        collapsed |= has_collapsed(data.task, outputs, metrics_of_split)
    for name, split in zip(data.task.submission, data.task.test_splits):  # a file for each set
        if split in data.splits:  # some files of a task are optional
            outputs, _ = predict(model, opened.task, split)
            file = folder / "submission" / f"{name}.tsv"
            file.parent.mkdir(exist_ok=True)
            write_predictions(file, data.test_ids(split), format_predictions(data.task, outputs))
    result = {"update": read_updates(opened.state), "metrics": figures, "collapsed": collapsed}
    write_whole(folder / RESULT, json.dumps(result, indent=1) + "\n")


@torch.no_grad()
def predict(model: Any, fairseq_task: Any, split: str) -> tuple[Tensor, Tensor]:
    """Predict a split; return outputs ``(N, C)`` and labels ``(N,)`` in the order of its file.

    A test set has no labels: they are 0.
    """
    dataset = fairseq_task.load_dataset(split)  # our task of GLUE returns what it loads
    batches = fairseq_task.get_batch_iterator(
        dataset, max_sentences=_BATCH_SIZE, max_positions=fairseq_task.max_positions()
    ).next_epoch_itr(shuffle=False)
    outputs = [torch.empty(0)] * len(dataset)  # all replaced below
    labels = torch.zeros(len(dataset), dtype=torch.float64)  # float32 would round STS-B's scores
    on_gpu = next(model.parameters()).is_cuda
    for sample in batches:
        batch = utils.move_to_cuda(sample) if on_gpu else sample
        logits, _ = model(**batch["net_input"], classification_head_name=HEAD)
        for index, output in zip(sample["id"].tolist(), logits.float().cpu()):
            outputs[index] = output  # in the file's order, which batches do not have
        if "target" in sample:
            labels[sample["id"]] = sample["target"].view(-1).double()
    return torch.stack(outputs), labels


def measure(task: Task, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Compute all metrics of a task from outputs ``(N, C)`` and labels ``(N,)``."""
    if task.regression:
        return metrics.regression(outputs.view(-1), labels)
    counts = metrics.confusion(outputs.argmax(-1), labels, len(task.classes))  # by label, output
    return metrics.classification(counts)


def has_collapsed(task: Task, outputs: Tensor, figures: dict[str, float]) -> bool:
    """Check whether a model predicts NaN, the same for everything, or classes exactly at chance."""
    if task.regression:
        return metrics.has_no_ranking(outputs.view(-1))  # nor do NaN and infinity rank
    is_one_class = len(outputs.argmax(-1).unique()) == 1
    # A Matthews correlation, which tasks with two classes have, is 0 at chance.
    return not outputs.isfinite().all() or is_one_class or figures.get("matthews") == 0


if __name__ == "__main__":
    sys.exit(exit_codes.run_main(lambda: evaluate(Path(sys.argv[1]))))
