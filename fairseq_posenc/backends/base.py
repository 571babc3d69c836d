"""The interface of all backends, and the arguments of a call of attention.

B batch, H heads, T queries, S keys, D head size; G is H, or 1 for all heads.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fairseq_posenc.encodings.term import CountTemperature, Decay, Temperature
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.precision import at_least_fp32

# The reason given by backends that compute distances from the order of the tokens, not from ids.
NEEDS_CONSECUTIVE_IDS = "it needs position_ids that grow by one from token to token"


class AttentionCall(NamedTuple):
    """The arguments of attention, for every backend."""

    query: Tensor  # `(B, H, T, D)`, unscaled; the last T of S positions
    key: Tensor  # `(B, H, S, D)`, or with fewer heads, one for each group of query heads
    value: Tensor  # shaped as the keys
    terms: Terms  # what the position encodings add to the scores, or change in them
    mask: Mask = NO_MASK  # which keys a query may see. A query that may see none gets zeros
    dropout: float = 0.0  # probability of dropping a weight; 0 outside training
    need_weights: bool = False  # also return the weights before dropout

    def with_all_heads(self) -> "AttentionCall":
        """Repeat the heads of keys and values (grouped-query attention) to H."""
        times = self.query.size(1) // self.key.size(1)
        if times == 1:
            return self
        key, value = (x.repeat_interleave(times, 1) for x in (self.key, self.value))
        return self._replace(key=key, value=value)

    def temperature(self) -> Tensor | None:
        """Compute the factor of all scores of each query, ``(B or 1, G, T)``, or None for 1.

        It may depend on how many keys are visible, which the mask knows and the terms do not.
        """
        temperature, by_count = self.terms.find(Temperature), self.terms.find(CountTemperature)
        factors = None if temperature is None else temperature.factors
        if by_count is None:
            return factors
        counts = self.mask.count_visible(self.query.size(2), self.key.size(2), self.query.device)
        # `clamp` is for queries that see no key, and get zeros in any case.
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        logarithms = counts.clamp(min=1).to(dtype).log()[:, None]  # [B or 1, 1, T]
        counted = at_least_fp32(by_count.factor)[None, :, None] * logarithms  # [B or 1, G, T]
        if by_count.offset is not None:
            counted = counted + at_least_fp32(by_count.offset)[None, :, None]
        return counted if factors is None else factors * counted

    def decay(self) -> tuple[Tensor | None, Tensor | None]:
        """Select the sums c for earlier and for later keys, ``(B or 1, H, S, parts)`` each.

        c_i - c_j is added to the score of query i and key j. c is the running sum of the logarithms
        of the forget gates, or a penalty by position, in parts to add up: a rounded value and its
        rest, of each encoding with decay. The second is None if the first serves all visible pairs;
        both are None without decay.
        """
        if (decay := self.terms.find(Decay)) is None:
            return None, None
        earlier, later = decay.earlier, decay.later
        if later is None or self.mask.direction == "lr":  # lr: a query sees no later key
            return earlier, None
        # `later` has the opposite sign: c_j - c_i is added. rl: a query sees no earlier key.
        return (-later, None) if self.mask.direction == "rl" else (earlier, -later)


class Backend(Protocol):
    """A way to compute attention: a module with these functions, which `planner` calls in order."""

    def unavailable(self) -> str:
        """Explain why this backend cannot run on this machine; empty if it can."""

    def refuses(self, call: AttentionCall) -> str:
        """Explain why this backend cannot compute such a call; empty if it can.

        It reads no values: the tensors may be on "meta", which represents any GPU.
        """

    def attend(self, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        """Compute attended values ``(B, H, T, D)`` and, on request, weights ``(B, H, T, S)``."""


def no_reason() -> str:
    """Give no reason, as the ``unavailable`` of backends that run on every machine."""
    return ""


def check_dropout(probability: float) -> float:
    """Return a probability of dropping weights; refuse one below 0, or of 1 or more."""
    if not 0 <= probability < 1:
        raise UserError(f"dropout={probability:g} must be at least 0 and below 1")
    return probability


def refuse_second_order(backend: str) -> None:
    """Refuse to differentiate a hand-written backward pass again.

    Autograd enables gradients in a backward pass only for ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise UserError(
            f"the {backend} backend has no second-order gradients (create_graph=True, "
            "torch.autograd.functional.hvp): use the reference backend, which has them"
        )
