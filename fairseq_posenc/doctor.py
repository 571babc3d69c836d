"""``fairseq-posenc doctor``: what works on this machine, and a short test of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fairseq
import torch
from fairseq.modules.layer_norm import has_fused_layernorm
from fairseq.optim.fused_adam import get_fused_adam_class
from torch import Tensor, nn

from fairseq_posenc import registry
from fairseq_posenc.backends import BACKENDS, available
from fairseq_posenc.backends.base import Mask
from fairseq_posenc.encodings.base import Dims, Terms
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.version import __version__

PACKAGE = Path(__file__).resolve().parent
DIMS = Dims(embed_dim=16, num_heads=2, max_positions=8)
LENGTH = 6
# A GPU may round the factors of float32 products to ten bits; a wrong term is far beyond this.
TOLERANCE = 1e-2


class Finding(NamedTuple):
    """A line of the report. ``works`` is None for what the package can do without."""

    subject: str
    works: bool | None
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: ``fairseq-posenc doctor`` has no options."""


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if anything essential does not work."""
    print(f"fairseq-posenc {__version__}\n")
    marks = {True: "ok", None: "-", False: "FAILED"}
    healthy = True
    for finding in findings():
        print(f"{finding.subject:<20} {marks[finding.works]:<7} {finding.text}", flush=True)
        healthy = healthy and finding.works is not False
    return 0 if healthy else 1


def findings() -> Iterator[Finding]:
    """Look at one thing after the other; the self-test comes last."""
    yield Finding("Python", True, platform.python_version())
    yield Finding("torch", True, torch.__version__)
    yield _fairseq()
    yield from _cuda()
    yield from _apex()
    yield _triton()
    yield from _backends()
    yield _user_dir()
    yield self_test()


def _fairseq() -> Finding:
    for name in ("fairseq-fixed", "fairseq"):
        try:
            installed = f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
        return Finding("fairseq", True, installed)
    return Finding("fairseq", True, f"{fairseq.__version__}, not installed by pip")


def _cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but finds no device" if built else "torch has none"
        yield Finding("CUDA", None, f"{why}: training runs on the CPU")
        return
    capability = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    yield Finding("CUDA", True, f"{name}, capability {capability[0]}.{capability[1]}")
    if capability[0] >= 8:
        yield Finding("bf16", True, "the device computes in it: --bf16 is safer than --fp16")
    else:
        yield Finding("bf16", None, "the device does not compute in it: use --fp16")


def _apex() -> Iterator[Finding]:
    # fairseq takes both only on a GPU, however apex is installed.
    for subject, installed, otherwise in (
        ("apex layer norm", has_fused_layernorm, "fairseq uses torch's"),
        ("apex Adam", get_fused_adam_class() is not None, "fairseq uses its own"),
    ):
        if installed and torch.cuda.is_available():
            yield Finding(subject, True, "active: fairseq uses the fused kernel")
        else:
            why = "no GPU" if installed else "not installed"
            yield Finding(subject, None, f"{why}: {otherwise}, with the same result, slower")


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("triton", None, "not installed")
    return Finding("triton", True, importlib.metadata.version("triton"))


def _backends() -> Iterator[Finding]:
    for name, why_not in available().items():
        yield Finding(f"backend {name}", None if why_not else True, why_not or "can run")


def _user_dir() -> Finding:
    """Say where fairseq finds the package; a bare name is looked up beside fairseq itself."""
    by_name = Path(fairseq.__file__).parent.parent / PACKAGE.name
    if by_name.resolve() == PACKAGE:
        return Finding("--user-dir", True, f"{PACKAGE.name} (by name), or {PACKAGE}")
    if by_name.exists():
        return Finding("--user-dir", None, f"{PACKAGE}; the name means another copy, {by_name}")
    return Finding("--user-dir", None, f"{PACKAGE}; after `make install`, its name will do")


def self_test() -> Finding:
    """Compare every encoding, on every backend that runs here, with the equation in float64."""
    began = time.monotonic()
    backends = [name for name, why_not in available().items() if not why_not]
    for name in registry.names():
        try:
            errors = _errors(name, backends)
        except Exception as error:  # whatever it is, the report has to say it
            return Finding("self-test", False, f"{name}: {type(error).__name__}: {error}")
        for backend, difference in errors.items():
            if not difference < TOLERANCE:  # so that NaN fails
                text = f"{name} on {backend} is off by {difference:.1e}"
                return Finding("self-test", False, text)
    seconds = time.monotonic() - began
    tested = f"{len(registry.names())} encodings on {', '.join(backends)}"
    return Finding("self-test", True, f"{tested} agree with float64 ({seconds:.1f} s)")


@torch.no_grad()
def _errors(name: str, backends: list[str]) -> dict[str, float]:
    """Return, for each backend that serves an encoding, the largest error of a tiny forward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    encodings = registry.build(registry.parse(name), DIMS).to(device)
    for parameter in encodings.parameters():
        nn.init.normal_(parameter)  # as drawn, some would be too small for a mistake to show
    tokens = torch.arange(LENGTH, device=device)[None] + 4
    positions = Positions.of(tokens, padding_idx=1, eos_idx=2, tgt_len=LENGTH)
    shape = (1, DIMS.num_heads, LENGTH, DIMS.head_dim)
    query, key, value = (torch.randn(shape, device=device) for _ in range(3))
    for encoding in encodings.each():
        encoding.embed(positions)
    query, key = encodings.rotate(query, key, positions.block)
    terms = encodings.terms(Span.of(LENGTH, LENGTH, device), positions)
    expected = _by_the_equation(query, key, value, terms)
    return {
        backend: float((attended[0].double().cpu() - expected).abs().max())
        for backend in backends
        if not BACKENDS[backend].refuses(terms, need_weights=False)
        for attended, _ in [BACKENDS[backend].attend(query, key, value, terms, Mask())]
    }


def _by_the_equation(query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> Tensor:
    """Return attention ``(H, T, D)`` by the equation of ``encodings.base``, pair by pair."""
    q, k, v = (x[0].double().cpu() for x in (query, key, value))
    heads, length, width = q.shape
    scores = torch.empty(heads, length, length, dtype=torch.float64)
    for h, i, j in itertools.product(range(heads), range(length), range(length)):

        def row(table: Tensor, h: int = h, distance: int = j - i) -> Tensor:
            return table[h % len(table), distance + length - 1].double().cpu()

        parts = [q[h, i] @ k[h, j] * (1.0 if terms.gain is None else row(terms.gain))]
        if terms.query_table is not None:
            parts.append(q[h, i] @ row(terms.query_table))
        if terms.key_table is not None:
            parts.append(k[h, j] @ row(terms.key_table))
        combined = math.prod(parts) if terms.product else sum(parts)
        score = combined / math.sqrt((terms.scale_factor or 1.0) * width)
        if terms.bias is not None:
            score = score + row(terms.bias)
        if terms.pair_bias is not None:
            score = score + terms.pair_bias[0, h % terms.pair_bias.size(1), i, j].double().cpu()
        scores[h, i, j] = score
    return scores.softmax(-1) @ v
