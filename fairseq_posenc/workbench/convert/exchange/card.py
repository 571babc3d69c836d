"""Writes the model card (README.md) of an exported folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.loading.checkpoints import read_updates
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.results.markdown import code, escape

_CARD = """---
license: {license}
language: [{languages}]
library_name: {library}
pipeline_tag: {pipeline}
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

# Not AutoTokenizer, which in transformers 5 asks to run the model's code.
_MODEL = """from transformers import {auto}, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained("FOLDER")
model = {auto}.from_pretrained("FOLDER"{trust})"""
_GRAPH = """import onnxruntime
from transformers import PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained("FOLDER")
session = onnxruntime.InferenceSession("FOLDER/model.onnx")
inputs = tokenizer(["a text"], return_tensors="np", padding=True)
{outputs} = session.run(None, dict(inputs))"""

# Head of a model -> name of its task on Hugging Face's hub.
_PIPELINES = {
    "masked_lm": "fill-mask",
    "classes": "text-classification",
    "spans": "question-answering",
    "causal_lm": "text-generation",
    "translation": "translation",
}


class Labels(NamedTuple):
    """Labels of a model card that a checkpoint does not record."""

    license: str = "unknown"  # the hub's name of the license
    languages: tuple[str, ...] = ()  # codes; by default those of a translation model's data


def format_model_usage(config: dict[str, Any]) -> str:
    """Format Python lines that load a model with transformers, by its config.json."""
    kind = config["architectures"][0].partition("For")[2]
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    return _MODEL.format(auto=f"AutoModelFor{kind}", trust=trust)


def format_graph_usage(outputs: Sequence[str]) -> str:
    """Format Python lines that run a graph with onnxruntime, by the names of its outputs."""
    return _GRAPH.format(outputs=", ".join(outputs) if len(outputs) > 1 else f"({outputs[0]},)")


def write_card(
    folder: Path,
    trained: OpenModel,
    target: str,
    usage: str,
    notes: Sequence[str],
    labels: Labels,
) -> None:
    """Write README.md into a folder.

    Args:
        folder: the exported folder.
        trained: the exported model.
        target: value of ``--to``.
        usage: Python lines that load or run the export.
        notes: what was compared and what is missing, one line each.
        labels: further labels of the card.
    """
    task = trained.settings.task
    translates = trained.family.name == "translation"
    languages = labels.languages or ((task.source_lang, task.target_lang) if translates else ())
    encodes = target == "onnx" and translates
    rows = [
        (f"positions, {side}", code(s.identity.describe())) for side, s in trained.stacks.items()
    ]
    rows.append(("parameters", f"{sum(x.numel() for x in trained.model.parameters()):,}"))
    rows.append(("architecture in fairseq", code(trained.settings.model._name)))
    rows.append(("data", code(trained.data.resolve().name)))
    rows.append(("updates", f"{read_updates(trained.state):,}"))
    extra = trained.state.get("extra_state") or {}
    if isinstance(extra.get("val_loss"), float):
        metric = trained.settings.checkpoint.get("best_checkpoint_metric") or "loss"
        rows.append((f"validation {metric}", f"{extra['val_loss']:.3f}"))
    text = _CARD.format(
        title=escape(trained.path.resolve().parent.name or trained.path.stem),
        version=__version__,
        file=escape(trained.path.name),
        rows="\n".join(f"| {name} | {value} |" for name, value in rows),
        license=labels.license,
        languages=", ".join(languages),
        pipeline="feature-extraction" if encodes else _PIPELINES[trained.head],
        library=target if target in ("onnx", "ctranslate2") else "transformers",
        target=target,
        usage=usage,
        notes="\n".join(f"- {note}" for note in notes),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
