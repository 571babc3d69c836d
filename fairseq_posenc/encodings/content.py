"""Encodings that read the content of tokens: counted positions, forget gates, states.

B batch, T queries, H heads, C model size, R table rows; in formulas m layers, h heads, d head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import INIT_STD, Dims, Encoding, register
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import CountedRows, RowsByDistance, Term
from fairseq_posenc.positions import Positions


@register("cope")
class Cope(Encoding):
    """A key's distance is a sum of gates; each gate says how much a token in between counts.

    Equation:
        e_ij = z_ij + (1 - f) (q_i.a_p) + f (q_i.a_u), where z_ij = q_i.k_j / sqrt(d); the gates
        sigmoid(z_it) of the keys from j to i add up to p + f, but at most P - 1 (then f = 0); p is
        a whole number, u = p + 1.
    Shapes:
        a ``(P, d)`` in each layer, P the option ``positions``; its heads share it.
    Parameters:
        m * P * d
    Source:
        Golovneva et al. (2024), "CoPE", arXiv:2405.18719, section 4 and appendix B.
    Differs:
        a starts at 0. With ``window(first=F)``, hidden keys between the first ones and the window
        do not count.
    """

    acts_on = "scores"
    axes = 0  # it reads no position ids
    zeros = ("table",)  # parameters that start at 0
    causal_reason = "it counts back from the query"  # not empty: refused in encoders

    def __init__(self, dims: Dims, *, positions: int = 64) -> None:
        super().__init__(dims)
        self.table = nn.Parameter(torch.empty(positions, dims.head_dim))  # set to 0 later

    def terms(self, positions: Positions) -> list[Term]:
        """Return the table; attention counts the positions, as they depend on the scores."""
        return [CountedRows(self.table)]


@register("fox")
class Fox(Encoding):
    """The forget gates of the tokens between key and query lower the score.

    Equation:
        e_ij = q_i.k_j / sqrt(d) + sum_t log(f_t), where t runs from j + 1 to i,
        f_t = sigmoid(w_h.x_t + b_h), and x is the input of the layer.
    Shapes:
        w ``(H, C)`` and b ``(H,)`` in each layer. An encoder has a second set for later
        keys, where t runs from i + 1 to j.
    Parameters:
        2 * m * h * (C + 1); half of it in a causal model
    Source:
        Lin et al. (2025), "Forgetting Transformer", arXiv:2503.02130, section 3.
    Differs:
        the paper is about causal models. b starts at ``start``. Padding does not forget, and
        logarithms are rounded to multiples of 2^-32, whose sums are exact.
    """

    acts_on = "scores"
    axes = 0  # it reads no position ids

    def __init__(self, dims: Dims, *, start: float = 5.0) -> None:
        super().__init__(dims)
        self.start = start
        self.gate = nn.Linear(dims.embed_dim, dims.num_heads * (1 if dims.causal else 2))

    def reset_parameters(self) -> None:
        """Begin with gates that forget nearly nothing."""
        nn.init.normal_(self.gate.weight, std=INIT_STD)
        nn.init.constant_(self.gate.bias, self.start)

    def forget_gates(self, x: Tensor) -> Tensor:
        """Project the layer's input to logits of gates, ``(B, T, H or 2 H)``.

        Attention adds their term ``Decay``: with gates of 1, 0.5 and 0.5, the scores of the third
        query get log(0.25), log(0.5) and 0.
        """
        gates: Tensor = self.gate(x)
        return gates


@register("inkling")
class Inkling(Encoding):
    """The query's state, a narrow projection, is multiplied by a trained vector of the distance.

    Equation:
        e_ij = q_i.k_j / sqrt(d) + s_i.p_r, where the state s_i is W_h x_i, x is the input of the
        layer, and r = j - i. p_r is 0 from a distance of E on.
    Shapes:
        W ``(H * rank, C)`` and p ``(E, rank)`` in each layer; its heads share p. An encoder has
        2E-1 rows, also for later keys.
    Parameters:
        m * rank * (h * C + E); in an encoder m * rank * (h * C + 2E-1)
    Source:
        Inkling (2026), ``r_proj``, ``d_rel`` (rank) and ``rel_extent`` (E) of
        ``InklingAttention`` in Hugging Face's transformers. The model has no other positions. Its
        layers without a window also have ``logn(factor=0.1,length=N)``; in the others, E is the
        length of the window.
    Differs:
        the model is causal, normalizes queries and keys, and divides by d, not by its root. E is by
        default the smaller of 1024 and n.
    """

    acts_on = "scores"
    length_options = ("extent",)  # trained rows keep their distances if it changes
    rows_depend_on_causal = True  # loading copies no rows between encoders and decoders

    def __init__(self, dims: Dims, *, rank: int = 16, extent: int | None = None) -> None:
        super().__init__(dims)
        self.extent = min(1024, dims.max_positions) if extent is None else extent
        # Rows are for distances j - i from 1 - extent to `last_distance`.
        self.last_distance = 0 if dims.causal else self.extent - 1
        self.projection = nn.Linear(dims.embed_dim, dims.num_heads * rank, bias=False)
        self.table = nn.Parameter(torch.empty(self.extent + self.last_distance, rank))

    def extend(self, name: str, weight: Tensor) -> Tensor:
        """Extend a loaded table to this one's extent, with rows of zeros for larger distances."""
        if name != "table":
            return weight
        missing = max(0, len(self.table) - len(weight))
        missing_later = missing // 2 if self.last_distance > 0 else 0  # those of later keys
        return F.pad(weight, (0, 0, missing - missing_later, missing_later))

    def states(self, x: Tensor) -> Tensor:
        """Project the input of the layer, ``(B, T, C)``, to states ``(B, H, T, rank)``."""
        states: Tensor = self.projection(x)
        return states.unflatten(-1, (self.dims.num_heads, -1)).transpose(1, 2)

    def terms(self, positions: Positions) -> list[Term]:
        """Select the rows, ``(1, R, rank)``, with rows of zeros for distances beyond the table."""
        rows = F.pad(self.table[None], (0, 0, 1, 1))  # one row of zeros before, one after
        starts = range(1 - self.extent, self.last_distance + 2)  # where rows 1, 2, ... begin
        kept, runs = Runs.select(starts, positions)  # the slice that the call's distances need
        return [RowsByDistance(rows[:, kept], runs, of="state")]  # they multiply `states`
