"""Lists the commands of ``make gpu``, the most important first, with an estimated time of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
CASE = "tests/backends/test_triton.py::test_reset_with_padding_on_the_left[both-False]"
FEW = ["alibi", "shaw", "m4m", "deberta"]
OTHERS = ["rope", "t5", "m4", "tupe"]  # `none` and fairseq's own take part in each step
NAMES = ["none", *FEW, *OTHERS]
RIVALS = ["alibi", "shaw", "deberta"]  # FlexAttention compiles each at each length for seconds
BATCHES = {512: 8, 2048: 2, 128: 32, 8192: 1}  # of whole updates, by length
EACH = "128 512 2048 8192"  # lengths
BOTH, EAGER = "triton sdpa", "triton sdpa reference"
BF16, FP16 = "bfloat16", "float16"
LIMIT = 9 * 60
TIMED = ("layers", "updates")
SCRIPTS = {
    "layers": ["benchmarks/attention.py", "--scopes", "layer", "--modes", "training"],
    "updates": ["benchmarks/train.py"],
    "survival": ["benchmarks/survive.py"],
}
# Options that a dry run appends; the last value of a repeated option counts.
TINY = "--device cpu --dtype float32 --batch 1 --rounds 1 --seconds 1 --threads 1"
DRY = {
    "layers": f"{TINY} --lengths 8 --encodings shaw --backends triton",
    "updates": f"{TINY} --length 8 --size tiny --layers 1 --encodings shaw --backends triton",
    "survival": f"{TINY} --length 8 --encodings shaw m4m --updates 2",
}


class Step(NamedTuple):
    """A command: its kind, its estimated seconds, and its words."""

    name: str
    kind: str
    seconds: int
    words: list[str]


def steps(dry_run: bool) -> list[Step]:
    """List the steps, each with its estimated time on an H200; see :func:`estimate`."""
    tests = [CASE] if dry_run else ["-m", "not slow", "tests/backends/test_triton.py"]
    listed = [
        Step("tests", "tests", 80, [*PYTEST, *tests]),
        Step("memory checker", "checker", 80, [*PYTEST, CASE]),
        _measure("survival", 120, BF16, "0.1", "--updates 300", ["all"]),
        _measure("survival", 120, FP16, "0.1", "--updates 300", ["all"]),
        *first(),
        *rest(),
    ]
    if dry_run:
        # The same steps with other sizes are one step.
        listed = list({step.kind: step for step in reversed(listed)}.values())[::-1]
        return [
            Step(f"{x.kind}, tiny", x.kind, 0, x.words + DRY.get(x.kind, "").split())
            for x in listed
        ]
    return listed


def first() -> list[Step]:
    """List the measurements that a first call has time for: those of the project's aims."""
    return [
        _measure("layers", 75, BF16, "0.1", "--lengths 128 512 2048 --batch 8", NAMES, BOTH),
        _measure("updates", 55, BF16, "0.1", "--length 512 --batch 8", NAMES),
        _measure("layers", 30, BF16, "0.1", "--lengths 8192 --batch 1", NAMES),
        _measure("layers", 70, BF16, "0", f"--lengths {EACH} --batch 1", RIVALS, "auto flex"),
        *(_updates(BF16, "0.1", length, FEW) for length in (2048, 128, 8192)),
        _measure("layers", 25, FP16, "0.1", f"--lengths {EACH} --batch 1", FEW),
        _measure("layers", 25, BF16, "0.1", f"--lengths {EACH} --batch 1", FEW, EAGER),
        _updates(FP16, "0.1", 512, FEW),
        _measure("updates", 30, BF16, "0", "--length 512 --batch 8", FEW, EAGER),
    ]


def rest() -> Iterator[Step]:
    """Yield the other measurements: every encoding, length and type, with and without dropout."""
    conditions = [(FP16, "0.1"), (BF16, "0"), (FP16, "0")]
    for dtype, dropout in conditions:
        for length in BATCHES:
            if length != 512 or (dtype, dropout) == (FP16, "0"):
                yield _updates(dtype, dropout, length, FEW)
    yield _measure("layers", 25, FP16, "0", f"--lengths {EACH} --batch 1", FEW)
    for dtype, dropout in [(BF16, "0.1"), *conditions]:
        for length in BATCHES:
            if length != 512 or (dtype, dropout) != (BF16, "0.1"):
                yield _updates(dtype, dropout, length, OTHERS)
    for dtype, dropout in conditions:
        encodings = OTHERS if dtype == FP16 else ["m4m", *OTHERS]
        yield _measure("layers", 25, dtype, dropout, f"--lengths {EACH} --batch 1", encodings)


def estimate(planned: list[Step]) -> int:
    """Estimate the seconds of some steps; those without timing run together."""
    together = [step.seconds for step in planned if step.kind not in TIMED]
    return max(together, default=0) + sum(step.seconds for step in planned if step.kind in TIMED)


def _updates(dtype: str, dropout: str, length: int, encodings: list[str]) -> Step:
    options = f"--length {length} --batch {BATCHES[length]}"
    return _measure("updates", 27, dtype, dropout, options, encodings)


def _measure(
    kind: str,
    seconds: int,
    dtype: str,
    dropout: str,
    options: str,
    encodings: list[str],
    backends: str = "triton",
) -> Step:
    words = [*SCRIPTS[kind], *f"--device cuda --dtype {dtype} --dropout {dropout} --json".split()]
    words += ["--encodings", *encodings]
    words += ["--backends", *backends.split(), "--seconds", "2"]
    name = f"{kind}, {dtype}, dropout {dropout}, {options.replace('--', '')}, {backends}"
    return Step(f"{name}: {' '.join(encodings)}", kind, seconds, [*words, *options.split()])
