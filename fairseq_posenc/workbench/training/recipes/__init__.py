"""The papers' recipes and the results that they report, from ``recipes.json``.

The file is the source of ``fairseq-posenc train-recipe``, of the YAML files for fine-tuning, and of
the papers' tables in ``fairseq-posenc report``. Its parts:

- ``sources``: the papers;
- ``pretraining``, ``finetuning``: recipes by name. ``settings`` has the values in the paper, under
  the names of fairseq's options; ``not_given`` has further values that a training needs, and
  ``note`` their origin. ``position_encodings`` and ``attention_directions`` are those that the
  paper compares. A recipe that is ``like`` another one lists only the differences;
- ``housekeeping``: options that do not change results, for all models and by family: about logs,
  checkpoints, and that no sentence is dropped;
- ``models``: DecBERT's models, by their name for ``--model``, with the directions of their layers;
- ``ablations``: groups of models for ``fairseq-posenc ablation``; ``table``: the rows of a table;
- ``reported``: tables of results, with a metric for each column; on GLUE, that of the protocol.
  ``A2`` is table 2 of paper A; words such as ``B-figure2`` name other places with results;
- ``pictures``: pictures and descriptions in the papers without figures, each with its command.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError

FILE = Path(__file__).with_name("recipes.json")
TRANSLATION = "translation_iwslt17"
Figure = tuple[str, str, Optional[str]]  # task, metric, split


class Recipe(NamedTuple):
    """A paper's recipe for training a model from scratch, or from a released one."""

    name: str  # name of the recipe and of its script in `train_scripts/`
    title: str  # description in one line
    source: str  # key of the paper in `sources`
    where: str  # section of the paper
    arch: str  # architecture of the model, without its positions
    batch: int  # size of the global batch in `unit`
    unit: str  # `sequences` or `tokens`
    per_gpu: int  # maximum size of a GPU's batch in `unit`
    settings: dict[str, Any]  # values in the paper, by option of fairseq (such as `adam_betas`)
    not_given: dict[str, Any]  # values of further options, which are not in the paper
    housekeeping: dict[str, Any]  # values of options that do not change results
    init: str  # initial weights: `random`, the name of a released model, or `not given`
    has_models: bool  # whether a model is chosen by name: DecBERT's, which differ in directions
    hardware: dict[str, Any]  # `gpus`, their `kind` and `hours` of a run, if they are in the paper
    warmup_epochs: Optional[int]  # warm-up of a schedule in epochs; None for a schedule in updates
    seeds: Sequence[int]  # random seeds, if the paper made several runs
    note: str  # origin of the values of `not_given`

    @property
    def all_settings(self) -> dict[str, Any]:
        """All settings, whether they are in the paper or not."""
        return {**self.settings, **self.not_given}


@cache
def load() -> dict[str, Any]:
    """Load ``recipes.json``, with ``like``, ``table`` and the metrics of GLUE resolved."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    entries = data["pretraining"]
    for name, entry in entries.items():  # an entry comes after the one that it is like
        if "like" in entry:
            entries[name] = _merge(entries[entry.pop("like")], entry)
    for ablation in data["ablations"].values():
        if "table" in ablation:
            table = data["reported"][ablation["table"]]
            ablation |= {"title": table["title"], "recipe": table["recipe"], "runs": table["rows"]}
    for table in data["reported"].values():
        for column in table["columns"].values():
            if "metric" not in column:  # a task of GLUE, or a part of one, such as MNLI-mm
                task = column["task"].removesuffix("-mm").removesuffix("-m")
                column["metric"] = data["finetuning"]["glue"][table["source"]]["metrics"][task]
    return data


def _merge(old: Any, new: Any) -> Any:
    """Merge two nested tables; entries of the new one win."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def housekeeping(family: str) -> dict[str, Any]:
    """Collect the options that do not change results, for a family of models or a fine-tuning."""
    return {**load()["housekeeping"]["all"], **load()["housekeeping"][family]}


def list_trainings() -> dict[str, Any]:
    """List the recipes for ``fairseq-posenc train-recipe``, as entries of the file, by name."""
    return {**load()["pretraining"], TRANSLATION: load()["finetuning"]["translation"]["iwslt17"]}


def build_recipe(name: str) -> Recipe:
    """Build a recipe for ``fairseq-posenc train-recipe`` by name.

    Raises:
        UserError: no recipe has this name.
    """
    entries = list_trainings()
    if name not in entries:
        raise UserError(f"no recipe is called '{name}'; choose from {', '.join(entries)}")
    entry = entries[name]
    batch = entry["batch"]
    copied = ("title", "source", "where", "arch", "init", "note", "settings", "not_given")
    return Recipe(
        name=name,
        **{key: entry[key] for key in copied},
        batch=batch["size"],
        unit=batch["unit"],
        per_gpu=batch["per_gpu"],
        housekeeping={**housekeeping(entry["family"]), **entry.get("housekeeping", {})},
        has_models=len(entry.get("attention_directions", ())) > 1,
        hardware=entry.get("hardware", {}),
        warmup_epochs=entry.get("warmup_epochs"),
        seeds=entry.get("seeds", ()),
    )


def find_model(directions: str) -> str:
    """Find the name of DecBERT's model by the attention directions of its first layers."""
    models = load()["models"]
    return next(name for name, model in models.items() if model["directions"] == directions)


def largest_share(batch: int, devices: int, maximum: int) -> Optional[int]:
    """Compute the largest batch per device that divides the global batch; None without one."""
    sizes = range(maximum, 0, -1)
    return next((size for size in sizes if batch % (devices * size) == 0), None)


class PaperTable(NamedTuple):
    """A paper's table of results."""

    id: str  # short name, such as `A2`
    title: str
    source: str  # key of the paper in `sources`
    where: str  # place in the paper
    recipe: str  # name of the recipe of its models
    columns: dict[str, Figure]  # task, metric and split of each column
    digits: dict[str, int]  # decimals of each column
    rows: list[dict[str, Any]]  # entries of `recipes.json` in the paper's order
    note: str  # remark on the figures


@cache
def load_tables() -> dict[str, PaperTable]:
    """Load all tables of results by short name."""
    tables = {}
    for name, entry in load()["reported"].items():
        columns = entry["columns"].items()
        tables[name] = PaperTable(
            id=name,
            **{key: entry[key] for key in ("title", "source", "where", "recipe", "rows")},
            columns={column: (c["task"], c["metric"], c["split"]) for column, c in columns},
            digits={column: c.get("digits", 2) for column, c in columns},
            note=entry.get("note", ""),
        )
    return tables
