"""Finds fairseq's options for a Hugging Face folder.

:func:`options_from_config` reads them from the config.json of a class of transformers.
:func:`plan_model` corrects those in an export of ours, which was perhaps changed since.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import utils

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.specs import Spec
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.workbench.convert.exchange.config_json import ACTIVATIONS, ARCHITECTURES
from fairseq_posenc.workbench.convert.exchange.encoding_maps import IMPORTED, parse_positions
from fairseq_posenc.workbench.convert.exchange.hf_folder_reader import HFFolder
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import EXPORTED_AS
from fairseq_posenc.workbench.convert.exchange.param_names import EPSILON, LAYOUTS

_SIZES = {  # fairseq's options without `encoder_` -> fields of config.json
    "layers": "num_hidden_layers",
    "embed_dim": "hidden_size",
    "ffn_embed_dim": "intermediate_size",
    "attention_heads": "num_attention_heads",
}
_TASKS = {"masked_lm": "masked_lm", "classes": "glue", "spans": "squad"}  # head -> fairseq's task
_CLASSIFIER = "classifier.out_proj.weight"  # has a row for each class


class ModelPlan(NamedTuple):
    """The model of fairseq that a folder becomes."""

    model: dict[str, Any]  # options of the model
    task: dict[str, Any]  # options of its task
    head: str  # `spans`, `classes`, or the name of the family
    head_name: str  # fairseq's name of the head for classes
    classes: int  # number of classes, 0 without such a head


def options_from_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Find the options of a masked LM in fairseq for a config.json of transformers.

    They have the form of those in our exports: sections ``model`` and ``task``.

    Raises:
        UserError: the class is unknown, or fairseq's RoBERTa has no such settings.
    """
    model = str((config.get("architectures") or [None])[0])
    if model not in IMPORTED:
        raise UserError(
            f"{path}: a {shortened(model)}; fairseq-posenc imports {', '.join(IMPORTED)}, and its "
            "own exports. For other positions, a model may stay one of transformers: "
            "fairseq-posenc swap"
        )
    layout = LAYOUTS[model]
    epsilon, activation = config.get("layer_norm_eps"), config.get("hidden_act")
    if epsilon != EPSILON:
        raise UserError(
            f"{path}: layer_norm_eps is {epsilon}, and fairseq's layer norms have {EPSILON:g}: the "
            "model would compute something else"
        )
    head_activation = layout.activations.get("masked_lm")
    if head_activation not in (None, activation):
        raise UserError(
            f"{path}: a {model} has {head_activation} in its head and "
            f"{shortened(str(activation))} in its layers, and a RoBERTa of fairseq has one "
            "activation"
        )
    fairseq_names = _name_activations()
    if activation not in fairseq_names:
        raise UserError(f"{path}: fairseq has no activation {shortened(str(activation))}")
    sizes = {f"encoder_{ours}": config.get(theirs) for ours, theirs in _SIZES.items()}
    others = [config.get(name) for name in ("max_position_embeddings", "vocab_size")]
    if not all(isinstance(size, int) and size > 0 for size in (*sizes.values(), *others)):
        raise UserError(f"{path}: its config.json has sizes that are not numbers of 1 or more")
    positions = parse_positions(model, config)
    if positions is None:
        raise UserError(f"{path}: the package does not have the positions of its {model}")
    item, max_positions = positions
    return {
        "model": {
            **sizes,
            "_name": f"roberta_{item.name}",
            "position_encoding": str(Spec.uniform((item,))),
            "max_positions": max_positions,
            "activation_fn": fairseq_names[activation],
        },
        "task": {"_name": "masked_lm"},
    }


def _name_activations() -> dict[str, str]:
    """Map the names of activations in transformers to those in fairseq."""
    return {ACTIVATIONS.get(name, name): name for name in utils.get_available_activation_fns()}


