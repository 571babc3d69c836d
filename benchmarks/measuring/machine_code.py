"""What a compiled kernel's machine code says: registers, spills, and the instructions of its loops.

A kernel's time is in its innermost loops, each pass of which takes one tile of queries by keys. So
their instructions, times the threads that run them, divided by the pairs of a tile, are those for
each pair. Loops of one kernel that follow each other are added up; what is outside of them, and how
often a branch inside is taken, is not looked at: a branch counts in full.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
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


class Code(NamedTuple):
    """What is read from one kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes that a thread stores for lack of registers.
        shared_bytes: of the memory that a program's threads share.
        matrix: names of the matrix instructions, with how often they stand in loops.
        pairs: instructions for each pair of query and key, in all and by kind.
    """

    registers: int
    spilled: int
    shared_bytes: int
    matrix: dict[str, int]
    pairs: dict[str, float]


def read(compiled: Any, tile: int) -> Code:
    """Return what the machine code of a compiled kernel says, whose loops take ``tile`` pairs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", path)
        lines = _run("nvdisasm", "-c", path).splitlines()
    every = Counter(_names(lines))
    inside = Counter(name for loop in innermost(lines) for name in loop)
    threads = 32 * compiled.metadata.num_warps
    counts = Counter(kind_of(name) for name in inside.elements())
    pairs = {kind: counts[kind] * threads / tile for kind in (*KINDS, "integer")}
    return Code(
        registers=int(re.findall(r"REG:(\d+)", usage)[-1]),
        spilled=sum(n * _width(name) for name, n in every.items() if name.startswith("STL")),
        shared_bytes=compiled.metadata.shared,
        matrix={name: n for name, n in inside.items() if kind_of(name) == "matrix"},
        pairs={"total": sum(pairs.values()), **pairs},
    )


def kind_of(name: str) -> str:
    """Return the kind of an instruction by its name, modifiers included."""
    stem = name.split(".")[0]
    found = (kind for kind, names in KINDS.items() if re.fullmatch(names, stem))
    return next(found, "integer")


def full_width(code: Code, arch: int) -> bool:
    """Return whether no matrix product runs at less than the chip's full width."""
    return {name.split(".")[0] for name in code.matrix} <= set(FULL[arch])


def innermost(lines: list[str]) -> Iterator[list[str]]:
    """Yield the instructions of each loop of a listing that has no other in it."""
    labels = {
        line.strip()[:-1]: at for at, line in enumerate(lines) if re.match(r"\s*\.L\w+:", line)
    }
    ends: dict[int, int] = {}
    for at, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*\((\.L\w+)\)", line)
        start = labels.get(target[1], at) if target else at
        if start < at:
            ends[start] = at  # of several branches back, the last
    loops = [(start, end, _names(lines[start : end + 1])) for start, end in ends.items()]
    loops = [loop for loop in loops if len(loop[2]) >= SMALLEST_LOOP]
    for start, end, names in loops:
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b, _ in loops):
            yield names


def _names(lines: list[str]) -> list[str]:
    return [name for name in map(_name, lines) if name]


def _name(line: str) -> str:
    """Return the name of the instruction of a line with its modifiers; empty if it has none."""
    found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
    return "" if found is None or found[1] == "NOP" else found[1]


def _width(name: str) -> int:
    return BYTES[next((x for x in name.split(".") if x in ("64", "128")), "")]


def _run(tool: str, *words: object) -> str:
    from triton import knobs

    command = [str(getattr(knobs.nvidia, tool).path), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
