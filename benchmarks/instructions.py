"""Counts what our Triton kernels cost a GPU of compute capability 9.0, which need not be there.

Compiles the kernels of a training step in bfloat16 with dropout for it, and prints for both passes
the instructions for a pair of tokens, in tiles near the diagonal and in those where a clipped table
has one row for all pairs; shared memory, registers, and bytes of registers that had no room.

    python benchmarks/instructions.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from subprocess import STDOUT
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import torch
import triton.backends.nvidia
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.backends.triton import attend
from fairseq_posenc.encodings.runs import Runs
from fairseq_posenc.encodings.term import NumbersByDistance, RowsByDistance, Term
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.mask import Mask
from fairseq_posenc.workbench.results.markdown import table

BATCH, HEADS, LENGTH, HEAD_DIM = 8, 12, 2048, 64  # RoBERTa-base
TABLES = ["shaw", "deberta", "m4m"]  # encodings that can be clipped
FORMS = ["none", "alibi", *TABLES]
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Z]\S*)(.*);")
KINDS = ["forward", "backward"]


def leaf(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Create a trained tensor without memory."""
    return torch.empty(*size, dtype=dtype, device="meta", requires_grad=True)


def build_terms(form: str, clipped: bool) -> Terms:
    """Build the terms of an encoding."""
    runs = Runs(range(-15, 17), 1 - LENGTH, LENGTH - 1, torch.device("meta")) if clipped else None
    rows = leaf(1, 2 * LENGTH - 1 if runs is None else runs.num_rows, HEAD_DIM)
    is_product = form == "m4m"
    of_queries = RowsByDistance(rows, runs, of="query", multiplies=is_product)
    rows_of_keys = rows if is_product else leaf(*rows.shape)
    of_keys = RowsByDistance(rows_of_keys, runs, of="key", multiplies=is_product)
    bias = NumbersByDistance(leaf(HEADS, 2 * LENGTH - 1, dtype=torch.float32).detach())
    terms: dict[str, list[Term]] = {"none": [], "alibi": [bias], "shaw": [of_queries]}
    return Terms(terms.get(form, [of_queries, of_keys]))


def compile_kernels(terms: Terms) -> dict[str, tuple[int, Any]]:
    """Compile the kernels of a call, both passes; return the pairs of a tile and the kernel."""
    compiled: dict[str, tuple[int, Any]] = {}

    def compile_only(self: JITFunction, grid: tuple[int]) -> Any:
        def launch(problem: Any, opt: Any, *args: Any, **options: Any) -> None:
            kernel = self.warmup(problem, opt, *args, grid=grid, **options)
            compiled[self.fn.__name__] = opt.M.value * opt.N.value, kernel

        return launch

    JITFunction.__getitem__ = compile_only
    query, key, value = (leaf(BATCH, HEADS, LENGTH, HEAD_DIM) for _ in range(3))
    attended, _ = attend(AttentionCall(query, key, value, terms, Mask(), dropout=0.1))
    leaves = [query, *(x for x in terms.tensors().values() if x.requires_grad)]
    torch.autograd.grad(attended, leaves, torch.empty_like(attended))
    return compiled


def describe(pairs: int, kernel: Any) -> list[str]:
    """Format the instructions for a pair, in near and in far tiles, and the memory of a kernel."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        commands = [[CUOBJDUMP, option, file.name] for option in ("-sass", "-res-usage")]
        sass, usage = (subprocess.check_output(x, text=True, stderr=STDOUT) for x in commands)
    *far, near = (f"{32 * kernel.metadata.num_warps * x / pairs:.1f}" for x in count_loops(sass))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return [near, max(far, default=""), f"{kernel.metadata.shared / 1024:.0f}", *found.groups()]


def count_loops(sass: str) -> list[int]:
    """Count the instructions of the outermost loops, in their order."""
    lines = [(int(x[1], 16), x[2], x[3]) for x in INSTRUCTION.finditer(sass)]
    jumps = [(at, re.search(r"0x([0-9a-f]+)", rest)) for at, op, rest in lines if "BRA" in op]
    loops = {(int(x[1], 16), at) for at, x in jumps if x and int(x[1], 16) < at}
    outer = [x for x in loops if not any(y[0] <= x[0] and x[1] <= y[1] and x != y for y in loops)]
    return [sum(start <= at <= end for at, *_ in lines) for start, end in sorted(outer)]


def main() -> None:
    """Compile, and print the table."""
    hopper = {"get_current_target": GPUTarget("cuda", 90, 32)}
    hopper |= {"get_current_device": 0, "get_current_stream": 0}
    driver.set_active(SimpleNamespace(**{k: lambda *_, x=x: x for k, x in hopper.items()}))
    rows = []
    for form in FORMS:
        for clipped in (False, True) if form in TABLES else (False,):
            compiled = compile_kernels(build_terms(form, clipped))
            name = f"`{form}(16)`" if clipped else f"`{form}`"
            rows += [[name, kind, *describe(*compiled[f"{kind}_kernel"])] for kind in KINDS]
    header = ["encoding", "kernel", "near", "far", "KB", "registers", "spilled bytes"]
    print(table(header, rows, "llr"))


if __name__ == "__main__":
    main()
