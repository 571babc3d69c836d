"""What a window saves: a layer's training step with it, by the same layer's without.

Each case runs in a process of its own, on one thread, in processor time; memory is the most that
the process held beyond what it had before the step.

    python benchmarks/windows.py --lengths 2048 8192 --windows 128 512
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fairseq_posenc.api import SelfAttention, StackPositions
from fairseq_posenc.errors import UserError
from measuring.commands import exit_on_error, machine, new_parser

WIDTH, HEADS = 256, 4


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--encodings", nargs="+", default=["none", "rope", "m4m"], metavar="SPEC")
    add("--lengths", nargs="+", type=int, default=[2048, 8192], metavar="N", help="tokens")
    add("--windows", nargs="+", type=int, default=[128, 512], metavar="W", help="keys")
    add("--rounds", type=int, default=3, help="steps of a case; the fastest counts (default: 3)")
    add("--out", type=Path, metavar="FILE", help="where the figures go, as JSON")
    add("--case", nargs=3, metavar=("SPEC", "N", "BACKEND"), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def run_case(spec: str, length: int, backend: str, rounds: int) -> dict[str, float]:
    """Time training steps of one causal layer in this process, and measure its memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    positions = StackPositions(spec, WIDTH, HEADS, max_positions=length, causal=True)
    layer = SelfAttention(positions, backend=backend)
    x = torch.randn(1, length, WIDTH, requires_grad=True)
    before, seconds = _peak(), []
    for _ in range(rounds):
        began = time.process_time()
        layer(*positions(x))[0].sum().backward()
        seconds.append(time.process_time() - began)
    return {"seconds": min(seconds), "megabytes": (_peak() - before) / 2**20}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every case: each encoding and length without a window, and with each of them."""
    rows = []
    for encoding in args.encodings:
        for length in args.lengths:
            whole = _in_process(encoding, length, "auto", args.rounds)
            for window in args.windows:
                spec = f"{encoding}+window(size={window})"
                found = _in_process(spec, length, "auto", args.rounds)
                ratios = {name: found[name] / whole[name] for name in found}
                rows.append(
                    {"encoding": encoding, "length": length, "window": window, "ratio": ratios}
                    | {"whole": whole, "windowed": found}
                )
                print(
                    f"{encoding:<8} n {length:>6,}  W {window:>4}  {found['seconds']:.2f} s "
                    f"by {whole['seconds']:.2f} s: {ratios['seconds']:.2f}; "
                    f"{found['megabytes']:,.0f} MB by {whole['megabytes']:,.0f} MB: "
                    f"{ratios['megabytes']:.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Measure, print, and keep the figures."""
    args = parse_args(sys.argv[1:])
    if args.case:
        spec, length, backend = args.case
        print(json.dumps(run_case(spec, int(length), backend, args.rounds)))
        return
    rows = measure(args)
    if args.out:
        command = " ".join(["python benchmarks/windows.py", *sys.argv[1:]])
        kept = {"command": command, "machine": machine(torch.device("cpu")), "rows": rows}
        args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _in_process(spec: str, length: int, backend: str, rounds: int) -> dict[str, float]:
    """Run a case in a process of its own."""
    words = [sys.executable, __file__, "--rounds", str(rounds), "--case", spec, str(length)]
    done = subprocess.run([*words, backend], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{spec}, {length} tokens: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _peak() -> int:
    """Read the most memory that this process ever held, in bytes (Linux counts in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    exit_on_error(main)
