"""What the source papers trained, and the numbers that they report: ``recipes.json``.

Its parts:

- ``sources``: the papers;
- ``pretraining``, ``finetuning``: set-ups, by the name of their script or task. ``settings`` holds
  what the paper gives, under the names of fairseq's options; ``not_given`` holds what a training
  needs beside that and the paper does not give. ``note`` says where these values are from;
- ``models``: DecBERT's, by the name that its scripts take, with what their first layers see;
- ``ablations``: models that belong together, each trained by ``train_scripts/ablation.sh NAME``;
- ``reported``: the tables of results, with a metric for each column.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.errors import UserError

FILE = Path(__file__).with_name("recipes.json")


class Pretraining(NamedTuple):
    """How a paper pre-trained a model.

    Attributes:
        name: of the recipe, and of its script in ``train_scripts/``.
        source: key of the paper in ``sources``.
        batch: sequences of an update, on all GPUs together.
        settings: what the paper gives, by option of fairseq (``max_update``, ``adam_betas``).
        not_given: what it does not give, likewise.
        init: ``random``, the name of a released model, or ``not given``.
        hardware: ``gpus``, their ``kind``, and the ``hours`` that a run took, None if not given.
        note: where the values of ``not_given`` are from.
    """

    name: str
    source: str
    batch: int
    settings: dict[str, Any]
    not_given: dict[str, Any]
    init: str
    hardware: dict[str, Any]
    note: str

    @property
    def all_settings(self) -> dict[str, Any]:
        """Every setting, given or not."""
        return {**self.settings, **self.not_given}


@cache
def load() -> dict[str, Any]:
    """Return the contents of the file; see the head of this module."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


def pretraining(name: str) -> Pretraining:
    """Return a recipe by name.

    Raises:
        UserError: there is none of that name.
    """
    known = load()["pretraining"]
    if name not in known:
        raise UserError(f"no recipe is called '{name}'; there are {', '.join(known)}")
    entry = known[name]
    return Pretraining(
        name,
        entry["source"],
        entry["batch"]["size"],
        entry["settings"],
        entry["not_given"],
        entry["init"],
        entry["hardware"],
        entry["note"],
    )
