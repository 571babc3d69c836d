"""Writes the model card (README.md) of a saved folder: how to load it, and its positions."""

import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCard

TAG = "fairseq-posenc"  # of models on the hub
_HEADER = f"""---
library_name: transformers
tags: [{TAG}, position-encoding]
---

"""
_BODY = """\
A {class_name} with these positions, as a spec of fairseq-posenc (max_positions {length}):

    {spec}

```python
import fairseq_posenc.hf  # pip install '.[hf]' in a checkout of fairseq-posenc
from transformers import {auto_class}

model = {auto_class}.from_pretrained("FOLDER")
```

Without the first line transformers refuses this folder, because it lacks these positions.
"""
# Finds a body that this module wrote, with any text in place of the `{fields}`, whose braces
# `re.escape` has written as `\{` and `\}`.
_BODY_PATTERN = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(_BODY)))


class CardFields(NamedTuple):
    """What a card says about a model; the names are those of the fields of ``_BODY``."""

    class_name: str  # the model's class
    auto_class: str  # the Auto class that loads the model
    spec: str  # the model's positions
    length: int  # the number of positions


def write_card(folder: Path, fields: CardFields, complete: bool = False) -> None:
    """Write the card of a folder; in a card that exists, update the body that this module wrote.

    Args:
        folder: folder of the card.
        fields: what the card says.
        complete: whether to add the body to a card that lacks it. When a model is pushed to the
            hub, transformers puts a card into the folder first: the hub's, or a new one.
    """
    path = folder / "README.md"
    body = _BODY.format(**fields._asdict())
    if not path.exists():
        path.write_text(_HEADER + body, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    if complete and "import fairseq_posenc.hf" not in text:
        card = ModelCard.load(path)
        card.text = f"\n{body}\n{card.text}"
        card.save(path)
    elif _BODY_PATTERN.search(text):  # the model may have been given other positions since then
        # A function, because backslashes in a replacement text would be read as escapes.
        path.write_text(_BODY_PATTERN.sub(lambda match: body, text), encoding="utf-8")
