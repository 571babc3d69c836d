"""Measures all that needs a GPU in one process of about seven minutes: ``make gpu``.

First the kernels' tests, without which no time counts. Then, the most decisive first: what an
operation and a launch cost the host; fairseq's layer, and the share of its attention; our kernels,
on the GPU and on the host; torch's attention with biases; layers beside fairseq's; FlexAttention. A
section that fails, or takes more than twice its seconds, is reported and stops no other. Results
are written after every section.

    python benchmarks/gpu.py --out demo/gpu             # results.json, tables.md
    python benchmarks/gpu.py --out demo/gpu --dry-run   # tiny, on Triton's interpreter
    python benchmarks/gpu.py --out demo/gpu --keep      # results.json goes to docs
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import json_values
from fairseq_posenc.workbench.results.markdown import fill_page, table
from fairseq_posenc.workbench.results.record import Record
from measuring.commands import exit_on_error, new_parser
from measuring.contenders import STOCK, Contender
from measuring.families import ROBERTA_BASE, Case, Size
from measuring.page import RESULTS
from measuring.scopes import layer, operation
from measuring.timing import Pass, clock, interleaved, median, peak, ratio

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gpu.md"
KEPT = RESULTS / "gpu.json"
START, END = "<!-- gpu: generated -->", "<!-- end of gpu -->"
# One layer of DeBERTa-base on an H200, bfloat16, forward and backward (huggingface/transformers,
# pull request 48176): implementation, unknown dropout, and milliseconds.
PUBLISHED_LENGTH = 8192
PUBLISHED = [["eager, as published", "", "119.3"], ["DisentangledFlash, as published", "", "88.9"]]
ENCODINGS = ["none", "alibi", "t5", "shaw", "deberta", "m4m"]
SHAPES = [(8, 2048), (32, 512), (2, 8192)]  # sentences and tokens: 16,384 tokens each
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m"]

Row = dict[str, Any]  # a row of a table: its cells by the titles of the columns


@dataclass
class Result:
    """What a section measured, and how it ended."""

    section: str
    end: str  # `done`, or what went wrong
    seconds: float
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """The machine and the sizes that are measured."""

    dry_run: bool

    @property
    def device(self) -> torch.device:
        """The GPU; the processor in a dry run."""
        return torch.device("cpu" if self.dry_run else "cuda")

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Sentences and tokens of a batch."""
        return [(1, 8)] if self.dry_run else SHAPES

    def case(self, batch: int, length: int, dropout: float = 0.1) -> Case:
        """Describe a layer in training."""
        dtype = torch.float32 if self.dry_run else torch.bfloat16
        size = Size(16, 1, 32, 1) if self.dry_run else ROBERTA_BASE
        return Case(length, batch, dropout, dtype, self.device, size=size)

    def time_host(self, run: Pass, count: int) -> tuple[float, float]:
        """Measure the milliseconds of a pass, and those in which the host was busy."""
        count = 1 if self.dry_run else count
        now = clock(self.device)
        run()
        began, host_began = now(), time.perf_counter()
        for _ in range(count):
            run()
        host = time.perf_counter() - host_began
        return 1e3 * (now() - began) / count, 1e3 * host / count

    def time_kernels(self, run: Pass, count: int = 3) -> list[tuple[str, float]]:
        """List the kernels of a pass with their milliseconds on the GPU, the longest first."""
        activity = ProfilerActivity.CPU if self.dry_run else ProfilerActivity.CUDA
        total = "self_cpu_time_total" if self.dry_run else "self_device_time_total"
        run()
        with profile(activities=[activity]) as profiled:
            for _ in range(1 if self.dry_run else count):
                run()
        times = [(x.key, getattr(x, total) / 1e3 / count) for x in profiled.key_averages()]
        return sorted(times, key=lambda item: -item[1])


