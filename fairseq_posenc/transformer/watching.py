"""The attention of every layer and head in a forward pass, with the parts of its scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Optional

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from fairseq_posenc.analysis.split import Split, split
from fairseq_posenc.positions import Span
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.passing import carried

_NAME = re.compile(r"(encoder|decoder)\.(?:.+\.)?layers\.(\d+)\.(self_attn|encoder_attn)$")
Hook = Callable[..., Any]


class Attention(NamedTuple):
    """What one layer did.

    Attributes:
        stack: ``encoder`` or ``decoder``.
        cross: whether keys are the other stack's.
        layer: counted from 0.
        weights: ``(batch, heads, tgt_len, src_len)``.
        split: the parts of its scores; None for cross-attention and for fairseq's own models.
    """

    stack: str
    cross: bool
    layer: int
    weights: Tensor
    split: Optional[Split]


@torch.no_grad()
def watch(model: nn.Module, run: Callable[[], Any]) -> list[Attention]:
    """Return what every attention did in a full forward pass, stack by stack.

    Args:
        model: of any family, in evaluation mode.
        run: makes the pass.
    """
    seen: list[Attention] = []
    with ExitStack() as hooks:
        hooks.enter_context(_step_by_step(model))
        for name, module in model.named_modules():
            place = _NAME.search(name)
            if place and isinstance(module, MultiheadAttention):
                before = module.register_forward_pre_hook(_ask, with_kwargs=True)
                after = module.register_forward_hook(_note(place, seen), with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        run()
    return sorted(seen, key=lambda each: (each.stack == "decoder", each.cross, each.layer))


def _ask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "need_weights": True, "need_head_weights": True}


def _note(place: re.Match[str], seen: list[Attention]) -> Hook:
    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        weights = out[1].transpose(0, 1)  # of the heads first
        ours = isinstance(module, PositionalAttention)
        parts = _split(module, kwargs["query"]) if ours else None
        cross = place[3] == "encoder_attn"
        seen.append(Attention(place[1], cross, int(place[2]), weights, parts))

    return note


def _split(attention: PositionalAttention, x: Tensor) -> Split:
    """Return the parts of the scores for what came in, ``(T, B, C)``."""
    shared = carried()
    assert shared is not None, "a layer of a stack"
    query, key = (
        projection(x).unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3)
        for projection in (attention.q_proj, attention.k_proj)
    )
    terms = attention.terms(Span.of(x.size(0), x.size(0), x.device), shared)
    return split(query, key, terms, shared.rotation)


@contextmanager
def _step_by_step(model: nn.Module) -> Iterator[None]:
    """Keep fairseq's own layers from torch's single call for a layer, which has no weights."""
    layers = [m for m in model.modules() if isinstance(m, TransformerEncoderLayerBase)]
    before = [getattr(layer, "can_use_fastpath", False) for layer in layers]
    for layer in layers:
        layer.can_use_fastpath = False
    try:
        yield
    finally:
        for layer, fast in zip(layers, before):
            layer.can_use_fastpath = fast
