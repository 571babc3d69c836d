"""Encoder-decoder attention with rotary positions, for ``rope(cross_attention=true)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.positions import Positions


class RotaryCrossAttention(MultiheadAttention):
    """fairseq's encoder-decoder attention, whose queries and keys are rotated by their positions.

    Queries stand at their position in the target, keys at theirs in the source. fairseq's forward
    is kept, with its caches and beams: the rotation follows the two projections as a hook. Keys are
    cached rotated.

    Args:
        embed_dim: C.
        num_heads: H.
        encodings: those that rotate.
        **kwargs: fairseq's own.
    """

    def __init__(self, embed_dim: int, num_heads: int, encodings: Encodings, **kwargs: Any) -> None:
        super().__init__(embed_dim, num_heads, encoder_decoder_attention=True, **kwargs)
        self.encodings = encodings
        self._target: Positions | None = None
        self._at_keys: Tensor | None = None
        self.q_proj.register_forward_hook(self._rotate_queries)
        self.k_proj.register_forward_hook(self._rotate_keys)

    @contextmanager
    def given(self, positions: Positions | None) -> Iterator[None]:
        """Hand over the positions of the target, which fairseq's layers cannot pass."""
        self._target = positions
        try:
            yield
        finally:  # nothing of a forward pass survives it
            self._target = self._at_keys = None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq's class does: ``(T, B, C)`` in and out.

        Args:
            query: of the decoder.
            key: the encoder's output ``(S, B, C)``.
            value: the same.
            key_padding_mask: padding of the source, ``(B, S)``.
            **kwargs: fairseq's own.
        """
        self._at_keys = None if key is None else _source_positions(key, key_padding_mask)
        attended: tuple[Tensor, Tensor | None] = super().forward(
            query, key, value, key_padding_mask=key_padding_mask, **kwargs
        )
        return attended

    def _rotate_queries(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        if self._target is None:  # outside a model
            at_queries = torch.arange(out.size(0), device=out.device)[None]
        else:
            at_queries = self._target.queries(self._target.block)
        return self._rotate(out, at_queries, which=0)

    def _rotate_keys(self, module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
        assert self._at_keys is not None
        at_keys = self._at_keys
        if at_keys.size(0) > out.size(1):  # fairseq projects one key for all beams of a sentence
            at_keys = at_keys.view(out.size(1), -1, at_keys.size(1))[:, 0]
        return self._rotate(out, at_keys, which=1)

    def _rotate(self, x: Tensor, index: Tensor, which: int) -> Tensor:
        heads = x.view(*x.shape[:2], self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        rotated = self.encodings.rotate(heads, heads, index)[which]  # [B, H, T, D]
        return rotated.permute(2, 0, 1, 3).reshape(x.shape)


def _source_positions(key: Tensor, padding: Tensor | None) -> Tensor:
    tokens = key.new_zeros(key.size(1), key.size(0), dtype=torch.long)
    if padding is not None and padding.size(0) == key.size(1):
        tokens = padding.long()
    return Positions.of(tokens, padding_idx=1, eos_idx=-1, tgt_len=key.size(0)).block
