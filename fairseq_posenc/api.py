"""Position encodings without fairseq's models: for a look, a test, or a model of one's own.

Example::

    from fairseq_posenc.api import PositionEncoding

    encoding = PositionEncoding("learned+m4m", embed_dim=768, num_heads=12, max_positions=512)
    encoding.parameter_counts()               # {'input.learned.table.weight': 393216, ...}
    scores = encoding.scores(query, key)      # (batch, heads, tgt_len, src_len)
    curves = encoding.distance_curve(64)      # (heads, 129), distances -64 .. 64
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq_posenc import registry
from fairseq_posenc.backends import reference
from fairseq_posenc.backends.base import Mask
from fairseq_posenc.encodings.base import Dims, Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span

PADDING, END, TOKEN = 1, 2, 3


class PositionEncoding(nn.Module):
    """The encodings of one layer, and of the input before it, from a spec.

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
        self.spec = registry.parse(spec)
        self.dims = Dims(embed_dim, num_heads, max_positions, causal)
        self.input = registry.build(self.spec.at("input"), self.dims)
        self.shared = registry.build(self.spec.at("stack"), self.dims)
        self.layer = registry.build(self.spec.at("layer"), self.dims)

    def parameter_counts(self) -> dict[str, int]:
        """Return the size of each trained parameter by name: input, shared by layers, per layer."""
        return {name: parameter.numel() for name, parameter in self.named_parameters()}

    def embed(self, embeddings: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return token embeddings ``(batch, length, embed_dim)`` with the input encoding added."""
        batch, length = embeddings.shape[:2]
        positions = _positions(batch, length, key_padding_mask, embeddings.device)
        for encoding in self.input.each():
            vectors = encoding.embed(positions)
            if vectors is not None:
                embeddings = embeddings + vectors.type_as(embeddings)
        return embeddings

    def scores(self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the attention scores before masks and softmax.

        Args:
            query: projected queries, unscaled, ``(batch, heads, length, head_dim)``.
            key: projected keys of the same tokens, same shape.
            key_padding_mask: True for padding, ``(batch, length)``; it never shifts a position.

        Returns:
            ``(batch, heads, tgt_len, src_len)``, in float32 at least.
        """
        query, key, terms = self._prepare(query, key, key_padding_mask)
        return reference.scores(query, key, terms)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Return the attended values ``(batch, heads, length, head_dim)``; see :meth:`scores`."""
        query, key, terms = self._prepare(query, key, key_padding_mask)
        mask = Mask("lr" if self.dims.causal else "both", key_padding_mask)
        return reference.attend(query, key, value, terms, mask)[0]

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
        length = 2 * reach + 1
        generator = torch.Generator().manual_seed(seed)
        content = torch.randn(samples, 1, self.dims.embed_dim, generator=generator)
        parameter = next(self.parameters(), content)
        # Drawn on the CPU, so that every device gets the same vectors.
        content = content.to(parameter.device)
        embedded = self.embed(content.expand(-1, length, -1))
        heads = embedded.unflatten(-1, (self.dims.num_heads, -1)).transpose(1, 2)
        return self.scores(heads, heads)[:, :, reach].mean(0)

    def _prepare(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Terms]:
        shape = (self.dims.num_heads, key.size(2), self.dims.head_dim)
        if query.shape != key.shape or query.shape[1:] != shape:
            raise UserError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be "
                f"(batch, {shape[0]} heads, length, {shape[2]})"
            )
        length = query.size(2)
        positions = _positions(query.size(0), length, key_padding_mask, query.device)
        query, key = self.layer.rotate(query, key, positions.block)
        span = Span.of(length, length, query.device)
        terms = self.shared.terms(span, positions) | self.layer.terms(span, positions)
        return query, key, terms.unprojected(self.dims.num_heads)


def _positions(batch: int, length: int, padding: Tensor | None, device: torch.device) -> Positions:
    tokens = torch.full((batch, length), TOKEN, device=device)
    if padding is not None:
        tokens = tokens.masked_fill(padding.to(device), PADDING)
    return Positions.of(tokens, PADDING, END, length)
