"""Writes what a saved folder has beside the model: its card (README.md), and its loader.

The card says how to load the model, and names its positions. transformers runs the loader for
``trust_remote_code=True``.
"""

import re
from pathlib import Path

from huggingface_hub import ModelCard

from fairseq_posenc.errors import how_to_install

TAG = "fairseq-posenc"  # of models on the hub
LOADER = "positions_loader"  # the module of `auto_map`
_LOADER_TEXT = f'''\
"""Loads the model of this folder; config.json says which positions it has."""

try:
    from fairseq_posenc.hf.saving import PositionsConfig
except ImportError as error:
    message = "this model has other positions than its class in transformers: "
    raise ImportError(message + """{how_to_install("hf")}""") from error
'''
_HEADER = f"---\nlibrary_name: transformers\ntags: [{TAG}, position-encoding]\n---\n\n"
_BODY = """\
A {class_name} with these positions, as a spec of fairseq-posenc (max_positions {length}):

    {spec}

```python
import fairseq_posenc.hf  # or trust_remote_code=True, where the package is installed
from transformers import {auto_class}

model = {auto_class}.from_pretrained("FOLDER")
```

Without the package transformers refuses this folder, because it lacks these positions.
"""
# Finds a body that this module wrote, with any text in place of the `{fields}`, whose braces
# `re.escape` has written as `\{` and `\}`.
_BODY_PATTERN = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(_BODY)))


def write_loader(folder: Path) -> None:
    """Write the loader of a folder."""
    (folder / f"{LOADER}.py").write_text(_LOADER_TEXT, encoding="utf-8")


def write_card(folder: Path, fields: dict[str, str], complete: bool = False) -> None:
    """Write the card of a folder; in a card that exists, update the body that this module wrote.

    Args:
        folder: folder of the card.
        fields: the texts for the fields of ``_BODY``.
        complete: whether to add the body to a card that lacks it. When a model is pushed to the
            hub, transformers puts a card into the folder first: the hub's, or a new one.
    """
    path = folder / "README.md"
    body = _BODY.format(**fields)
    text = path.read_text(encoding="utf-8") if path.exists() else _HEADER + body
    # A function, because backslashes in a replacement text would be read as escapes.
    path.write_text(_BODY_PATTERN.sub(lambda match: body, text), encoding="utf-8")
    if complete and not _BODY_PATTERN.search(text):
        card = ModelCard.load(path)
        card.text = f"\n{body}\n{card.text}"
        card.save(path)
