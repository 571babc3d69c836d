"""The model card of an exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.convert.exchange.trained import Trained
from fairseq_posenc.workbench.results.markdown import plain

_CARD = """---
library_name: {library}
tags: [fairseq, position-encoding]
---

# {title}

Trained with [fairseq](https://github.com/facebookresearch/fairseq) and fairseq-posenc, and written
by its version {version} with `fairseq-posenc export --checkpoint {file} --to {target}`.

| | |
| --- | --- |
{rows}

```python
{usage}
```

{notes}
"""


_MODEL = """from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = {auto}.from_pretrained("FOLDER"{trust})"""
_GRAPH = """import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
session = onnxruntime.InferenceSession("FOLDER/model.onnx")
inputs = tokenizer(["a text"], return_tensors="np", padding=True)
{outputs} = session.run(None, dict(inputs))"""


def model_usage(config: dict[str, Any]) -> str:
    """Return the lines that read a model with transformers.

    Args:
        config: config.json.
    """
    kind = config["architectures"][0].partition("For")[2]
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    return _MODEL.format(auto=f"AutoModelFor{kind}", trust=trust)


def graph_usage(outputs: Sequence[str]) -> str:
    """Return the lines that run a graph with onnxruntime.

    Args:
        outputs: their names.
    """
    return _GRAPH.format(outputs=", ".join(outputs) if len(outputs) > 1 else f"({outputs[0]},)")


def card(trained: Trained, target: str, usage: str, notes: Sequence[str]) -> str:
    """Return the text of README.md.

    Args:
        trained: the model.
        target: what it was exported to.
        usage: lines of Python.
        notes: of the export: what was compared, what is not there.
    """
    rows = [(f"positions, {side}", f"`{s.identity.told()}`") for side, s in trained.stacks.items()]
    rows.append(("parameters", f"{sum(each.numel() for each in trained.model.parameters()):,}"))
    rows.append(("architecture in fairseq", f"`{trained.settings.model._name}`"))
    rows.append(("data", f"`{trained.data.resolve().name}`"))
    rows += _figures(trained)
    return _CARD.format(
        title=plain(trained.path.resolve().parent.name or trained.path.stem),
        version=__version__,
        file=plain(trained.path.name),
        rows="\n".join(f"| {name} | {plain(value)} |" for name, value in rows),
        library="onnx" if target == "onnx" else "transformers",
        target=target,
        usage=usage,
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
