"""Kills commands at random moments, runs them to their ends, and compares what they made.

    python -m tests.helpers.kills --rounds 20 --jobs compare preprocess

A round starts a command, kills it outright up to three times, each time when it has just changed a
file, and runs it to its end: it has to make the files, figures and weights of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.helpers.commands import FAMILIES, TRAINING, USER_DIR, script, sentences

# What differs between undisturbed runs: times, logs, locks and folders.
_VARYING_FILES = (".log", ".html", ".png", ".lock", ".fairseq-posenc", ".fairseq-train")
_VARYING_KEYS = {"seconds", "tokens_per_second", "command", "speed", "duration"}


def training(out: Path) -> list[Any]:
    """Return a training with checkpoints within and at the ends of its epochs."""
    family = FAMILIES["causal_lm"]
    words = ["--user-dir", USER_DIR, *family.task, *family.model, *TRAINING, "--save-dir", out]
    words += ["--batch-size", 4, "--max-epoch", 3, "--max-update", 10, "--dropout", 0.1]
    return ["fairseq-train", family.data(), *words, "--save-interval-updates", 3]


def compare(out: Path) -> list[Any]:
    """Return a comparison of two models, with validations and checkpoints."""
    from tests.workbench.experiments.test_compare import compare_call

    return compare_call(out, "none,decbert_diff", 40, "--seeds", "1,2", "--jobs", "2")


def preprocess(out: Path) -> list[Any]:
    """Return the preprocessing of a text."""
    texts = [str(sentences().parent / name) for name in ("train", "valid")]
    words = ["--train", texts[0], "--valid", texts[1], "--words", "--workers", 2, "--out", out]
    return ["fairseq-posenc", "preprocess", "plain_text", *words]


def glue(out: Path) -> list[Any]:
    """Return a fine-tuning on CoLA, with a checkpoint after each epoch, and its evaluation."""
    from tests.workbench.finetuning.test_glue_commands import LONG, RATE, arguments

    return ["fairseq-posenc", *arguments("m4m", *RATE, "--out", out, *LONG)]


JOBS: dict[str, Callable[[Path], list[Any]]] = {
    "training": training,
    "compare": compare,
    "preprocess": preprocess,
    "glue": glue,
}


def read_results(out: Path) -> dict[str, Any]:
    """Read what a command made, without what varies between runs."""
    found: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_dir() or name.endswith(_VARYING_FILES):
            continue
        if path.suffix == ".pt":
            model = torch.load(path, map_location="cpu", weights_only=False)["model"]
            found[name] = {key: tensor.tolist() for key, tensor in model.items()}
        elif path.suffix == ".json":
            found[name] = _drop_times(json.loads(path.read_text("utf-8")), str(out))
        else:
            found[name] = path.read_bytes().replace(str(out).encode(), b"OUT")
    return found


def _drop_times(value: Any, out: str) -> Any:
    if isinstance(value, dict):
        kept = {key: _drop_times(item, out) for key, item in value.items()}
        return {key: item for key, item in kept.items() if key not in _VARYING_KEYS}
    if isinstance(value, list):
        return [_drop_times(item, out) for item in value]
    return value.replace(out, "OUT") if isinstance(value, str) else value


def start(command: list[Any], log: Path) -> subprocess.Popen[bytes]:
    """Start a command as a new process, whose output goes to a file."""
    words = [str(script(command[0])), *map(str, command[1:])]
    with open(log, "ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=output)


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


def run_to_end(job: str, folder: Path) -> tuple[dict[str, Any], int]:
    """Run a job; return its results, and how often it changed its files."""
    process = start(JOBS[job](folder / "out"), folder / "said")
    changes = count_changes(process, folder / "out", math.inf)
    if process.wait():
        raise AssertionError(f"{job} failed: {(folder / 'said').read_text()[-2000:]}")
    return read_results(folder / "out"), changes


def kill_and_finish(job: str, folder: Path, kills: int, changes: int, rng: random.Random) -> Any:
    """Kill a job at random changes of its files, run it to its end, and return its results."""
    for _ in range(kills):
        process = start(JOBS[job](folder / "out"), folder / "said")
        count_changes(process, folder / "out", rng.randint(1, changes))
        time.sleep(rng.uniform(0, 0.005))  # also within the change
        process.kill()
        process.wait()
    return run_to_end(job, folder)[0]


def main() -> int:
    """Run all rounds; return 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    lost = 0
    for job in args.jobs:
        rng = random.Random(f"{args.seed} {job}")
        folder = Path(tempfile.mkdtemp())
        expected, changes = run_to_end(job, folder)
        for number in range(args.rounds):
            shutil.rmtree(folder / "out")
            found = kill_and_finish(job, folder, rng.randint(1, 3), changes, rng)
            names = [name for name in expected | found if expected.get(name) != found.get(name)]
            print(f"{job}, round {number + 1}: {', '.join(names) or 'the same'}", flush=True)
            lost += bool(names)
        shutil.rmtree(folder)
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
