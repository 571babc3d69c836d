"""Everything that a GPU is needed for, in one command of at most nine minutes: ``make gpu``.

Tests of the kernels, with memory that nobody wrote filled with NaN among them; a memory checker on
a case that starts every kernel; some hundred updates in half precision; layers and whole updates
beside torch's and FlexAttention. What is not timed runs at once, then what is, one by one, the most
important first: what would be too late is cut and said. No step stops the others.

    python benchmarks/gpu.py --out demo/gpu             # results.json, tables.md
    python benchmarks/gpu.py --out demo/gpu --dry-run   # as far as it goes on Triton's interpreter
    python benchmarks/gpu.py --out demo/gpu --keep      # results.json goes to docs
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from measuring import gpu_page

ROOT = Path(__file__).parents[1]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
CASE = "tests/test_triton.py::test_reset_with_padding_on_the_left[both-False]"
NAMES = ["none", "rope", "alibi", "t5", "shaw", "m4", "m4m", "deberta", "tupe"]
FEW = ["alibi", "shaw", "m4m", "deberta"]
RIVALS = ["alibi", "shaw", "deberta"]  # FlexAttention compiles each at each length for seconds
EACH = "128 512 2048 8192"  # lengths
BOTH, EAGER = "triton sdpa", "triton sdpa reference"
LIMIT = 9 * 60
TIMED = ("layers", "updates")
SCRIPTS = {
    "layers": ["benchmarks/attention.py", "--scopes", "layer", "--modes", "training"],
    "updates": ["benchmarks/train.py"],
    "survival": ["benchmarks/survive.py"],
}
# What a dry run appends: of an option that is given twice, the last one holds.
TINY = "--device cpu --dtype float32 --batch 1 --rounds 1 --seconds 1 --threads 1"
DRY = {
    "layers": f"{TINY} --lengths 8 --encodings shaw --backends triton",
    "updates": f"{TINY} --length 8 --size tiny --layers 1 --encodings shaw --backends triton",
    "survival": f"{TINY} --length 8 --encodings shaw m4m --updates 2",
}


class Step(NamedTuple):
    """A command: which kind, how many seconds it is expected to take, and its words."""

    name: str
    kind: str
    seconds: int
    words: list[str]


def steps(dry_run: bool) -> list[Step]:
    """Return what is done, each with an estimate of its time on an H200; see :func:`estimate`."""
    tests = [CASE] if dry_run else ["-m", "not slow", "tests/test_triton.py"]
    found = [
        Step("tests", "tests", 80, [*PYTEST, *tests]),
        Step("memory checker", "checker", 80, [*PYTEST, CASE]),
        _measure("survival", 120, "bfloat16", "0.1", "--updates 300", ["all"]),
        _measure("survival", 120, "float16", "0.1", "--updates 300", ["all"]),
        _measure("layers", 75, "bfloat16", "0.1", "--lengths 128 512 2048 --batch 8", NAMES, BOTH),
        _measure("updates", 55, "bfloat16", "0.1", "--length 512 --batch 8", NAMES),
        _measure("layers", 30, "bfloat16", "0.1", "--lengths 8192 --batch 1", NAMES),
        _measure("layers", 70, "bfloat16", "0", f"--lengths {EACH} --batch 1 --flex", RIVALS),
        _measure("updates", 30, "bfloat16", "0.1", "--length 2048 --batch 2", FEW),
        _measure("updates", 25, "bfloat16", "0.1", "--length 128 --batch 32", FEW),
        _measure("updates", 30, "bfloat16", "0.1", "--length 8192 --batch 1", FEW),
        _measure("layers", 25, "float16", "0.1", f"--lengths {EACH} --batch 1", FEW),
        _measure("layers", 25, "bfloat16", "0.1", f"--lengths {EACH} --batch 1", FEW, EAGER),
        _measure("updates", 25, "float16", "0.1", "--length 512 --batch 8", FEW),
        _measure("updates", 30, "bfloat16", "0", "--length 512 --batch 8", FEW, EAGER),
    ]
    if dry_run:
        # The same steps with other sizes are one step.
        found = list({each.kind: each for each in reversed(found)}.values())[::-1]
        return [
            Step(f"{x.kind}, tiny", x.kind, 0, x.words + DRY.get(x.kind, "").split()) for x in found
        ]
    return found


def estimate(found: list[Step]) -> int:
    """Return the seconds of some steps, of which those that are not timed run at once."""
    together = [step.seconds for step in found if step.kind not in TIMED]
    return max(together) + sum(step.seconds for step in found if step.kind in TIMED)


def _measure(
    kind: str,
    seconds: int,
    dtype: str,
    dropout: str,
    more: str,
    encodings: list[str],
    backends: str = "triton",
) -> Step:
    words = [*SCRIPTS[kind], *f"--device cuda --dtype {dtype} --dropout {dropout} --json".split()]
    words += ["--encodings", *encodings]
    words += ["--backends", *backends.split(), "--seconds", "2"]
    name = f"{kind}, {dtype}, dropout {dropout}, {more.replace('--', '')}, {backends}"
    return Step(name, kind, seconds, [*words, *more.split()])


def run(step: Step, dry_run: bool, left: float) -> dict[str, Any]:
    """Run a step; return how it ended, with its rows or the end of what it said.

    Args:
        step: the step.
        dry_run: whether Triton's interpreter takes the place of a GPU, and time does not matter.
        left: seconds until everything has to be done.
    """
    if not dry_run and left < step.seconds / 2:
        return {"step": step.name, "end": f"cut: {left:.0f} s were left", "seconds": 0.0}
    command = [sys.executable, *step.words]
    if step.kind == "checker":
        checker = shutil.which("compute-sanitizer")
        if checker is None:
            return {"step": step.name, "end": "skipped: no compute-sanitizer here", "seconds": 0.0}
        command = [checker, "--error-exitcode", "9", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    result: dict[str, Any] = {"step": step.name}
    try:
        limit = None if dry_run else min(left, 2 * step.seconds)
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, **pipes)
        result["end"] = "done" if done.returncode == 0 else f"failed with {done.returncode}"
        if step.kind in SCRIPTS and done.stdout.startswith("["):
            result["rows"] = json.loads(done.stdout)
        else:
            result["said"] = (done.stdout + done.stderr)[-2_000:]
    except subprocess.TimeoutExpired:
        result["end"] = f"stopped after {limit:.0f} s"
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def run_all(found: list[Step], dry_run: bool) -> Iterator[dict[str, Any]]:
    """Run the steps, first those that are not timed, and yield what :func:`run` returns."""
    end = time.monotonic() + LIMIT

    def one(step: Step) -> dict[str, Any]:
        return run(step, dry_run, end - time.monotonic())

    with ThreadPoolExecutor(max_workers=1 if dry_run else None) as pool:
        yield from pool.map(one, [step for step in found if step.kind not in TIMED])
    yield from map(one, [step for step in found if step.kind in TIMED])


def main() -> None:
    """Run everything, and keep what was found after every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo/gpu"), help="folder (default: demo/gpu)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny, on Triton's interpreter")
    keep = "measure nothing; keep the folder's results.json, and write the tables of docs/gpu.md"
    parser.add_argument("--keep", action="store_true", help=keep)
    args = parser.parse_args()
    if args.keep:
        gpu_page.keep(args.out / "results.json")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for result in run_all(steps(args.dry_run), args.dry_run):
        print(f"{result['step']}: {result['end']}", file=sys.stderr, flush=True)
        results.append(result)
        (args.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (args.out / "tables.md").write_text(
            "\n".join(gpu_page.tables(results)) + "\n", encoding="utf-8"
        )
    print((args.out / "tables.md").read_text("utf-8"))
    sys.exit(any(result["end"].startswith(("failed", "stopped", "cut")) for result in results))


if __name__ == "__main__":
    main()
