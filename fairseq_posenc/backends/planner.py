"""Chooses the backend of a call, and gives the reason.

Backends are ranked, and the first that can compute the call is taken. The orders were measured
(``benchmarks/attention.py``). On a GPU, our kernels are chosen only where a benchmark on such a GPU
is recorded, and none is at present; FlexAttention runs only where it is requested.
"""

import logging

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
_logged: set[str] = set()

# Where `triton` won a benchmark of layers with dropout on a GPU (`make gpu`). Only earlier kernels
# did, on an H100. Today's have not run on a GPU yet, so they are taken only where requested.
RECORDED_CHIP = "sm_90"  # compute capability
RECORDED_LENGTHS = range(2048, 8193)  # numbers of keys
# The names of the terms of each benchmark, such as {"query_table"}; none: `triton` is never chosen.
RECORDED_TERMS: tuple[set[str], ...] = ()


def available() -> dict[str, str]:
    """Explain, for each backend, why it cannot run on this machine (empty: it can)."""
    return {name: backend.unavailable() for name, backend in BACKENDS.items()}


def check(requested: str, terms: Terms, head_dim: int, locality: Locality = NO_LIMITS) -> None:
    """Refuse a requested backend that cannot compute ``terms`` at all.

    Args:
        requested: ``auto`` or the name of a backend.
        terms: of a single token; rows that layers project are projected, as in a call.
        head_dim: D.
        locality: the spec's limits of the keys; a call's segments are not known yet.

    Raises:
        UserError: it cannot, cannot run on this machine, or is unknown.
    """
    if requested == "auto":
        return
    backend = _find_backend(requested)
    call = CallFeatures(
        "cuda" if torch.cuda.is_available() else "cpu",
        head_dim=head_dim,
        limited=locality.limits or locality.documents,  # `limits`: a window, or present segments
        first_keys=locality.first_keys is not None,  # `triton` refuses them
        documents=locality.documents,  # `blocked` refuses them beside resets
    )
    _refuse_if(backend.unavailable() or backend.refuses(terms, call), requested)


def _find_backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _refuse_if(why_not: str, name: str) -> None:
    if why_not:
        raise UserError(f"position backend {name} cannot compute this: {why_not}")


def choose(requested: str, terms: Terms, call: CallFeatures) -> tuple[str, str]:
    """Choose the fastest backend that can compute a call, or the one that was requested.

    The choice is logged, once for each kind of call.

    Args:
        requested: ``auto``, or a backend that :func:`check` accepts. If the attention weights are
            requested, the reference takes its place, since no other backend returns them.
        terms: of the encodings, added to the scores.
        call: all other features.

    Returns:
        The name of the backend, and the reason for the choice.

    Raises:
        UserError: the requested backend cannot compute the call.
    """
    if requested == "auto":
        name, reason = _choose_fastest(terms, call)
    else:
        backend = _find_backend(requested)
        _refuse_if(backend.refuses(terms, call._replace(need_weights=False)), requested)
        name, reason = requested, "requested"
        if call.need_weights:
            name, reason = "reference", "the attention weights are requested"
    if not torch.compiler.is_compiling():  # logging would break the compiled graph
        _log_once(name, reason, terms, call)
    return name, reason


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
    """Attend on the chosen backend; all other arguments are fields of :class:`AttentionCall`.

    Raises:
        UserError: the dropout is not a probability, or the requested backend cannot compute this.
    """
    mask = mask.without_needless_window(key.size(2))
    call = AttentionCall(query, key, value, terms, mask, check_dropout(dropout), need_weights)
    name, _ = choose(requested, terms, call.features)
    return BACKENDS[name].attend(call)


def _choose_fastest(terms: Terms, call: CallFeatures) -> tuple[str, str]:
    order, reason = _rank(terms, call)
    reasons = [reason]
    for name in order.split():
        if name == "blocked" and torch.compiler.is_compiling():
            continue  # torch.compile cannot trace its hand-written passes
        why_not = BACKENDS[name].unavailable() or BACKENDS[name].refuses(terms, call)
        if not why_not:
            return name, "; ".join(reasons)
        reasons.append(f"not {name}: {why_not}")
    raise AssertionError("the reference backend serves everything")


def _rank(terms: Terms, call: CallFeatures) -> tuple[str, str]:
    """Rank backends, separated by spaces, the fastest first; say why that is the fastest."""
    plain = terms.is_biased_dot_product  # no gain, cap or sink, and no vectors by distance
    biases = Terms([x for x in terms if isinstance(x, (ByDistance, NumbersByPair))])  # of any kind
    fused, blocks = "sdpa reference" if plain else "reference", "blocked sdpa reference"
    if is_exporting():  # so the length cannot decide
        return "sdpa reference", "a graph for all lengths"
    if call.device != "cpu":
        if plain and not biases:
            return fused, "a plain dot product"
        return _rank_on_gpu(terms, call)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in biases.tensors().values())
    cases = [  # condition, backends and reason; the first that holds counts
        (call.tgt_len == 1, fused, "a single query"),
        (call.src_len < SHORT, fused, f"fewer than {SHORT} keys"),
        (not plain, "blocked reference", "no matrix of scores by distance"),
        (call.limited, blocks, "hidden keys are left out"),
        (call.dropout, blocks, "torch's attention is slow to drop weights"),
        (not biases, fused, "a plain dot product"),
        # `sdpa` needs gradients of all pairs, or a bias for each sentence.
        (learns or call.padded, blocks, "no bias for each sentence, no matrix of gradients"),
    ]
    found = ((order, reason) for holds, order, reason in cases if holds)
    return next(found, (fused, "a dot product and a fixed bias"))


def _rank_on_gpu(terms: Terms, call: CallFeatures) -> tuple[str, str]:
    """Rank backends: `triton` only where it won a benchmark, `flex` nowhere."""
    if call.tgt_len == 1:
        return "sdpa reference", "a single query"
    chip = find_chip()
    is_recorded = chip == RECORDED_CHIP and {*_list_names(terms)} in RECORDED_TERMS
    if is_recorded and call.src_len in RECORDED_LENGTHS and call.dropout and not call.limited:
        return "triton sdpa blocked reference", f"the fastest in a benchmark on {chip}"
    others = "reference blocked" if call.src_len <= SHORT_ON_GPU else "blocked reference"
    reason = f"not triton, not flex: no recorded benchmark of such a call on {chip}"
    return f"sdpa {others}", reason


def find_chip() -> str:
    """Find the compute capability of the GPU in use, such as ``sm_90``."""
    if not torch.cuda.is_available():
        return "a GPU that is not here"
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _list_names(terms: Terms) -> list[str]:
    """List the names of the terms, except the scale factor."""
    return [term.name for term in terms.without(ScaleFactor)]


def _log_once(name: str, reason: str, terms: Terms, call: CallFeatures) -> None:
    """Log a choice, unless it has been logged for a call of the same kind."""
    if not logger.isEnabledFor(logging.INFO):
        return
    features = [call.device, str(call.dtype).removeprefix("torch.")]
    features += [x for x, holds in (("dropout", call.dropout), ("padding", call.padded)) if holds]
    names = ", ".join(_list_names(terms)).replace("_", " ") or "plain"
    line = f"attention ({names}; {', '.join(features)}): {name}, {reason}"
    if line not in _logged:
        _logged.add(line)
        logger.info(line)
