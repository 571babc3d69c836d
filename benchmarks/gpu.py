"""Everything that a GPU is needed for, in one command of at most nine minutes: ``make gpu``.

Tests of the kernels, with memory that nobody wrote filled with NaN among them; a memory checker on
a case that starts every kernel; some hundred updates in half precision; layers and whole updates
beside torch's and FlexAttention. What is not timed runs at once, then what is, one by one, the most
important first: what would be too late is cut and said, and the same command goes on with it. What
is done is kept as long as the code is the same. No step stops the others.

    python benchmarks/gpu.py --out demo/gpu             # results.json, tables.md
    python benchmarks/gpu.py --out demo/gpu --dry-run   # as far as it goes on Triton's interpreter
    python benchmarks/gpu.py --out demo/gpu --keep      # results.json goes to docs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fairseq_posenc.workbench.running.files import write_whole
from measuring import gpu_page
from measuring.commands import new_parser
from measuring.gpu_steps import LIMIT, SCRIPTS, TIMED, Step, steps

ROOT = Path(__file__).parents[1]


def code() -> str:
    """Compute a checksum of all code that is tested and timed."""
    digest = hashlib.sha256()
    for folder in ("fairseq_posenc", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def done_before(path: Path) -> dict[str, dict[str, Any]]:
    """Read the results of steps that an earlier call finished with this very code, by name."""
    found = json.loads(path.read_text("utf-8")) if path.exists() else []
    here = code()
    return {x["step"]: x for x in found if x["end"] == "done" and x["code"] == here}


def run(step: Step, dry_run: bool, left: float) -> dict[str, Any]:
    """Run a step; return how it ended, with its rows or the end of what it said.

    Args:
        step: the step.
        dry_run: whether Triton's interpreter takes the place of a GPU, and time does not matter.
        left: seconds until everything has to be done.
    """
    result: dict[str, Any] = {"step": step.name, "code": code()}
    if not dry_run and left < step.seconds / 2:
        return {**result, "end": f"cut: {left:.0f} s were left", "seconds": 0.0}
    command = [sys.executable, *step.words]
    if step.kind == "checker":
        checker = shutil.which("compute-sanitizer")
        if checker is None:
            return {**result, "end": "skipped: no compute-sanitizer here", "seconds": 0.0}
        command = [checker, "--error-exitcode", "9", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
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


def run_all(
    found: list[Step], before: dict[str, dict[str, Any]], dry_run: bool
) -> Iterator[dict[str, Any]]:
    """Run the steps, first those that are not timed; yield results, old ones where there are."""
    end = time.monotonic() + LIMIT

    def one(step: Step) -> dict[str, Any]:
        return before.get(step.name) or run(step, dry_run, end - time.monotonic())

    with ThreadPoolExecutor(max_workers=1 if dry_run else None) as pool:
        yield from pool.map(one, [step for step in found if step.kind not in TIMED])
    yield from map(one, [step for step in found if step.kind in TIMED])


def keep_all(results: list[dict[str, Any]], out: Path) -> None:
    """Write the results and their tables."""
    write_whole(out / "results.json", json.dumps(results, indent=1))
    write_whole(out / "tables.md", "\n".join(gpu_page.tables(results)) + "\n")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo/gpu"), help="folder (default: demo/gpu)")
    add("--dry-run", action="store_true", help="tiny, on Triton's interpreter")
    keep = "measure nothing; keep the folder's results.json, and write the tables of docs/gpu.md"
    add("--keep", action="store_true", help=keep)
    return parser.parse_args()


def main() -> None:
    """Run everything, and keep what was found after every step."""
    args = parse_args()
    if args.keep:
        gpu_page.keep(args.out / "results.json")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    found = steps(args.dry_run)
    before = done_before(args.out / "results.json")
    known = dict(before)
    for result in run_all(found, before, args.dry_run):
        again = ", before" * (result["step"] in before)
        print(f"{result['step']}: {result['end']}{again}", file=sys.stderr, flush=True)
        known[result["step"]] = result
        keep_all([known[step.name] for step in found if step.name in known], args.out)
    print((args.out / "tables.md").read_text("utf-8"))
    if left := sum(result["end"].startswith("cut") for result in known.values()):
        print(f"{left} steps are left: the same command goes on with them", file=sys.stderr)
    sys.exit(any(result["end"].startswith(("failed", "stopped")) for result in known.values()))


if __name__ == "__main__":
    main()
