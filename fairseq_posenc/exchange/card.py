"""The model card of an exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq_posenc.exchange.trained import Trained
from fairseq_posenc.version import __version__

_CARD = """---
library_name: transformers
tags: [fairseq, position-encoding]
---

# {title}

Trained with [fairseq](https://github.com/facebookresearch/fairseq) and fairseq-posenc, and written
by its version {version} with `fairseq-posenc export --checkpoint {file} --to hf`.

| | |
| --- | --- |
{rows}

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {auto}.from_pretrained("FOLDER"{trust})
```

{notes}
"""


def card(trained: Trained, config: dict[str, Any], notes: Sequence[str]) -> str:
    """Return the text of README.md.

    Args:
        trained: the model.
        config: its configuration there.
        notes: of the export: what was compared, what is not there.
    """
    rows = [(f"positions, {side}", f"`{s.identity.told()}`") for side, s in trained.stacks.items()]
    rows.append(("parameters", f"{sum(each.numel() for each in trained.model.parameters()):,}"))
    rows.append(("architecture in fairseq", f"`{trained.settings.model._name}`"))
    rows.append(("data", f"`{trained.data.resolve().name}`"))
    rows += _figures(trained)
    (architecture,) = config["architectures"]
    kind = architecture.partition("For")[2]
    return _CARD.format(
        title=trained.path.resolve().parent.name or trained.path.stem,
        version=__version__,
        file=trained.path.name,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows),
        auto=f"AutoModelFor{kind}",
        trust=", trust_remote_code=True" if "auto_map" in config else "",
        notes="\n".join(f"- {note}" for note in notes),
    )


def _figures(trained: Trained) -> list[tuple[str, str]]:
    """Return what the checkpoint says of its training."""
    history = trained.state.get("optimizer_history") or [{}]
    found = [("updates", f"{history[-1].get('num_updates', 0):,}")]
    extra = trained.state.get("extra_state") or {}
    if isinstance(extra.get("val_loss"), float):
        metric = trained.settings.checkpoint.get("best_checkpoint_metric") or "loss"
        found.append((f"validation {metric}", f"{extra['val_loss']:.3f}"))
    return found
