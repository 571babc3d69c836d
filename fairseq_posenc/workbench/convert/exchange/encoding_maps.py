"""Maps position encodings to model classes of transformers: tensors, shapes and configurations.

An export finds the classes of a model's encoding; an import finds the encoding in a config.json,
then the map of its class. The maps of all other weights stand in ``param_names``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.encodings.deberta import EPSILON as TABLE_EPSILON
from fairseq_posenc.encodings.deberta import DebertaV2
from fairseq_posenc.encodings.distance_table import DistanceEncoding
from fairseq_posenc.encodings.learned import Learned
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rope_parameters import read_rope
from fairseq_posenc.encodings.rope_scaling import TRAINED_LENGTH, Scaling
from fairseq_posenc.encodings.t5 import T5
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Item, parse
from fairseq_posenc.workbench.convert.exchange.param_names import EPSILON

_GPT_NEOX = "GPTNeoXForCausalLM"
_ROBERTA = "RobertaForMaskedLM"
_XLM_ROBERTA = "XLMRobertaForMaskedLM"
_DEBERTA = "DebertaV2ForMaskedLM"
_OPT = "OPTForCausalLM"
# Model classes whose folders become a fairseq model, whoever wrote them.
IMPORTED = (_ROBERTA, _XLM_ROBERTA, _DEBERTA)
_OFFSET = 2  # rows before position 0, in fairseq's tables of positions and in these
_ROBERTA_TABLE = "roberta.embeddings.position_embeddings.weight"
_LEARNED = {  # class -> its table
    _ROBERTA: _ROBERTA_TABLE,
    _XLM_ROBERTA: _ROBERTA_TABLE,
    _OPT: "model.decoder.embed_positions.weight",
}
_EMBEDDING_TYPES = {"shaw": "relative_key", "m4": "relative_key_query"}  # in RoBERTa
_RELATIVE = {embedding_type: name for name, embedding_type in _EMBEDDING_TYPES.items()}
_DEBERTA_CONFIG = {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}


class ParamMap(NamedTuple):
    """The map from a parameter of an encoding to a tensor of a model class, and back."""

    name: str  # name of the tensor, with `{}` for the index of the layer
    to_hf: Callable[[Tensor], Tensor]  # computes the tensor from the parameter
    from_hf: Callable[[Tensor], Tensor]  # computes the parameter from the tensor


class HFClass(NamedTuple):
    """A model class that can have exactly the positions of an encoding."""

    model: str  # name of the class
    config: Mapping[str, Any]  # fields of its configuration that describe the positions
    weights: Mapping[str, ParamMap] = {}  # the encoding's parameter -> its tensor
    fixed: Mapping[str, Tensor] = {}  # further tensors for positions, with constant values
    # permutation of the coordinates of a head in queries and keys: theirs[i] = ours[order[i]]
    order: Optional[Tensor] = None
    only_in_version_4: bool = False  # whether transformers 5 no longer has such positions


def list_hf_classes(encoding: Encoding) -> list[HFClass]:
    """List the model classes that can have an encoding's positions; [] if it has several axes."""
    find = _FINDERS.get(encoding.name)
    return [] if find is None or getattr(encoding, "axes", 1) > 1 else find(encoding)


def parse_positions(model: str, config: dict[str, Any]) -> tuple[Item, int] | None:
    """Read the encoding and the number of positions in a config.json; None if unknown here."""
    size = config.get("max_position_embeddings", 0)
    if model == _GPT_NEOX:
        rope = _parse_rope(config, size)
        return None if rope is None else (rope, size)
    embedding_type = config.get("position_embedding_type", "absolute")
    if model in _LEARNED and embedding_type == "absolute":
        return Item.canonical("learned", {}), size - _count_rows_before(model)
    if model == _ROBERTA and embedding_type in _RELATIVE:
        return Item.canonical(_RELATIVE[embedding_type], {}), size
    buckets = config.get("position_buckets", -1)
    if model == _DEBERTA and _is_plain_deberta(config) and isinstance(buckets, int) and buckets > 1:
        return Item.canonical("deberta_v2", {"buckets": buckets}), size
    return None


