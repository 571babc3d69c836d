"""Encoder-decoder attention with rotary positions, for ``rope(cross_attention=true)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from fairseq_posenc.transformer.attention import IncrementalState


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

    Raises:
        UserError: quantisation noise (``q_noise``).
    """

    def __init__(self, embed_dim: int, num_heads: int, encodings: Encodings, **kwargs: Any) -> None:
        super().__init__(embed_dim, num_heads, encoder_decoder_attention=True, **kwargs)
        if kwargs.get("q_noise", 0.0) > 0:
            raise UserError(
                "rope(cross_attention=true) does not work with --quant-noise-pq: quantised "
                "projections would not rotate"
            )
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
        incremental_state: IncrementalState = None,
        need_weights: bool = True,
        static_kv: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as fairseq's class does: ``(T, B, C)`` in and out.

        Args:
            query: of the decoder.
            key: the encoder's output ``(S, B, C)``.
            value: the same.
            key_padding_mask: padding of the source, ``(B, S)``.
            incremental_state: fairseq's caches.
            need_weights: also return the weights.
            static_kv: the keys are the same at every step, as always in fairseq's decoders.
            **kwargs: fairseq's own.

        Raises:
            UserError: neither ``static_kv`` nor caches, or a padding mask of another size.
        """
        if not static_kv and incremental_state is None:
            # fairseq would then use torch's function, which passes by the projections' hooks.
            raise UserError("rotary encoder-decoder attention must be called with static_kv=True")
        self._at_keys = None if key is None else _source_positions(key, key_padding_mask)
        attended: tuple[Tensor, Tensor | None] = super().forward(
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            incremental_state=incremental_state,
            need_weights=need_weights,
            static_kv=static_kv,
            **kwargs,
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
    shape = (key.size(1), key.size(0))
    if padding is None or padding.dim() == 0:  # fairseq too takes a number for no mask
        tokens = key.new_zeros(shape, dtype=torch.long)
    elif padding.shape == shape:
        tokens = padding.long()
    else:
        raise UserError(
            f"padding of shape {tuple(padding.shape)} does not fit a source of shape {shape} "
            "(batch, length)"
        )
    return Positions.of(tokens, padding_idx=1, eos_idx=-1, tgt_len=key.size(0)).block
