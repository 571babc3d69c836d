"""Finds fairseq's options for a Hugging Face folder.

:func:`options_from_config` reads them from the config.json of a class of transformers.
:func:`plan_model` reads those that an export of ours stores, and adapts them if the folder was
trained or edited in transformers since.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import utils
from torch import Tensor

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.specs import Spec
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.workbench.convert.exchange.config_json import ACTIVATIONS, ARCHITECTURES
from fairseq_posenc.workbench.convert.exchange.encoding_maps import IMPORTED, parse_positions
from fairseq_posenc.workbench.convert.exchange.hf_folder_reader import HFFolder, read_class_name
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
    name = read_class_name(config)
    if name not in IMPORTED:
        raise UserError(
            f"{path}: a {shortened(name)} cannot be imported; fairseq-posenc imports "
            f"{', '.join(IMPORTED)}, and its own exports. To change only the positions of a model "
            "of transformers, use fairseq-posenc swap"
        )
    layout = LAYOUTS[name]
    epsilon, activation = config.get("layer_norm_eps"), config.get("hidden_act")
    if epsilon != EPSILON:
        raise UserError(
            f"{path}: layer_norm_eps is {epsilon}, and fairseq's layer norms have {EPSILON:g}: the "
            "model would compute something else"
        )
    head_activation = layout.activations.get("masked_lm")
    if head_activation not in (None, activation):
        raise UserError(
            f"{path}: this {name} has {head_activation} in its head and "
            f"{shortened(str(activation))} in its layers; fairseq's RoBERTa has one activation "
            "for both"
        )
    fairseq_names = _name_activations()
    if activation not in fairseq_names:
        raise UserError(f"{path}: fairseq has no activation {shortened(str(activation))}")
    sizes = {f"encoder_{ours}": config.get(theirs) for ours, theirs in _SIZES.items()}
    others = [config.get(name) for name in ("max_position_embeddings", "vocab_size")]
    if not all(isinstance(size, int) and size > 0 for size in (*sizes.values(), *others)):
        raise UserError(f"{path}: its config.json has sizes that are not numbers of 1 or more")
    positions = parse_positions(name, config)
    if positions is None:
        raise UserError(f"{path}: the positions of its {name} are not supported")
    encoding, max_positions = positions
    return {
        "model": {
            **sizes,
            "_name": f"roberta_{encoding.name}",
            "position_encoding": str(Spec.uniform((encoding,))),
            "max_positions": max_positions,
            "activation_fn": fairseq_names[activation],
        },
        "task": {"_name": "masked_lm"},
    }


def _name_activations() -> dict[str, str]:
    """Map the names of activations in transformers to those in fairseq."""
    return {ACTIVATIONS.get(name, name): name for name in utils.get_available_activation_fns()}


def plan_model(settings: dict[str, Any], folder: HFFolder) -> ModelPlan:
    """Adapt the options that an export stores to the model that the folder now has.

    If the folder was trained or edited in transformers, its head, rotations or tied weights may no
    longer match. All other options are those of ``settings``.

    Args:
        settings: the folder's entry of our options: sections ``model`` and ``task``, and perhaps
            ``head_name`` and ``EXPORTED_AS``.
        folder: the folder.

    Raises:
        UserError: no model of fairseq has such a head or such rotations.
    """
    head, head_activation = _find_head(folder)
    model = {**settings["model"], **_find_untied_embeddings(settings["model"], folder.weights)}
    if head == "causal_lm":
        model |= _find_changed_rotations(settings, folder)
    if head_activation is not None:
        model |= _find_changed_activation(model, head, head_activation, folder.path)
    task = dict(settings["task"])
    if head in _TASKS:
        task["_name"] = _TASKS[head]
    classifier = folder.weights.get(_CLASSIFIER)
    classes = 0 if classifier is None else classifier.size(0)
    return ModelPlan(model, task, head, str(settings.get("head_name", HEAD)), classes)


def _find_changed_activation(
    model: dict[str, Any], head: str, activation: Any, path: Path
) -> dict[str, str]:
    """Return the option of a head's activation if it has changed.

    fairseq's head for classes has an activation of its own, and may change; that for masked tokens
    has the activation of the layers.
    """
    option = "pooler_activation_fn" if head == "classes" else "activation_fn"
    trained_with = str(model.get(option))
    if ACTIVATIONS.get(trained_with, trained_with) == activation:
        return {}
    changed = _name_activations().get(str(activation))
    if head != "classes" or changed is None:
        raise UserError(
            f"{path}: {shortened(str(activation))} in its head, where a model of fairseq with "
            f"these options has {shortened(trained_with)}"
        )
    return {option: changed}


def _find_changed_rotations(settings: dict[str, Any], folder: HFFolder) -> dict[str, Any]:
    """Return the options of a GPT-NeoX's rotations that have changed since its export.

    Exporting and parsing may change the wording of a spec (``ntk`` becomes a larger base). So an
    export also stores the spec to which its config.json is parsed, under ``EXPORTED_AS``.
    """
    name = read_class_name(folder.config)
    if name != "GPTNeoXForCausalLM":
        return {}
    parsed = parse_positions(name, folder.config)
    if parsed is None:
        raise UserError(f"{folder.path}: the scaling of its rotary positions is not supported")
    encoding, size = parsed
    spec = str(Spec.uniform((encoding,)))
    if spec == settings.get(EXPORTED_AS):
        return {}
    return {"position_encoding": spec, "max_target_positions": size}


def _find_untied_embeddings(model: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, bool]:
    """Return the options that untie embeddings whose two tensors now differ."""
    if model.get("share_all_embeddings"):  # of a translation model
        source = weights.get("encoder.embed_tokens.weight")
        target = weights.get("decoder.embed_tokens.weight")
        if source is None or target is None or torch.equal(source, target):
            return {}
        return {"share_all_embeddings": False, "share_decoder_input_output_embed": True}
    layout = next((x for x in LAYOUTS.values() if x.scaled_embeddings in weights), None)
    if layout is None:  # no causal LM of transformers; our own code stores tied embeddings once
        return {}
    # transformers' class stores them twice: the output as it is, and the input scaled as the export
    # does, so that equal tensors have equal bits.
    output = weights.get(f"{layout.names['decoder.embed_tokens.']}weight")
    if output is None:
        return {}
    scale = 1.0 if model.get("no_scale_embedding") else math.sqrt(output.size(1))
    tied = torch.equal(output * scale, weights[layout.scaled_embeddings])
    return {} if tied else {"share_decoder_input_output_embed": False}


def _find_head(folder: HFFolder) -> tuple[str, Any]:
    """Find the head of a folder's class, and the head's activation, None if it has none."""
    name = read_class_name(folder.config)
    for head, our_class in ARCHITECTURES.items():
        if our_class == name:
            has_activation = head in ("masked_lm", "classes")
            return head, folder.config.get("head_activation") if has_activation else None
    for layout in LAYOUTS.values():
        for head, hf_class in layout.heads.items():
            if hf_class == name:
                return head, layout.activations.get(head)
    raise UserError(f"{folder.path}: a {shortened(name)} is not an export of fairseq-posenc")
