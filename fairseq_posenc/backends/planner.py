"""Chooses the backend of a call, and gives the reason.

Backends are ranked, and the first that can compute the call is taken. The orders were measured
(``benchmarks/attention.py``). On a GPU, our kernels are chosen only where a benchmark on such a GPU
is recorded, and none is at present; FlexAttention runs only where it is requested.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.backends import blocked, flex, reference, sdpa, triton
from fairseq_posenc.backends.base import AttentionCall, Backend, CallFeatures, check_dropout
from fairseq_posenc.backends.forward_cache import is_exporting
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.locality import Locality
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, ScaleFactor
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    "triton": triton,
    "flex": flex,
    "sdpa": sdpa,
    "blocked": blocked,
    "reference": reference,
}
NO_LIMITS = Locality()
SHORT = 48  # number of keys below which setting up blocks takes too long on a CPU
# Keys up to which the reference is faster than blocks on an H100, and needs no more memory.
SHORT_ON_GPU = 512
_logged: set[tuple[object, ...]] = set()  # kinds of calls whose plan has been logged

# Where `triton` won a benchmark of layers with dropout on a GPU (`make gpu`). Only earlier kernels
# did, on an H100. Today's have not run on a GPU yet, so they are taken only where requested.
RECORDED_CHIP = "sm_90"  # compute capability
RECORDED_LENGTHS = range(2048, 8193)  # numbers of keys
# The names of the terms of each benchmark, such as {"query_table"}; none: `triton` is never chosen.
RECORDED_TERMS: tuple[set[str], ...] = ()


class BackendChoice(NamedTuple):
    """The backend of a call, and the reason for the choice."""

    name: str
    reason: str

    @property
    def backend(self) -> Backend:
        """The backend itself."""
        return BACKENDS[self.name]


def available() -> dict[str, str]:
    """Explain, for each backend, why it cannot run on this machine (empty: it can)."""
    return {name: backend.unavailable() for name, backend in BACKENDS.items()}


def check(requested: str, terms: Terms, head_dim: int, locality: Locality = NO_LIMITS) -> None:
    """Refuse a requested backend that cannot compute ``terms`` at all.

    Args:
        requested: ``auto`` or the name of a backend.
        terms: of a single token; rows that layers project are projected, as in a call.
        head_dim: D.
        locality: limits of the keys.

    Raises:
        UserError: it cannot, cannot run on this machine, or is unknown.
    """
    if requested == "auto":
        return
    backend = _find_backend(requested)
    call = CallFeatures(
        "cuda" if torch.cuda.is_available() else "cpu",
        head_dim=head_dim,
        limited=locality.limits or locality.documents,  # whose segments a single token lacks
        first_keys=locality.first_keys is not None,
        documents=locality.documents,
    )
    _refuse_if(backend.unavailable() or backend.refuses(terms, call), requested)


def _find_backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _refuse_if(why_not: str, name: str) -> None:
    if why_not:
        raise UserError(f"position backend {name} cannot compute this: {why_not}")


def choose(requested: str, terms: Terms, call: CallFeatures) -> BackendChoice:
    """Choose the fastest backend that can compute a call, or the one that was requested.

    The choice is logged, once for each kind of call.

    Args:
        requested: ``auto``, or a backend that :func:`check` accepts. If the attention weights are
            requested, the reference takes its place, since no other backend returns them.
        terms: of the encodings, added to the scores.
        call: all other features.

    Raises:
        UserError: the requested backend cannot compute the call.
    """
    if requested == "auto":
        plan = _choose_fastest(terms, call)
    else:
        backend = _find_backend(requested)
        _refuse_if(backend.refuses(terms, call._replace(need_weights=False)), requested)
        plan = BackendChoice(requested, "requested")
        if call.need_weights:
            plan = BackendChoice("reference", "the attention weights are requested")
    if not torch.compiler.is_compiling():  # logging would break the compiled graph
        _log_once(plan, terms, call)
    return plan


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: Terms,
    mask: Mask,
    dropout: float = 0.0,
    need_weights: bool = False,
    requested: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Attend on the backend that :func:`choose` chooses; see :class:`AttentionCall`.

    Raises:
        UserError: the dropout is not a probability, or the requested backend cannot compute this.
    """
    mask = mask.without_needless_window(key.size(2))
    call = AttentionCall(query, key, value, terms, mask, check_dropout(dropout), need_weights)
    return choose(requested, terms, call.features).backend.attend(call)


