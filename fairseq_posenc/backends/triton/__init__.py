"""Flash attention with tables by distance, forward and backward, as Triton kernels for a GPU.

Scores exist for one tile at a time; the backward pass keeps their gradients for some heads at a
time. Importing this module does not import triton.
"""

import importlib.util
import os
import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fairseq_posenc.backends.base import NEEDS_CONSECUTIVE_IDS, AttentionCall
from fairseq_posenc.precision import no_autocast

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 128  # tiles were chosen, and are tested, up to it; other backends take wider heads
OF_SOFTMAX = "these kernels have no temperature, cap or sink"
SERVED = ("query_table", "key_table", "gain", "bias", "scale_factor")  # `Term.name`
UNSERVED = {  # why the others are not
    **dict.fromkeys(("temperature", "count_temperature", "softcap", "sink"), OF_SOFTMAX),
    "decay": "these kernels add no decay to the scores",
    **dict.fromkeys(("states", "state_table"), "these kernels do not read states of tokens"),
    "reset": "these kernels do not reset rows of the first token",
    "value_table": "these kernels add no rows to the values",
    "counted_table": "counted positions depend on all scores of a query",
    "channel_gain": "no matrix product computes a gain for each channel",
    "pair_bias": "a bias for each pair of tokens is not a function of their distance",
    "layer_table": "each layer must project the rows first",
}
MIN_VERSION = (3, 6)  # of Triton: the oldest that these kernels were compiled with


def unavailable() -> str:
    """Explain why this backend cannot run on this machine; empty if it can."""
    version = read_version()
    if not version:
        return "triton is not installed"
    major, minor = re.findall(r"\d+", version)[:2]
    if (int(major), int(minor)) < MIN_VERSION:
        return f"triton is {version}, and {'.'.join(map(str, MIN_VERSION))} is the oldest supported"
    if is_interpreted():
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.cuda and torch.cuda.get_device_capability() < (8, 0):  # not with ROCm
        return "the GPU is older than compute capability 8.0"  # from which it has bfloat16 and TF32
    return ""


def refuses(call: AttentionCall) -> str:
    """Explain why these kernels cannot compute such a call; empty if they can."""
    device, dtype, head_dim = call.query.device.type, call.query.dtype, call.query.size(3)
    reasons = {
        "it does not keep the attention weights": call.need_weights,
        "torch.compile cannot trace its kernels": torch.compiler.is_compiling(),
        f"it runs on a GPU, not on {device}": device == "cpu" and not is_interpreted(),
        "its queries, keys and values have one width": head_dim != call.value.size(3),
        f"its heads are at most {MAX_HEAD_DIM} wide, not {head_dim}": head_dim > MAX_HEAD_DIM,
        f"it computes in float32 at most, not in {dtype}": dtype not in DTYPES,
        NEEDS_CONSECUTIVE_IDS: call.terms.by_ids,
        "a window with first keys is not one range of keys": call.mask.first_keys is not None,
        **{UNSERVED[term.name]: True for term in call.terms if term.name not in SERVED},
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Compute attended values ``(B, H, T, D)``, and no weights.

    Raises:
        UserError: the keys that a query may see are not a range.
    """
    # Imported here, because importing triton takes long, and it may not be installed.
    from fairseq_posenc.backends.triton.attention import Attention
    from fairseq_posenc.backends.triton.problem import read_call

    with no_autocast(call.value.device):
        problem = read_call(call)
        return Attention.apply(problem, *problem.tensors), None


@cache  # each call of attention on a GPU asks for it
def read_version() -> str:
    """Read Triton's version from its source, as importing takes long; empty if not installed."""
    spec = importlib.util.find_spec("triton")  # its distributions have several names
    if spec is None or spec.origin is None:
        return ""
    match = re.search(r"__version__ = [\"']([^\"']+)", Path(spec.origin).read_text("utf-8"))
    return match[1] if match else ""


def is_interpreted() -> bool:
    """Check whether Triton interprets kernels on a CPU, as in tests, instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"
