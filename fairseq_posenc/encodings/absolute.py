"""Absolute positions: vectors that are added to the token embeddings, trained or fixed, or none.

B batch, T queries, C model size, n positions that the model has room for.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions


@register("none")
class NoEncoding(Encoding):
    """Nothing is added: the model sees a bag of words, unless its layers are causal or directed.

    Equation:
        x_i = w_i, where w_i is the token embedding.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        the ablation of Luo et al. (2022), "DecBERT", arXiv:2204.08688, and of causal language
        models since.
    Differs:
        nothing.
    """

    acts_on = "input"
    axes = 0  # it reads no position ids


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
    has_position_table = True  # a row for each position: longer models need new rows

    def __init__(self, dims: Dims, *, axes: int = 1) -> None:
        super().__init__(dims)
        self.axes = axes
        self.max_positions = dims.max_positions  # also read by `transformer.stacks`, for fairseq
        # An nn.Embedding, so that fairseq's BERT initialization draws it like fairseq's table.
        self.table = nn.Embedding(axes * dims.max_positions, dims.embed_dim)

    def reset_parameters(self) -> None:
        """Draw the vectors as fairseq does outside BERT: normal, standard deviation C^-0.5."""
        nn.init.normal_(self.table.weight, std=self.dims.embed_dim**-0.5)

    def embed(self, positions: Positions) -> Tensor:
        """Look up the vectors of the queries' positions, ``(B or 1, T, C)``."""
        positions.check_limit(self.dims.max_positions, self.name)
        ids = positions.query_ids  # counted, a caller's, or random
        if self.axes == 1:
            return F.embedding(ids, self.table.weight)
        ids = ids if ids.dim() == 3 else ids[..., None]  # a token's only id is for all axes
        end = self.table.num_embeddings
        first_rows = torch.arange(0, end, self.max_positions, device=ids.device)  # by axis
        # Other ids must not read the rows of another axis: at the row `end` the lookup fails.
        index = torch.where((ids >= 0) & (ids < self.max_positions), ids + first_rows, end)
        return F.embedding(index, self.table.weight).sum(2)  # of `(B or 1, T, axes, C)`


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
        Huang et al. (2021), arXiv:2109.12788, section 5.2 ("real absolute positions").
    Differs:
        the input marks the ends of sentences; a row without marks is one. fairseq's masked LM hides
        about one ``</s>`` in eight, which then counts only with its ``include_target_tokens``.
        In a row without ``<s>``, such as a source in translation, the first token is at 0.
    """

    without_options = ("axes",)  # specs refuse it: sentences have one axis
    counts_in_sentences = True  # so specs refuse it with random positions

    def embed(self, positions: Positions) -> Tensor:
        """Look up the vectors of the queries' positions in their sentences, ``(B, T, C)``.

        Raises:
            UserError: a block, which may be a single sentence, is longer than the table.
        """
        positions.check_limit(self.dims.max_positions, self.name)
        return F.embedding(positions.queries(positions.sentence_ids()), self.table.weight)


@register("sinusoidal")
class Sinusoidal(Encoding):
    """Sines and cosines of the position are added to the token embeddings.

    Equation:
        x_i = w_i + s p_i, where p_i[2t] = sin(i / 10000^(2t/C)) and
        p_i[2t+1] = cos(i / 10000^(2t/C)); s is the option ``scale``.
    Shapes:
        adds ``(B or 1, T, C)``.
    Parameters:
        0
    Source:
        Vaswani et al. (2017), "Attention Is All You Need", arXiv:1706.03762, section 3.5.
    Differs:
        nothing with ``layout=interleaved`` and ``scale=1``. ``layout=half``, as in Marian: all
        sines, then all cosines. ``layout=fairseq``, for checkpoints of fairseq's own models: the
        same with frequencies 10000^(-t/(C/2 - 1)), and positions counted from padding_idx + 1.
        On several ``axes``, each has an equal part of the width, as in MAE (arXiv:2111.06377).
        ``scale=0.03`` is for masked LMs, whose token embeddings start with a standard deviation of
        0.02: sinusoids of 0.7 drown them.
    """

    acts_on = "input"
    takes_real_ids = True  # positions may be numbers such as 0.5

    def __init__(
        self,
        dims: Dims,
        *,
        layout: Literal["interleaved", "half", "fairseq"] = "interleaved",
        scale: float = 1.0,
        axes: int = 1,
    ) -> None:
        super().__init__(dims)
        if dims.embed_dim % (2 * axes):
            needed = "an even width" if axes == 1 else f"a multiple of {2 * axes} as width"
            raise UserError(f"sinusoidal needs {needed}, not {dims.embed_dim}")
        self.axes = axes
        self.layout = layout
        self.scale = scale

    def embed(self, positions: Positions) -> Tensor:
        """Compute the vectors of the queries' positions in float32, ``(B or 1, T, C)``."""
        ids = positions.query_ids
        first_id = 2 if self.layout == "fairseq" else 0  # padding_idx + 1, which is 1 + 1
        longest = positions.longest if positions.counted and positions.drawn is None else None
        if longest is not None and ids.size(0) > 1 and ids.size(1) > 1:
            # Counted ids, not `drawn` ones, are below `longest`; rows repeat them: computed once.
            table = self.vectors(torch.arange(longest, device=ids.device) + first_id)
            return F.embedding(ids, self.scale * table)
        return self.scale * self.vectors(ids + first_id)

    def vectors(self, ids: Tensor) -> Tensor:
        """Compute p at positions ``ids``, ``(B or 1, T)``, in float32: ``(B or 1, T, C)``.

        On several axes, ids are ``(B or 1, T, axes)``. Distances ``(R,)`` give ``(R, C)``.
        """
        if ids.dim() < 3:  # a token's only id is for all axes
            ids = ids[..., None].expand(*ids.shape, self.axes)
        half = self.dims.embed_dim // (2 * self.axes)
        steps = half - 1 if self.layout == "fairseq" else half
        exponents = torch.arange(half, dtype=torch.float32, device=ids.device) / max(steps, 1)
        # In float32 in every model: half precision would round large angles.
        frequencies = torch.exp(exponents * -math.log(10000.0))
        angles = ids.float().unsqueeze(-1) * frequencies  # [..., axes, C / axes / 2]
        dim = -1 if self.layout == "interleaved" else -2  # where sine and cosine are stacked
        return torch.stack([angles.sin(), angles.cos()], dim).flatten(-3)  # [..., C]
