"""Runs everything that needs a GPU in one command of at most nine minutes: ``make gpu``.

These are tests of the kernels, also with uninitialized memory filled with NaN; a memory checker on
a case that starts every kernel; a few hundred updates in half precision; and layers and whole
updates beside torch's and FlexAttention. Steps without timing run first and together, then timed
ones one by one, the most important first. Steps that no longer fit are reported as cut; the same
command continues with them. Finished steps are not repeated while the code is the same. A step that
fails does not stop the others. `measuring/gpu_steps.py` lists the steps.

    python benchmarks/gpu.py --out demo/gpu             # results.json, tables.md
    python benchmarks/gpu.py --out demo/gpu --dry-run   # tiny sizes, on Triton's interpreter
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
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.results.markdown import fill_page, table
from fairseq_posenc.workbench.results.record import Record
from measuring.commands import exit_on_error, new_parser
from measuring.gpu_steps import SCRIPTS, TIME_LIMIT, TIMED_KINDS, Step, list_steps
from measuring.page import RESULTS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
KEPT = RESULTS / "gpu.json"
START, END = "<!-- gpu: generated -->", "<!-- end of gpu -->"
# One layer of DeBERTa-base on an H200, bfloat16, forward and backward (huggingface/transformers,
# pull request 48176): implementation, unknown dropout, and milliseconds.
PUBLISHED_LENGTH = 8192
PUBLISHED = [["eager, as published", "", "119.3"], ["DisentangledFlash, as published", "", "88.9"]]

# For each step: its name, how it ended, its seconds, the checksum of the code, and its table rows.
Results = list[dict[str, Any]]


@cache  # the code stays the same during a call
def checksum_code() -> str:
    """Compute a checksum of all code that is tested and timed."""
    digest = hashlib.sha256()
    for folder in ("fairseq_posenc", "benchmarks", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def read_finished(path: Path) -> dict[str, dict[str, Any]]:
    """Read the results of steps that an earlier call finished with the same code, by name."""
    results = json.loads(path.read_text("utf-8")) if path.exists() else []
    code = checksum_code()
    finished = [result for result in results if (result["end"], result["code"]) == ("done", code)]
    return {result["step"]: result for result in finished}


def run(step: Step, dry_run: bool, seconds_left: float) -> dict[str, Any]:
    """Run a step; return how it ended, with its rows or the end of its output.

    In a dry run, Triton's interpreter replaces the GPU, and there is no limit of time.
    """
    result: dict[str, Any] = {"step": step.name, "code": checksum_code()}
    if not dry_run and seconds_left < step.seconds / 2:
        return {**result, "end": f"cut: {seconds_left:.0f} s were left", "seconds": 0.0}
    command = [sys.executable, *step.arguments]
    if step.kind == "checker":
        checker = shutil.which("compute-sanitizer")
        if checker is None:
            return {**result, "end": "skipped: no compute-sanitizer here", "seconds": 0.0}
        command = [checker, "--error-exitcode", "9", *command]  # pytest's own codes are below 9
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    if dry_run:
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    try:
        # An estimate may be wrong by a factor of two.
        limit = None if dry_run else min(seconds_left, 2 * step.seconds)
        process = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit, capture_output=True, text=True
        )
        result["end"] = "done" if process.returncode == 0 else f"failed with {process.returncode}"
        if step.kind in SCRIPTS and process.stdout.startswith("["):
            result["rows"] = json.loads(process.stdout)
        else:
            result["said"] = (process.stdout + process.stderr)[-2_000:]
    except subprocess.TimeoutExpired:
        result["end"] = f"stopped after {limit:.0f} s"
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def run_all(
    planned: list[Step], finished: dict[str, dict[str, Any]], dry_run: bool
) -> Iterator[dict[str, Any]]:
    """Run the steps, first those without timing; yield their results, or earlier ones."""
    end = time.monotonic() + TIME_LIMIT

    def run_once(step: Step) -> dict[str, Any]:
        return finished.get(step.name) or run(step, dry_run, end - time.monotonic())

    with ThreadPoolExecutor(max_workers=1 if dry_run else None) as pool:
        yield from pool.map(run_once, [step for step in planned if step.kind not in TIMED_KINDS])
    yield from map(run_once, [step for step in planned if step.kind in TIMED_KINDS])


def format_tables(results: Results) -> list[str]:
    """Format a list of all steps, and the rows that steps measured, as Markdown."""
    cells = [[result["step"], result["end"], f"{result['seconds']:.0f}"] for result in results]
    lines = [table(["step", "end", "seconds"], cells, "llr"), *_compare_with_published(results)]
    for result in results:
        if rows := result.get("rows"):
            has_memory = "memory_ratio" in rows[0]  # only layers have
            lines += ["", f"**{result['step']}**", ""]
            lines.append(_compare_backends(rows) if has_memory else _list_rows(rows))
    return lines


def _compare_backends(rows: Results) -> str:
    """Format time and memory of layers, divided by those of fairseq's, with a column a backend."""
    rows = [row for row in rows if row["encoding"] != "stock"]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    found = {
        (row["encoding"], row["length"], row["backend"]): (
            f"{row['ratio']:.2f}, {row['memory_ratio']:.1f} ({row['seconds'] * 1e3:.1f})"
        )
        for row in rows
    }
    places = dict.fromkeys((row["encoding"], row["length"]) for row in rows)
    cells = [
        [f"`{encoding}`", f"{length:,}", *(found.get((encoding, length, x), "") for x in backends)]
        for encoding, length in places
    ]
    titles = [f"{name}: time, memory (ms)" for name in backends]
    return table(["encoding", "length", *titles], cells, "lr" + "r" * len(backends))


