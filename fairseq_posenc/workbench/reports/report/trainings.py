"""Trainings as runs: from their checkpoints, and from the logs beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from fairseq_posenc.workbench.reports.report.logs import (
    of_masked_lm,
    of_translation,
    read_log,
    recipe_of,
)
from fairseq_posenc.workbench.reports.report.runs import Run
from fairseq_posenc.workbench.reports.report.training import Training
from fairseq_posenc.workbench.training.recipes.reported import Figure

TRANSLATION = "translation/iwslt17"  # the recipe of all translation models


def of_training(path: Path, training: Training, recipe: Optional[str]) -> Run:
    """Return a training as a run, with its perplexity and what its log tells.

    Args:
        path: folder or checkpoint.
        training: what was read there.
        recipe: the paper's set-up that the user says it stands for; None takes that of the script
            that made the folder, or the usual one.
    """
    whole = path.is_dir() or training.path.name.startswith("checkpoint")
    usual = {"language_modeling": "b_lm", "translation": TRANSLATION}.get(training.task, "b_small")
    figures, notes = _figures(training, whole)
    return Run(
        training.path.parent.name if whole else path.stem,
        "training" if training.task == "translation" else "pre-training",
        path,
        recipe or recipe_of(training.path.parent) or usual,
        training.encoding,
        training.directions,
        figures,
        training,
        notes,
    )


def _figures(training: Training, whole: bool) -> tuple[dict[Figure, float], list[str]]:
    """Return a training's figures, and what a reader has to know of them."""
    log = read_log(training.path.parent if whole else Path("/nonexistent"))
    if training.task == "translation":
        figures = of_translation(log, translation_task(training))
        return figures, [] if figures else ["there is no train.log beside its checkpoint"]
    causal = training.task == "language_modeling"
    task = _corpus(training) if causal else "validation"
    notes = [] if task else ["the name of its data folder holds neither wikitext nor zh or chinese"]
    figures = {} if causal else of_masked_lm(log)
    if training.perplexity is None:
        notes.append("its checkpoint has no validation loss")
    else:
        figures[(task or "another text", "perplexity", "valid")] = training.perplexity
    return figures, notes


def _corpus(training: Training) -> Optional[str]:
    """Return the column of a language model's text, by the name of its data folder."""
    name = _data_name(training)
    if "wikitext" in name and "103" in name:
        return "WikiText-103"
    return "Chinese Wikipedia" if "zh" in name or "chinese" in name else None


def translation_task(training: Optional[Training]) -> str:
    """Return what a translation model is measured on, by the name of its data folder."""
    name = "" if training is None else _data_name(training)
    return "IWSLT2017 fr-en" if "iwslt" in name and "fr-en" in name else name or "another text"


def _data_name(training: Training) -> str:
    return Path(str(training.settings.get("data", "")).split(":")[0]).name.lower()
