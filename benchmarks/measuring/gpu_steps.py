"""Lists the commands of ``make gpu``, the most important first, each with an estimated time.

A step is a test, a check or a measurement in a process of its own. Estimates are of an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
ALL_KERNELS_TEST = "tests/backends/test_triton.py::test_reset_with_padding_on_the_left[both-False]"
MAIN_ENCODINGS = ["alibi", "shaw", "m4m", "deberta"]
OTHER_ENCODINGS = ["rope", "t5", "m4", "tupe"]
ENCODINGS = ["none", *MAIN_ENCODINGS, *OTHER_ENCODINGS]
RIVALS = "triton sdpa blocked reference"
BATCHES = {512: 8, 2048: 2, 128: 32, 8192: 1}  # important lengths first -> sentences of an update
ALL_LENGTHS = "--lengths 128 512 2048 8192 --batch 1"
BF16, FP16 = "bfloat16", "float16"
TIME_LIMIT = 9 * 60  # seconds of a call; another call continues with the steps that did not fit
TIMED_KINDS = ("layers", "updates")
SCRIPTS = {
    "layers": "benchmarks/attention.py --scopes layer --modes training --seconds 2",
    "updates": "benchmarks/train.py --seconds 2",
    "survival": "benchmarks/survive.py",
}
# Options that a dry run appends; the last value of a repeated option counts.
TINY = "--device cpu --dtype float32 --batch 1 --threads 1"
DRY_RUN_OPTIONS = {
    "layers": f"{TINY} --rounds 1 --lengths 8 --encodings shaw --backends triton",
    "updates": f"{TINY} --rounds 1 --length 8 --size tiny --layers 1 --encodings shaw "
    "--backends triton",
    "survival": f"{TINY} --length 8 --encodings shaw m4m --updates 2",
}


class Step(NamedTuple):
    """A command, and its estimated seconds."""

    name: str
    kind: str  # `tests`, `checker`, or a key of :data:`SCRIPTS`
    seconds: int
    arguments: list[str]  # the arguments of Python


def list_steps(dry_run: bool) -> list[Step]:
    """List all steps, or for a dry run a tiny one of each kind."""
    tests = [ALL_KERNELS_TEST]
    if not dry_run:
        files = ["tests/backends/test_triton.py", "tests/test_gpu.py"]
        tests = ["-n", "4", "-m", "not slow", *files]
    steps = [
        Step("tests", "tests", 120, [*PYTEST, *tests]),
        Step("memory checker", "checker", 80, [*PYTEST, ALL_KERNELS_TEST]),
        _build_step("survival", 120, BF16, "0.1", "--updates 300", ["all"]),
        _build_step("survival", 120, FP16, "0.1", "--updates 300", ["all"]),
        *list_main_steps(),
        *list_other_steps(),
    ]
    if not dry_run:
        return list({step.name: step for step in steps}.values())  # other steps repeat main ones
    by_kind = {step.kind: step for step in steps}  # any of each kind, as sizes do not matter
    return [
        Step(f"{kind}, tiny", kind, 0, step.arguments + DRY_RUN_OPTIONS.get(kind, "").split())
        for kind, step in by_kind.items()
    ]


def list_main_steps() -> list[Step]:
    """List the measurements by which the project is judged; a first call has time for them."""
    medium = "--lengths 512 2048 --batch 8"
    encodings = [*MAIN_ENCODINGS, "t5"]
    return [  # kind, estimated seconds, type, dropout, options, encodings, backends
        _build_step("layers", 45, BF16, "0.1", medium, encodings, RIVALS),
        _build_step("layers", 70, BF16, "0", medium, encodings, f"{RIVALS} flex"),
        _build_step("layers", 40, "float32", "0.1", medium, encodings, RIVALS),
        _build_step("layers", 40, BF16, "0.1", "--lengths 128 8192 --batch 1", encodings, RIVALS),
        _build_step("updates", 55, BF16, "0.1", "--length 512 --batch 8", ENCODINGS),
        *(_build_updates(BF16, "0.1", length, MAIN_ENCODINGS) for length in (2048, 128, 8192)),
        _build_step("layers", 25, FP16, "0.1", ALL_LENGTHS, MAIN_ENCODINGS),
        _build_updates(FP16, "0.1", 512, MAIN_ENCODINGS),
        _build_step("updates", 30, BF16, "0", "--length 512 --batch 8", MAIN_ENCODINGS, RIVALS),
    ]


def list_other_steps() -> Iterator[Step]:
    """Yield all encodings, lengths, 16-bit types and dropouts; main steps may be among them."""
    conditions = product((MAIN_ENCODINGS, OTHER_ENCODINGS), (BF16, FP16), ("0.1", "0"))
    for encodings, dtype, dropout in conditions:
        for length in BATCHES:
            yield _build_updates(dtype, dropout, length, encodings)
        yield _build_step("layers", 25, dtype, dropout, ALL_LENGTHS, encodings)


def _build_updates(dtype: str, dropout: str, length: int, encodings: list[str]) -> Step:
    options = f"--length {length} --batch {BATCHES[length]}"
    return _build_step("updates", 27, dtype, dropout, options, encodings)


def _build_step(
    kind: str,
    seconds: int,
    dtype: str,
    dropout: str,
    options: str,
    encodings: list[str],
    backends: str = "triton",
) -> Step:
    names = " ".join(encodings)
    arguments = (
        f"--device cuda --dtype {dtype} --dropout {dropout} --json --encodings {names} "
        f"--backends {backends} {options}"
    )
    name = f"{kind}, {dtype}, dropout {dropout}, {options.replace('--', '')}, {backends}: {names}"
    return Step(name, kind, seconds, f"{SCRIPTS[kind]} {arguments}".split())
