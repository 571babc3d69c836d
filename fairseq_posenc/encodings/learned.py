"""Learned absolute positions, as in BERT and RoBERTa."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from fairseq_posenc.registry import register


@register("learned")
class Learned(Encoding):
    """A trained vector for each position is added to the token embeddings.

    Equation:
        x_i = w_i + p_i, i the position among the row's real tokens, from 0.
    Shapes:
        table ``(n, C)``; adds ``(B or 1, T, C)``.
    Parameters:
        n * C
    Source:
        Devlin et al. (2018), "BERT", arXiv:1810.04805; fairseq's LearnedPositionalEmbedding.
    Differs:
        fairseq's table has padding_idx + 1 unused rows before position 0; they are cut off when
        one of its checkpoints is loaded.
    """

    acts_on: ClassVar[Literal["input"]] = "input"

    def __init__(self, dims: Dims) -> None:
        super().__init__(dims)
        # An nn.Embedding, so that fairseq's BERT initialisation reaches it as it does its own.
        self.table = nn.Embedding(dims.max_positions, dims.embed_dim)

    def reset_parameters(self) -> None:
        """Draw the vectors as fairseq does outside BERT: normal, standard deviation C^-0.5."""
        nn.init.normal_(self.table.weight, std=self.dims.embed_dim**-0.5)

    def embed(self, positions: Positions) -> Tensor:
        """Return the vectors of the queries' positions, ``(B or 1, T, C)``."""
        return self.lookup(positions.block, positions)

    def lookup(self, index: Tensor, positions: Positions) -> Tensor:
        """Return the queries' vectors, given each token's row ``index``, ``(B or 1, S)``.

        Raises:
            UserError: a position lies beyond the table.
        """
        limit = self.dims.max_positions
        if index.size(1) > limit and int(index.max()) >= limit:
            raise UserError(
                f"a sequence of {int(index.max()) + 1} tokens is longer than the {limit} positions "
                f"of {self.name!r}: raise --max-positions (--max-source-positions, "
                "--max-target-positions) before training, or shorten the input"
            )
        return F.embedding(positions.queries(index), self.table.weight)

    @classmethod
    def parameter_count(cls, dims: Dims, layers: int) -> int:
        """Return n * C."""
        return dims.max_positions * dims.embed_dim
