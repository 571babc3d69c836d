"""What a compiled kernel's machine code says: registers, spills, and the instructions of its loops.

A kernel's time is in its innermost loops, each pass of which takes one tile of queries by keys. So
their instructions, times the threads that run them, divided by the pairs of a tile, are those for
each pair. Loops of one kernel that follow each other are added up; what is outside of them, and how
often a branch inside is taken, is not looked at: a branch counts in full.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {
    "matrix": r"HMMA|HGMMA|IMMA|QGMMA|UTC\w*MMA",
    "float": r"FADD|FMUL|FFMA|FMNMX|FSEL|FSETP|FSET|FCHK|HADD2|HMUL2|HFMA2|F2FP|F2F",
    "special": r"MUFU|I2F\w*|F2I",
    "shared": r"LDS\w*|STS\w*|LDSM|STSM|SHFL",
    "global": r"LDG\w*|STG\w*|LD|ST|LDGSTS|LDGDEPBAR|UBLK\w*|UTMA\w*|RED\w*|ATOM\w*",
    "local": r"LDL|STL",
}  # everything else: integers, addresses, predicates, moves and control
FULL = {80: ("HMMA",), 90: ("HGMMA",), 100: ("UTCHMMA", "HGMMA")}  # a chip's widest instructions
SMALLEST_LOOP = 16  # instructions; shorter ones wait for a barrier
BYTES = {"": 4, "64": 8, "128": 16}
INSTRUCTION = 16  # bytes
LINE = r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)"


class Kernel(NamedTuple):
    """One kernel of one form of the terms, as Triton compiled it."""

    form: str
    kernel: str  # its function
    dropout: bool
    reset: bool
    compiled: Any
    tile: int  # pairs of query and key that each pass of its loops takes

    @property
    def name(self) -> str:
        """The name of its machine code, which forms share."""
        return str(self.compiled.hash)


class Code(NamedTuple):
    """What is read from one kernel."""

    registers: int  # of a thread
    spilled: int  # bytes that a thread stores for lack of registers
    shared_bytes: int  # of the memory that a program's threads share
    matrix: dict[str, int]  # names of the matrix instructions, with how often they stand in loops
    pairs: dict[str, float]  # instructions for each pair of query and key, in all and by kind


class Instruction(NamedTuple):
    """Where it stands, its name with modifiers, and where it branches to, if it does."""

    address: int
    name: str
    target: int | None


def read_codes(kernels: Iterable[Kernel]) -> dict[str, Code]:
    """Disassemble compiled kernels; return registers, spills and instructions by kernel name."""
    kernel_of, codes = {kernel.name: kernel for kernel in kernels}, {}
    for arch in {kernel.compiled.metadata.target.arch for kernel in kernel_of.values()}:
        own = [x for x in kernel_of.values() if x.compiled.metadata.target.arch == arch]
        texts = [_extract_instructions(kernel.compiled.asm["cubin"]) for kernel in own]
        lines = iter(_disassemble(b"".join(texts), arch))
        for kernel, text in zip(own, texts):
            instructions = list(islice(lines, len(text) // INSTRUCTION))
            codes[kernel.name] = _read_code(kernel, instructions)
    return codes


def _read_code(kernel: Kernel, instructions: list[Instruction]) -> Code:
    compiled = kernel.compiled
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", path)
    every = Counter(each.name for each in instructions)
    inside = Counter(name for loop in find_innermost_loops(instructions) for name in loop)
    threads = 32 * compiled.metadata.num_warps
    counts = Counter(classify_instruction(name) for name in inside.elements())
    pairs = {kind: counts[kind] * threads / kernel.tile for kind in (*KINDS, "integer")}
    return Code(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        spilled=sum(n * _count_bytes(name) for name, n in every.items() if name.startswith("STL")),
        shared_bytes=compiled.metadata.shared,
        matrix={name: n for name, n in inside.items() if classify_instruction(name) == "matrix"},
        pairs={"total": sum(pairs.values()), **pairs},
    )


def classify_instruction(name: str) -> str:
    """Classify an instruction by its name, modifiers included."""
    stem = name.split(".")[0]
    matching = (kind for kind, names in KINDS.items() if re.fullmatch(names, stem))
    return next(matching, "integer")


def full_width(code: Code, arch: int) -> bool:
    """Check that every matrix product runs at the chip's full width."""
    return {name.split(".")[0] for name in code.matrix} <= set(FULL[arch])


def find_innermost_loops(instructions: list[Instruction]) -> Iterator[list[str]]:
    """Yield the names of the instructions of each loop that has no other in it."""
    # Of several branches back to one place, the last one.
    ends = {x.target: x.address for x in instructions if x.target is not None}
    named = [x for x in instructions if x.name != "NOP"]
    loops = [
        (start, end, [x.name for x in named if start <= x.address <= end])
        for start, end in ends.items()
        if start < end
    ]
    loops = [loop for loop in loops if len(loop[2]) >= SMALLEST_LOOP]
    for start, end, names in loops:
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b, _ in loops):
            yield names


def _extract_instructions(cubin: bytes) -> bytes:
    """Extract the one section of instructions of a compiled kernel, which is a file of ELF."""
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + size * n) for n in range(number)]
    (section,) = (
        cubin[start : start + length]
        for name, _, _, _, start, length in sections
        if cubin[sections[names][4] + name :].startswith(b".text.")
    )
    return section


def _disassemble(text: bytes, arch: int) -> list[Instruction]:
    """Disassemble many kernels at once, as most of the time is the tool's start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instructions"
        path.write_bytes(text)
        listing = _run("nvdisasm", "--binary", f"SM{arch}{'a' * (arch >= 90)}", path)
    instructions = []
    for line in re.finditer(LINE, listing, re.MULTILINE):
        branch = re.search(r"\b0x([0-9a-f]+)", line[3]) if line[2].startswith("BRA") else None
        instructions.append(
            Instruction(int(line[1], 16), line[2], int(branch[1], 16) if branch else None)
        )
    if len(instructions) * INSTRUCTION != len(text):
        raise RuntimeError(f"nvdisasm: {len(instructions)} instructions read of {len(text)} bytes")
    return instructions


def _count_bytes(name: str) -> int:
    return BYTES[next((x for x in name.split(".") if x in ("64", "128")), "")]


def _run(tool: str, *words: object) -> str:
    from triton import knobs

    command = [str(getattr(knobs.nvidia, tool).path), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