def _choose_fastest(terms: Terms, call: CallFeatures) -> BackendChoice:
    if is_exporting():  # so the length cannot decide
        order = ["sdpa", "reference"]
        reason = "a graph for all lengths"
    elif call.device == "cpu":
        order, reason = _rank_on_cpu(terms, call)
    else:
        order, reason = _rank_on_gpu(terms, call)
    if torch.compiler.is_compiling():  # which cannot trace the hand-written passes of `blocked`
        order = [name for name in order if name != "blocked"]
    reasons: list[str] = []
    for name in order:
        why_not = BACKENDS[name].unavailable() or BACKENDS[name].refuses(terms, call)
        if not why_not:
            return BackendChoice(name, "; ".join([reason, *reasons]))
        reasons.append(f"not {name}: {why_not}")
    raise AssertionError("the reference backend serves everything")


def _rank_on_cpu(terms: Terms, call: CallFeatures) -> tuple[list[str], str]:
    """Rank backends from the fastest on; the reason is the call, or what the first does without."""
    plain = terms.is_biased_dot_product  # no gain or cap, and no vectors by distance but states'
    if call.src_len < SHORT or call.tgt_len == 1:
        reason = "a single query" if call.tgt_len == 1 else f"fewer than {SHORT} keys"
        return (["sdpa", "reference"] if plain else ["reference"]), reason
    if not plain:
        return ["blocked", "reference"], "no matrix of scores by distance"
    if call.limited:
        return ["blocked", "sdpa", "reference"], "hidden keys are left out"
    if call.dropout:
        return ["blocked", "sdpa", "reference"], "torch's attention is slow to drop weights"
    biases = Terms([x for x in terms if isinstance(x, (ByDistance, NumbersByPair))])  # any kind
    if not biases:
        return ["sdpa", "reference"], "a plain dot product"
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in biases.tensors().values())
    if learns or call.padded:  # `sdpa` needs gradients of all pairs, or a bias for each sentence
        return ["blocked", "sdpa", "reference"], "no bias for each sentence, no matrix of gradients"
    return ["sdpa", "reference"], "a dot product and a fixed bias"


def _rank_on_gpu(terms: Terms, call: CallFeatures) -> tuple[list[str], str]:
    """Rank backends, with the reason: `triton` only where it won a benchmark, `flex` nowhere."""
    if terms.is_biased_dot_product and not terms.has(ByDistance, NumbersByPair):  # no bias
        return ["sdpa", "reference"], "a plain dot product"
    if call.tgt_len == 1:
        return ["sdpa", "reference"], "a single query"
    others = ["sdpa", "blocked", "reference"]
    chip = find_chip()
    why_not = _find_unrecorded(terms, call, chip)
    if not why_not:
        return ["triton", *others], f"its kernels were the fastest in a benchmark on {chip}"
    if call.src_len <= SHORT_ON_GPU:
        others = ["sdpa", "reference", "blocked"]
    return others, f"not triton, not flex: no recorded benchmark {why_not}"


def find_chip() -> str:
    """Find the compute capability of the GPU in use, such as ``sm_90``."""
    if not torch.cuda.is_available():
        return "a GPU that is not here"
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _find_unrecorded(terms: Terms, call: CallFeatures, chip: str) -> str:
    """Say what no benchmark is recorded for; empty if one is (with dropout, and no hidden keys)."""
    if chip != RECORDED_CHIP:
        return f"for {chip}"
    if {*_list_names(terms)} not in RECORDED_TERMS or not call.dropout or call.limited:
        return f"of such terms for {chip}"
    return "" if call.src_len in RECORDED_LENGTHS else f"of such a length for {chip}"


def _list_names(terms: Terms) -> list[str]:
    """List the names of the terms, but the scale factor."""
    return [term.name for term in terms.without(ScaleFactor)]


def _log_once(plan: BackendChoice, terms: Terms, call: CallFeatures) -> None:
    """Log a plan, unless it has been logged for a call of the same kind."""
    if not logger.isEnabledFor(logging.INFO):
        return
    names = _list_names(terms)
    kind_of_call = (plan, *names, call.device, call.dtype, call.padded, call.dropout)
    if kind_of_call in _logged:
        return
    _logged.add(kind_of_call)
    features = [call.device, str(call.dtype).removeprefix("torch.")]
    if call.dropout:
        features.append("dropout")
    if call.padded:
        features.append("padding")
    listed = ", ".join(name.replace("_", " ") for name in names) or "plain"
    logger.info(f"attention ({listed}; {', '.join(features)}): {plan.name}, {plan.reason}")
