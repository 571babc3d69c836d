"""Writes the files of an exported model: configuration, weights, code, and its card (README.md).

Its names of files and of entries in config.json are also those by which the folder is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.convert.exchange.standalone import (
    Symbol,
    build_standalone,
    load_module,
)
from fairseq_posenc.workbench.loading.checkpoints import read_updates
from fairseq_posenc.workbench.loading.open_model import OpenModel
from fairseq_posenc.workbench.results.markdown import code, escape

WEIGHTS, CONFIG, CODE = "model.safetensors", "config.json", "modeling_fairseq_posenc.py"
FAIRSEQ = "fairseq"  # key of config.json: fairseq's options, needed to import the model again
# Entries of FAIRSEQ.
EXPORTED_AS = "hf_positions"  # the spec that importing config.json gives
WEIGHT_SETTINGS = "meanings"  # by stack, the settings that the weights were trained with
TRAINED_LENGTHS = "trained_lengths"  # by stack
TARGET = "target"  # folder of the target's tokenizer, if it is not the source's
# Docstring of CODE. Its line with the version is left out when two versions' code is compared.
_TITLE = """A Transformer built from position encodings: {spec}.

Written by fairseq-posenc {version} from its own modules; needs torch and transformers alone.
"""
VERSION_LINE = re.compile(r"^Written by fairseq-posenc [\w.+-]+ from", re.MULTILINE)
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write configuration and weights."""
    write_json(folder / CONFIG, config)
    path = folder / WEIGHTS
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((folder / CONFIG).stat().st_mode)  # save_file makes it readable only by its owner


def generate_code(config: dict[str, Any]) -> str:
    """Generate the source of a model: its classes, its encodings, and their dependencies."""
    # Of values such as `modeling_fairseq_posenc.PosencForMaskedLM`.
    classes = {name.rpartition(".")[2] for name in config["auto_map"].values()}
    # transformers writes a missing stack as null when it saves a trained model.
    stacks = [config[key] for key in ("encoder_stack", "decoder_stack") if config.get(key)]
    # It also sorts entries, which loses the order of encodings; the code must not depend on it.
    layers = [[sorted(layer) for layer in stack["positions"]] for stack in stacks]
    names = sorted({name for stack in layers for layer in stack for name in layer})
    symbols = [Symbol(x.__module__, x.__name__) for x in map(registry.get, names)]
    for source in ("configuration", "models"):
        module = f"fairseq_posenc.workbench.convert.exchange.modeling.{source}"
        definitions = load_module(module).definitions
        symbols += [Symbol(module, name) for name in definitions if name in classes]
    specs = [",".join("+".join(layer) or "none" for layer in stack) for stack in layers]
    spec = " and ".join(dict.fromkeys(specs))
    return build_standalone(_TITLE.format(spec=spec, version=__version__), symbols)


class Labels(NamedTuple):
    """Labels of a model card that a checkpoint does not record."""

    license: str = "unknown"  # the hub's name of the license
    languages: tuple[str, ...] = ()  # codes; by default those of a translation model's data


def format_model_usage(config: dict[str, Any]) -> str:
    """Format Python lines that load a model with transformers, by its config.json."""
    kind = config["architectures"][0].rpartition("For")[2]
    trust = ", trust_remote_code=True" if "auto_map" in config else ""
    return _MODEL.format(auto=f"AutoModelFor{kind}", trust=trust)


def format_graph_usage(outputs: Sequence[str]) -> str:
    """Format Python lines that run a graph with onnxruntime, by the names of its outputs."""
    return _GRAPH.format(outputs=", ".join(outputs) if len(outputs) > 1 else f"({outputs[0]},)")


def write_card(
    folder: Path, trained: OpenModel, target: str, usage: str, notes: Sequence[str], labels: Labels
) -> None:
    """Write README.md into the folder of an exported model.

    Args:
        folder: the folder.
        trained: the model.
        target: value of ``--to``.
        usage: Python lines that load or run the export.
        notes: lines about the comparison and about parts that are missing.
        labels: further labels of the card.
    """
    languages = labels.languages
    if trained.translates and not languages:
        languages = trained.settings.task.source_lang, trained.settings.task.target_lang
    encodes = target == "onnx" and trained.translates  # the graph is only the encoder
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
