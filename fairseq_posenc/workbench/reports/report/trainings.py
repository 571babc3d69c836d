"""Trainings as runs: figures of their checkpoints, and of the logs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from fairseq_posenc.workbench.reports.report.checkpoint import Training, translation_task
from fairseq_posenc.workbench.reports.report.runs import TRANSLATION, Run
from fairseq_posenc.workbench.results.loss_stages import find_stages, smoothed
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.stages import read_inputs
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes import Figure

LOG = "train.log"  # which the training scripts write beside the checkpoints
_STAGES = ("start ends", "plateau ends", "dive ends", "length of the plateau")
_LEVEL = "3.48"  # of DecBERT's figure 4


def build_run(path: Path, training: Training, recipe: Optional[str]) -> Run:
    """Build the run of a training, with its perplexity and the figures of its log.

    ``path`` is its folder or checkpoint. Without a recipe of the user's, that of the script that
    made the folder is taken, or the usual one.
    """
    whole = path.is_dir() or training.path.name.startswith("checkpoint")
    usual = {"language_modeling": "b_lm", "translation": TRANSLATION}.get(training.task, "b_small")
    figures, notes = _figures(training, whole)
    name = training.path.parent.name if whole else path.stem
    kind = "training" if training.task == "translation" else "pre-training"
    recipe = recipe or _find_recipe(training.path.parent) or usual
    what = training.encoding, training.directions
    return Run(name, kind, path, recipe, *what, figures, training, notes)


def _figures(training: Training, whole: bool) -> tuple[dict[Figure, float], list[str]]:
    """Collect a training's figures, and notes on them."""
    log = training.path.parent / LOG
    curve = read_curve_file(log) if whole and log.is_file() else Curve([], 0.0)
    if training.task == "translation":
        figures = _translation_figures(curve, translation_task(training))
        return figures, [] if figures else ["there is no train.log beside its checkpoint"]
    causal = training.task == "language_modeling"
    task = _corpus(training) if causal else "validation"
    notes = [] if task else ["the name of its data folder holds neither wikitext nor zh or chinese"]
    figures = {} if causal else _masked_lm_figures(curve)
    if training.perplexity is None:
        notes.append("its checkpoint has no validation loss")
    else:
        figures[(task or "another text", "perplexity", "valid")] = training.perplexity
    return figures, notes


def _corpus(training: Training) -> Optional[str]:
    """Name the column of a language model's text by its data folder."""
    name = training.data_name
    if "wikitext" in name and "103" in name:
        return "WikiText-103"
    return "Chinese Wikipedia" if "zh" in name or "chinese" in name else None


def _masked_lm_figures(curve: Curve) -> dict[Figure, float]:
    """Compute the last training loss, the stages, and when DecBERT's perplexity is reached."""
    figures: dict[Figure, float] = {}
    points = smoothed(curve)
    if points:
        figures["masked LM", "loss", "train"] = points[-1][1]
    if stages := find_stages(curve):
        length = stages.plateau - stages.start
        for metric, updates in zip(_STAGES, (*stages, length)):
            figures["pre-training", metric, "train"] = updates
    for epoch, entry in curve.epochs.items():
        # Rounded as the paper prints it.
        if round(entry.perplexity, 2) <= float(_LEVEL):
            reached = {"epoch": epoch, "update": entry.updates, "perplexity": entry.perplexity}
            figures |= {(_LEVEL, metric, "valid"): value for metric, value in reached.items()}
            break
    return figures


def _translation_figures(curve: Curve, task: str) -> dict[Figure, float]:
    """Collect losses in nats and the accuracy as a share, as the report on IWSLT 2017 does."""
    figures: dict[Figure, float] = {}
    points = smoothed(curve)
    if points:
        figures[task, "loss", "train"] = points[-1][1]
    if curve.points:
        figures[task, "loss", "valid"] = curve.best.nats
        if curve.best.accuracy is not None:
            figures[task, "accuracy", "valid"] = curve.best.accuracy / 100
    return figures


def _find_recipe(folder: Path) -> Optional[str]:
    """Find the recipe that a folder was trained with; None without one."""
    name = (read_inputs(folder) or {}).get("recipe")
    return name if name in recipes.load()["pretraining"] else None
