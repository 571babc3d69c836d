"""Projections, rotations and terms of attention, which several libraries' modules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encodings
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Span
from fairseq_posenc.shared import Shared

# Of a layer's earlier tokens: `key` (rotated) and `value`, both (B, H, S, D); `decay`,
# (B, G, S, 2);
# and `tokens`, the number of all that were read: of keys that no later query sees none is kept.
Cache = dict[str, Any]


class AttentionCore:
    """Projections, rotations and terms of attention, for modules of any library to mix in.

    Attributes:
        batch_first: whether inputs and outputs are ``(B, T, C)``, else ``(T, B, C)``.
        num_heads: H.
        head_dim: D.
        encodings: of the layer.
    """

    batch_first = True
    if TYPE_CHECKING:  # torch.jit evaluates the annotations of a class, and knows few types
        num_heads: int
        head_dim: int
        encodings: Encodings
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        out_proj: nn.Linear

    def project(self, x: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to rotated queries and keys, and values, each ``(B, H, T, D)``.

        Keys and values may be of fewer heads (see :meth:`repeat_heads`).
        """
        query, key, value = (
            self.split_heads(projection(x))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if (rotation := self.rotation(shared)) is not None:
            query, key = rotation.rotate_queries(query), rotation.rotate_keys(key)
        return query, key, value

    def rotation(self, shared: Shared) -> Rotation | None:
        """Select the rotation of the T tokens: the stack's, this layer's own, or None."""
        positions = shared.positions
        return shared.rotation or self.encodings.rotation(positions.queries(positions.places))

    def terms(self, span: Span, shared: Shared) -> Terms:
        """Combine the terms of the stack and of this layer, with their rows projected to heads."""
        terms = shared.layer_terms() | self.encodings.terms(span, shared.positions)

        def project(projection: nn.Module, rows: Tensor) -> Tensor:
            heads = projection(rows).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
            return self.repeat_heads(heads, 0)  # [H, R, D]

        return terms.projected(
            lambda rows: project(self.q_proj, rows), lambda rows: project(self.k_proj, rows)
        )

    def repeat_heads(self, x: Tensor, dim: int = 1) -> Tensor:
        """Repeat the heads of keys or values, one for each group of queries' heads, to H."""
        groups = self.num_heads // x.size(dim)
        return x if groups == 1 else x.repeat_interleave(groups, dim)

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the last dimension of ``(B, T, C)`` or ``(T, B, C)`` into heads."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        return heads.permute((0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3))  # [B, H, T, D]

    def merge_heads(self, attended: Tensor) -> Tensor:
        """Merge the heads of ``(B, H, T, D)``, and project them to the layer's output."""
        merged = attended.permute((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3)).flatten(2)
        output: Tensor = self.out_proj(merged)  # [B, T, C]
        return output


def make_projections(
    dims: Dims, num_key_value_heads: int | None, bias: bool, source_dim: int
) -> Iterator[nn.Linear]:
    """Make the projections to queries, keys and values, and that of the output."""
    kv_heads = dims.num_heads if num_key_value_heads is None else num_key_value_heads
    if kv_heads < 1 or dims.num_heads % kv_heads:
        raise UserError(
            f"num_key_value_heads={kv_heads} must divide the {dims.num_heads} heads of the queries"
        )
    kv_dim = kv_heads * dims.head_dim
    yield nn.Linear(dims.embed_dim, dims.heads_dim, bias)
    yield nn.Linear(source_dim, kv_dim, bias)
    yield nn.Linear(source_dim, kv_dim, bias)
    yield nn.Linear(dims.heads_dim, dims.embed_dim, bias)


def check_dropout(probability: float) -> float:
    """Return the probability of dropping a weight; refuse one outside of 0 to below 1."""
    if not 0 <= probability < 1:
        raise UserError(f"dropout={probability:g} must be at least 0 and below 1")
    return probability
