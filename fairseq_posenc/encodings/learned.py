"""Learned absolute positions: of a row, as in BERT and RoBERTa, or of each sentence in it.

The letters of shapes are those of :mod:`~fairseq_posenc.encodings.base`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.term import Cost
from fairseq_posenc.positions import Positions


@register("learned")
class Learned(Encoding):
    """A trained vector for each position is added to the token embeddings.

    Equation:
        x_i = w_i + p_i, where i counts the row's real tokens from 0. On several ``axes`` the
        vectors of all are added.
    Shapes:
        table ``(axes * n, C)``; adds ``(B or 1, T, C)``.
    Parameters:
        axes * n * C
    Source:
        Devlin et al. (2018), "BERT", arXiv:1810.04805; fairseq's LearnedPositionalEmbedding.
    Differs:
        fairseq's table has padding_idx + 1 unused rows before position 0; loading one of its
        checkpoints cuts them off.
    """

    acts_on = "input"
    has_position_table = True
    cost = Cost("n C", "n C")

    def __init__(self, dims: Dims, *, axes: int = 1) -> None:
        super().__init__(dims)
        self.axes = axes
        # An nn.Embedding, so that fairseq's BERT initialisation draws it like fairseq's table.
        self.table = nn.Embedding(axes * dims.max_positions, dims.embed_dim)

    @property
    def max_positions(self) -> int:
        """The number of positions; fairseq reads this attribute of ``embed_positions``."""
        return self.table.num_embeddings // self.axes

    def reset_parameters(self) -> None:
        """Draw the vectors as fairseq does outside BERT: normal, standard deviation C^-0.5."""
        nn.init.normal_(self.table.weight, std=self.dims.embed_dim**-0.5)

    def embed(self, positions: Positions) -> Tensor:
        """Look up the vectors of the queries' positions, ``(B or 1, T, C)``."""
        positions.check_limit(self.dims.max_positions, self.name)
        ids = positions.query_places
        if self.axes == 1:
            return F.embedding(ids, self.table.weight)
        ids = ids if ids.dim() == 3 else ids[..., None]  # a token's only id is for all axes
        end = self.table.num_embeddings
        first_rows = torch.arange(0, end, self.max_positions, device=ids.device)  # of each axis
        # An id beyond its axis must not read the next axis: at the row `end` the lookup fails.
        index = torch.where(ids < self.max_positions, ids + first_rows, end)  # [B or 1, T, axes]
        return F.embedding(index, self.table.weight).sum(2)


@register("sentence_learned")
class SentenceLearned(Learned):
    """As ``learned``, but positions restart after each end of sentence in a block.

    Equation:
        x_i = w_i + p_s, where s is the position of token i in its sentence, from 1; the first token
        of a row, its ``<s>``, is at 0.
    Shapes:
        table ``(n, C)``; adds ``(B, T, C)``.
    Parameters:
        n * C
    Source:
        Huang et al. (2021), "Multiplicative Position-aware Transformer Models for Language
        Understanding", arXiv:2109.12788, section 5.2 ("real absolute positions").
    Differs:
        the input marks the ends of sentences. A masked ``</s>`` (about one in eight) counts only
        with ``include_target_tokens``, as in the recipe ``a_none``. In a row without ``<s>``, such
        as a source in translation, the first token is at 0.
    """

    without_options = ("axes",)  # sentences have one axis
    counts_in_sentences = True

    def embed(self, positions: Positions) -> Tensor:
        """Look up the vectors of the queries' positions in their sentences, ``(B, T, C)``.

        Raises:
            UserError: a block is longer than the table, which one sentence could fill.
        """
        positions.check_limit(self.dims.max_positions, self.name)
        return F.embedding(positions.queries(positions.sentence_ids()), self.table.weight)