def plan_model(settings: dict[str, Any], folder: HFFolder) -> ModelPlan:
    """Update a folder's options of fairseq to its model, which may have been changed since.

    Options that the folder does not contradict are those of ``settings``.

    Raises:
        UserError: no model of fairseq has such a head.
    """
    head, head_activation = _find_head(folder)
    model = {**settings["model"], **_find_untied(settings["model"], folder)}
    if head == "causal_lm":
        model |= _find_changed_rotation(settings, folder)
    if head_activation is not None:
        # fairseq's head for masked tokens has the activation of the layers; that for classes has
        # one of its own.
        option = "pooler_activation_fn" if head == "classes" else "activation_fn"
        trained_with = str(model.get(option))
        if ACTIVATIONS.get(trained_with, trained_with) != head_activation:
            changed = _name_activations().get(head_activation) if head == "classes" else None
            if changed is None:
                raise UserError(
                    f"{folder.path}: {shortened(str(head_activation))} in its head, where a model "
                    f"of fairseq with such layers has {shortened(trained_with)}"
                )
            model[option] = changed
    task = {**settings["task"], **({"_name": _TASKS[head]} if head in _TASKS else {})}
    classifier = folder.weights.get(_CLASSIFIER)
    classes = 0 if classifier is None else classifier.size(0)
    return ModelPlan(model, task, head, str(settings.get("head_name", HEAD)), classes)


def _find_changed_rotation(settings: dict[str, Any], folder: HFFolder) -> dict[str, Any]:
    """Return the options of a GPT-NeoX's rotations that have changed since its export.

    A config.json may be parsed to an equal, but not the same spec (``ntk`` is a larger base). So an
    export also stores the spec to which its config.json is parsed, under ``EXPORTED_AS``.
    """
    name = folder.config["architectures"][0]
    if name != "GPTNeoXForCausalLM":
        return {}
    parsed = parse_positions(name, folder.config)
    if parsed is None:
        raise UserError(
            f"{folder.path}: the package does not have the scaling of its rotary positions"
        )
    item, size = parsed
    spec = str(Spec.uniform((item,)))
    if spec == settings.get(EXPORTED_AS):
        return {}
    return {"position_encoding": spec, "max_target_positions": size}


def _find_untied(model: dict[str, Any], folder: HFFolder) -> dict[str, bool]:
    """Return the options that untie embeddings whose two tensors now differ."""
    weights = folder.weights
    if model.get("share_all_embeddings"):
        first = weights.get("encoder.embed_tokens.weight")
        second = weights.get("decoder.embed_tokens.weight")
        untied = {"share_all_embeddings": False, "share_decoder_input_output_embed": True}
    else:
        layouts = [layout for layout in LAYOUTS.values() if layout.scaled_embeddings in weights]
        if not layouts:  # no causal LM of transformers; our own code stores tied embeddings once
            return {}
        # Such a class has our embeddings twice: as its output, and scaled as its input.
        output = layouts[0].names["decoder.embed_tokens."]
        first, second = weights.get(f"{output}weight"), weights[layouts[0].scaled_embeddings]
        if first is not None and not model.get("no_scale_embedding"):
            first = first * math.sqrt(first.size(1))
        untied = {"share_decoder_input_output_embed": False}
    tied = first is None or second is None or torch.equal(first, second)
    return {} if tied else untied


def _find_head(folder: HFFolder) -> tuple[str, Any]:
    """Find the head of a folder's class, and the head's activation, None if it has none."""
    name = str((folder.config.get("architectures") or [None])[0])
    for head, our_class in ARCHITECTURES.items():
        if our_class == name:
            has_activation = head in ("masked_lm", "classes")
            return head, folder.config.get("head_activation") if has_activation else None
    for layout in LAYOUTS.values():
        for head, hf_class in layout.heads.items():
            if hf_class == name:
                return head, layout.activations.get(head)
    raise UserError(f"{folder.path}: a {shortened(name)} is not an export of fairseq-posenc")
