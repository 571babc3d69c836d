"""What the source papers trained, and the numbers that they report: ``recipes.json``.

It is the one source of ``fairseq-posenc train-recipe``, of the YAML files and of the tables beside
which ``fairseq-posenc report`` sets a user's figures. Its parts:

- ``sources``: the papers;
- ``pretraining``, ``finetuning``: set-ups, by name. ``settings`` holds what the paper gives, under
  the names of fairseq's options; ``not_given`` holds what a training needs beside that and the
  paper does not give; ``note`` says where these values are from. A set-up that is ``like`` another
  one says only what differs;
- ``housekeeping``: options that change no result, for all and by kind of model: what is logged and
  kept, and that no sentence is dropped;
- ``models``: DecBERT's, by the name that ``--model`` takes, with what their first layers see;
- ``ablations``: models that belong together, each trained by ``fairseq-posenc ablation NAME``;
- ``reported``: the tables of results, with a metric for each column: on GLUE, the protocol's;
- ``pictures``: what the sources show or describe and have no figures of, each with its command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError

FILE = Path(__file__).with_name("recipes.json")
TRANSLATION = "translation_iwslt17"
Figure = tuple[str, str, Optional[str]]  # task, metric, split

# By the paper's own number or, where a figure or the text has the numbers, by that.
TABLES = {
    **{"A1": "m4m_table1", "A-loss": "m4m_losses", "A2": "m4m_table2", "A-raffel": "m4m_raffel"},
    **{f"A{number}": f"m4m_table{number}" for number in range(3, 8)},
    **{f"B{number}": f"decbert_table{number}" for number in range(1, 5)},
    **{"B-figure2": "decbert_figure2", "B-figure4": "decbert_figure4", "C": "fr_en"},
}


class Recipe(NamedTuple):
    """How a paper trained a model from scratch, or went on with a released one."""

    name: str  # of the recipe, and of its script in `train_scripts/`
    title: str  # what is trained, in a line
    source: str  # key of the paper in `sources`
    where: str  # the place in the paper
    arch: str  # the architecture, whose positions are chosen apart
    batch: int  # sequences or tokens of an update, on all GPUs together
    unit: str  # `sequences` or `tokens`
    per_gpu: int  # how many of them a GPU takes at a time, at most
    # what the paper gives, by option of fairseq (`max_update`, `adam_betas`)
    settings: dict[str, Any]
    not_given: dict[str, Any]  # what it does not give, likewise
    housekeeping: dict[str, Any]  # options that change no result, likewise
    init: str  # `random`, the name of a released model, or `not given`
    has_models: bool  # whether it is for DecBERT's models, which are chosen by name
    # `gpus`, their `kind`, and the `hours` that a run took; None if not given
    hardware: dict[str, Any]
    # after which the rate falls until `max_epoch`; None if it goes by updates
    warmup_epochs: Optional[int]
    seeds: Sequence[int]  # of the runs, if it has several
    note: str  # where the values of `not_given` are from

    @property
    def all_settings(self) -> dict[str, Any]:
        """Every setting, given or not."""
        return {**self.settings, **self.not_given}


@cache
def load() -> dict[str, Any]:
    """Load the contents of the file; see the head of this module."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    entries = data["pretraining"]
    for name, entry in entries.items():  # one that another is like stands before it
        if "like" in entry:
            entries[name] = _merged(entries[entry.pop("like")], entry)
    for table in data["reported"].values():
        protocol = data["finetuning"]["glue"].get(table["source"])
        for column in table["columns"].values():
            if "metric" not in column:
                task = column["task"].removesuffix("-mm").removesuffix("-m")
                column["metric"] = protocol["metrics"][task]
    return data


def _merged(old: Any, new: Any) -> Any:
    """Take the old entries of tables where the new ones say nothing."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def housekeeping(family: str) -> dict[str, Any]:
    """Collect the options that change no result, for a kind of model or of fine-tuning."""
    return {**load()["housekeeping"]["all"], **load()["housekeeping"][family]}


def trainings() -> dict[str, Any]:
    """Collect the recipes of ``fairseq-posenc train-recipe`` by name."""
    return {**load()["pretraining"], TRANSLATION: load()["finetuning"]["translation"]["iwslt17"]}


def training(name: str) -> Recipe:
    """Build a recipe by name.

    Raises:
        UserError: there is none of that name.
    """
    return _build_recipe(name, trainings())


def pretraining(name: str) -> Recipe:
    """Build a recipe of pre-training by name.

    Raises:
        UserError: there is none of that name.
    """
    return _build_recipe(name, load()["pretraining"])


def _build_recipe(name: str, known: Mapping[str, Any]) -> Recipe:
    if name not in known:
        raise UserError(f"no recipe is called '{name}'; there are {', '.join(known)}")
    entry = known[name]
    batch = entry["batch"]
    same = ("title", "source", "where", "arch", "init", "note", "settings", "not_given")
    return Recipe(
        name=name,
        **{key: entry[key] for key in same},
        batch=batch["size"],
        unit=batch["unit"],
        per_gpu=batch["per_gpu"],
        housekeeping={**housekeeping(entry["family"]), **entry.get("housekeeping", {})},
        has_models=len(entry.get("attention_directions", ())) > 1,
        hardware=entry.get("hardware", {}),
        warmup_epochs=entry.get("warmup_epochs"),
        seeds=entry.get("seeds", ()),
    )


def model_of(directions: str) -> str:
    """Name DecBERT's model that has given directions in its first layers."""
    models = load()["models"]
    return next(name for name, model in models.items() if model["directions"] == directions)


def largest_share(batch: int, devices: int, most: int) -> Optional[int]:
    """Compute a device's largest share that divides the batch of all into whole steps, if any."""
    return next((each for each in range(most, 0, -1) if batch % (devices * each) == 0), None)


class Reported(NamedTuple):
    """A paper's table."""

    id: str  # as in `A2`
    title: str  # what it is about
    source: str  # key of the paper in `sources`
    where: str  # in the paper
    recipe: str  # the set-up of its models
    columns: dict[str, Figure]  # what each shows, by name
    digits: dict[str, int]  # how many a figure has after the point, by column
    rows: list[dict[str, Any]]  # in the paper's order, as `recipes.json` has them
    note: str  # what a reader has to know of the figures


@cache
def reported() -> dict[str, Reported]:
    """Collect all tables by their short names."""
    return {name: _build_table(name, load()["reported"][key]) for name, key in TABLES.items()}


def _build_table(name: str, entry: dict[str, Any]) -> Reported:
    columns = entry["columns"].items()
    return Reported(
        id=name,
        **{key: entry[key] for key in ("title", "source", "where", "recipe", "rows")},
        columns={column: (x["task"], x["metric"], x["split"]) for column, x in columns},
        digits={column: each.get("digits", 2) for column, each in columns},
        note=entry.get("note", ""),
    )
