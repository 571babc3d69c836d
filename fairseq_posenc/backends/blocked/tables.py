"""The terms of a call as the blocks take them: scaled, of one type, padded to whole tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.blocked.geometry import Geometry
from fairseq_posenc.encodings.base import Terms


class Tables(NamedTuple):
    """The tensors among the terms; see :class:`~fairseq_posenc.encodings.base.Terms`.

    Those by distance have the rows of a geometry, and with the reset two more behind them.
    """

    query_table: Tensor | None
    key_table: Tensor | None
    gain: Tensor | None
    bias: Tensor | None
    pair_bias: Tensor | None
    value_table: Tensor | None

    @classmethod
    def of(cls, terms: Terms, geometry: Geometry, kind: torch.dtype) -> Tables:
        """Return the tables of type ``kind``; the steps are recorded for their gradients."""
        rows = geometry.tgt_len + geometry.src_len - 1
        missing = geometry.rows - rows

        def laid_out(table: Tensor | None) -> Tensor | None:
            if table is None:
                return None
            table = table.to(kind)
            if missing:
                blank = table.new_zeros(table.size(0), missing, *table.shape[2:])
                table = torch.cat([table[:, :rows], blank, table[:, rows:]], dim=1)
            return table.contiguous()

        pair_bias = terms.pair_bias
        if pair_bias is not None:
            pair_bias = F.pad(
                pair_bias.to(kind).flip(2),
                (
                    0,
                    geometry.padded_src - geometry.src_len,
                    0,
                    geometry.padded_tgt - geometry.tgt_len,
                ),
            )
        return cls(
            laid_out(terms.query_table),
            laid_out(terms.key_table),
            laid_out(terms.gain),
            laid_out(terms.bias),
            pair_bias,
            laid_out(terms.value_table),
        )

    def of_heads(self, heads: slice) -> Tables:
        """Return the tables of some heads, as views; biases by pair stay whole."""

        def chosen(table: Tensor | None) -> Tensor | None:
            return table if table is None or table.size(0) == 1 else table[heads]

        by_distance = self._replace(pair_bias=None)
        return Tables(*map(chosen, by_distance))._replace(pair_bias=self.pair_bias)

    def zeros(self, wanted: Sequence[bool]) -> Tables:
        """Return zeros for the tables that are wanted, to add gradients to."""
        return Tables(
            *(
                torch.zeros_like(table) if table is not None and wants else None
                for table, wants in zip(self, wanted)
            )
        )
