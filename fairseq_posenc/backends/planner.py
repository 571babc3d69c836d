"""Chooses the backend of a call, and gives the reason.

Backends are ranked, and the first that can compute the call is taken. The orders were measured
(``benchmarks/attention.py``). On a GPU, our kernels and FlexAttention run only where they are
requested: no benchmark has shown yet that they are faster there.
"""

import logging

import torch
from torch import Tensor

from fairseq_posenc.backends import blocked, flex, reference, sdpa, triton
from fairseq_posenc.backends.base import AttentionCall, Backend, check_dropout
from fairseq_posenc.encodings.term import ByDistance, NumbersByPair, ScaleFactor
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.mask import NO_MASK, Mask
from fairseq_posenc.torch_modes import is_exporting

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Backend] = {
    "triton": triton,
    "flex": flex,
    "sdpa": sdpa,
    "blocked": blocked,
    "reference": reference,
}
SHORT = 48  # number of keys below which setting up blocks takes too long on a CPU
# Keys up to which the reference is faster than blocks on an H100, and needs no more memory.
SHORT_ON_GPU = 512
_logged: set[str] = set()  # the lines of `_log_once`


def available() -> dict[str, str]:
    """Explain, for each backend, why it cannot run on this machine (empty: it can)."""
    return {name: backend.unavailable() for name, backend in BACKENDS.items()}


def check(requested: str, terms: Terms, head_dim: int, mask: Mask = NO_MASK) -> None:
    """Refuse a requested backend that cannot compute ``terms`` at all.

    Args:
        requested: ``auto`` or the name of a backend.
        terms: of any length, as only their kinds count. Rows that layers project (DeBERTa's) must
            have been projected.
        head_dim: D.
        mask: what the position encodings hide (windows); the tokens' segments are not known yet.

    Raises:
        UserError: it cannot compute them, cannot run on this machine, or is unknown.
    """
    if requested == "auto":
        return
    backend = _find_backend(requested)
    x = torch.empty(1, 1, SHORT, head_dim, device="meta")  # as on a GPU; any T above 1 would do
    call = AttentionCall(x, x, x, terms, mask)
    _refuse_if(backend.unavailable() or backend.refuses(call), requested)


def _find_backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UserError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]


def _refuse_if(why_not: str, name: str) -> None:
    if why_not:
        raise UserError(f"position backend {name} cannot compute this: {why_not}")


def choose(requested: str, call: AttentionCall) -> tuple[str, str]:
    """Choose the fastest backend that can compute a call, or the one that was requested.

    The choice is logged, once for each kind of call.

    Args:
        requested: ``auto``, or a backend that :func:`check` accepts. If the attention weights are
            requested, the reference takes its place, since no other backend returns them.
        call: the call, whose values do not matter; "meta" represents a GPU.

    Returns:
        The name of the backend, and the reason for the choice.

    Raises:
        UserError: the requested backend cannot compute the call.
    """
    if requested == "auto":
        name, reason = _choose_fastest(call)
    else:
        _refuse_if(_find_backend(requested).refuses(call._replace(need_weights=False)), requested)
        name, reason = requested, "requested"
        if call.need_weights:
            name, reason = "reference", "the attention weights are requested"
    if not torch.compiler.is_compiling():  # logging would break the compiled graph
        _log_once(name, reason, call)
    return name, reason


def attend(call: AttentionCall, requested: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Compute a call: attended values ``(B, H, T, D)``, and on request weights ``(B, H, T, S)``.

    Raises:
        UserError: the dropout is not a probability, or the requested backend cannot compute this.
    """
    check_dropout(call.dropout)
    if not is_exporting():  # an exported graph serves all lengths, so there the window stays
        call = call._replace(mask=call.mask.without_needless_window(call.key.size(2)))
    name, _ = choose(requested, call)
    return BACKENDS[name].attend(call)


def _choose_fastest(call: AttentionCall) -> tuple[str, str]:
    order, reason = _rank(call)
    reasons = [reason]
    for name in order:
        if name == "blocked" and torch.compiler.is_compiling():
            continue  # torch.compile cannot trace its hand-written passes
        why_not = BACKENDS[name].unavailable() or BACKENDS[name].refuses(call)
        if not why_not:
            return name, "; ".join(reasons)
        reasons.append(f"not {name}: {why_not}")
    raise AssertionError("the reference backend serves everything")


def _rank(call: AttentionCall) -> tuple[list[str], str]:
    """List backends, the fastest first, and say why that is the fastest."""
    terms, tgt_len, src_len = call.terms, call.query.size(2), call.key.size(2)
    is_padded = call.mask.key_padding is not None
    plain = terms.is_biased_dot_product  # no gain, cap or sink, and no vectors by distance
    tables = Terms([x for x in terms if isinstance(x, (ByDistance, NumbersByPair))])
    blocks = ["blocked", "sdpa", "reference"]
    fused = ["sdpa", "reference"] if plain else ["reference"]  # sdpa refuses others
    if is_exporting():  # so the length cannot decide
        return fused, "a graph for all lengths"
    if call.query.device.type != "cpu":
        if plain and not tables:
            return fused, "a plain dot product"
        if tgt_len == 1:
            return fused, "a single query"
        others = ["blocked", "reference"] if src_len > SHORT_ON_GPU else ["reference", "blocked"]
        return ["sdpa", *others], "not triton, not flex: no benchmark shows them faster"
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tables.tensors().values())
    cases = [  # condition, backends and reason; the first that holds counts
        (tgt_len == 1, fused, "a single query"),
        (src_len < SHORT, fused, f"fewer than {SHORT} keys"),
        (not plain, ["blocked", "reference"], "more than a dot product and a bias"),
        (call.mask.has_limits, blocks, "hidden keys are left out"),  # by windows or segments
        (call.dropout > 0, blocks, "torch's attention is slow to drop weights"),
        (not tables, fused, "a plain dot product"),
        (learns or is_padded, blocks, "sdpa would need gradients or a bias for all pairs"),
    ]
    found = ((order, reason) for holds, order, reason in cases if holds)
    return next(found, (fused, "a dot product and a fixed bias"))


def _log_once(name: str, reason: str, call: AttentionCall) -> None:
    """Log a choice, unless it has been logged for a call of the same kind."""
    if not logger.isEnabledFor(logging.INFO):
        return
    features = [call.query.device.type, str(call.query.dtype).removeprefix("torch.")]
    options = {"dropout": call.dropout > 0, "padding": call.mask.key_padding is not None}
    features += [option for option, is_used in options.items() if is_used]
    listed = [term.name for term in call.terms.without(ScaleFactor)]
    names = ", ".join(listed).replace("_", " ") or "plain"
    line = f"attention ({names}; {', '.join(features)}): {name}, {reason}"
    if line not in _logged:
        _logged.add(line)
        logger.info(line)
