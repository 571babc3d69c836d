"""Changes of the softmax: temperatures (factors of all scores of a query), a cap, and sinks.

They change the scores e_ij of other encodings of a layer, as in ``rope+llama4``. Specs refuse
options that are not above 0, unless their type is ``Signed``.

B batch, T queries, H heads; in formulas m layers, h heads.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from fairseq_posenc.encodings.base import Dims, Encoding, register
from fairseq_posenc.encodings.term import CountTemperature, ScoreCap, SinkScore, Temperature, Term
from fairseq_posenc.errors import UserError
from fairseq_posenc.option_values import Signed
from fairseq_posenc.positions import Positions
from fairseq_posenc.precision import make_constant


class ScoreFactor(Encoding, ABC):
    """A factor of all scores of a query, which may depend on its position; not trained."""

    acts_on = "softmax"
    takes_real_ids = True  # positions may be numbers such as 0.5
    shared_by_layers = True  # one module, which all layers use

    @abstractmethod
    def _factors(self, ids: Tensor) -> Tensor:
        """Compute the factors at positions ``ids``, ``(B or 1, T)`` of float32, from 0 on."""

    def terms(self, positions: Positions) -> list[Term]:
        """Multiply all scores; random positions (``randomized``) do not change the factors."""
        factors = self._factors(positions.queries(positions.ids).float())  # of the last T tokens
        return [Temperature(factors.unsqueeze(1))]  # [B or 1, 1, T]


@register("llama4")
class Llama4(ScoreFactor):
    """All scores of a query are multiplied by a factor that grows in steps of a fixed length.

    Equation:
        w_ij = softmax_j(tau_i * e_ij), tau_i = 1 + beta * ln(1 + floor((i + 1) / L)), where i
        counts real tokens from 0, and L is ``length``.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Llama 4 (``attn_scale``, ``floor_scale`` of its configuration), on layers without rope:
        ``3*rope+chunk(size=8192),none+llama4``.
    Differs:
        positions are those of each sentence, so padding changes nothing.
    """

    def __init__(self, dims: Dims, *, beta: float = 0.1, length: int = 8192) -> None:
        super().__init__(dims)
        self.beta = beta
        self.length = length

    def _factors(self, ids: Tensor) -> Tensor:
        return 1 + self.beta * ((ids + 1) / self.length).floor().log1p()


@register("ministral3")
class Ministral3(ScoreFactor):
    """All scores of a query are multiplied by a factor that grows with multiples of a length.

    Equation:
        w_ij = softmax_j(tau_i * e_ij), tau_i = 1 + beta * ln(1 + floor(i / L)), where i counts real
        tokens from 0 and L is the trained length.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Ministral 3 (``llama_4_scaling_beta``, ``original_max_position_embeddings``).
    Differs:
        positions are those of each sentence, so padding changes nothing. ``length`` is by default
        the length that the weights were trained at.
    """

    def __init__(self, dims: Dims, *, beta: float = 0.1, length: int | None = None) -> None:
        super().__init__(dims)
        self.beta = beta
        self.length = length

    def _factors(self, ids: Tensor) -> Tensor:
        return 1 + self.beta * (ids / (self.length or self.dims.trained_length)).floor().log1p()


@register("logn")
class Logn(ScoreFactor):
    """All scores of a query grow with the logarithm of its position beyond the trained length.

    Equation:
        w_ij = softmax_j(tau_i * e_ij), tau_i = 1 + a ln(max(1, (i + 1) / L)), where i counts real
        tokens from 0 and L is the trained length. With a = 1 / ln L, as it is without ``factor``,
        tau_i = max(1, ln(i + 1) / ln L).
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Su (2021), "From the invariance of entropy to the scale of attention",
        kexue.fm/archives/8823; the first Qwen models, ``use_logn_attn``. Inkling has
        ``logn(factor=0.1,length=N)``, its ``log_scaling_alpha`` and ``log_scaling_n_floor``.
    Differs:
        positions are those of each sentence, so padding changes nothing. ``length`` is by default
        the length that the weights were trained at.
    """

    def __init__(
        self, dims: Dims, *, factor: float | None = None, length: int | None = None
    ) -> None:
        super().__init__(dims)
        self.factor = factor
        self.length = length

    def _factors(self, ids: Tensor) -> Tensor:
        length = self.length or self.dims.trained_length
        if self.factor is not None:
            return 1 + self.factor * ((ids + 1) / length).clamp(min=1.0).log()
        return ((ids + 1).log() / math.log(max(length, 2))).clamp(min=1.0)  # ln 1 is 0


@register("drope")
class Drope(ScoreFactor):
    """All scores are multiplied by a factor that grows with the logarithm of the length.

    Equation:
        w_ij = softmax_j((1 + b ln(max(n / L, 1))) * e_ij), where n is the model's maximum
        number of positions, L the trained length, and b was fitted on held-out text.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Gelberg et al. (2025), "DroPE", arXiv:2512.12167, appendix C.
    Differs:
        n is the model's limit, not the length of an input, so neither other sentences nor padding
        change a result, and decoding equals the full pass.
    """

    def __init__(self, dims: Dims, *, b: Signed = Signed(0.1)) -> None:  # noqa: B008  (immutable)
        super().__init__(dims)
        self.b = b

    def _factors(self, ids: Tensor) -> Tensor:
        growth = math.log(max(self.dims.max_positions / self.dims.trained_length, 1))
        return torch.full_like(ids, 1 + self.b * growth)


@register("ssmax")
class Ssmax(Encoding):
    """Scores of a query are multiplied by a trained factor and the log of its number of keys.

    Equation:
        w_ij = softmax_j(s * ln(n_i) * e_ij), where n_i is the number of real keys that query i may
        see, and s is trained for each head and layer. With ``offset``, the factor is
        s * ln(n_i) + b, where b is trained as well.
    Shapes:
        s ``(H,)`` in each layer; it starts at 1 / mean(ln n_i) over the trained length, so that
        training begins as plain attention. With an offset b ``(H,)``, s starts at 0 and b at 1.
    Parameters:
        m * h; 2 * m * h with an offset
    Source:
        Nakanishi (2025), "Scalable-Softmax Is Superior for Attention", arXiv:2501.19399, eq. 2.
        The offset is that of Mistral Large 4.
    Differs:
        keys hidden by padding, windows or documents are not counted; Mistral Large 4 counts all
        earlier positions.
    """

    acts_on = "softmax"
    axes = 0  # it reads no positions

    def __init__(self, dims: Dims, *, offset: bool = False) -> None:
        super().__init__(dims)
        self.factor = nn.Parameter(torch.empty(dims.num_heads))  # s
        self.offset = nn.Parameter(torch.empty(dims.num_heads)) if offset else None  # b

    def reset_parameters(self) -> None:
        """Start as plain attention; without an offset it is so on average over the queries."""
        if self.offset is not None:
            nn.init.zeros_(self.factor)
            nn.init.ones_(self.offset)
            return
        length = max(self.dims.trained_length, 2)
        # Queries of a causal model see 1 to L keys, whose logarithms add up to ln L!.
        mean = math.lgamma(length + 1) / length if self.dims.causal else math.log(length)
        nn.init.constant_(self.factor, 1 / mean)

    def terms(self, positions: Positions) -> list[Term]:
        """Return factor and offset; attention counts the keys, as they depend on the mask."""
        return [CountTemperature(self.factor, self.offset)]


@register("softcap")
class Softcap(Encoding):
    """No score is larger than a cap or smaller than its negative.

    Equation:
        w_ij = softmax_j(c * tanh(e_ij / c)), where e_ij is the whole score, with its temperature,
        and c is ``cap``. Masks come after it, and a sink is not capped.
    Shapes:
        no tensors.
    Parameters:
        0
    Source:
        Gemma 2 (``attn_logit_softcapping``), arXiv:2408.00118, section 2.
    Differs:
        nothing. (Unlike transformers' attention ``sdpa``, no backend here leaves the cap out.)
    """

    acts_on = "softmax"
    axes = 0  # it reads no positions

    def __init__(self, dims: Dims, *, cap: float = 50.0) -> None:
        super().__init__(dims)
        self.cap = cap

    def terms(self, positions: Positions) -> list[Term]:
        """Return the cap of the scores."""
        return [ScoreCap(self.cap)]


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
    axes = 0  # it reads no positions
    zeros = ("score",)  # the parameter that starts at 0, if there is no fixed value

    def __init__(self, dims: Dims, *, value: Signed | None = None) -> None:
        super().__init__(dims)
        if value is not None and abs(value) > torch.finfo(torch.float32).max:
            raise UserError(f"sink(value={value:g}): the score must fit float32")
        self.value = value
        if value is None:
            self.score = nn.Parameter(torch.empty(dims.num_heads))

    def terms(self, positions: Positions) -> list[Term]:
        """Return the extra score of each head."""
        if self.value is None:
            return [SinkScore(self.score)]
        return [SinkScore(make_constant([self.value] * self.dims.num_heads, positions.device))]
