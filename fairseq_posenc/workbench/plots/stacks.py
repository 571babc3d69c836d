"""The stack of layers that a picture shows, of a trained model or of an untrained spec.

A stack has a :class:`~fairseq_posenc.api.PositionEncoding` for each layer, which computes terms and
scores without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.shared import Shared
from fairseq_posenc.specs import parse

_SEED = 1


class PlottedStack(NamedTuple):
    """The position encodings and the projections of a stack's layers; indices begin at 0."""

    layers: list[PositionEncoding]  # encodings of each layer, including those that all share
    # weights of each layer's query and key projection, `(H, D, C)`; empty for an untrained spec
    projections: list[tuple[Tensor, Tensor]]

    @property
    def dims(self) -> Dims:
        """Sizes of the layers."""
        return self.layers[0].assembly.dims

    @property
    def name(self) -> str:
        """``encoder`` or ``decoder``."""
        return "decoder" if self.dims.causal else "encoder"

    @property
    def spec(self) -> str:
        """Spec of the position encodings."""
        return str(parse(",".join(str(layer.assembly.spec) for layer in self.layers)))

    @property
    def _has_different_layers(self) -> bool:
        """Whether layers have different specs, or encodings that they do not share."""
        specs = {layer.assembly.spec for layer in self.layers}
        return len(specs) > 1 or bool(self.layers[0].layer.as_list())

    def select_different(self, layers: Sequence[int]) -> Sequence[int]:
        """Select the layers to show: only the first if all share their encodings."""
        return layers if self._has_different_layers else layers[:1]

    def name_layer(self, index: int) -> str:
        """Name a layer by its number, from 1, or all layers if they share their encodings."""
        return f"layer {index + 1}" if self._has_different_layers else "all layers"

    def limit_distance(self, distance: int) -> int:
        """Limit a distance so that the middle position has as many positions on each side."""
        return min(distance, (self.dims.max_positions - 1) // 2)

    def compute_input_vectors(self) -> Tensor | None:
        """Compute the vectors that are added at the input, ``(max_positions, C)``, or None."""
        at_input = self.layers[0].input
        if at_input is None:
            return None
        (encoding,) = at_input.as_list()  # specs with two are refused
        vectors = encoding.embed(make_positions(self.dims.max_positions))
        return None if vectors is None else vectors[0]


def build_untrained_stack(
    spec: str, embed_dim: int, num_heads: int, max_positions: int, causal: bool
) -> PlottedStack:
    """Build the layers of a spec as they are before training.

    Raises:
        UserError: the spec is invalid, or sizes do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        layers = [
            PositionEncoding(layer, embed_dim, num_heads, max_positions, causal).eval()
            for layer in map(str, parse(spec).split_layers())
        ]
    return PlottedStack(layers, [])


def collect_trained_stacks(model: nn.Module) -> dict[str, PlottedStack]:
    """Collect the stacks of a trained model by name; empty for fairseq's own models."""
    # fairseq's stacks have no assembly; theirs is not imported: pictures of specs need no fairseq.
    stacks = [_build_stack(module) for module in model.modules() if hasattr(module, "assembly")]
    return {stack.name: stack for stack in stacks}


def compute_terms(encoding: PositionEncoding, length: int) -> tuple[Span, Terms]:
    """Compute a layer's terms for a sentence of ``length`` tokens, and their span.

    In the terms, each distance has its own row, even if some are equal. A reset (rows of their own
    for pairs with the first token, as in TUPE) adds two rows at the end, which are no distance's.
    """
    span = Span.from_lengths(length, length, torch.device("cpu"))
    positions = make_positions(length)
    shared = Shared.compute(encoding.shared, positions).of_kind(0).terms
    return span, (shared | encoding.layer.terms(span, positions)).expanded()


def make_positions(length: int) -> Positions:
    """Compute the positions of a sentence of ``length`` tokens."""
    return Positions.from_padding(torch.zeros(1, length, dtype=torch.bool))


def _build_stack(stack: Any) -> PlottedStack:
    """Build the encodings of each layer, with the trained modules."""
    dims = stack.assembly.dims
    layers, projections = [], []
    for index in range(len(stack.layers)):  # iterating over the list would apply LayerDrop
        attention = stack.layers[index].self_attn
        spec = stack.assembly.spec.select_layers([index])
        encoding = PositionEncoding(
            str(spec), dims.embed_dim, dims.num_heads, dims.max_positions, dims.causal
        )
        # Only its methods are needed: its new modules are all replaced by the trained ones.
        at_input = stack.embed_positions
        encoding.assembly = stack.assembly._replace(spec=spec)
        encoding.input = None if at_input is None else at_input.encodings
        encoding.shared = stack.encodings.select(attention.kind)  # those of this kind of layer
        encoding.layer = attention.encodings
        layers.append(encoding.eval())
        query, key = (
            projection.weight.detach().unflatten(0, (dims.num_heads, -1))
            for projection in (attention.q_proj, attention.k_proj)
        )
        projections.append((query, key))
    return PlottedStack(layers, projections)