def _find_learned(encoding: Learned) -> list[HFClass]:
    """Find RoBERTa, and OPT: the one causal class whose positions ignore padding."""
    classes = []
    for model, name in _LEARNED.items():
        table = ParamMap(
            name,
            to_hf=lambda weight: F.pad(weight, (0, 0, _OFFSET, 0)),
            from_hf=lambda weight: weight[_OFFSET:],
        )
        size = encoding.table.num_embeddings + _count_rows_before(model)
        classes.append(HFClass(model, {"max_position_embeddings": size}, {"table.weight": table}))
    return classes


def _count_rows_before(model: str) -> int:
    """Count the rows before position 0 that ``max_position_embeddings`` includes."""
    return 0 if model == _OPT else _OFFSET


def _find_relative(encoding: DistanceEncoding) -> list[HFClass]:
    """Find RoBERTa with relative positions, whose rows are in the order of i - j."""
    table = encoding.table
    size = encoding.dims.max_positions
    clipped = size - 1 - table.max_distance  # distances on each side that use our end row
    has_head_tables = table.weight.size(0) > 1
    # The class has no reset, one table for all heads, the scale 1 / sqrt(1.0 * head_dim), and no
    # rows for distances beyond its longest text.
    if table.reset is not None or has_head_tables or encoding.scale_factor != 1.0 or clipped < 0:
        return []

    def to_hf(weight: Tensor) -> Tensor:
        first = weight[:, :1].repeat_interleave(clipped, dim=1)
        last = weight[:, -1:].repeat_interleave(clipped, dim=1)
        return torch.cat([first, weight, last], dim=1)[0].flip(0)  # [2n-1, D]

    def from_hf(weight: Tensor) -> Tensor:
        return weight.flip(0)[None, clipped : weight.size(0) - clipped]  # [1, 2K+1, D]

    name = "roberta.encoder.layer.{}.attention.self.distance_embedding.weight"
    # The class also adds a table of absolute positions to its input.
    absolute = {_ROBERTA_TABLE: torch.zeros(size, encoding.dims.embed_dim)}
    embedding_type = _EMBEDDING_TYPES[encoding.name]
    config = {"position_embedding_type": embedding_type, "max_position_embeddings": size}
    weights = {"table.weight": ParamMap(name, to_hf, from_hf)}
    return [HFClass(_ROBERTA, config, weights, absolute, only_in_version_4=True)]


def _find_deberta_v2(encoding: DebertaV2) -> list[HFClass]:
    """Find DeBERTa V2.

    It has the same epsilon for all layer norms: 1e-5, fairseq's. Ours for the table is 1e-7. So
    the table is exported sqrt(1e-5 / 1e-7) times as large, and its layer norm gives the same rows.
    """
    if encoding.scale_factor != 3.0:  # the class always has the scale 1 / sqrt(3.0 * head_dim)
        return []
    factor = (EPSILON / TABLE_EPSILON) ** 0.5
    config = {
        **_DEBERTA_CONFIG,
        "position_buckets": encoding.buckets,
        "max_position_embeddings": encoding.dims.trained_length,
    }
    name = "deberta.encoder.rel_embeddings.weight"
    norm = "deberta.encoder.LayerNorm"
    weights = {
        "table": ParamMap(name, lambda table: table * factor, lambda table: table / factor),
        "norm_weight": ParamMap(f"{norm}.weight", torch.clone, torch.clone),
        "norm_bias": ParamMap(f"{norm}.bias", torch.clone, torch.clone),
    }
    return [HFClass(_DEBERTA, config, weights)]


def _is_plain_deberta(config: dict[str, Any]) -> bool:
    """Check that a DeBERTa V2 has the positions of ``deberta_v2`` alone."""
    # The two terms may be written in either order.
    config = {**config, "pos_att_type": sorted(config.get("pos_att_type") or ())}
    return (
        all(config.get(name) == value for name, value in _DEBERTA_CONFIG.items())
        and config.get("max_relative_positions", -1) < 1  # as max_position_embeddings
        and config.get("legacy", True) is True  # its head is RoBERTa's
    )


