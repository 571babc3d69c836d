"""``fairseq-posenc doctor``: reports what is installed and works, and tests the encodings."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Iterator
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
_MARKS = {True: "ok", None: "-", False: "FAILED"}
# `registry.names()` leaves out companions, encodings that are added to another one. These act on
# the softmax; their options make a difference in the 6 tokens of the self-test.
SOFTMAX_SPECS = ("ssmax", "ssmax(offset=true)", "logn(length=2)", "sink", "softcap(cap=1)")


class Finding(NamedTuple):
    """A line of the report."""

    subject: str
    works: bool | None  # None if it is optional and missing, or does not run here
    text: str


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if anything essential does not work."""
    print(f"fairseq-posenc {__version__}\n")
    healthy = True
    for finding in collect_findings():
        print(f"{finding.subject:<20} {_MARKS[finding.works]:<7} {finding.text}", flush=True)
        healthy = healthy and finding.works is not False
    return 0 if healthy else 1


def collect_findings() -> Iterator[Finding]:
    """Check the installation line by line; the self-test comes last."""
    yield Finding("Python", True, platform.python_version())
    yield Finding("torch", True, torch.__version__)
    yield from _check_fairseq()
    yield from _check_transformers()
    yield from _check_cuda()
    yield Finding("triton", bool(read_version()) or None, read_version() or "not installed")
    for name, why_not in available().items():  # why_not is empty if the backend runs here
        yield Finding(f"backend {name}", None if why_not else True, why_not or "can run")
    yield self_test()


def _check_fairseq() -> Iterator[Finding]:
    """Import fairseq; report the path for ``--user-dir``."""
    remedy = how_to_install("fairseq")
    spec = importlib.util.find_spec("fairseq")
    if spec is None or spec.origin is None:  # nothing, or only a folder
        yield Finding("fairseq", None, f"not installed: {remedy}")
        return
    try:
        import fairseq
    except Exception as error:  # versions that do not fit fail in many ways
        yield Finding("fairseq", False, f"{type(error).__name__}: {error}; {remedy}")
        return
    names = importlib.metadata.packages_distributions().get("fairseq", ["not installed by pip"])
    yield Finding("fairseq", True, f"{fairseq.__version__}, {names[0]}")
    yield _check_user_dir(Path(fairseq.__file__).parent.parent / PACKAGE.name)


def _check_transformers() -> Iterator[Finding]:
    """Import transformers' models, and torchaudio, which they import if it is installed."""
    modules = {"transformers.models.llama.modeling_llama": how_to_install("hf")}  # -> remedy
    if importlib.util.find_spec("torchaudio"):
        modules = {"torchaudio": "pip uninstall torchaudio", **modules}
    for module, remedy in modules.items():
        package = module.partition(".")[0]
        try:
            importlib.import_module(module)
            yield Finding(package, True, importlib.metadata.version(package))
        except Exception as error:  # versions that do not fit fail in many ways
            works = None if getattr(error, "name", "") == package else False  # None: not installed
            yield Finding(package, works, f"{error}; {remedy}")
            if package == "torchaudio":
                return  # transformers would fail for the same reason


def _check_cuda() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = "torch finds no device" if torch.version.cuda else "torch is built without it"
        yield Finding("CUDA", None, f"{why}: training runs on the CPU")
        return
    major, minor = torch.cuda.get_device_capability()
    yield Finding("CUDA", True, f"{torch.cuda.get_device_name()}, capability {major}.{minor}")
    advice = "use --bf16" if major >= 8 else "not supported by the device: use --fp16"
    yield Finding("bf16", major >= 8 or None, advice)  # since capability 8 (Ampere)


def _check_user_dir(by_name: Path) -> Finding:
    """Report the path for ``--user-dir``; fairseq looks up a bare name at ``by_name``."""
    if by_name.resolve() == PACKAGE:
        return Finding("--user-dir", True, f"{PACKAGE.name} (by name), or {PACKAGE}")
    name = f"means a copy, {by_name}" if by_name.exists() else "needs a checkout's `make install`"
    return Finding("--user-dir", None, f"{PACKAGE}; its name alone {name}")


def self_test() -> Finding:
    """Compare encodings with float64, on each backend that runs here but FlexAttention."""
    began = time.monotonic()
    # FlexAttention takes seconds to compile a kernel for each encoding.
    backends = [name for name, why in available().items() if not why and name != "flex"]
    names = registry.names()
    # Again with the option that gives pairs with the first token other scores, as in TUPE.
    resets = [f"{name}(reset=true)" for name in names if "reset" in registry.options(name)]
    for spec in (*names, *resets, *SOFTMAX_SPECS):
        try:
            errors = measure_errors(spec, backends, causal=specs.parse(spec).is_causal_only)
        except Exception as error:  # any error belongs in the report
            return Finding("self-test", False, f"{spec}: {type(error).__name__}: {error}")
        for part, difference in errors.items():  # the input, the rotation, and each backend
            if not difference < TOLERANCE:  # so that NaN fails
                return Finding("self-test", False, f"{spec} on {part} is off by {difference:.1e}")
    text = f"attention on {', '.join(backends)} agrees with float64 for the terms of"
    text += f" {len(names)} encodings ({time.monotonic() - began:.1f} s)"
    return Finding("self-test", True, text)
