"""Kills a training at random moments, runs it to its end, and compares what it made.

    python -m tests.helpers.kills --rounds 20

A round starts it, kills it outright up to three times, each time when it has just changed a file,
and runs it to its end: its checkpoints have to have the weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.helpers.commands import FAMILIES, TRAINING, USER_DIR, script


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a training with checkpoints within and at the ends of its epochs, as a new process."""
    family = FAMILIES["causal_lm"]
    words = ["--user-dir", USER_DIR, *family.task, *family.model, *TRAINING]
    words += ["--batch-size", 4, "--max-epoch", 3, "--max-update", 10, "--dropout", 0.1]
    words += ["--save-interval-updates", 3, "--save-dir", folder / "out"]
    with open(folder / "said", "ab") as output:
        command = [str(word) for word in (script("fairseq-train"), family.data(), *words)]
        return subprocess.Popen(command, stdout=output, stderr=output)


def read_weights(out: Path) -> dict[str, Any]:
    """Read the weights of all checkpoints below a folder."""
    found: dict[str, Any] = {}
    for path in out.glob("*.pt"):
        weights = torch.load(path, map_location="cpu", weights_only=False)["model"]
        found[path.name] = {name: tensor.tolist() for name, tensor in weights.items()}
    return found


def list_files(folder: Path) -> list[tuple[str, int]]:
    """List the files below a folder with their sizes, without logs."""
    found = []
    for place, _, names in os.walk(folder):  # which passes over folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append((name, os.path.getsize(os.path.join(place, name))))
    return sorted(file for file in found if not file[0].endswith(".log"))


def count_changes(process: subprocess.Popen[bytes], folder: Path, most: float) -> int:
    """Count how often the files of a folder change until a process ends, or up to ``most``."""
    number, files = 0, list_files(folder)
    while number < most and process.poll() is None:
        time.sleep(0.001)
        last, files = files, list_files(folder)
        number += files != last
    return number


def run_to_end(folder: Path) -> tuple[dict[str, Any], int]:
    """Train to the end; return the weights, and how often files changed."""
    process = start(folder)
    changes = count_changes(process, folder / "out", math.inf)
    if process.wait():
        raise AssertionError(f"it failed: {(folder / 'said').read_text()[-2000:]}")
    return read_weights(folder / "out"), changes


def kill_and_finish(folder: Path, kills: int, changes: int, rng: random.Random) -> dict[str, Any]:
    """Kill a training at random changes of its files, train to the end, and return the weights."""
    for _ in range(kills):
        process = start(folder)
        count_changes(process, folder / "out", rng.randint(1, changes))
        time.sleep(rng.uniform(0, 0.005))  # also within the change
        process.kill()
        process.wait()
    return run_to_end(folder)[0]


def main() -> int:
    """Run all rounds; return 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng, folder = random.Random(args.seed), Path(tempfile.mkdtemp())
    expected, changes = run_to_end(folder)
    lost = 0
    for number in range(args.rounds):
        shutil.rmtree(folder / "out")
        found = kill_and_finish(folder, rng.randint(1, 3), changes, rng)
        names = [name for name in expected | found if expected.get(name) != found.get(name)]
        print(f"round {number + 1}: {', '.join(names) or 'the same'}", flush=True)
        lost += bool(names)
    shutil.rmtree(folder)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
