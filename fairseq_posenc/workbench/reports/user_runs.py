"""Reads a user's runs and their figures from records, checkpoints and logs.

Figures have the keys of the papers' tables, ``(task, metric, split)``, and their units, so that a
run belongs in a table if they share keys: ``("RTE", "accuracy", "dev"): 66.1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.tasks.glue.definitions import name_column
from fairseq_posenc.workbench.reports.checkpoint_facts import (
    PRETRAINING_TASKS,
    CheckpointFacts,
    read_checkpoint,
)
from fairseq_posenc.workbench.results.loss_stages import find_stages, last_loss
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running.jobs import read_inputs
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, Curve, read_curve_file
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes import TRANSLATION, Figure

_STAGES = ("start ends", "plateau ends", "dive ends", "length of the plateau")
# DecBERT's figure 4 says when a perplexity of 3.48 is reached; there, this number is the task.
_FIGURE_4 = "3.48"
_ANOTHER_TEXT = "another text"
# Columns of a record of BLEU, and the metrics of the table.
_BLEU_METRICS = {"BLEU-4 on pieces, 0 to 1": "bleu", "BLEU": "sacreBLEU", "chrF2": "chrF2"}


class Evaluation(NamedTuple):
    """The results in a record."""

    figures: dict[Figure, float]
    recipe: Optional[str] = None  # recipe to compare with unless the user names another
    notes: Sequence[str] = ()  # remarks on the figures


class UserRun(NamedTuple):
    """A user's training or evaluation of a model, with its figures."""

    name: str  # name in the report
    kind: str  # `pre-training`, `training` (translation), `glue`, `glue-test`, `squad` or `bleu`
    path: Path  # file or folder of the results
    recipe: str  # recipe of the paper that it is compared with
    encoding: Optional[str]  # spec of the position encodings; None if not known
    directions: Optional[str]  # directions of its layers, as in `lr,rl`; None if not known
    figures: dict[Figure, float]
    training: Optional[CheckpointFacts]  # training of the model; None if its checkpoint is missing
    notes: Sequence[str] = ()  # remarks on the figures
    record: Optional[Record] = None  # the record; None for a training

    @property
    def model(self) -> str:
        """A key that all runs of a pre-trained model share."""
        if self.training is None:
            return self.name
        path = self.training.path
        return str(path.parent if path.name.startswith("checkpoint") else path)


def find_training(runs: Sequence[UserRun]) -> Optional[CheckpointFacts]:
    """Find the training of a model, given as its runs; None if its checkpoint is missing."""
    return next((run.training for run in runs if run.training is not None), None)


def read_runs(path: Path, record: Record, recipe: Optional[str]) -> list[UserRun]:
    """Build the runs of a record; none if no table of the papers has results of its kind.

    Args:
        path: file of the record.
        record: the record.
        recipe: recipe that the user named; None for the usual one.
    """
    if record.kind == "bleu":
        # The papers' search is greedy; a user's file of translations has no beam.
        rows = record.figures["scores"]
        return [_build_bleu_run(path, row, record) for row in rows if row["beam"] in (None, 1)]
    if record.kind not in _READERS:
        return []
    evaluation = _READERS[record.kind](record)
    training = _read_if_present(record.data.get("checkpoint"), path)
    directions = record.data.get("attention_directions")
    encoding = record.spec
    if training is not None:
        directions = training.directions if directions is None else directions
        encoding = encoding or training.encoding
        if training.task not in PRETRAINING_TASKS:  # a fine-tuned model
            training = _read_if_present(training.start, path)
    run = UserRun(
        name=str(record.data.get("name") or path.stem),
        kind=record.kind,
        path=path,
        recipe=recipe or evaluation.recipe or _find_m4m_recipe(training),
        encoding=encoding,
        directions=directions,
        figures=evaluation.figures,
        training=training,
        notes=evaluation.notes,
        record=record,
    )
    return [run]


def _find_m4m_recipe(training: Optional[CheckpointFacts]) -> str:
    """Find the pre-training of M4M's paper that is most like that of a model."""
    if training is None:
        return "a_small"
    sizes = (training.settings.get("encoder_layers"), training.settings.get("encoder_embed_dim"))
    if sizes == (24, 1024):  # of RoBERTa-large
        return "a_large"
    return "a_base" if training.is_released or training.start else "a_small"


def _read_glue(record: Record) -> Evaluation:
    protocol = record.data["protocol"]
    statistic = recipes.load()["finetuning"]["glue"][protocol]["statistic"]
    figures: dict[Figure, float] = {}
    runs = record.figures["runs"]
    for row in record.figures["tasks"]:
        column, metric = name_column(row["task"], row["metric"])
        figures[column, metric, "dev"] = float(row[statistic])
    counts = Counter(run["task"] for run in runs)
    collapsed = Counter(run["task"] for run in runs if run["collapsed"])
    notes = [f"{task}: {n} of {counts[task]} runs collapsed" for task, n in collapsed.items()]
    if unfinished := record.data.get("unfinished"):
        notes.append(f"not finished: {unfinished}")
    return Evaluation(figures, "b_small" if protocol == "decbert" else None, notes)


def _read_glue_test(record: Record) -> Evaluation:
    figures: dict[Figure, float] = {
        (row["task"], metric, "test"): float(value)
        for row in record.rows
        for metric, value in row.items()
        if metric != "task"
    }
    return Evaluation(figures, "b_large")


