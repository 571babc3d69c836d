"""Learned absolute positions that restart in every sentence of a packed block."""

from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.encodings.base import register
from fairseq_posenc.encodings.learned import Learned
from fairseq_posenc.positions import Positions


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

    def embed(self, positions: Positions) -> Tensor:
        """Look up the vectors of the queries' positions in their sentences, ``(B, T, C)``.

        Raises:
            UserError: a block is longer than the table, which one sentence could fill.
        """
        positions.check_limit(self.dims.max_positions, self.name)
        return F.embedding(positions.queries(positions.sentence_ids()), self.table.weight)
