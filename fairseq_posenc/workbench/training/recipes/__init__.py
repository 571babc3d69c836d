"""The papers' recipes and the numbers that they report, from ``recipes.json``.

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
from collections.abc import Sequence
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

    name: str  # name of the recipe and of its script in `train_scripts/`
    title: str  # description in a line
    source: str  # key of the paper in `sources`
    where: str  # place in the paper
    arch: str  # architecture; its positions are chosen apart
    batch: int  # size of the global batch, in `unit`
    unit: str  # `sequences` or `tokens`
    per_gpu: int  # maximum size of the batch of a GPU, in `unit`
    settings: dict[str, Any]  # values that the paper gives, by option of fairseq (`adam_betas`)
    not_given: dict[str, Any]  # values of further options, which it does not give
    housekeeping: dict[str, Any]  # values of options that change no result
    init: str  # start of the weights: `random`, the name of a released model, or `not given`
    is_decbert: bool  # whether it is for DecBERT's models, which are chosen by name
    hardware: dict[str, Any]  # `gpus`, their `kind`, `hours` of a run, as far as they are given
    warmup_epochs: Optional[int]  # for a schedule in epochs, until `max_epoch`; None for updates
    seeds: Sequence[int]  # random seeds, if the paper made several runs
    note: str  # source of the values of `not_given`

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
            entries[name] = _merge(entries[entry.pop("like")], entry)
    for table in data["reported"].values():
        protocol = data["finetuning"]["glue"].get(table["source"])
        for column in table["columns"].values():
            if "metric" not in column:
                task = column["task"].removesuffix("-mm").removesuffix("-m")
                column["metric"] = protocol["metrics"][task]
    return data


def _merge(old: Any, new: Any) -> Any:
    """Merge two nested tables; an entry of the new one replaces that of the old."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}


def housekeeping(family: str) -> dict[str, Any]:
    """Collect the options that change no result, for a kind of model or of fine-tuning."""
    return {**load()["housekeeping"]["all"], **load()["housekeeping"][family]}


def list_trainings() -> dict[str, Any]:
    """List the entries of the recipes of ``fairseq-posenc train-recipe`` by name."""
    return {**load()["pretraining"], TRANSLATION: load()["finetuning"]["translation"]["iwslt17"]}


def build_recipe(name: str) -> Recipe:
    """Build a recipe of ``fairseq-posenc train-recipe`` by name.

    Raises:
        UserError: no recipe has this name.
    """
    known = list_trainings()
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
        is_decbert=len(entry.get("attention_directions", ())) > 1,
        hardware=entry.get("hardware", {}),
        warmup_epochs=entry.get("warmup_epochs"),
        seeds=entry.get("seeds", ()),
    )


def find_model(directions: str) -> str:
    """Find the name of DecBERT's model that has given directions in its first layers."""
    models = load()["models"]
    return next(name for name, model in models.items() if model["directions"] == directions)


def largest_share(batch: int, devices: int, most: int) -> Optional[int]:
    """Compute a device's largest share that divides the batch of all into whole steps, if any."""
    return next((share for share in range(most, 0, -1) if batch % (devices * share) == 0), None)


class Reported(NamedTuple):
    """A paper's table."""

    id: str  # short name, such as `A2`
    title: str
    source: str  # key of the paper in `sources`
    where: str  # place in the paper
    recipe: str  # name of the recipe of its models
    columns: dict[str, Figure]  # the figure of each column, by the column's name
    digits: dict[str, int]  # decimals of its figures, by column
    rows: list[dict[str, Any]]  # entries of `recipes.json`, in the paper's order
    note: str  # remark on the figures


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
        digits={column: shown.get("digits", 2) for column, shown in columns},
        note=entry.get("note", ""),
    )
