"""Writes model cards that say how a folder is loaded, and which positions the model has."""

import re
from pathlib import Path

from huggingface_hub import ModelCard

TAG = "fairseq-posenc"
_HEADER = f"""---
library_name: transformers
tags: [{TAG}, position-encoding]
---

"""
_BODY = """A {name} with these positions, as a spec of fairseq-posenc (max_positions {length}):

    {spec}

```python
import fairseq_posenc.hf  # pip install '.[hf]' in a checkout of fairseq-posenc
from transformers import {auto}

model = {auto}.from_pretrained("FOLDER")
```

Without the first line transformers refuses this folder, because it lacks these positions.
"""
# Finds a body that was written here, whatever stands in place of its `{fields}`.
_WRITTEN = re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(_BODY)))


def write_card(folder: Path, name: str, auto: str, spec: str, length: int) -> None:
    """Write the card of a folder, or update one that was written here; leave any other card.

    Args:
        folder: folder of a saved model.
        name: name of the model's class.
        auto: name of the Auto class that loads it.
        spec: spec of its positions.
        length: longest sequence of its positions.
    """
    path = folder / "README.md"
    body = _BODY.format(name=name, auto=auto, spec=spec, length=length)
    if not path.exists():
        path.write_text(_HEADER + body, encoding="utf-8")
        return
    text = path.read_text(encoding="utf-8")
    if _WRITTEN.search(text):  # the model may have got other positions since
        path.write_text(_WRITTEN.sub(lambda match: body, text), encoding="utf-8")


def complete_card(folder: Path, name: str, auto: str, spec: str, length: int) -> None:
    """Add to a card for the hub how the model is loaded, if it does not say so.

    For the hub, transformers replaces the folder's card by its own.
    """
    path = folder / "README.md"
    if "import fairseq_posenc.hf" not in path.read_text(encoding="utf-8"):
        card = ModelCard.load(path)
        card.text = f"\n{_BODY.format(name=name, auto=auto, spec=spec, length=length)}\n{card.text}"
        card.save(path)
    write_card(folder, name, auto, spec, length)