def _find_rope(encoding: Rope) -> list[HFClass]:
    """Find GPT-NeoX; for the paper's rotation also RoFormer, which has a table of all angles."""
    rotates = bool(encoding.frequencies.any())  # GPT-NeoX rotates at least one pair
    classes = [_describe_gpt_neox(encoding)] if rotates else []
    is_roformers = encoding.layout == "interleaved" and encoding.scaling == Scaling()
    if not is_roformers or encoding.base != 10000.0 or encoding.rotated != encoding.dims.head_dim:
        return classes
    rows = encoding.dims.max_positions
    angles = torch.arange(rows)[:, None] * encoding.frequencies  # [n, D/2]
    table = torch.cat([angles.sin(), angles.cos()], dim=1)  # [n, D]
    config = {"max_position_embeddings": rows, "rotary_value": False}
    fixed = {"roformer.encoder.embed_positions.weight": table}
    return [*classes, HFClass("RoFormerForMaskedLM", config, fixed=fixed)]


def _describe_gpt_neox(encoding: Rope) -> HFClass:
    """Describe GPT-NeoX, which rotates the first coordinates of a head, in the layout ``half``.

    Pairs with frequency 0 (of the scaling ``proportional``) become coordinates that GPT-NeoX does
    not rotate. Its frequencies are base^(-2i / w) for w rotated coordinates. Ours are
    base^(-2i / w'), where w' counts such pairs, too. So its base is ours to the power w / w'.
    """
    scaling, dims = encoding.scaling, encoding.dims
    width = 2 * int(encoding.frequencies.count_nonzero())
    base = scaling.scaled_base(encoding.base, encoding.rotated, dims) ** (width / encoding.rotated)
    part = width / dims.head_dim
    scaled = scaling.to_hf(dims)
    config = {
        "max_position_embeddings": dims.max_positions,
        "rotary_emb_base": base,  # this and the next two are read up to transformers 4
        "rotary_pct": part,
        "rope_scaling": scaled or None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": base,
            "partial_rotary_factor": part,
            **scaled,
        },
    }
    pairs = encoding.order()  # coordinates pair by pair; the rotated pairs come first
    order = torch.cat([pairs[:width:2], pairs[1:width:2], pairs[width:]])
    return HFClass(_GPT_NEOX, config, order=order)


def _parse_rope(config: dict[str, Any], size: int) -> Item | None:
    """Read the rotations of a GPT-NeoX; None for a scaling that is unknown here."""
    parameters = config.get("rope_parameters")
    # Our exports have both forms. transformers 4 neither reads nor changes the newer one.
    if parameters is None or str(config.get("transformers_version")).startswith("4."):
        parameters = dict(config.get("rope_scaling") or {})
        if "rotary_emb_base" in config:
            parameters.setdefault("rope_theta", config["rotary_emb_base"])
        if "rotary_pct" in config:
            parameters.setdefault("partial_rotary_factor", config["rotary_pct"])
    parameters = {"partial_rotary_factor": 0.25, **parameters}  # transformers' default
    if config.get(TRAINED_LENGTH):
        parameters[TRAINED_LENGTH] = config[TRAINED_LENGTH]
    try:
        (item,) = parse(read_rope(parameters, size, "half")).items
    except UserError:
        return None
    return item


def _find_t5(encoding: T5) -> list[HFClass]:
    """Find MPNet, which has T5's buckets; its absolute positions are set to zero."""
    options = (encoding.num_buckets, encoding.max_distance, encoding.scale_factor)
    # MPNet is an encoder; its code fixes 32 buckets, the largest distance 128, and the scale
    # 1 / sqrt(1.0 * head_dim).
    if encoding.dims.causal or options != (32, 128, 1.0):
        return []
    rows = encoding.dims.max_positions + 2  # position 0 is in row 2
    config = {"relative_attention_num_buckets": 32, "max_position_embeddings": rows}
    name = "mpnet.encoder.relative_attention_bias.weight"
    table = ParamMap(name, torch.t, torch.t)
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
