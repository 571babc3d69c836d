"""Position encodings for PyTorch models of any kind; needs no fairseq.

For a model of one's own, :class:`StackPositions` and a :class:`SelfAttention` in each layer::

    positions = StackPositions("learned+m4m", embed_dim=768, num_heads=12, max_positions=512)
    layers = [SelfAttention(positions, dropout=0.1) for _ in range(12)]

    x, shared = positions(embeddings, key_padding_mask)   # once a forward pass
    x = x + layers[0](x, shared)

For a look or a test, :class:`PositionEncoding` is that of a single layer::

    encoding = PositionEncoding("learned+m4m", embed_dim=768, num_heads=12)
    encoding.parameter_counts()               # {'input.learned.table.weight': 393216, ...}
    scores = encoding.scores(query, key)      # (batch, heads, tgt_len, src_len)
    curves = encoding.distance_curve(64)      # (heads, 129), distances -64 .. 64
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, nn

from fairseq_posenc.assembly import Assembly, Shared
from fairseq_posenc.backends import attend, reference
from fairseq_posenc.backends.base import DIRECTIONS, Mask
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span, may_sync
from fairseq_posenc.registry import parse

__all__ = ["Cache", "PositionEncoding", "SelfAttention", "StackPositions"]

PADDING, END, TOKEN = 1, 2, 3
Cache = dict[str, Tensor]  # keys, rotated, and values of earlier steps


class StackPositions(nn.Module):
    """The positions of a stack of layers: what is added at its input, and what its layers share.

    Args:
        spec: as for ``--position-encoding``, such as ``learned+m4m(max_distance=128)``.
        embed_dim: width of the model.
        num_heads: number of attention heads.
        max_positions: longest sequence; trained tables have their size from it.
        causal: True for a decoder, whose queries see no later keys.

    Raises:
        UserError: a spec that cannot be read or has no meaning, or sizes that do not fit.
    """

    def __init__(
        self,
        spec: str,
        embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.assembly = Assembly(parse(spec), Dims(embed_dim, num_heads, max_positions, causal))
        self.assembly.check("auto")
        self.input = self.assembly.build_input()
        self.shared = self.assembly.build_stack()

    def forward(
        self, embeddings: Tensor, key_padding_mask: Optional[Tensor] = None, past: int = 0
    ) -> tuple[Tensor, Shared]:
        """Return embeddings with the input encoding added, and what every layer is given.

        Args:
            embeddings: of the tokens, ``(batch, tgt_len, embed_dim)``.
            key_padding_mask: True for padding, on either side, ``(batch, past + tgt_len)``; it
                never shifts a position.
            past: number of earlier tokens, whose keys and values are in the caches.
        """
        batch, tgt_len = embeddings.shape[:2]
        positions = _positions(batch, past + tgt_len, tgt_len, key_padding_mask, embeddings.device)
        for encoding in self.input.each() if self.input is not None else ():
            vectors = encoding.embed(positions)
            if vectors is not None:
                embeddings = embeddings + vectors.type_as(embeddings)
        return embeddings, Shared.compute(self.shared, positions)


class SelfAttention(nn.Module):
    """Multi-head self-attention of one layer, with position encodings.

    Parameters have the names of fairseq's, so that weights can be carried over.

    Args:
        positions: of the stack that the layer is in; not a part of this module.
        dropout: probability of dropping a weight in training.
        direction: ``both``, ``lr`` or ``rl`` (see :class:`~fairseq_posenc.backends.base.Mask`); by
            default ``lr`` in a causal stack, else ``both``.
        backend: ``auto``, or the name of one that must be used.
        bias: whether the projections have biases.

    Raises:
        UserError: an unknown direction, or a backend that cannot compute the encodings.
    """

    def __init__(
        self,
        positions: StackPositions,
        dropout: float = 0.0,
        direction: Optional[str] = None,
        backend: str = "auto",
        bias: bool = True,
    ) -> None:
        super().__init__()
        dims = positions.assembly.dims
        positions.assembly.check(backend)
        self.num_heads, self.dropout, self.backend = dims.num_heads, dropout, backend
        self.direction = direction or ("lr" if dims.causal else "both")
        if self.direction not in DIRECTIONS or (dims.causal and self.direction != "lr"):
            raise UserError(
                f"direction {self.direction!r}: choose one of {', '.join(DIRECTIONS)}; in a causal "
                "stack it is lr"
            )
        width = dims.embed_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, bias) for _ in range(4)
        )
        self.encodings = positions.assembly.build_layer()

    def forward(
        self, x: Tensor, shared: Shared, cache: Optional[Cache] = None, need_weights: bool = False
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Attend.

        Args:
            x: ``(batch, tgt_len, embed_dim)``.
            shared: what the stack's positions returned for this forward pass.
            cache: of this layer, empty at the first step of a generation; filled.
            need_weights: also return the attention weights, which only the reference computes.

        Returns:
            ``(batch, tgt_len, embed_dim)``, and the weights ``(batch, heads, tgt_len, src_len)`` or
            None.
        """
        query, key, value = (self._heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = shared.rotate(query, key)
        if cache is not None:
            if cache:
                key = torch.cat([cache["key"], key], dim=2)
                value = torch.cat([cache["value"], value], dim=2)
            cache.update(key=key, value=value)
        positions = shared.positions
        span = Span.from_lengths(query.size(2), key.size(2), x.device)
        terms = shared.terms | self.encodings.terms(span, positions)
        terms = terms.projected(
            lambda rows: self._heads(self.q_proj(rows)[None])[0],
            lambda rows: self._heads(self.k_proj(rows)[None])[0],
        )
        mask = shared.mask(self.direction)
        dropout = self.dropout if self.training else 0.0
        attended, weights = attend(
            query, key, value, terms, mask, dropout, need_weights, self.backend
        )
        return self.out_proj(attended.transpose(1, 2).flatten(2)), weights

    def _heads(self, x: Tensor) -> Tensor:
        """Return ``(batch, heads, length, head_dim)`` of ``(batch, length, embed_dim)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class PositionEncoding(StackPositions):
    """The positions of one layer and of the input before it: for a look, a test, a comparison.

    Arguments and errors are those of :class:`StackPositions`.
    """

    def __init__(
        self,
        spec: str,
        embed_dim: int,
        num_heads: int,
        max_positions: int = 512,
        causal: bool = False,
    ) -> None:
        super().__init__(spec, embed_dim, num_heads, max_positions, causal)
        self.layer = self.assembly.build_layer()

    def parameter_counts(self) -> dict[str, int]:
        """Return the size of each trained parameter by name: input, shared by layers, per layer."""
        return {name: parameter.numel() for name, parameter in self.named_parameters()}

    def embed(self, embeddings: Tensor, key_padding_mask: Optional[Tensor] = None) -> Tensor:
        """Return token embeddings ``(batch, length, embed_dim)`` with the input encoding added."""
        return self(embeddings, key_padding_mask)[0]

    def scores(
        self, query: Tensor, key: Tensor, key_padding_mask: Optional[Tensor] = None
    ) -> Tensor:
        """Return the attention scores before masks and softmax.

        Args:
            query: projected queries of the last tokens, unscaled, ``(batch, heads, tgt_len,
                head_dim)``.
            key: projected keys of all tokens, ``(batch, heads, src_len, head_dim)``.
            key_padding_mask: True for padding, ``(batch, src_len)``; it never shifts a position.

        Returns:
            ``(batch, heads, tgt_len, src_len)``, in float32 at least.
        """
        query, key, terms, _ = self._prepare(query, key, key_padding_mask)
        return reference.scores(query, key, terms)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        direction: Optional[str] = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> Tensor:
        """Return the attended values ``(batch, heads, tgt_len, head_dim)``; see :meth:`scores`.

        Args:
            query: as for :meth:`scores`.
            key: likewise, of earlier tokens as well.
            value: as ``key``.
            key_padding_mask: likewise.
            direction: what a query sees, ``both``, ``lr`` or ``rl``; by default as the layer is.
            dropout: probability of dropping a weight.
            backend: ``auto``, or the name of one that must be used.
        """
        query, key, terms, positions = self._prepare(query, key, key_padding_mask)
        causal = self.assembly.dims.causal
        mask = Mask(direction or ("lr" if causal else "both"), positions.padding)
        return attend(query, key, value, terms, mask, dropout, requested=backend)[0]

    @torch.no_grad()
    def distance_curve(self, reach: int, samples: int = 64, seed: int = 0) -> Tensor:
        """Return how the score of equal contents changes with their distance.

        The mean score of a query and a key made from the same random vector, ``distance`` apart,
        over ``samples`` vectors; what stands at the input is added to the vector first.

        Args:
            reach: the largest distance.
            samples: number of random vectors of norm sqrt(embed_dim).
            seed: of the vectors.

        Returns:
            ``(heads, 2 * reach + 1)`` for distances ``-reach .. reach``.
        """
        dims, length = self.assembly.dims, 2 * reach + 1
        generator = torch.Generator().manual_seed(seed)
        content = torch.randn(samples, 1, dims.embed_dim, generator=generator)
        parameter = next(self.parameters(), content)
        # Drawn on the CPU, so that every device gets the same vectors.
        content = content.to(parameter.device)
        embedded = self.embed(content.expand(-1, length, -1))
        heads = embedded.unflatten(-1, (dims.num_heads, -1)).transpose(1, 2)
        return self.scores(heads, heads)[:, :, reach].mean(0)

    def _prepare(
        self, query: Tensor, key: Tensor, key_padding_mask: Optional[Tensor]
    ) -> tuple[Tensor, Tensor, Terms, Positions]:
        dims = self.assembly.dims
        batch, _, tgt_len, _ = query.shape
        src_len = key.size(2)
        shapes = [(batch, dims.num_heads, length, dims.head_dim) for length in (tgt_len, src_len)]
        if [query.shape, key.shape] != shapes or tgt_len > src_len:
            raise UserError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be (batch, "
                f"{dims.num_heads} heads, length, {dims.head_dim}), the queries of the last tokens"
            )
        positions = _positions(batch, src_len, tgt_len, key_padding_mask, query.device)
        shared = Shared.compute(self.shared, positions)
        query, _ = shared.rotate(query, query)
        everywhere = self.shared.rotation(positions.ids)
        key = key if everywhere is None else everywhere.rotate_keys(key)
        terms = shared.terms | self.layer.terms(
            Span.from_lengths(tgt_len, src_len, query.device), positions
        )
        return query, key, terms.unprojected(dims.num_heads), positions


def _positions(
    batch: int, src_len: int, tgt_len: int, padding: Optional[Tensor], device: torch.device
) -> Positions:
    tokens = torch.full((batch, src_len), TOKEN, device=device)
    if padding is not None:
        tokens = tokens.masked_fill(padding.to(device), PADDING)
    inspect = may_sync(device, decoding=tgt_len < src_len)
    return Positions.from_tokens(tokens, PADDING, END, tgt_len, inspect)
