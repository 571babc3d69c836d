"""Our runs and their figures, from records of evaluations and from trainings with their logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.workbench.reports.checkpoint_facts import (
    PRETRAINING,
    CheckpointFacts,
    read,
    translation_task,
)
from fairseq_posenc.workbench.results.loss_stages import find_stages, smooth_losses
from fairseq_posenc.workbench.results.record import Record, Row
from fairseq_posenc.workbench.running.logs import Curve, read_curve_file
from fairseq_posenc.workbench.running.stages import read_inputs
from fairseq_posenc.workbench.training import recipes
from fairseq_posenc.workbench.training.recipes import Figure

TRANSLATION = "translation/iwslt17"  # the recipe of all translation models
# Figures, the recipe of such a record unless a user names another, and notes.
Evaluation = tuple[dict[Figure, float], Optional[str], list[str]]
LOG = "train.log"  # which the training scripts write beside the checkpoints
_STAGES = ("start ends", "plateau ends", "dive ends", "length of the plateau")
_LEVEL = "3.48"  # of DecBERT's figure 4
_METRICS = {"BLEU-4 on pieces, 0 to 1": "bleu", "BLEU": "sacreBLEU", "chrF2": "chrF2"}


class OwnRun(NamedTuple):
    """One model of ours: its figures and what they are of."""

    name: str  # what the report calls it
    kind: str  # `pre-training`, `training` (translation), `glue`, `glue-test`, `squad` or `bleu`
    path: Path  # the file or folder that it is from
    recipe: str  # the paper's set-up that it stands for
    encoding: Optional[str]  # its position encodings, None if not known
    directions: Optional[str]  # what its layers see, as in `lr,rl`; None if not known
    figures: dict[Figure, float]  # in percent, or a perplexity
    # its pre-training; None if that checkpoint is not there any more
    training: Optional[CheckpointFacts]
    notes: list[str]  # what a reader has to know of the figures
    record: Optional[Record] = None  # what the file holds, None for a training

    @property
    def model(self) -> str:
        """What is the same for two runs of one pre-trained model."""
        if self.training is None:
            return self.name
        path = self.training.path
        return str(path.parent if path.name.startswith("checkpoint") else path)


def read_runs(path: Path, record: Record, recipe: Optional[str]) -> list[OwnRun]:
    """Build the runs of a record, for the user's recipe if any; none of a kind in no table."""
    if record.kind == "bleu":
        rows = record.figures["scores"]  # the report's own test is greedy
        return [_bleu(path, row, record) for row in rows if row["beam"] in (None, 1)]
    if record.kind not in _EVALUATIONS:
        return []
    figures, usual, notes = _EVALUATIONS[record.kind](record)
    training = read_if_there(record.data.get("checkpoint"), path)
    directions, encoding = record.data.get("attention_directions"), record.spec
    if training is not None:
        directions = training.directions if directions is None else directions
        encoding = encoding or training.encoding
        if training.task not in PRETRAINING:  # a fine-tuned model
            training = read_if_there(training.start, path)
    name, recipe = str(record.data.get("name") or path.stem), recipe or usual
    place = name, record.kind, path, recipe or _recipe_of_m4m(training)
    return [OwnRun(*place, encoding, directions, figures, training, notes, record)]


def _glue(record: Record) -> Evaluation:
    mean = record.data["protocol"] == "decbert"
    figures = {
        _column(row["task"], row["metric"], "dev"): float(row["mean" if mean else "best"])
        for row in record.figures["tasks"]
    }
    runs = Counter(run["task"] for run in record.figures["runs"])
    collapsed = Counter(run["task"] for run in record.figures["runs"] if run["collapsed"])
    notes = [f"{task}: {n} of {runs[task]} runs collapsed" for task, n in collapsed.items()]
    if unfinished := record.data.get("unfinished"):
        notes.append(f"not finished: {unfinished}")
    return figures, "b_small" if mean else None, notes


def _column(task: str, metric: str, split: str) -> Figure:
    """Build the column's key; MNLI's two development sets are columns of their own."""
    stem, _, part = metric.rpartition("_")
    return (f"{task}-{part}", stem, split) if part in ("m", "mm") else (task, metric, split)


def _glue_test(record: Record) -> Evaluation:
    figures: dict[Figure, float] = {
        (row["task"], metric, "test"): float(value)
        for row in record.rows
        for metric, value in row.items()
        if metric != "task"
    }
    return figures, "b_large", []


def _squad(record: Record) -> Evaluation:
    task, (row,) = f"SQuAD{record.data['squad']}", record.rows
    return {(task, metric, "dev"): float(row[metric]) for metric in ("exact", "f1")}, None, []


_EVALUATIONS = {"glue": _glue, "glue-test": _glue_test, "squad": _squad}


def _bleu(path: Path, row: Row, record: Record) -> OwnRun:
    is_model = row["beam"] is not None and str(row["path"]).endswith(".pt")
    training = read_if_there(row["path"], path) if is_model else None
    task = translation_task(training)
    figures = {(task, metric, "test"): row[name] for name, metric in _METRICS.items()}
    found: dict[Figure, float] = {
        figure: float(value) for figure, value in figures.items() if value is not None
    }
    notes = [f"sacreBLEU {row['BLEU']:.2f}"]
    return OwnRun(
        name=row["system"],
        kind="bleu",
        path=path,
        recipe=TRANSLATION,
        encoding=training.encoding if training else None,
        directions=training.directions if training else None,
        figures=found,
        training=training,
        notes=notes,
        record=record,
    )


def read_if_there(checkpoint: Any, path: Path) -> Optional[CheckpointFacts]:
    """Read a checkpoint, whose path is relative to here or to the file that names it."""
    if checkpoint is None:
        return None
    places = (Path(checkpoint), path.parent / checkpoint)
    found = next((place for place in places if place.is_file()), None)
    return None if found is None else read(found)


def _recipe_of_m4m(training: Optional[CheckpointFacts]) -> str:
    """Choose the nearest set-up of the M4M paper."""
    if training is not None and training.large:
        return "a_large"
    trained_on = training is not None and (training.released or training.start)
    return "a_base" if trained_on else "a_small"


def build_run(path: Path, training: CheckpointFacts, recipe: Optional[str]) -> OwnRun:
    """Build the run of a training, with its perplexity and the figures of its log.

    ``path`` is its folder or checkpoint. Without a recipe of the user's, that of the script that
    made the folder is taken, or the usual one.
    """
    whole = path.is_dir() or training.path.name.startswith("checkpoint")
    usual = {"language_modeling": "b_lm", "translation": TRANSLATION}.get(training.task, "b_small")
    figures, notes = _training_figures(training, whole)
    name = training.path.parent.name if whole else path.stem
    kind = "training" if training.task == "translation" else "pre-training"
    recipe = recipe or _find_recipe(training.path.parent) or usual
    what = training.encoding, training.directions
    return OwnRun(name, kind, path, recipe, *what, figures, training, notes)


def _training_figures(
    training: CheckpointFacts, whole: bool
) -> tuple[dict[Figure, float], list[str]]:
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


def _corpus(training: CheckpointFacts) -> Optional[str]:
    """Name the column of a language model's text by its data folder."""
    name = training.data_name
    if "wikitext" in name and "103" in name:
        return "WikiText-103"
    return "Chinese Wikipedia" if "zh" in name or "chinese" in name else None


def _masked_lm_figures(curve: Curve) -> dict[Figure, float]:
    """Compute the last training loss, the stages, and when DecBERT's perplexity is reached."""
    figures: dict[Figure, float] = {}
    points = smooth_losses(curve)
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
    points = smooth_losses(curve)
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