def _list_rows(rows: Results) -> str:
    """Format rows as they are; names stand in their first columns."""
    return table(list(rows[0]), [[_format(x) for x in row.values()] for row in rows], "lllllr")


def keep(path: Path, kept: Path = KEPT, page: Path = PAGE) -> None:
    """Copy a file of results to the documentation, and write the page's tables from it.

    Raises:
        UserError: the page lacks a marker.
    """
    recorded = json.loads(path.read_text("utf-8"))
    results = [result for result in recorded if not result["end"].startswith("cut")]
    body = "\n".join(format_tables(results))
    if cut := len(recorded) - len(results):
        body += f"\n\nThere was no time for {cut} more steps."
    text = fill_page(page, START, f"\n\n{body}\n\n", END)
    columns = ("step", "end", "seconds")
    steps = [{name: result[name] for name in columns} for result in results]
    rows = {result["step"]: result["rows"] for result in results if result.get("rows")}
    Record("benchmark-gpu", {"steps": steps, **rows}, {}, command="make gpu").write(kept)
    page.write_text(text, encoding="utf-8")


def _compare_with_published(results: Results) -> list[str]:
    """Format DeBERTa's layer at the published length beside the published times."""
    ours = []
    for row in chain.from_iterable(result.get("rows", []) for result in results):
        if not row["encoding"].startswith("deberta"):
            continue
        case = (row.get("scope"), row["length"], row["dtype"])  # only layers have a scope
        if case == ("layer", PUBLISHED_LENGTH, "bfloat16"):
            name = f"`{row['encoding']}`, {row['backend']}"
            ours.append([name, f"{row['dropout']:g}", f"{row['seconds'] * 1e3:.1f}"])
    if not ours:
        return []
    title = (
        f"**A layer of DeBERTa-base at n = {PUBLISHED_LENGTH:,}**, forward and backward, bfloat16"
    )
    return ["", title, "", table(["who", "dropout", "ms"], [*PUBLISHED, *ours], "llr")]


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo/gpu"), help="folder (default: demo/gpu)")
    add("--dry-run", action="store_true", help="tiny, on Triton's interpreter")
    kept = "measure nothing; keep the folder's results.json, and write the tables of docs/gpu.md"
    add("--keep", action="store_true", help=kept)
    return parser.parse_args()


def main() -> None:
    """Run all steps, and write the results after every step."""
    args = parse_args()
    if args.keep:
        keep(args.out / "results.json")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    planned = list_steps(args.dry_run)
    finished = read_finished(args.out / "results.json")
    by_step = dict(finished)  # step -> result, of earlier calls too
    for result in run_all(planned, finished, args.dry_run):
        source = " by an earlier call" if result["step"] in finished else ""
        print(f"{result['step']}: {result['end']}{source}", file=sys.stderr, flush=True)
        by_step[result["step"]] = result
        results = [by_step[step.name] for step in planned if step.name in by_step]
        write_whole(args.out / "results.json", json.dumps(results, indent=1))
        write_whole(args.out / "tables.md", "\n".join(format_tables(results)) + "\n")
    print((args.out / "tables.md").read_text("utf-8"))
    if cut := sum(result["end"].startswith("cut") for result in by_step.values()):
        print(f"{cut} steps are left: the same command continues with them", file=sys.stderr)
    sys.exit(any(result["end"].startswith(("failed", "stopped")) for result in by_step.values()))


if __name__ == "__main__":
    exit_on_error(main)
