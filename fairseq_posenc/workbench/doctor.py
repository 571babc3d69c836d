"""``fairseq-posenc doctor``: reports what is installed and works, and tests every encoding."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from fairseq_posenc import registry, specs
from fairseq_posenc.analysis.self_test import measure_errors
from fairseq_posenc.backends import available
from fairseq_posenc.backends.triton import read_version
from fairseq_posenc.errors import how_to_install
from fairseq_posenc.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
# A GPU may round the factors of float32 products to TF32 (ten bits); a wrong term is off by more.
TOLERANCE = 1e-2
# Specs whose options make a difference on the 6 tokens of the self-test.
SOFTMAX_SPECS = ("ssmax", "ssmax(offset=true)", "logn(length=2)", "sink", "softcap(cap=1)")


class Finding(NamedTuple):
    """A line of the report."""

    subject: str
    works: bool | None  # None if it is missing and optional
    text: str


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if anything essential does not work."""
    print(f"fairseq-posenc {__version__}\n")
    marks = {True: "ok", None: "-", False: "FAILED"}
    healthy = True
    for finding in collect_findings():
        print(f"{finding.subject:<20} {marks[finding.works]:<7} {finding.text}", flush=True)
        healthy = healthy and finding.works is not False
    return 0 if healthy else 1


def collect_findings() -> Iterator[Finding]:
    """Check the installation line by line; the self-test comes last."""
    yield Finding("Python", True, platform.python_version())
    yield Finding("torch", True, torch.__version__)
    fairseq = importlib.util.find_spec("fairseq")
    has_fairseq = fairseq is not None and fairseq.origin is not None  # not only a folder
    yield _check_fairseq(has_fairseq)
    yield from _check_transformers()
    yield from _check_cuda()
    if has_fairseq:
        yield from _check_apex()
    triton = read_version()
    yield Finding("triton", True if triton else None, triton or "not installed")
    for name, why_not in available().items():
        yield Finding(f"backend {name}", None if why_not else True, why_not or "can run")
    if has_fairseq:
        yield _check_user_dir()
    yield self_test()


def _check_fairseq(is_installed: bool) -> Finding:
    if not is_installed:
        extra = f"{how_to_install('fairseq')} adds the plugin and most commands"
        return Finding("fairseq", None, f"not installed: the library works; {extra}")
    for name in ("fairseq-fixed", "fairseq"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return Finding("fairseq", True, f"{name} {importlib.metadata.version(name)}")
    import fairseq

    return Finding("fairseq", True, f"{fairseq.__version__}, not installed by pip")


def _check_transformers() -> Iterator[Finding]:
    """Import a model of transformers, which imports torchaudio wherever that is installed."""
    if importlib.util.find_spec("transformers") is None:
        extra = f"{how_to_install('hf')} adds models of transformers"
        yield Finding("transformers", None, f"not installed: {extra}")
        return
    version = importlib.metadata.version("transformers")
    why_not = _try_import("transformers", "LlamaForCausalLM")
    if not why_not:
        yield Finding("transformers", True, version)
        return
    yield Finding("transformers", False, f"{version} cannot import LlamaForCausalLM: {why_not}")
    if importlib.util.find_spec("torchaudio") and (why_not := _try_import("torchaudio")):
        remedy = "pip uninstall torchaudio (fairseq needs it for speech alone)"
        yield Finding("torchaudio", False, f"torch {torch.__version__} cannot load it: {remedy}")


def _try_import(module: str, name: str = "__name__") -> str:
    """Import a name from a module; return the first line of the error, or "" if there is none."""
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return ""


def _check_cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but finds no device" if built else "torch has none"
        yield Finding("CUDA", None, f"{why}: training runs on the CPU")
        return
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    yield Finding("CUDA", True, f"{name}, capability {major}.{minor}")
    if major >= 8:
        yield Finding("bf16", True, "supported by the device: --bf16 is safer than --fp16")
    else:
        yield Finding("bf16", None, "not supported by the device: use --fp16")


def _check_apex() -> Iterator[Finding]:
    from fairseq.modules.layer_norm import has_fused_layernorm
    from fairseq.optim.fused_adam import get_fused_adam_class

    yield _describe_apex("apex layer norm", has_fused_layernorm, "fairseq uses torch's")
    has_adam = get_fused_adam_class() is not None
    yield _describe_apex("apex Adam", has_adam, "fairseq uses its own")


def _describe_apex(subject: str, is_installed: bool, otherwise: str) -> Finding:
    """Describe a kernel of apex, which fairseq uses only on a GPU."""
    if is_installed and torch.cuda.is_available():
        return Finding(subject, True, "active: fairseq uses the fused kernel")
    why = "no GPU" if is_installed else "not installed"
    return Finding(subject, None, f"{why}: {otherwise}, with the same result, slower")


def _check_user_dir() -> Finding:
    """Report the path for ``--user-dir``; fairseq looks up a bare name beside its own package."""
    import fairseq

    by_name = Path(fairseq.__file__).parent.parent / PACKAGE.name
    if by_name.resolve() == PACKAGE:
        return Finding("--user-dir", True, f"{PACKAGE.name} (by name), or {PACKAGE}")
    if by_name.exists():
        return Finding("--user-dir", None, f"{PACKAGE}; its name alone means a copy, {by_name}")
    return Finding("--user-dir", None, f"{PACKAGE}; after `make install`, its name will do")


def self_test() -> Finding:
    """Compare every encoding with float64 on every backend that runs here and supports it."""
    began = time.monotonic()
    # FlexAttention takes seconds to compile a kernel for each encoding.
    backends = [name for name, why in available().items() if not why and name != "flex"]
    names = registry.names()
    resets = [f"{name}(reset=true)" for name in names if "reset" in registry.options(name)]
    for spec in (*names, *resets, *SOFTMAX_SPECS):
        try:
            errors = measure_errors(spec, backends, causal=specs.parse(spec).is_causal_only)
        except Exception as error:  # any error belongs in the report
            return Finding("self-test", False, f"{spec}: {type(error).__name__}: {error}")
        for part, difference in errors.items():
            if not difference < TOLERANCE:  # so that NaN fails
                return Finding("self-test", False, f"{spec} on {part} is off by {difference:.1e}")
    seconds = time.monotonic() - began
    text = f"attention on {', '.join(backends)} agrees with float64 for the terms of"
    return Finding("self-test", True, f"{text} {len(names)} encodings ({seconds:.1f} s)")
