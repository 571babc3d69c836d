"""The subject of a picture: layers and heads of a trained model or of an untrained spec.

Each layer has a :class:`~fairseq_posenc.api.PositionEncoding`, whose encodings have three places:
at the ``input``, ``shared`` by layers, and in this layer alone (``encodings``).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc.api import PositionEncoding
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import compute_shared
from fairseq_posenc.specs import parse


@dataclass(frozen=True)
class Subject:
    """A stack, and the layers and heads of it that a picture shows; indices begin at 0."""

    by_layer: list[PositionEncoding]  # of every layer, also of layers that are not shown
    shown_layers: list[int]
    shown_heads: list[int]
    # weights of every layer's query and key projection, `(H, D, C)`; empty for an untrained spec
    projections: list[tuple[Tensor, Tensor]]
    checkpoint: Path | None = None  # where it is from; None for a model in memory and a spec

    @property
    def dims(self) -> Dims:
        """Sizes of the layers."""
        return self.by_layer[0].dims

    @property
    def stack(self) -> str:
        """``encoder`` or ``decoder``."""
        return "decoder" if self.dims.causal else "encoder"

    @property
    def title(self) -> str:
        """The spec of the position encodings, and where they are from."""
        spec = parse(",".join(str(layer.spec) for layer in self.by_layer))  # as in 3*rope,none
        return f"{spec} in {self.checkpoint}" if self.checkpoint else str(spec)

    @property
    def named_layers(self) -> dict[int, str]:
        """The names of the layers to show; only the first if all share their encodings."""
        specs = {layer.spec for layer in self.by_layer}
        if len(specs) > 1 or self.by_layer[0].encodings.as_list():  # or it has some of its own
            return {index: f"layer {index + 1}" for index in self.shown_layers}
        return {self.shown_layers[0]: "all layers"}

    def limit_reach(self, reach: int) -> int:
        """Limit a distance so that the middle position has that many positions on each side."""
        return min(reach, (self.dims.max_positions - 1) // 2)

    def compute_input_vectors(self) -> Tensor | None:
        """Compute the vectors that are added at the input, ``(max_positions, C)``, or None."""
        if (at_input := self.by_layer[0].input) is None:
            return None
        (encoding,) = at_input.as_list()  # `parse` refuses a spec with two of them
        vectors = encoding.embed(make_positions(self.dims.max_positions))
        assert vectors is not None, "an input encoding adds vectors"
        return vectors[0]  # without the batch of one

    def compute_terms(self, layer: int) -> tuple[Tensor, Terms]:
        """Compute distances ``(R,)`` in ``max_positions`` tokens, ascending, and a layer's terms.

        Tables in the terms are ``(H or 1, R, ...)``: each distance has its own row, even if some
        are equal. A reset (rows for pairs with the first token, as in TUPE) adds two rows at the
        end, which belong to no distance.
        """
        position_encoding = self.by_layer[layer]
        positions = make_positions(self.dims.max_positions)
        (shared,) = compute_shared(position_encoding.shared, positions)  # of the only kind of layer
        terms = shared.terms | position_encoding.encodings.terms(positions)  # with the layer's own
        return positions.distances(), terms.expanded()


def build_subject(
    spec: str, embed_dim: int, num_heads: int, max_positions: int, causal: bool = False
) -> Subject:
    """Build all layers and heads of a spec as they are before training.

    Raises:
        UserError: the spec is invalid, or sizes do not fit.
    """
    parsed = parse(spec)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(1)
        by_layer = [
            PositionEncoding(str(layer), embed_dim, num_heads, max_positions, causal).eval()
            for layer in (parsed.select_layers([i]) for i in range(len(parsed.layers)))
        ]
    return Subject(by_layer, [*range(len(by_layer))], [*range(num_heads)], projections=[])


def collect_subjects(model: nn.Module) -> dict[str, Subject]:
    """Collect the stacks of a trained model by name; empty for fairseq's own models."""
    # Only our stacks have `spec`; their class is not imported: pictures of specs need no fairseq.
    stacks = [module for module in model.modules() if hasattr(module, "spec")]
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        return {subject.stack: subject for subject in map(_build_trained_subject, stacks)}


def make_positions(length: int) -> Positions:
    """Compute the positions of a sentence of ``length`` tokens."""
    return Positions.from_padding(torch.zeros(1, length, dtype=torch.bool))


def _build_trained_subject(stack: Any) -> Subject:
    """Build each layer's encodings from the trained modules: the shared ones, and its own."""
    dims = stack.dims
    sizes = dims.embed_dim, dims.num_heads, dims.max_positions, dims.causal
    by_layer, projections = [], []
    for index in range(len(stack.layers)):  # iterating over the list would apply LayerDrop
        attention = stack.layers[index].self_attn
        layer = PositionEncoding(str(stack.spec.select_layers([index])), *sizes)
        # Only its methods are needed: its new modules are all replaced by the trained ones.
        layer.dims = dims  # with the length in training, which `sizes` lack
        at_input = stack.embed_positions  # None if nothing is added at the input
        layer.input = None if at_input is None else at_input.encodings
        layer.shared = stack.encodings.select(attention.kind)  # of layers with its encodings
        layer.encodings = attention.encodings  # those only of this layer
        by_layer.append(layer.eval())
        weights = (x.weight.detach() for x in (attention.q_proj, attention.k_proj))
        query, key = (weight.unflatten(0, (dims.num_heads, -1)) for weight in weights)
        projections.append((query, key))
    return Subject(by_layer, [*range(len(by_layer))], [*range(dims.num_heads)], projections)
