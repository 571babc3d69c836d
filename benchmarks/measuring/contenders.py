"""Lists the contenders: fairseq's own attention, and encodings on backends that support them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from fairseq_posenc import registry, specs
from fairseq_posenc.assembly import build_encodings, build_shared
from fairseq_posenc.backends import available, choose
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.planner import BACKENDS
from fairseq_posenc.encodings.base import Dims, Encodings, SharedEncodings
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import compute_shared
from fairseq_posenc.transformer.attention import PositionalAttention


class Contender(NamedTuple):
    """An encoding and the backend that computes it."""

    encoding: str
    backend: str


STOCK = Contender("stock", "fairseq")  # fairseq's own classes, without this package

# With this standard deviation, no score is so far below the highest of its row that its weight is
# a denormal number, which processors compute slowly.
TABLE_STD = 0.2


def backend_names(requested: list[str]) -> list[str]:
    """List the backends of a command line; ``all`` means those that run here.

    Raises:
        UserError: a backend is unknown, or cannot run here.
    """
    why_not = available()  # backend -> why it cannot run here, or nothing
    for name in requested:
        if name not in ("auto", "all", *BACKENDS):
            raise UserError(f"unknown backend {name!r}; known: auto, all, {', '.join(BACKENDS)}")
        if why_not.get(name):  # "auto" and "all" have no entry
            raise UserError(f"backend {name} cannot run here: {why_not[name]}")
    running = [name for name in BACKENDS if not why_not[name]]
    return [name for word in requested for name in (running if word == "all" else [word])]


def contenders(
    encodings: Iterable[str], backends: Iterable[str], dims: Dims, call: AttentionCall
) -> list[Contender]:
    """List the contenders of a benchmark, with ``none`` on every backend that is used.

    Raises:
        UserError: a spec cannot be read, or does not apply to such a layer.
    """
    listed = encoding_contenders(encodings, backends, dims, call)
    call = call._replace(terms=_compute_terms_of_one_token("none", dims, call.query.device))
    used = [contender.backend for contender in listed]
    plain = [Contender("none", name) for name in used if not BACKENDS[name].refuses(call)]
    return list(dict.fromkeys([*plain, *listed]))


def encoding_contenders(
    encodings: Iterable[str], backends: Iterable[str], dims: Dims, call: AttentionCall
) -> list[Contender]:
    """List the contenders of a benchmark, with ``none`` only if it is one of the encodings.

    The backend ``auto`` is the one that the package would choose for ``call``. Encodings that a
    backend refuses are left out, with a message.

    Raises:
        UserError: a spec cannot be read, or does not apply to such a layer.
    """
    listed = []
    for spec in encodings:
        terms = _compute_terms_of_one_token(spec, dims, call.query.device)
        of_spec = call._replace(terms=terms)
        # Some rotations (that of `pope`) make queries and keys wider than values.
        if any(registry.get(item.name).widens for item in specs.parse(spec).items):
            wider = torch.cat([call.query, call.query], -1)
            of_spec = of_spec._replace(query=wider, key=wider)
        for backend in backends:
            name = choose("auto", of_spec)[0] if backend == "auto" else backend
            if why_not := BACKENDS[name].refuses(of_spec):
                _say(f"no row for {spec} on {name}: {why_not}")
            else:
                listed.append(Contender(spec, name))
    return list(dict.fromkeys(listed))


def build_random_encodings(spec: str, dims: Dims) -> tuple[Encodings, SharedEncodings]:
    """Build the encodings of a layer, and those that all layers share.

    Their parameters are drawn at random, as many start at zero, which would leave work out.
    """
    parsed = specs.parse(spec)
    layer = build_encodings(parsed.layer_modules(0), dims)  # of the first layer
    shared = build_shared(parsed, dims)
    for parameter in (*layer.parameters(), *shared.parameters()):
        torch.nn.init.normal_(parameter, std=TABLE_STD)
    return layer, shared


def make_positions(batch: int, length: int, device: torch.device) -> Positions:
    """Compute the positions of tokens without padding."""
    tokens = torch.zeros(batch, length, dtype=torch.long, device=device)  # 0: an ordinary token
    return Positions.from_tokens(tokens, padding_idx=1, eos_idx=2, tgt_len=length)


@cache  # so that a message is printed once
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _compute_terms_of_one_token(spec: str, dims: Dims, device: torch.device) -> Terms:
    """Compute the terms of one token, which are enough to choose a backend."""
    layer, shared = build_random_encodings(spec, dims)
    attention = PositionalAttention(dims.embed_dim, dims.num_heads, layer).to(device)
    positions = make_positions(1, 1, device)
    of_input = layer.input_terms(torch.zeros(1, 1, dims.embed_dim, device=device), positions)
    return attention.compute_terms(compute_shared(shared.to(device), positions)[0]) | of_input
