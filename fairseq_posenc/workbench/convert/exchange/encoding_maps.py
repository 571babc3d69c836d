"""Position encodings in the model classes of transformers: names, shapes and configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.encodings.deberta_v2 import EPSILON, DebertaV2
from fairseq_posenc.encodings.distance_table import DistanceEncoding, repeat_row
from fairseq_posenc.encodings.learned import Learned
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_scaling import SETTINGS
from fairseq_posenc.encodings.t5 import T5
from fairseq_posenc.registry import Item, parse


class ParamMap(NamedTuple):
    """A parameter of an encoding as a tensor of a model class."""

    name: str  # of the tensor, with `{}` for the number of the layer
    there: Callable[[Tensor], Tensor]  # computes the tensor from the parameter
    back: Callable[[Tensor], Tensor]  # computes the parameter from the tensor


class HFClass(NamedTuple):
    """A model class that has an encoding's positions, and no others."""

    model: str  # its name
    config: Mapping[str, Any]  # the fields of its configuration that describe the positions
    weights: Mapping[str, ParamMap] = {}  # the encoding's parameters, by their names
    fixed: Mapping[str, Tensor] = {}  # further tensors that it has for its positions
    until: Optional[int] = None  # the last major version of transformers that has it; None for all


def hf_classes(encoding: Encoding) -> list[HFClass]:
    """List the model classes that have an encoding's positions."""
    find = _FINDERS.get(encoding.name)
    return [] if find is None else find(encoding)


def parse_positions(model: str, config: dict[str, Any]) -> tuple[Item, int] | None:
    """Read a model class's encoding and number of positions; None for one not known here."""
    size = config.get("max_position_embeddings", 0)
    if model == _GPT_NEOX:
        rope = _parse_rope(config, size)
        return None if rope is None else (rope, size)
    kind = config.get("position_embedding_type", "absolute")
    if model in _LEARNED and kind == "absolute":
        return Item.canonical("learned", {}), size - _OFFSET
    if model == _ROBERTA and kind in _RELATIVE:
        return Item.canonical(_RELATIVE[kind], {}), size
    buckets = config.get("position_buckets", -1)
    if model == _DEBERTA and _is_plain_deberta(config) and isinstance(buckets, int) and buckets > 1:
        return Item.canonical("deberta_v2", {"buckets": buckets}), size
    return None


_GPT_NEOX = "GPTNeoXForCausalLM"
# Settings of the scalings of rope, ours and theirs. Their dynamic and longrope take the length of a
# batch, ours that of the model.
_SCALINGS: dict[str, dict[str, str]] = {
    "linear": {},
    "yarn": {
        **{name: name for name in SETTINGS["yarn"]},
        "length": "original_max_position_embeddings",
    },
    "llama3": {
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "length": "original_max_position_embeddings",
    },
}
_ROBERTA = "RobertaForMaskedLM"
_RELATIVE = {"relative_key": "shaw", "relative_key_query": "m4"}
_OFFSET = 2  # rows before position 0, of fairseq's table as of these
_LEARNED = {
    _ROBERTA: "roberta.embeddings.position_embeddings.weight",
    "XLMRobertaForMaskedLM": "roberta.embeddings.position_embeddings.weight",
    "OPTForCausalLM": "model.decoder.embed_positions.weight",
}


def _find_learned(encoding: Learned) -> list[HFClass]:
    """RoBERTa, and of the causal models OPT, whose padding never shifts a position."""
    rows = encoding.table.num_embeddings
    sizes = {"OPTForCausalLM": rows}  # it does not count the rows before
    return [
        HFClass(
            model,
            {"max_position_embeddings": sizes.get(model, rows + _OFFSET)},
            {
                "table.weight": ParamMap(
                    name,
                    lambda weight: F.pad(weight, (0, 0, _OFFSET, 0)),
                    lambda weight: weight[_OFFSET:],
                )
            },
        )
        for model, name in _LEARNED.items()
    ]


def _find_relative(encoding: DistanceEncoding) -> list[HFClass]:
    """RoBERTa with relative positions, whose rows run over i - j."""
    table, plain = encoding.table, encoding.scale_factor == 1.0
    size, width = encoding.dims.max_positions, encoding.dims.embed_dim
    clipped = size - 1 - table.max_distance  # distances that share our end row, on each side
    if table.reset is not None or table.weight.size(0) > 1 or not plain or clipped < 0:
        return []

    def there(weight: Tensor) -> Tensor:
        first, last = repeat_row(weight[:, :1], clipped), repeat_row(weight[:, -1:], clipped)
        return torch.cat([first, weight, last], dim=1)[0].flip(0)  # [2n-1, D]

    def back(weight: Tensor) -> Tensor:
        return weight.flip(0)[None, clipped : weight.size(0) - clipped]  # [1, 2K+1, D]

    name = "roberta.encoder.layer.{}.attention.self.distance_embedding.weight"
    kind = next(kind for kind, ours in _RELATIVE.items() if ours == encoding.name)
    absolute = {_LEARNED[_ROBERTA]: torch.zeros(size, width)}
    config = {"position_embedding_type": kind, "max_position_embeddings": size}
    weights = {"table.weight": ParamMap(name, there, back)}
    return [HFClass(_ROBERTA, config, weights, absolute, until=4)]


_DEBERTA = "DebertaV2ForMaskedLM"
_DEBERTA_CONFIG = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}


