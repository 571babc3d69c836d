"""Builds passes of the attention operation, of a layer and of a model: fairseq's own, and ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, cast

import torch
from fairseq.models.roberta.model import base_architecture
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.backends import BACKENDS
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.mask import Mask
from fairseq_posenc.shared import compute_shared
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import set_context
from fairseq_posenc.transformer.layers import PositionalDecoderLayer, PositionalEncoderLayer
from fairseq_posenc.transformer.options import configure_stack
from measuring.contenders import STOCK, Contender, build_random_encodings, make_positions
from measuring.families import Case, trainer_step
from measuring.timing import Pass

SEED = 1
QUERY_STD = 0.7  # about the deviation of queries and keys in an untrained layer


def operation(contender: Contender, case: Case) -> Pass:
    """Build a pass of the attention operation alone, on projected queries, keys and values.

    fairseq's is the call that its attention makes, ``scaled_dot_product_attention``. Ours includes
    everything that an encoding does: rotations, tables, and the tables' projections.
    """
    torch.manual_seed(SEED)
    # Drawn in the order (T, B, H, D), so that strides are those of fairseq's projections.
    shape = (case.length, case.batch, case.size.num_heads, case.dims.head_dim)
    query, key, value = (
        _draw(case, *shape, std=QUERY_STD).permute(1, 2, 0, 3).detach() for _ in range(3)
    )
    if contender == STOCK:

        def attend_stock() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, dropout_p=case.dropout)

        return _build_pass(attend_stock, case, nn.ModuleList(), [query, key, value])
    encodings, shared = build_random_encodings(contender.encoding, case.dims)  # of a layer, of all
    attention = PositionalAttention(case.size.embed_dim, case.size.num_heads, encodings)
    modules = nn.ModuleList([attention, shared]).to(case.device, case.dtype)
    positions = make_positions(case.batch, case.length, case.device)
    # The layer's input, which some encodings read beside queries and keys.
    x = _draw(case, case.batch, case.length, case.size.embed_dim, std=1.0)

    def attend() -> Tensor:
        common = compute_shared(shared, positions)[0]  # all layers are of one kind
        q, k = query, key
        if (rotation := attention.rotation(common, case.length)) is not None:
            q, k = rotation.rotate_queries(query), rotation.rotate_keys(key)
        terms = attention.compute_terms(common) | encodings.input_terms(x, positions)
        return BACKENDS[contender.backend].attend(
            AttentionCall(q, k, value, terms, Mask(), dropout=case.dropout)
        )[0]

    return _build_pass(attend, case, modules, [query, key, value])


def layer(contender: Contender, case: Case) -> Pass:
    """Build a pass of a whole encoder layer, or of a causal LM's layer of the same sizes.

    Encodings that all layers of a model share are computed for this single layer.
    """
    torch.manual_seed(SEED)
    x = _draw(case, case.length, case.batch, case.size.embed_dim, std=1.0)
    inputs: dict[str, Any] = {"encoder_padding_mask": None}
    settings: dict[str, Any] = {}
    if case.causal:
        mask = torch.full((case.length, case.length), -torch.inf).triu(1)  # of later tokens
        inputs = {"self_attn_mask": mask.to(case.device, case.dtype)}
        settings = {"no_encoder_attn": True}
    if contender == STOCK:
        stock_class: Any = (
            TransformerDecoderLayerBase if case.causal else TransformerEncoderLayerBase
        )
        # fairseq's layer ignores the options of encodings: any contender would do.
        stock = stock_class(layer_config(Contender("none", "auto"), case), **settings)
        stock.to(case.device, case.dtype)
        return _build_pass(lambda: _select_output(stock(x, **inputs)), case, stock, [x])
    our_class: Any = PositionalDecoderLayer if case.causal else PositionalEncoderLayer
    ours = our_class(layer_config(contender, case), **settings)
    ours.self_attn.encodings, shared = build_random_encodings(contender.encoding, case.dims)
    ours.self_attn.stack = None  # the state below is of no stack
    modules = nn.ModuleList([ours, shared]).to(case.device, case.dtype)
    positions = make_positions(case.batch, case.length, case.device)

    def compute() -> Tensor:
        with set_context(compute_shared(shared, positions)):
            return _select_output(ours(x, **inputs))

    return _build_pass(compute, case, modules, [x])


def _select_output(output: Any) -> Tensor:
    """Select the output of a layer, which decoders give with attention weights."""
    return cast("Tensor", output[0] if isinstance(output, tuple) else output)


def layer_config(contender: Contender, case: Case) -> Any:
    """Build fairseq's configuration of RoBERTa-base's layer, with our options and encodings."""
    args = Namespace(
        encoder_embed_dim=case.size.embed_dim,
        decoder_embed_dim=case.size.embed_dim,
        encoder_attention_heads=case.size.num_heads,
        decoder_attention_heads=case.size.num_heads,
        encoder_ffn_embed_dim=case.size.ffn_dim,
        decoder_ffn_embed_dim=case.size.ffn_dim,
        dropout=case.dropout,
        attention_dropout=case.dropout,
        max_source_positions=case.length,
        max_target_positions=case.length,
        position_encoding=contender.encoding,
        position_backend=contender.backend,
    )
    base_architecture(args)
    config = configure_stack(args, "decoder" if case.causal else "encoder")
    config.directions = ("both",)  # a causal layer is given fairseq's mask
    return config


def _draw(case: Case, *shape: int, std: float) -> Tensor:
    return (torch.randn(shape) * std).to(case.device, case.dtype)


def _build_pass(
    compute: Callable[[], Tensor], case: Case, modules: nn.Module, inputs: list[Tensor]
) -> Pass:
    """Build a pass in the case's mode: without gradients, or with those of all tensors."""
    training = case.mode == "training"
    modules.train(training)
    for x in inputs:
        x.requires_grad_(training)
    with torch.no_grad():
        grad_output = torch.randn_like(compute())  # a pass only to know the shape
    leaves = [*inputs, *modules.parameters()]

    def run() -> None:
        with torch.set_grad_enabled(training):
            out = compute()
        if training:
            out.backward(grad_output)
            for leaf in leaves:  # so that no pass begins with another's gradients
                leaf.grad = None

    return run


SCOPES: dict[str, Callable[[Contender, Case], Pass]] = {
    "op": operation,
    "layer": layer,
    "causal": layer,  # of a case whose family is `causal_lm`
    "model": trainer_step,
}
