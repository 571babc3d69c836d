"""``fairseq-posenc doctor``: what works on this machine, and a short test of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import platform
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fairseq
import torch
from fairseq.modules.layer_norm import has_fused_layernorm
from fairseq.optim.fused_adam import get_fused_adam_class
from torch import Tensor, nn

from fairseq_posenc import registry
from fairseq_posenc.backends import BACKENDS, available
from fairseq_posenc.backends.base import Mask
from fairseq_posenc.encodings.base import Dims, Encodings, Terms
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
    """Try every encoding on every backend that runs here and does not refuse it."""
    began = time.monotonic()
    backends = [name for name, why_not in available().items() if not why_not]
    encoders = registry.names_for(encoder=True)
    for name in registry.names():
        resets = [f"{name}+reset"] if "reset" in registry.options(name) else []
        for spec in [name, *resets]:
            try:
                errors = _errors(spec, backends, causal=name not in encoders)
            except Exception as error:  # whatever it is, the report has to say it
                return Finding("self-test", False, f"{spec}: {type(error).__name__}: {error}")
            for part, difference in errors.items():
                if not difference < TOLERANCE:  # so that NaN fails
                    text = f"{spec} on {part} is off by {difference:.1e}"
                    return Finding("self-test", False, text)
    seconds = time.monotonic() - began
    text = f"attention on {', '.join(backends)} agrees with float64 for the terms of"
    return Finding("self-test", True, f"{text} {len(registry.names())} encodings ({seconds:.1f} s)")


@torch.no_grad()
def _errors(spec: str, backends: list[str], causal: bool) -> dict[str, float]:
    """Return the largest error of a tiny forward: at the input, of rotations, on each backend."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    encodings = registry.build(registry.parse(spec), DIMS._replace(causal=causal)).to(device)
    for parameter in encodings.parameters():
        nn.init.normal_(parameter)  # as drawn, some would be too small for a mistake to show
    tokens = torch.arange(LENGTH, device=device)[None] + 4
    positions = Positions.of(tokens, padding_idx=1, eos_idx=2, tgt_len=LENGTH)
    shape = (1, DIMS.num_heads, LENGTH, DIMS.head_dim)
    query, key, value = (torch.randn(shape, device=device) for _ in range(3))
    errors = {"the input": _input_error(encodings, positions)}
    errors["rotation"] = _rotation_error(encodings, query, key, positions.block)
    query, key = encodings.rotate(query, key, positions.block)
    terms = encodings.terms(Span.of(LENGTH, LENGTH, device), positions)
    mask = Mask("lr" if causal else "both")
    expected = _by_the_equation(query, key, value, terms, causal)
    served = terms.unprojected(DIMS.num_heads)
    for name in backends:
        if not BACKENDS[name].refuses(served, need_weights=False):
            attended, _ = BACKENDS[name].attend(query, key, value, served, mask)
            errors[name] = float((attended[0].double().cpu() - expected).abs().max())
    return errors


def _input_error(encodings: Encodings, positions: Positions) -> float:
    """Return 0 if what is added to the embeddings is finite and has their shape, else infinity."""
    vectors = [encoding.embed(positions) for encoding in encodings.each()]
    shape = (1, LENGTH, DIMS.embed_dim)
    good = all(x is None or (x.shape == shape and bool(x.isfinite().all())) for x in vectors)
    return 0.0 if good else math.inf


def _rotation_error(encodings: Encodings, query: Tensor, key: Tensor, index: Tensor) -> float:
    """Return how much the products of rotated queries and keys change when all of them move."""

    def products(moved: int) -> Tensor:
        q, k = (x.double().cpu() for x in encodings.rotate(query, key, index + moved))
        return q @ k.transpose(-1, -2)

    at_start, unrotated = products(0), (query @ key.transpose(-1, -2)).double().cpu()
    rotates = any(encoding.acts_on == "rotation" for encoding in encodings.each())
    if rotates and (at_start - unrotated).abs().max() < TOLERANCE:
        return math.inf  # doing nothing would pass, too
    return float((products(moved=5) - at_start).abs().max())


def _by_the_equation(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, causal: bool
) -> Tensor:
    """Return attention ``(H, T, D)`` by the equation of ``encodings.base``, on the CPU."""
    q, k, v = (x[0].double().cpu() for x in (query, key, value))
    at = partial(_of_pairs, _rows_of_pairs(terms))
    products = q[:, :, None] * k[:, None] * at(terms.channel_gain, 1.0)  # [H, T, S, D]
    parts = [products.sum(-1) * at(terms.gain, 1.0)]
    tables = [(q[:, :, None], terms.query_table), (k[:, None], terms.key_table)]
    if terms.content_rows is not None:  # nothing projects them here; each head has its columns
        rows = terms.content_rows.unflatten(-1, (DIMS.num_heads, -1)).transpose(0, 1)
        tables += [(q[:, :, None], rows), (k[:, None], rows)]
    parts += [(x * at(table)).sum(-1) for x, table in tables if table is not None]
    combined = math.prod(parts) if terms.product else sum(parts)
    scores = combined / math.sqrt((terms.scale_factor or 1.0) * q.size(-1)) + at(terms.bias)
    if terms.pair_bias is not None:
        scores = scores + terms.pair_bias[0].double().cpu()
    if causal:
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    return (scores.softmax(-1)[..., None] * (v[:, None] + at(terms.value_table))).sum(2)


def _rows_of_pairs(terms: Terms) -> Tensor:
    """Return the row of a table for each pair, ``(T, S)``: j - i, or one of the reset's two."""
    places = torch.arange(LENGTH)
    rows = places - places[:, None] + LENGTH - 1
    if terms.first is not None:
        rows[:, 0], rows[0] = 2 * LENGTH, 2 * LENGTH - 1
    return rows


def _of_pairs(rows: Tensor, table: Tensor | None, otherwise: float = 0.0) -> Any:
    """Return a table's entries for each pair, ``(G, T, S, ...)``, or what stands for no table."""
    return otherwise if table is None else table.double().cpu()[:, rows]
