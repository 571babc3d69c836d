"""Measures how fast raw text becomes a data-bin: preprocess plain_text and fairseq's own chain.

The chain is fairseq's for RoBERTa: GPT-2 BPE line by line in a process pool, ids written as text,
then ``fairseq-preprocess --only-source --srcdict dict.txt``. The script of its first half is in
fairseq's examples, which are not installed with the package; :func:`encode_as_fairseq` does exactly
what it does, with fairseq's own ``GPT2BPE``. Both sides have the same number of processes, start-up
time counts for both, and the files they write must be equal byte for byte.

  python benchmarks/preprocess.py --text wiki.train.tokens --bpe gpt2_bpe/ --megabytes 100
"""

from __future__ import annotations

import filecmp
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import RunError, UserError
from fairseq_posenc.tokens.files import read_bytes
from fairseq_posenc.workbench.results.markdown import table
from fairseq_posenc.workbench.running.devices import count_cores
from fairseq_posenc.workbench.running.exit_codes import run_main
from fairseq_posenc.workbench.running.options import Parser, positive_int

PROGRAM = (Path(sys.executable).with_name("fairseq-posenc"), "preprocess", "plain_text")
_encoder: Any = None  # of each process of the pool


def _start_encoder(folder: Path) -> None:
    from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig

    global _encoder
    vocabulary, merges = str(folder / "encoder.json"), str(folder / "vocab.bpe")
    _encoder = GPT2BPE(GPT2BPEConfig(gpt2_encoder_json=vocabulary, gpt2_vocab_bpe=merges))


def _encode(line: str) -> str | None:
    line = line.strip()
    return _encoder.encode(line) if line else None


def encode_as_fairseq(
    text: Path, bpe: Path, folder: Path, workers: int, keep_empty: bool = False
) -> None:
    """Write the ids of a text's lines as fairseq's multiprocessing_bpe_encoder does.

    Empty lines are left out, or with ``keep_empty`` stay empty.
    """
    with (
        open(text, encoding="utf-8") as lines,
        open(bpe, "w", encoding="utf-8") as output,
        Pool(workers, _start_encoder, (folder,)) as pool,
    ):
        encoded: Iterable[str | None] = pool.imap(_encode, lines, chunksize=100)
        for line in encoded:
            if line is not None or keep_empty:
                print(line or "", file=output)


def run_chain(text: Path, dest: Path, folder: Path, workers: int) -> None:
    """Make a data-bin with fairseq's chain."""
    encode_as_fairseq(text, dest.with_suffix(".bpe"), folder, workers)
    command = [Path(sys.executable).with_name("fairseq-preprocess"), "--only-source"]
    command += ["--srcdict", folder / "dict.txt", "--trainpref", dest.with_suffix(".bpe")]
    _run([*command, "--destdir", dest, "--workers", workers])


def run_ours(text: Path, dest: Path, folder: Path, workers: int) -> None:
    """Make a data-bin with this project's program."""
    command = [*PROGRAM, "--train", text, "--out", dest, "--workers", workers]
    command += ["--encoder-json", folder / "encoder.json", "--vocab-bpe", folder / "vocab.bpe"]
    _run([*command, "--dict", folder / "dict.txt", "--empty-lines", "drop"])


def _run(command: Iterable[object]) -> None:
    words = [str(part) for part in command]
    if subprocess.run(words, stdout=subprocess.DEVNULL).returncode:
        raise RunError(f"{Path(words[0]).name} failed, for the reason above")


def write_text(source: Path, path: Path, megabytes: int) -> None:
    """Repeat a text file, which may be compressed, until it has at least a size."""
    if not (content := read_bytes(source, f"--text {source}")):
        raise UserError(f"--text {source}: the file is empty; name a file with text in it")
    with open(path, "wb") as output:
        while output.tell() < megabytes * 10**6:
            output.write(content)


def main() -> int:
    """Time both sides, print a Markdown table and the machine, and fail if the files differ."""
    parser = Parser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="text file, also .gz")
    parser.add_argument("--bpe", type=Path, required=True, help="encoder.json vocab.bpe dict.txt")
    parser.add_argument("--megabytes", type=positive_int, default=100)
    parser.add_argument("--workers", type=positive_int, default=count_cores())
    args = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("fairseq-fixed", "regex"))
    processor = subprocess.getoutput("lscpu | sed -n 's/^Model name: *//p'")
    machine = (
        f"{processor}, {count_cores()} cores, load {os.getloadavg()[0]:.1f} before the run; "
        f"Python {sys.version.split()[0]}, {packages}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        text = Path(temporary, "text")
        write_text(args.text, text, args.megabytes)
        size = text.stat().st_size / 1e6
        seconds = {}
        processor_seconds = {}
        ours, chain = Path(temporary, "ours"), Path(temporary, "chain")
        sides = [("plain_text", run_ours, ours), ("fairseq's chain", run_chain, chain)]
        for name, run, folder in sides:
            began = time.perf_counter()
            busy = sum(os.times()[:4])  # user and system, of this process and its ended children
            run(text, folder, args.bpe, args.workers)
            seconds[name] = time.perf_counter() - began
            processor_seconds[name] = sum(os.times()[:4]) - busy
            if run is run_ours:  # the first: the peak is that of all processes until now
                memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        files = ["train.bin", "train.idx", "dict.txt"]
        same, _, _ = filecmp.cmpfiles(ours, chain, files, shallow=False)  # by content
    header = [f"{size:.0f} MB of text, {args.workers} processes", "seconds", "MB/s"]
    header += ["times as fast", "processor seconds", "times as little"]
    rows = []
    for name, taken in seconds.items():
        ratio = seconds["fairseq's chain"] / taken
        less = processor_seconds["fairseq's chain"] / processor_seconds[name]
        row = [name, f"{taken:.1f}", f"{size / taken:.2f}", f"{ratio:.1f}"]
        rows.append([*row, f"{processor_seconds[name]:.1f}", f"{less:.1f}"])
    print(table(header, rows))
    print(f"\nequal byte for byte: {', '.join(same)} of {', '.join(files)}; ", end="")
    print(f"largest process of plain_text: {memory:.0f} MiB\n{machine}")
    return 0 if same == files else 1


if __name__ == "__main__":
    sys.exit(run_main(main))
