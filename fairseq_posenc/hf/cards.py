"""Writes what a saved folder has beside the model: its card (README.md), and its loader."""

from pathlib import Path

from fairseq_posenc.errors import how_to_install

TAG = "fairseq-posenc"  # of models on the hub
LOADER = "positions_loader"  # the module of `auto_map`, which `trust_remote_code=True` runs
_LOADER_TEXT = f'''\
"""Loads the model of this folder; config.json says which positions it has."""

try:
    from fairseq_posenc.hf.saving import PositionsConfig
except ImportError as error:
    message = "this model has other positions than its class in transformers: "
    raise ImportError(message + """{how_to_install("hf")}""") from error
'''
_CARD = """\
---
library_name: transformers
tags: [{tag}, position-encoding]
---

A {class_name} with other positions than its class: `position_encoding` in config.json names them,
as a spec of fairseq-posenc. transformers' Auto classes load it after `import fairseq_posenc.hf`
or, where that package is installed, with `trust_remote_code=True`. Without it they refuse it.
"""


def write_loader(folder: Path) -> None:
    """Write the loader of a folder."""
    (folder / f"{LOADER}.py").write_text(_LOADER_TEXT, encoding="utf-8")


def write_card(folder: Path, class_name: str) -> None:
    """Write a card that says how to load the model, unless the folder has one."""
    path = folder / "README.md"
    if not path.exists():
        path.write_text(_CARD.format(tag=TAG, class_name=class_name), encoding="utf-8")
