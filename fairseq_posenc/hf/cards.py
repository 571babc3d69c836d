"""Writes model cards that say how a folder is loaded, and which positions the model has."""

import re
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import ModelCard

TAG = "fairseq-posenc"
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
# Finds a body that was written here, whatever stands in place of its `{fields}`.
_BODY_PATTERN = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(_BODY)))


class CardFields(NamedTuple):
    """What a card says about a model."""

    class_name: str  # of the model
    auto_class: str  # name of the Auto class that loads it
    spec: str  # of its positions
    length: int  # number of its positions


def write_card(folder: Path, fields: CardFields, complete: bool = False) -> None:
    """Write the card of a folder, or update what was written here.

    Args:
        folder: folder of the card.
        fields: what the card says.
        complete: whether to add the body to a card that others wrote. When a model is pushed,
            transformers has put the hub's card, or a new one, into the folder.
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
    elif _BODY_PATTERN.search(text):  # the model may have got other positions since
        path.write_text(_BODY_PATTERN.sub(lambda match: body, text), encoding="utf-8")
