"""The plugin's attention without a stack around it, as formulas are compared with it."""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import SharedEncodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import compute_shared
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import set_context


class LoneAttention(PositionalAttention):
    """An attention that computes the position state itself: only padding is known of its tokens."""

    def forward(self, query: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Attend as the base class does; an incremental state counts its tokens."""
        padding = named.get("key_padding_mask")
        state = named.get("incremental_state")
        tgt_len, batch = query.shape[:2]
        src_len = tgt_len
        if state is not None:
            state["tokens"] = src_len = tgt_len + state.get("tokens", 0)
        if padding is None:
            padding = torch.zeros(batch, src_len, dtype=torch.bool, device=query.device)
        positions = Positions.from_padding(padding, tgt_len=tgt_len)
        shared = compute_shared(SharedEncodings(self.encodings.as_dict()), positions)
        # The layer adds its terms to those of the stack; kept, they would count twice.
        with set_context((shared[0]._replace(terms=Terms()),)):
            return super().forward(query, *args, **named)