def _find_deberta_v2(encoding: DebertaV2) -> list[HFClass]:
    """DeBERTa V2, whose layer norms have one epsilon: there it is fairseq's 1e-5.

    The norm of a table that is sqrt(1e-5 / 1e-7) times as large is the same with that.
    """
    if encoding.scale_factor != 3.0:
        return []
    factor = (1e-5 / EPSILON) ** 0.5
    config = {
        **_DEBERTA_CONFIG,
        "position_buckets": encoding.buckets,
        "max_position_embeddings": encoding.dims.trained_length,
    }
    stem = "deberta.encoder."
    weights = {
        "table": ParamMap(
            f"{stem}rel_embeddings.weight", lambda x: x * factor, lambda x: x / factor
        ),
        "norm_weight": ParamMap(f"{stem}LayerNorm.weight", torch.clone, torch.clone),
        "norm_bias": ParamMap(f"{stem}LayerNorm.bias", torch.clone, torch.clone),
    }
    return [HFClass(_DEBERTA, config, weights)]


def _is_plain_deberta(config: dict[str, Any]) -> bool:
    """Check that a DeBERTa V2 has no positions beside those of ``deberta_v2``."""
    found = {**config, "pos_att_type": sorted(config.get("pos_att_type") or ())}
    return (
        all(found.get(name) == value for name, value in _DEBERTA_CONFIG.items())
        and config.get("max_relative_positions", -1) < 1
        and config.get("legacy", True) is True
    )


def _find_rope(encoding: Rope) -> list[HFClass]:
    """RoFormer, which has a table of all angles as in the paper, or GPT-NeoX for halves."""
    rows, kind = encoding.dims.max_positions, encoding.scaling.kind
    if encoding.layout == "half":
        if kind not in (*_SCALINGS, "none"):
            return []
        base, part = float(encoding.base), encoding.rotated / encoding.dims.head_dim
        scaled = _scaling_there(encoding)
        config = {
            "max_position_embeddings": rows,
            "rotary_emb_base": base,  # up to transformers 4, as the next two
            "rotary_pct": part,
            "rope_scaling": scaled or None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": base,
                "partial_rotary_factor": part,
                **scaled,
            },
        }
        return [HFClass(_GPT_NEOX, config)]
    if kind != "none" or encoding.base != 10000.0 or encoding.rotated != encoding.dims.head_dim:
        return []
    angles = torch.arange(rows)[:, None] * encoding.frequencies  # [n, D/2]
    table = torch.cat([angles.sin(), angles.cos()], dim=1)  # [n, D]
    config = {"max_position_embeddings": rows, "rotary_value": False}
    fixed = {"roformer.encoder.embed_positions.weight": table}
    return [HFClass("RoFormerForMaskedLM", config, fixed=fixed)]


def _scaling_there(encoding: Rope) -> dict[str, Any]:
    """Describe a scaling as GPT-NeoX's configuration does; empty where it has none."""
    kind, factor, settings = encoding.scaling
    if kind not in _SCALINGS:
        return {}
    given = {**settings, "length": settings.get("length") or encoding.dims.trained_length}
    found = {theirs: given[ours] for ours, theirs in _SCALINGS[kind].items()}
    return {
        "rope_type": kind,
        "factor": factor,
        **{name: value for name, value in found.items() if value is not None},
    }


def _parse_rope(config: dict[str, Any], size: int) -> Item | None:
    """Read the rotations of a GPT-NeoX; None for a scaling not known here."""
    found = config.get("rope_parameters")
    if found is None or str(config.get("transformers_version")).startswith("4."):
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        old = {name: config[theirs] for name, theirs in names.items() if theirs in config}
        found = {**old, **(config.get("rope_scaling") or {})}
    found = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, **found}
    kind = found.get("rope_type", found.get("type", "default"))
    text = f"layout=half,base={found['rope_theta']},fraction={found['partial_rotary_factor']}"
    if kind != "default":
        if kind not in _SCALINGS:
            return None
        given = {ours: found.get(theirs) for ours, theirs in _SCALINGS[kind].items()}
        if given.get("length") == size:
            del given["length"]
        settings = [f"{name}={value}".lower() for name, value in given.items() if value is not None]
        text += f",scaling={':'.join([kind, str(found.get('factor')), *settings])}"
    (item,) = parse(f"rope({text})").items
    return item


def _find_t5(encoding: T5) -> list[HFClass]:
    """MPNet, which has T5's buckets, and absolute positions beside them: of zeros."""
    options = (encoding.num_buckets, encoding.max_distance, encoding.scale_factor)
    if encoding.dims.causal or options != (32, 128, 1.0):
        return []
    rows = encoding.dims.max_positions + 2  # its first position is in the row 2
    config = {"relative_attention_num_buckets": 32, "max_position_embeddings": rows}
    name = "mpnet.encoder.relative_attention_bias.weight"
    table = ParamMap(name, lambda weight: weight.T, lambda weight: weight.T.contiguous())
    absolute = torch.zeros(rows, encoding.dims.embed_dim)
    fixed = {"mpnet.embeddings.position_embeddings.weight": absolute}
    return [HFClass("MPNetForMaskedLM", config, {"table": table}, fixed)]


_FINDERS: dict[str, Callable[[Any], list[HFClass]]] = {
    "learned": _find_learned,
    "shaw": _find_relative,
    "m4": _find_relative,
    "deberta_v2": _find_deberta_v2,
    "rope": _find_rope,
    "t5": _find_t5,
}
