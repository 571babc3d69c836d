"""Everything that a GPU is needed for, in one command of at most nine minutes: ``make gpu``.

Tests of the kernels, with memory that nobody wrote filled with NaN among them; a memory checker on
a case that starts every kernel; layers and whole updates beside torch's and FlexAttention; and some
hundred updates in half precision. Every step has a limit of its own, and none stops the others.

    python benchmarks/gpu.py --out demo/gpu             # results.json, tables.md
    python benchmarks/gpu.py --out demo/gpu --dry-run   # as far as it goes on Triton's interpreter
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_posenc.reporting.markdown import table

ROOT = Path(__file__).parents[1]
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
CASE = "tests/test_triton.py::test_reset_with_padding_on_the_left[both-False]"
NAMES = ["none", "rope", "alibi", "t5", "shaw", "m4", "m4m", "deberta", "tupe"]
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
    """A command: which kind, how many seconds it may take, and its words."""

    name: str
    kind: str
    seconds: int
    words: list[str]


def steps(dry_run: bool) -> list[Step]:
    """Return what is done, the most important first; the limits add up to nine minutes."""
    tests = [CASE] if dry_run else ["-m", "not slow", "tests/test_triton.py"]
    found = [
        Step("tests", "tests", 80, [*PYTEST, *tests]),
        Step("memory checker", "checker", 50, [*PYTEST, CASE]),
        _measure("layers", 80, "bfloat16", "0.1", "--lengths 128 512 2048 --batch 8"),
        _measure("layers", 40, "bfloat16", "0.1", "--lengths 8192 --batch 1"),
        _measure("layers", 60, "bfloat16", "0", "--lengths 512 2048 8192 --batch 1 --flex"),
        _measure("layers", 40, "float16", "0.1", "--lengths 512 --batch 8"),
        _measure("layers", 20, "bfloat16", "0.1", "--lengths 512 --batch 8", "reference"),
        _measure("updates", 70, "bfloat16", "0.1", "--length 512 --batch 8"),
        _measure("survival", 50, "bfloat16", "0.1", "--updates 300", "triton"),
        _measure("survival", 50, "float16", "0.1", "--updates 300", "triton"),
    ]
    if dry_run:
        # The same steps with other sizes are one step.
        found = list({each.kind: each for each in reversed(found)}.values())[::-1]
        return [
            Step(f"{x.kind}, tiny", x.kind, 0, x.words + DRY.get(x.kind, "").split()) for x in found
        ]
    return found


def _measure(
    kind: str, seconds: int, dtype: str, dropout: str, more: str, backends: str = "triton sdpa"
) -> Step:
    words = [*SCRIPTS[kind], *f"--device cuda --dtype {dtype} --dropout {dropout} --json".split()]
    words += ["--encodings", *(["all"] if kind == "survival" else NAMES)]
    words += ["--backends", *backends.split(), "--seconds", "2"]
    name = f"{kind}, {dtype}, dropout {dropout}, {more.replace('--', '')}, {backends}"
    return Step(name, kind, seconds, [*words, *more.split()])


def run(step: Step, dry_run: bool) -> dict[str, Any]:
    """Run a step; return how it ended, with its rows or the end of what it said."""
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
        limit = None if dry_run else step.seconds
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, **pipes)
        result["end"] = "done" if done.returncode == 0 else f"failed with {done.returncode}"
        if step.kind in SCRIPTS and done.stdout.startswith("["):
            result["rows"] = json.loads(done.stdout)
        else:
            result["said"] = (done.stdout + done.stderr)[-2_000:]
    except subprocess.TimeoutExpired:
        result["end"] = f"stopped after {step.seconds} s"
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def tables(results: list[dict[str, Any]]) -> list[str]:
    """Return the results as Markdown."""
    cells = [[x["step"], x["end"], f"{x['seconds']:.0f}"] for x in results]
    lines = [table(["step", "end", "seconds"], cells, "llr")]
    for result in results:
        if rows := result.get("rows"):
            header = list(rows[0])
            cells = [[_cell(row[x]) for x in header] for row in rows]
            lines += ["", f"**{result['step']}**", "", table(header, cells, "lllllr")]
    return lines


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Run everything, and keep what was found after every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo/gpu"), help="folder (default: demo/gpu)"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny, on Triton's interpreter")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for step in steps(args.dry_run):
        print(f"{step.name} ...", file=sys.stderr, flush=True)
        results.append(run(step, args.dry_run))
        (args.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        (args.out / "tables.md").write_text("\n".join(tables(results)) + "\n", encoding="utf-8")
    print((args.out / "tables.md").read_text("utf-8"))
    sys.exit(any(result["end"].startswith(("failed", "stopped")) for result in results))


if __name__ == "__main__":
    main()