def _read_squad(record: Record) -> Evaluation:
    task = f"SQuAD{record.data['squad']}"
    (row,) = record.rows
    return Evaluation({(task, metric, "dev"): float(row[metric]) for metric in ("exact", "f1")})


_READERS = {"glue": _read_glue, "glue-test": _read_glue_test, "squad": _read_squad}


def _build_bleu_run(path: Path, row: Row, record: Record) -> UserRun:
    """Build the run of a row of a record of BLEU: a model, or a file of translations."""
    is_model = row["beam"] is not None and str(row["path"]).endswith(".pt")
    training = _read_if_present(row["path"], path) if is_model else None
    task = _name_translation_test(training)
    figures: dict[Figure, float] = {
        (task, metric, "test"): float(row[column])
        for column, metric in _BLEU_METRICS.items()
        if row[column] is not None
    }
    return UserRun(
        name=row["system"],
        kind="bleu",
        path=path,
        recipe=TRANSLATION,
        encoding=training.encoding if training else None,
        directions=training.directions if training else None,
        figures=figures,
        training=training,
        notes=[f"sacreBLEU {row['BLEU']:.2f}"],
        record=record,
    )


def _name_translation_test(training: Optional[CheckpointFacts]) -> str:
    """Name the test set of a translation model by its data: IWSLT 2017's, or the data folder."""
    name = "" if training is None else training.data_name
    if "iwslt" in name and "fr-en" in name:
        return "IWSLT2017 fr-en"
    return name or _ANOTHER_TEXT


def _read_if_present(checkpoint: Any, path: Path) -> Optional[CheckpointFacts]:
    """Read a checkpoint that a file names, relative to the working folder or to that file."""
    if checkpoint is not None:
        for candidate in (Path(checkpoint), path.parent / checkpoint):
            if candidate.is_file():
                return read_checkpoint(candidate)
    return None


def build_run(path: Path, training: CheckpointFacts, recipe: Optional[str]) -> UserRun:
    """Build the run of a training, with its perplexity and the figures of its log.

    Args:
        path: folder or checkpoint of the training.
        training: facts about it.
        recipe: recipe that the user named; None for that of the folder's stamp, or the usual one.
    """
    is_save_dir = path.is_dir() or training.path.name.startswith("checkpoint")
    usual = {"language_modeling": "b_lm", "translation": TRANSLATION}.get(training.task, "b_small")
    stamped = (read_inputs(training.path.parent) or {}).get("recipe")
    if stamped in recipes.load()["pretraining"]:  # not if another command wrote the stamp
        usual = str(stamped)
    figures, notes = _collect_figures(training, is_save_dir)
    return UserRun(
        name=training.path.parent.name if is_save_dir else path.stem,
        kind="training" if training.task == "translation" else "pre-training",
        path=path,
        recipe=recipe or usual,
        encoding=training.encoding,
        directions=training.directions,
        figures=figures,
        training=training,
        notes=notes,
    )


def _collect_figures(
    training: CheckpointFacts, has_log: bool
) -> tuple[dict[Figure, float], list[str]]:
    """Collect a training's figures, and notes on them."""
    log = training.path.parent / TRAIN_LOG
    curve = read_curve_file(log) if has_log and log.is_file() else Curve([], 0.0)
    if training.task == "translation":
        figures = _compute_translation_figures(curve, _name_translation_test(training))
        return figures, [] if figures else ["no train.log beside its checkpoint"]
    figures, notes, task = {}, [], "validation"
    if training.task == "masked_lm":
        figures = _compute_masked_lm_figures(curve)
    else:
        task = _name_lm_text(training.data_name)
    if task == _ANOTHER_TEXT:
        notes.append("the name of its data folder contains neither wikitext nor zh or chinese")
    if training.perplexity is None:
        notes.append("its checkpoint has no validation loss")
    else:
        figures[task, "perplexity", "valid"] = training.perplexity
    return figures, notes


def _name_lm_text(data_name: str) -> str:
    """Name the text of a causal LM as in their table, which has a column for each text."""
    if "wikitext" in data_name and "103" in data_name:
        return "WikiText-103"
    if "zh" in data_name or "chinese" in data_name:
        return "Chinese Wikipedia"
    return _ANOTHER_TEXT


def _compute_masked_lm_figures(curve: Curve) -> dict[Figure, float]:
    """Compute the last training loss, the stages, and when figure 4's perplexity is reached."""
    figures: dict[Figure, float] = {}
    if (loss := last_loss(curve)) is not None:
        figures["masked LM", "loss", "train"] = loss
    if stages := find_stages(curve):
        for metric, updates in zip(_STAGES, (*stages, stages.plateau_length)):
            figures["pre-training", metric, "train"] = updates
    # Rounded as the paper prints it.
    low = (x for x in curve.epochs.values() if round(x.perplexity, 2) <= float(_FIGURE_4))
    if first := next(low, None):
        figures[_FIGURE_4, "epoch", "valid"] = first.epoch
        figures[_FIGURE_4, "update", "valid"] = first.updates
        figures[_FIGURE_4, "perplexity", "valid"] = first.perplexity
    return figures


def _compute_translation_figures(curve: Curve, task: str) -> dict[Figure, float]:
    """Collect losses in nats and the accuracy as a share, as in the report on IWSLT 2017."""
    figures: dict[Figure, float] = {}
    if (loss := last_loss(curve)) is not None:
        figures[task, "loss", "train"] = loss
    if curve.points:
        figures[task, "loss", "valid"] = curve.best.nats
        if curve.best.accuracy is not None:
            figures[task, "accuracy", "valid"] = curve.best.accuracy / 100
    return figures
