"""Translates a stack's positions to the fields of CTranslate2's specification.

It has fields for a table of vectors at the input, a rotation of queries and keys, vectors by
distance for keys and values, and a bias by distance. Any encoding that computes only these fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, Optional

import torch
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec, RotaryScalingType
from ctranslate2.specs.model_spec import OPTIONAL
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.alibi import head_slopes
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Span
from fairseq_posenc.shared import Shared

# Fields of terms without a field in CTranslate2 -> their description for the message.
_WITHOUT_FIELD = {
    "counted_table": "counted positions",
    "key_table": "vectors that meet the keys",
    "gain": "factors of the dot product",
    "channel_gain": "factors of the dot product",
    "state_table": "states of the tokens",
    "pair_bias": "a bias that is not a function of the distance alone",
    "product": "a product of scores",
    "first": "rows of their own for the first token",
    "temperature": "a temperature",
    "log_visible": "a temperature",
    "sink": "a sink",
    "softcap": "a cap of the scores",
}
_ONLY_ONE = "and CTranslate2 reads one of them"


class PlacedPositions(NamedTuple):
    """The positions of a stack in the fields of CTranslate2."""

    # `(max_positions, embed_dim)`; CTranslate2 adds it to the token embeddings, unless the first
    # layer's attention has positions
    table: Tensor
    attention: list[MultiHeadAttentionSpec]  # for each layer, with only its positions set
    alibi: bool  # whether the scores of all layers have ALiBi's bias; only in causal stacks


@torch.no_grad()
def place_positions(stack: Any, *, reads_prompts: bool) -> PlacedPositions:
    """Translate the positions of a stack.

    Args:
        stack: encoder or decoder of one of our models.
        reads_prompts: whether it is a causal LM, which reads a prompt of many tokens at once; there
            CTranslate2 computes distances of a bias wrongly, except those of ALiBi.

    Raises:
        UserError: an encoding computes something that CTranslate2 does not support.
    """
    dims: Dims = stack.assembly.dims
    length = dims.max_positions
    tokens = torch.full((1, length), stack.dictionary.unk())  # no padding, no end of a sentence
    span = Span.from_lengths(tgt_len=length, src_len=length, device=tokens.device)
    shared = stack.compute_shared(tokens, tgt_len=length)
    shared_by_layer = [shared.of_kind(layer.self_attn.kind) for layer in stack.layers]
    terms = []  # of each layer, with an entry for each distance
    for layer, layer_shared in zip(stack.layers, shared_by_layer):
        terms.append(layer.self_attn.terms(span, layer_shared).expanded())
    _refuse_unsupported(stack, shared_by_layer, terms)
    table = _compute_input_table(stack, tokens)
    bias = _find_common_bias(stack, terms)
    alibi = all(item.bias is not None for item in terms) and _is_alibi(bias, dims)
    if bias is not None and not alibi and reads_prompts:
        _refuse(stack, "a bias", "and CTranslate2 reads prompts with its distances wrong")
    attention: list[MultiHeadAttentionSpec] = []
    for layer, layer_shared, layer_terms in zip(stack.layers, shared_by_layer, terms):
        if alibi:  # CTranslate2 computes it
            layer_terms = layer_terms._replace(bias=None)
        encodings = stack.encodings.select(layer.self_attn.kind).as_list()
        rope = next((encoding for encoding in encodings if isinstance(encoding, Rope)), None)
        if rope is None and layer_shared.rotation is not None:
            _refuse(stack, "a rotation that is not RoPE's")
        attention.append(_build_attention(stack, layer_terms, rope))
    rotates = any(layer_shared.rotation is not None for layer_shared in shared_by_layer)
    if table is not None and (rotates or any(item.has_score_terms for item in terms)):
        _refuse(stack, "positions both at the input and in the attention", _ONLY_ONE)
    if table is None:  # where the field is empty, CTranslate2 adds sinusoids
        table = torch.zeros(length, dims.embed_dim)
    return PlacedPositions(table, attention, alibi)


def _refuse(stack: Any, lacking: str, why: str = "which CTranslate2 does not support") -> NoReturn:
    raise UserError(f"--to ctranslate2: {stack.assembly.spec} has {lacking}, {why}")


def _refuse_unsupported(stack: Any, shared_by_layer: list[Shared], terms: list[Terms]) -> None:
    """Refuse a stack whose positions have no field in CTranslate2."""
    if not stack.assembly.dims.causal and set(stack.directions) != {"both"}:
        _refuse(stack, "attention directions")
    if getattr(stack, "rotates_source", False):
        _refuse(stack, "rotations between decoder and encoder")
    if any(item.encoding.widens for item in stack.assembly.spec.items):
        _refuse(stack, "queries and keys wider than values")
    if any(draft.decay is not None for draft in stack.assembly.draft_terms("auto")):
        _refuse(stack, "forget gates")
    for layer_shared, layer_terms in zip(shared_by_layer, terms):
        if layer_shared.positions.drawn is not None:
            _refuse(stack, "drawn positions")
        if layer_shared.locality.limits:
            _refuse(stack, "limits of the keys that a query sees")
        rotation = layer_shared.rotation
        if isinstance(rotation, PairRotation) and rotation.decay is not None:
            _refuse(stack, "a rotation that also decays")
        for name, description in _WITHOUT_FIELD.items():
            value = getattr(layer_terms, name)
            if value is not None and value is not False:  # `product` is a bool
                _refuse(stack, description)
        tables = [x for x in (layer_terms.query_table, layer_terms.value_table) if x is not None]
        if any(table.size(0) > 1 for table in tables):
            _refuse(stack, "vectors for each head")
        if tables and layer_terms.bias is not None:
            _refuse(stack, "both vectors and a bias by distance", _ONLY_ONE)


def _compute_input_table(stack: Any, tokens: Tensor) -> Optional[Tensor]:
    """Compute the vectors added at the input, ``(max_positions, embed_dim)``, or None."""
    if stack.embed_positions is None:
        return None
    vectors: Tensor = stack.embed_positions(tokens)
    two_sentences = tokens.clone()
    two_sentences[:, tokens.size(1) // 2] = stack.eos_idx
    if not torch.equal(vectors, stack.embed_positions(two_sentences)):
        _refuse(stack, "positions that restart in each sentence")
    return vectors[0]


def _find_common_bias(stack: Any, terms: Iterable[Terms]) -> Optional[Tensor]:
    """Find the bias by distance, ``(heads or 1, distances)``, of all layers with one, or None."""
    biases = [item.bias for item in terms if item.bias is not None]
    if any(not torch.equal(biases[0], other) for other in biases[1:]):
        _refuse(stack, "a bias in each layer", "and CTranslate2 adds that of the first to all")
    return biases[0] if biases else None


def _is_alibi(bias: Optional[Tensor], dims: Dims) -> bool:
    """Check whether a bias is ALiBi's in a causal stack, which CTranslate2 computes itself.

    Only distances to the left are compared, as a causal query sees no others.
    """
    if bias is None or not dims.causal:
        return False
    distances = torch.arange(-dims.max_positions + 1, 1.0)
    return torch.equal(
        bias[:, : dims.max_positions],
        torch.tensor(head_slopes(dims.num_heads))[:, None] * distances,
    )


def _build_attention(stack: Any, terms: Terms, rope: Optional[Rope]) -> MultiHeadAttentionSpec:
    """Build the self-attention of a layer with only its positions set."""
    dims = stack.assembly.dims
    tables = [terms.query_table, terms.value_table]
    has_tables = any(table is not None for table in tables)
    gain = 1.0 if rope is None else rope.scaling.gain(rope.dims)
    # A scaling multiplies the rotated coordinates of queries and keys by `gain`. CTranslate2 has
    # only a factor of the whole score.
    if rope is not None and gain != 1 and (has_tables or rope.rotated < dims.head_dim):
        _refuse(stack, "a rotation that scales a part of the scores")
    factors = None if rope is None else _find_scaling_factors(rope)
    rotary: dict[str, Any] = {}
    if rope is not None:
        rotary = {
            "rotary_dim": rope.rotated,
            "rotary_interleave": rope.layout == "interleaved",
            "rotary_base": rope.base,
            "rotary_scaling_type": None if factors is None else RotaryScalingType.Su,
        }
    spec = MultiHeadAttentionSpec(
        self_attention=True,
        relative_position=has_tables,
        relative_attention_bias=terms.bias is not None,
        **rotary,
    )
    if factors is not None:  # "Su" has a factor for each pair, so it can express any scaling
        spec.rotary_scaling_long_factor = factors.numpy()
        spec.rotary_scaling_short_factor = factors.numpy()
    if has_tables:
        _set_tables(spec, *tables)
    if terms.bias is not None:
        _set_bias(spec, terms.bias, dims)
    scale_factor = 1.0 if terms.scale_factor is None else terms.scale_factor
    spec.queries_scale = dims.scale(scale_factor) * gain**2
    return spec


def _find_scaling_factors(rope: Rope) -> Optional[Tensor]:
    """Find the factors by which scaling divides the frequencies of pairs; None if all are 1."""
    unscaled = rope.base ** -(torch.arange(0, rope.rotated, 2) / rope.rotated)
    factors = unscaled / rope.angles_per_position()
    return None if torch.allclose(factors, torch.ones(())) else factors


def _set_tables(
    spec: MultiHeadAttentionSpec, keys: Optional[Tensor], values: Optional[Tensor]
) -> None:
    """Set vectors by distance, ``(2 max_distance + 1, head_dim)``.

    CTranslate2 needs vectors for keys, so zeros stand for absent ones.
    """
    tables = [table[0] for table in (keys, values) if table is not None]
    rows = torch.cat(tables, dim=-1)
    middle = rows.size(0) // 2
    # Cut off repeated rows at the ends, as distances beyond the table use its end rows anyway:
    # `reach` is 2 if the rows of 2 and 3 are equal, and those of -2 and -3.
    changes = (rows[1:] != rows[:-1]).any(-1).nonzero().flatten()
    reach = max(middle - int(changes[0]), int(changes[-1]) + 1 - middle) if len(changes) else 1
    kept = slice(middle - reach, middle + reach + 1)
    spec.relative_position_keys = (
        torch.zeros_like(tables[0][kept]) if keys is None else keys[0, kept]
    ).numpy()
    spec.relative_position_values = OPTIONAL if values is None else values[0, kept].numpy()


def _set_bias(spec: MultiHeadAttentionSpec, bias: Tensor, dims: Dims) -> None:
    """Set a bias by distance in the form of T5's, with a bucket for each distance.

    T5 has buckets for earlier keys, by distance, then for later keys. In both, the first half of
    the buckets have a single distance; the second half have ranges of larger distances, which the
    model never sees, so they repeat the last bias.
    """
    length = dims.max_positions
    past, later = bias[:, :length].flip(1), bias[:, length - 1 :]
    sides = [past] if dims.causal else [past, later]
    buckets = torch.cat([F.pad(side, (0, length), mode="replicate") for side in sides], dim=1)
    spec.relative_attention_bias = buckets.expand(dims.num_heads, -1).t().contiguous().numpy()
    # First distance of the last bucket; any large number will do, as these buckets are equal.
    spec.relative_attention_max_distance = torch.tensor(2 * length, dtype=torch.int32).numpy()
