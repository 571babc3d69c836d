"""Kernels compiled for a GPU that is not there.

Triton asks a driver which chip it compiles for; a stand-in names one, and kernels that the backend
starts are compiled in place of being run. What their outputs hold then means nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fairseq_posenc.backends import triton as backend
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.mask import Mask
from fairseq_posenc.encodings.terms import Terms
from measuring.machine_code import Kernel

HEADS, LENGTH = 12, 512
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": HEADS},
    "gain": {"gain": 1},
    "shaw": {"query_table": 1},
    "m4": {"query_table": 1, "key_table": "query_table"},
    "deberta": {"query_table": 1, "key_table": 1},
    "m4m": {"query_table": 1, "key_table": "query_table", "product": True},
    "shaw+values": {"query_table": 1, "value_table": 1},
}  # a number: groups of heads with tables of their own; a name: the same table again


def compile_form(
    form: str, arch: int, dropout: bool, reset: bool, dtype: torch.dtype, width: int
) -> list[Kernel]:
    """Compile every kernel of a forward and a backward pass, as often as it is started."""
    with compiling(arch) as started:
        q, k, v = (
            torch.zeros(1, HEADS, LENGTH, width, dtype=dtype, requires_grad=True) for _ in "qkv"
        )
        terms = make_terms(form, reset, width)
        out, _ = backend.attend(AttentionCall(q, k, v, terms, Mask(), 0.1 if dropout else 0.0))
        out.sum().backward()
    return [
        Kernel(form, name, dropout, reset, compiled, options["N"] ** 2)
        for name, options, compiled in started
    ]


def make_terms(form: str, reset: bool, width: int) -> Terms:
    """Make the terms of a form with trained tables of zeros."""
    rows = 2 * LENGTH - 1 + 2 * reset
    terms: dict[str, Any] = {"first": (torch.arange(LENGTH) == 0)[None]} if reset else {}
    for name, value in FORMS[form].items():
        size = () if name in ("gain", "bias") else (width,)
        if isinstance(value, str):
            terms[name] = terms[value]
        else:
            table = name != "product"
            terms[name] = torch.zeros(value, rows, *size, requires_grad=True) if table else value
    return Terms(**terms)


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[list[tuple[str, dict[str, Any], Any]]]:
    """Have kernels compiled for a chip and not started; yields name, options and code of each."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    started: list[tuple[str, dict[str, Any], Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        started.append((self.__name__, kwargs, kernel))
        return kernel

    before = driver._active  # asking for it would look for a GPU
    driver.set_active(_stand_in(arch))
    JITFunction.run = compile_only
    try:
        yield started
    finally:
        JITFunction.run = run
        driver.set_active(before)


def _stand_in(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class StandIn(DriverBase):
        """Names a chip, and nothing else."""

        is_active = map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return arch  # compiled kernels are kept by device, and so by chip

        def get_current_stream(self, device: int) -> int:
            return 0

    return StandIn()
