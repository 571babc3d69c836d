"""Attention sinks: an extra score in the denominator of the softmax."""

from typing import Optional

import torch
from torch import nn

from fairseq_posenc.encodings.base import Dims, Encoding, Signed, register
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span


@register("sink")
class Sink(Encoding):
    """Each head adds one score to the softmax and drops its weight.

    Equation:
        w_ij = exp(e_ij) / (exp(s_h) + sum_t exp(e_it)), where s_h is trained for each head and
        layer, or has a fixed ``value``.
    Shapes:
        s ``(H,)`` in each layer; it starts at 0.
    Parameters:
        m * h; none with a value
    Source:
        gpt-oss (``sinks``); Miller (2023), "Attention Is Off By One", which is ``sink(value=0)``.
    Differs:
        a query that sees no key gets zeros.
    """

    acts_on = "softmax"
    takes_ids = "unread"

    def __init__(self, dims: Dims, *, value: Optional[Signed] = None) -> None:
        super().__init__(dims)
        if value is not None and abs(value) > torch.finfo(torch.float32).max:
            raise UserError(f"sink(value={value:g}): the score must fit float32")
        self.value = value
        if value is None:
            self.score = nn.Parameter(torch.empty(dims.num_heads))

    def reset_parameters(self) -> None:
        """Start at 0."""
        if self.value is None:
            nn.init.zeros_(self.score)

    def terms(self, span: Span, positions: Positions) -> Terms:
        """Return the extra score of each head."""
        if self.value is None:
            return Terms(sink=self.score)
        device, heads = positions.tokens.device, self.dims.num_heads
        return Terms(
            sink=torch.full((heads,), float(self.value), dtype=torch.float32, device=device)
        )