def run_tests(bench: Bench) -> Iterator[Row]:
    """Run the tests of the kernels in a process of their own."""
    chosen = ["-n", "0", "-k", "forbidden_pairs"] if bench.dry_run else ["-n", "12"]
    command = [sys.executable, *TESTS, "not slow", *chosen, "tests/backends/test_triton.py"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    yield {"tests": finished.stdout.strip().splitlines()[-1]}
    if finished.returncode:
        raise RuntimeError("tests fail: no figure below counts")


def measure_machine(bench: Bench) -> Iterator[Row]:
    """Measure what an operation costs the host, and a call of our attention without work."""
    yield {"what": "cpu" if bench.dry_run else torch.cuda.get_device_name(), "host ms": 0.0}
    x = torch.zeros(8, device=bench.device)
    yield {
        "what": "an operation",
        "host ms": bench.time_host(lambda: torch._foreach_add_([x], 1), 500)[1],
    }
    for encoding in ("none", "m4m"):
        run = operation(Contender(encoding, "triton"), bench.case(1, 8))
        host = bench.time_host(run, 50)[1]
        yield {"what": f"8 tokens, forward and backward, {encoding}", "host ms": host}


def measure_stock(bench: Bench) -> Iterator[Row]:
    """Measure fairseq's layer: on the GPU, on the host, and the share of its attention."""
    words = ("flash", "fmha", "sdpa", "attention", "cudnn")
    for batch, length in bench.shapes:
        run = layer(STOCK, bench.case(batch, length))
        whole, host = bench.time_host(run, 10)
        kernels = bench.time_kernels(run)
        attention = sum(ms for name, ms in kernels if any(word in name.lower() for word in words))
        yield {
            **{"batch": batch, "length": length, "ms": whole, "host ms": host},
            **{"GPU ms": sum(ms for _, ms in kernels), "attention ms": attention},
        }


def measure_kernels(bench: Bench) -> Iterator[Row]:
    """Measure our attention: each kernel on the GPU, and the host."""
    kinds = ("forward_kernel", "backward_kernel", "tokens_kernel", "tables_kernel")
    for batch, length in bench.shapes:
        for encoding in ENCODINGS:
            run = operation(Contender(encoding, "triton"), bench.case(batch, length))
            whole, host = bench.time_host(run, 5)
            kernels = bench.time_kernels(run)
            by_kind = {kind: sum(ms for name, ms in kernels if kind in name) for kind in kinds}
            total = sum(ms for _, ms in kernels)
            yield {
                **{"encoding": encoding, "batch": batch, "length": length},
                **{"ms": whole, "host ms": host, "GPU ms": total, **by_kind},
            }


def measure_sdpa(bench: Bench) -> Iterator[Row]:
    """Measure torch's attention with biases of 16 bits, on the GPU."""
    for encoding in ENCODINGS[:3]:
        for dropout in (0.1, 0.0):
            case = bench.case(*bench.shapes[0], dropout)
            kernels = bench.time_kernels(operation(Contender(encoding, "sdpa"), case))
            total = sum(ms for _, ms in kernels)
            yield {"encoding": encoding, "dropout": dropout, "GPU ms": total}


def measure_layers(bench: Bench) -> Iterator[Row]:
    """Measure layers beside fairseq's, with dropout."""
    for place, (batch, length) in enumerate(bench.shapes):
        contenders = [Contender(x, "triton") for x in ENCODINGS[:: 5 if bench.dry_run else 1]]
        if place == 0:
            contenders += [Contender(name, "sdpa") for name in ENCODINGS[:3]]
        yield from _compare_layers(bench, contenders, bench.case(batch, length))


def measure_flex(bench: Bench) -> Iterator[Row]:
    """Measure layers on FlexAttention, which has no dropout, beside fairseq's."""
    # On a processor it has no backward pass.
    contenders = [] if bench.dry_run else [Contender(name, "flex") for name in ENCODINGS]
    yield from _compare_layers(bench, contenders, bench.case(*bench.shapes[0], 0.0))


def _compare_layers(bench: Bench, contenders: list[Contender], case: Case) -> Iterator[Row]:
    stock = layer(STOCK, case)
    stock_memory = peak(stock, bench.device)
    for contender in contenders:
        run = layer(contender, case)
        run()
        memory = peak(run, bench.device)
        rounds = interleaved([stock, run], bench.device, rounds=1 if bench.dry_run else 5, limit=3)
        yield {
            **{"scope": "layer", "encoding": contender.encoding, "backend": contender.backend},
            **{"length": case.length, "dtype": str(case.dtype).removeprefix("torch.")},
            **{"dropout": case.dropout, "seconds": median(rounds, 1)},
            **{"ratio": ratio(rounds, 1, 0), "memory_ratio": memory / max(stock_memory, 1)},
        }


# The sections in order, with their seconds.
SECTIONS: dict[Callable[[Bench], Iterator[Row]], int] = {
    run_tests: 70,
    measure_machine: 15,
    measure_stock: 45,
    measure_kernels: 80,
    measure_sdpa: 25,
    measure_layers: 125,
    measure_flex: 60,
}


def run_section(measure: Callable[[Bench], Iterator[Row]], seconds: int, bench: Bench) -> Result:
    """Run a section; keep what it measured before a failure or its limit of time."""
    result = Result(measure.__name__, "done", 0.0)
    began = time.monotonic()

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {2 * seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(0 if bench.dry_run else 2 * seconds)
    try:
        for row in measure(bench):
            result.rows.append(json_values(row))
    # A kernel that cannot be compiled or has no memory; its error is none of ours.
    except Exception as error:
        result.end = f"failed: {type(error).__name__}: {error}".splitlines()[0][:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def format_tables(results: list[Result]) -> list[str]:
    """Format a list of all sections, and the rows that they measured, as Markdown."""
    cells = [[result.section, result.end, f"{result.seconds:.0f}"] for result in results]
    lines = [table(["section", "end", "seconds"], cells, "llr"), *_compare_with_published(results)]
    for result in results:
        if result.rows:
            has_memory = "memory_ratio" in result.rows[0]  # only layers have
            lines += ["", f"**{result.section}**", ""]
            lines.append((_compare_backends if has_memory else _list_rows)(result.rows))
    return lines


def _compare_backends(rows: list[Row]) -> str:
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


def _list_rows(rows: list[Row]) -> str:
    """Format rows as they are."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return table(list(rows[0]), cells, "l" + "r" * (len(rows[0]) - 1))


def _compare_with_published(results: list[Result]) -> list[str]:
    """Format DeBERTa's layer at the published length beside the published times."""
    ours = []
    for row in chain.from_iterable(result.rows for result in results):
        # Only layers have a scope.
        if row.get("scope") != "layer" or not row["encoding"].startswith("deberta"):
            continue
        if (row["length"], row["dtype"]) == (PUBLISHED_LENGTH, "bfloat16"):
            name = f"`{row['encoding']}`, {row['backend']}"
            ours.append([name, f"{row['dropout']:g}", f"{row['seconds'] * 1e3:.1f}"])
    if not ours:
        return []
    title = (
        f"**A layer of DeBERTa-base at n = {PUBLISHED_LENGTH:,}**, forward and backward, bfloat16"
    )
    return ["", title, "", table(["who", "dropout", "ms"], [*PUBLISHED, *ours], "llr")]


def keep(path: Path, kept: Path = KEPT, page: Path = PAGE) -> None:
    """Copy a file of results to the documentation, and write the page's tables from it.

    Raises:
        UserError: the page lacks a marker.
    """
    results = [Result(**result) for result in json.loads(path.read_text("utf-8"))]
    tables = "\n".join(format_tables(results))
    page.write_text(fill_page(page.read_text("utf-8"), START, f"\n\n{tables}\n\n", END), "utf-8")
    steps = [{"step": x.section, "end": x.end, "seconds": x.seconds} for x in results]
    rows = {result.section: result.rows for result in results if result.rows}
    Record("benchmark-gpu", {"steps": steps, **rows}, {}, command="make gpu").write(kept)


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
    """Run all sections, and write the results after every one."""
    args = parse_args()
    if args.keep:
        keep(args.out / "results.json")
        return
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        sys.exit("there is no CUDA device: --dry-run needs none")
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for measure, seconds in SECTIONS.items():
        results.append(run_section(measure, seconds, Bench(args.dry_run)))
        print(f"{results[-1].section}: {results[-1].end}", file=sys.stderr, flush=True)
        write_whole(args.out / "results.json", json.dumps([*map(asdict, results)], indent=1))
        write_whole(args.out / "tables.md", "\n".join(format_tables(results)) + "\n")
    print((args.out / "tables.md").read_text("utf-8"))
    sys.exit(any(result.end != "done" for result in results))


if __name__ == "__main__":
    exit_on_error(main)
