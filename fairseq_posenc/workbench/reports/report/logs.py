"""Figures that a checkpoint does not hold: those of the log beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from fairseq_posenc.workbench.results.loss_stages import find_stages, smoothed
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes.reported import Figure
from fairseq_posenc.workbench.training.train.identity import read_identity

LOG = "train.log"  # which the training scripts write beside the checkpoints


def read_log(folder: Path) -> Curve:
    """Return the curve of a training's log, an empty one if there is no log."""
    log = folder / LOG
    return read_curve_file(log) if log.is_file() else Curve([], 0.0)


def of_masked_lm(curve: Curve) -> dict[Figure, float]:
    """Return the training loss at the end, the stages, and when DecBERT's perplexity is reached."""
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


_STAGES = ("start ends", "plateau ends", "dive ends", "length of the plateau")
_LEVEL = "3.48"  # of DecBERT's figure 4


def of_translation(curve: Curve, task: str) -> dict[Figure, float]:
    """Return losses in nats and the accuracy as a share, as the report on IWSLT 2017 has them."""
    figures: dict[Figure, float] = {}
    points = smoothed(curve)
    if points:
        figures[task, "loss", "train"] = points[-1][1]
    if curve.points:
        figures[task, "loss", "valid"] = curve.best.nats
        if curve.best.accuracy is not None:
            figures[task, "accuracy", "valid"] = curve.best.accuracy / 100
    return figures


def recipe_of(folder: Path) -> Optional[str]:
    """Return the recipe whose script made a folder, None if none did."""
    name = (read_identity(folder) or {}).get("recipe")
    return name if name in recipes.load()["pretraining"] else None
