"""Measures attention with a window or documents, relative to the same attention without them.

The time is that of a training step of causal attention, in processor time on one thread. *Own
memory* is the peak of the process beyond queries, keys, values, output and the gradients of these
four; the peak of a whole layer with its projections is listed as well. Each case runs in processes
of its own; the medians of their figures are kept.

    python benchmarks/windows.py --lengths 2048 8192 --limits 'window(size=128)'
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.backends import attend, blocked
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.positions import Span
from measuring.commands import exit_on_error, machine, new_parser, own_command
from measuring.page import Rows

WIDTH, HEADS = 256, 4
WARM_UP = 256  # tokens of a first call, in which libraries allocate memory that they keep
MEAN_DOCUMENT = 400  # tokens of a random document
FIGURES = {"seconds": "{:.2f} s", "own_mb": "{:,.0f} MB own", "layer_mb": "{:,.0f} MB of a layer"}


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--encodings", nargs="+", default=["none", "t5", "m4m"], metavar="SPEC")
    add("--lengths", nargs="+", type=int, default=[2048, 8192], metavar="N", help="tokens")
    add("--limits", nargs="+", default=["window(size=128)", "window(size=512)"], metavar="SPEC")
    add("--batch", type=int, default=1, help="sentences (default: 1)")
    add("--rounds", type=int, default=3, help="steps of a case; the fastest counts (default: 3)")
    add("--runs", type=int, default=3, help="processes of a case (default: 3)")
    add("--out", type=Path, metavar="FILE", help="where the figures go, as JSON")
    return parser.parse_args(words)


def run_case(spec: str, length: int, batch: int, rounds: int) -> dict[str, float]:
    """Measure attention, and then the layer around it, in this process.

    Beside the figures, the pairs of tokens that ``blocked`` computes are listed.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _step_attention(spec, WARM_UP, 1)
    idle_peak, seconds = _read_peak(), []
    for _ in range(rounds):
        began = time.process_time()
        pairs, needed_bytes = _step_attention(spec, length, batch)
        seconds.append(time.process_time() - began)
    own_bytes = _read_peak() - idle_peak - needed_bytes
    # A process's peak never falls, but a layer holds all that its attention does, and more.
    positions = StackPositions(spec, WIDTH, HEADS, max_positions=length, causal=True)
    layer = SelfAttention(positions)
    x = torch.randn(batch, length, WIDTH, requires_grad=True)
    layer(*positions(x, document_ids=_draw_documents(spec, batch, length)))[0].sum().backward()
    layer_bytes = _read_peak() - idle_peak
    megabytes = {"own_mb": own_bytes / 2**20, "layer_mb": layer_bytes / 2**20}
    return {"seconds": min(seconds), **megabytes, "pairs": pairs}


def _step_attention(spec: str, length: int, batch: int) -> tuple[int, int]:
    """Run attention forward and backward.

    Returns:
        The pairs that ``blocked`` computes, and the bytes that any attention needs: queries, keys,
        values, output and their gradients.
    """
    positions = StackPositions(spec, WIDTH, HEADS, max_positions=length, causal=True)
    layer = SelfAttention(positions)
    tensors = [torch.randn(batch, HEADS, length, WIDTH // HEADS) for _ in range(4)]
    query, key, value = (x.requires_grad_() for x in tensors[:3])
    ids = _draw_documents(spec, batch, length)
    _, shared = positions(torch.zeros(batch, length, 1).expand(-1, -1, WIDTH), document_ids=ids)
    terms = layer.terms(Span.from_lengths(length, length, query.device), shared)
    mask = shared.mask(layer.direction)
    attend(query, key, value, terms, mask)[0].backward(tensors[3])
    _, blocks = blocked.choose_blocks(AttentionCall(query, query, query, terms, mask))
    return sum(part.num_pairs for x in blocks for part in x), 2 * sum(x.nbytes for x in tensors)


def _draw_documents(spec: str, batch: int, length: int) -> Tensor | None:
    """Draw the document of each token, ``(batch, length)``; None for a spec without documents."""
    if "documents" not in spec:
        return None
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(batch, length, generator=generator) < 1 / MEAN_DOCUMENT).cumsum(1)


def measure(args: argparse.Namespace) -> Rows:
    """Measure every case: each encoding and length without a limit, and with each of them."""
    rows = []
    for encoding, length in product(args.encodings, args.lengths):
        whole = _run_processes(args, encoding, length)
        for limit in args.limits:
            limited = _run_processes(args, f"{encoding}+{limit}", length)
            ratios = {name: limited[name] / whole[name] for name in FIGURES}
            row = {"encoding": encoding, "length": length, "limit": limit, "ratio": ratios}
            rows.append({**row, "whole": whole, "limited": limited})
            shown = [
                f"{text.format(limited[name])}, by {ratios[name]:.2f}"
                for name, text in FIGURES.items()
            ]
            print(f"{encoding:<6} n {length:>6,}  {limit}  {'; '.join(shown)}", flush=True)
    return rows


def main() -> None:
    """Measure, print, and keep the figures."""
    args = parse_args(sys.argv[1:])
    rows = measure(args)
    if args.out:
        place = machine(torch.device("cpu"))
        kept = {"command": own_command(), "machine": place, "rows": rows}
        args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _run_processes(args: argparse.Namespace, spec: str, length: int) -> dict[str, float]:
    """Run a case in fresh processes, one at a time; take the median of each figure."""
    case = spec, length, args.batch, args.rounds
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = [pool.submit(run_case, *case) for _ in range(args.runs)]
    runs = [future.result() for future in futures]
    return {name: statistics.median(figures[name] for figures in runs) for name in runs[0]}


def _read_peak() -> int:
    """Read the peak memory of this process in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    exit_on_error(main)
