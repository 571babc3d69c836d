"""Collects the layers that pictures show: those of a trained model, or of an untrained spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.shared import Shared
from fairseq_posenc.specs import parse

_SEED = 1


class PlottedStack(NamedTuple):
    """The position encodings and the projections of a stack's layers."""

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
    def has_own_encodings(self) -> bool:
        """Whether encodings differ between layers, or have parameters in every layer."""
        specs = {layer.assembly.spec for layer in self.layers}
        return len(specs) > 1 or bool(self.layers[0].layer.as_list())

    def name_layer(self, layer: int) -> str:
        """Name a layer by its index, from 0, or all layers if they share their encodings."""
        return f"layer {layer + 1}" if self.has_own_encodings else "all layers"

    def limit_reach(self, reach: int) -> int:
        """Limit the largest distance of a picture, on both sides of a middle position."""
        return min(reach, (self.dims.max_positions - 1) // 2)

    def compute_input_vectors(self) -> Tensor | None:
        """Compute the vectors that the first encoding at the input adds, ``(max_positions, C)``.

        None if there are none.
        """
        positions = make_positions(self.dims.max_positions)
        for encoding in self.layers[0].input.as_list() if self.layers[0].input is not None else ():
            vectors = encoding.embed(positions)
            if vectors is not None:
                return vectors[0]
        return None


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
    stacks = [
        _build_trained_stack(module) for module in model.modules() if hasattr(module, "assembly")
    ]
    return {stack.name: stack for stack in stacks}


def compute_terms(positions: PositionEncoding, length: int) -> tuple[Span, Terms]:
    """Compute a layer's terms for a sentence of ``length`` tokens, and their span."""
    span = Span.from_lengths(length, length, torch.device("cpu"))
    ids = make_positions(length)
    terms = Shared.compute(positions.shared, ids).terms | positions.layer.terms(span, ids)
    return span, terms.expanded()


def make_positions(length: int) -> Positions:
    """Compute the positions of a sentence of ``length`` tokens."""
    return Positions.from_padding(torch.zeros(1, length, dtype=torch.bool))


def choose_numbers(numbers: Sequence[int] | None, count: int, part: str, model: str) -> list[int]:
    """Convert numbers of layers or heads, from 1, to indices, from 0.

    Args:
        numbers: the user's numbers; None for all.
        count: how many layers or heads the model has.
        part: ``layer`` or ``head``, the name of the option.
        model: name of the model in messages.

    Raises:
        UserError: a number is out of range.
    """
    for number in numbers or ():
        if not 1 <= number <= count:
            raise UserError(f"--{part} {number}: {model} has {part}s 1 to {count}")
    return [number - 1 for number in numbers] if numbers else list(range(count))


def _build_trained_stack(stack: Any) -> PlottedStack:
    spec, dims = stack.assembly
    layers, projections = [], []
    for index in range(len(stack.layers)):  # iterating over the list would apply LayerDrop
        attention = stack.layers[index].self_attn
        layer_spec = spec.select_layers([index])
        # This object is built for its methods; its modules are replaced by the trained ones.
        positions = PositionEncoding(
            str(layer_spec), dims.embed_dim, dims.num_heads, dims.max_positions, dims.causal
        )
        at_input = stack.embed_positions
        positions.assembly = stack.assembly._replace(spec=layer_spec)
        positions.input = None if at_input is None else at_input.encodings
        positions.shared = stack.encodings.select(attention.kind)
        positions.layer = attention.encodings
        layers.append(positions.eval())
        query, key = (
            projection.weight.detach().unflatten(0, (dims.num_heads, -1))
            for projection in (attention.q_proj, attention.k_proj)
        )
        projections.append((query, key))
    return PlottedStack(layers, projections)
