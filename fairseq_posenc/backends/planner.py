"""Chooses the backend of a call, and says why."""

from __future__ import annotations

from typing import NamedTuple

from fairseq_posenc.backends import reference, sdpa
from fairseq_posenc.backends.base import Backend
from fairseq_posenc.encodings.base import Terms
from fairseq_posenc.errors import UserError

BACKENDS: dict[str, Backend] = {"sdpa": sdpa, "reference": reference}  # fastest first


class Plan(NamedTuple):
    """The backend of a call, and why it was chosen."""

    name: str
    reason: str

    @property
    def backend(self) -> Backend:
        """The backend itself."""
        return BACKENDS[self.name]


def available() -> dict[str, str]:
    """Return, for each backend, why it cannot run on this machine (empty: it can)."""
    return dict.fromkeys(BACKENDS, "")


def choose(requested: str, terms: Terms, need_weights: bool = False) -> Plan:
    """Return the fastest backend that can compute ``terms``, or the one that was requested.

    Args:
        requested: ``auto`` or the name of a backend.
        terms: what the encodings add to the scores.
        need_weights: the attention weights are asked for, which only the reference returns; a
            requested backend then steps aside, for that call alone.

    Raises:
        UserError: the requested backend cannot do it, or is unknown.
    """
    if requested != "auto":
        if requested not in BACKENDS:
            raise UserError(f"unknown backend {requested!r}; known: auto, {', '.join(BACKENDS)}")
        why_not = BACKENDS[requested].refuses(terms, need_weights=False)
        if why_not:
            raise UserError(f"--position-backend {requested} cannot compute this: {why_not}")
        if not need_weights:
            return Plan(requested, "requested")
    reasons: list[str] = []
    for name, backend in BACKENDS.items():
        why_not = backend.refuses(terms, need_weights)
        if not why_not:
            return Plan(name, "; ".join(reasons) or "fastest")
        reasons.append(f"not {name}: {why_not}")
    raise AssertionError("the reference backend serves everything")
