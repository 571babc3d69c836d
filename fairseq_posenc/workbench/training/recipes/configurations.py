"""YAML files for ``fairseq-hydra-train``, from options as the command line has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY

from fairseq_posenc.workbench.running import host  # noqa: F401  (registers models and tasks)

MISSING = "???"
_CHOICES = {
    "task": TASK_DATACLASS_REGISTRY,
    "criterion": CRITERION_DATACLASS_REGISTRY,
    "optimizer": OPTIMIZER_DATACLASS_REGISTRY,
    "lr_scheduler": LR_SCHEDULER_DATACLASS_REGISTRY,
}
_FIXED = ("common", "distributed_training", "dataset", "optimization", "checkpoint")
_ORDER = (
    *("common", "task", "criterion", "model", "distributed_training", "dataset"),
    *("optimizer", "lr_scheduler", "optimization", "checkpoint"),
)
_WHY = {
    "data": "full path; several joined by colons",
    "required_batch_size_multiple": "or fairseq drops the end of an epoch",
    "skip_invalid_size_inputs_valid_test": "sentences of more than 512 tokens; the log counts them",
    "find_unused_parameters": "the head of the masked language model",
    "share_decoder_input_output_embed": "or there would not be the paper's 95 M parameters",
}


class Configuration(NamedTuple):
    """A file."""

    head: list[str]  # lines of comment
    options: Mapping[str, Any]  # values by option of fairseq; the name of a model is `arch`
    notes: Mapping[str, str]  # comments on some of them
    # the file that has what several files share, without its ending; empty if none has
    shared: str = ""


def texts(folder: Path, configurations: Mapping[str, Configuration]) -> dict[Path, str]:
    """Return the text of each file, by its name without ending, and of those that several share."""
    found = {}
    common: dict[str, dict[str, Any]] = {"": {}}
    for shared in {each.shared for each in configurations.values() if each.shared}:
        like = [each for each in configurations.values() if each.shared == shared]
        common[shared] = _common([each.options for each in like])
        head = [f"What several files have in common; they name it as `{shared}`."]
        whole = Configuration(head, common[shared], _common([each.notes for each in like]))
        found[folder / f"{shared}.yaml"] = _text(whole, common[shared])
    for name, each in configurations.items():
        own = {key: v for key, v in each.options.items() if key not in common[each.shared]}
        found[folder / f"{name}.yaml"] = _text(each, own)
    return found


def _common(mappings: list[Mapping[str, Any]]) -> dict[str, Any]:
    first, *others = mappings
    return {k: v for k, v in first.items() if all(k in each and each[k] == v for each in others)}


def _text(configuration: Configuration, options: Mapping[str, Any]) -> str:
    """Return the YAML of some options of a configuration."""
    sections: dict[str, list[str]] = {name: [] for name in _ORDER}
    for option, value in options.items():
        section, name = _place(option, configuration.options)
        note = configuration.notes.get(option) or _WHY.get(option)
        line = f"  {name}: {value if isinstance(value, str) else json.dumps(value)}"
        sections[section].append(f"{line} # {note}" if note else line)
    lines = [f"# {line}".rstrip() for line in configuration.head]
    if configuration.shared:
        lines += ["", "defaults:", "  - _self_", f"  - {configuration.shared}"]
    for name, body in sections.items():
        if body:
            body.sort(key=lambda line: not line.startswith("  _name:"))
            lines += ["", f"{name}:", *body]
    return "\n".join(lines) + "\n"


def _place(option: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the section of fairseq's configuration that has an option, and its name there."""
    if option == "arch":
        return "model", "_name"
    if option in _CHOICES:
        return option, "_name"
    sections = {name: getattr(FairseqConfig(), name) for name in _FIXED}
    sections.update({name: known.get(options.get(name)) for name, known in _CHOICES.items()})
    for name, chosen in sections.items():
        if chosen and option in {field.name for field in fields(chosen)}:
            return name, option
    return "model", option
