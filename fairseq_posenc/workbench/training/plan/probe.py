"""Reads the training to plan, builds the command of the probe, and reads its log.

The probe is the same training for a few updates, from update 0, in a folder of its own.
"""

from __future__ import annotations

import argparse
import resource
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.running.logs import Entry, parse_line, read_machine_facts
from fairseq_posenc.workbench.training import recipes

TRAIN = "fairseq-train"
# The probe must not end or save by epochs, and fairseq's options need a positive number.
_NEVER = "1000000000"


class PlannedTraining(NamedTuple):
    """The command of a training, and the options that the plan needs."""

    command: list[str]  # `fairseq-train` and its arguments
    recipe: Optional[str]  # recipe of a script; None for a command or a script without a recipe
    max_update: Optional[int]  # last update; None without this limit
    max_epoch: Optional[int]  # last epoch; None without this limit
    save_dir: Path  # folder of the checkpoints
    restores: bool  # whether it continues the training of another checkpoint
    position_encoding: Optional[str]  # spec of the positions; None if the architecture decides
    seed: int

    def build_probe(self, updates: int, save_dir: Path) -> list[str]:
        """Build the command of a short training from update 0, which saves one checkpoint."""
        command = [Path(self.command[0]).name, *self.command[1:]]  # run_logged finds it by name
        command += ["--max-update", str(updates), "--max-epoch", _NEVER]
        command += ["--save-dir", str(save_dir), "--no-epoch-checkpoints", "--disable-validation"]
        command += ["--save-interval", _NEVER, "--save-interval-updates", "0"]
        command += ["--log-format", "simple", "--log-interval", "1"]
        if self.restores:  # its weights, but not its number of updates
            for state in ("optimizer", "lr-scheduler", "meters", "dataloader"):
                command.append(f"--reset-{state}")
        return command


def read_training(words: Sequence[str]) -> PlannedTraining:
    """Read the user's words: a ``fairseq-train`` command, or a script and its arguments.

    Raises:
        UserError: the words start no training, or several.
    """
    recipe = None
    if not _is_training(words):
        # Such as train_scripts/b_small.sh learned ..., or fairseq-posenc train-recipe b_small ...
        names = (Path(word).stem for word in words)
        recipe = next((name for name in names if name in recipes.load()["pretraining"]), None)
        words = _ask_for_command(words)
    position = [Path(word).name for word in words].index(TRAIN)
    options = _parse_options([*words[position + 1 :]])
    return PlannedTraining(
        command=list(words),
        recipe=recipe,
        max_update=options.max_update or None,  # 0 means no limit
        max_epoch=options.max_epoch or None,
        save_dir=Path(options.save_dir),
        restores=options.restore_file is not None,
        position_encoding=options.position_encoding,
        seed=options.seed,
    )


def _is_training(words: Sequence[str]) -> bool:
    return any(Path(word).name == TRAIN for word in words)


def _parse_options(words: list[str]) -> argparse.Namespace:
    """Parse the options of fairseq-train that the plan needs, without importing fairseq."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-update", type=int)
    parser.add_argument("--max-epoch", type=int)
    parser.add_argument("--save-dir", default="checkpoints")
    parser.add_argument("--restore-file")
    parser.add_argument("--position-encoding")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_known_args(words)[0]


def _ask_for_command(words: Sequence[str]) -> list[str]:
    """Get a script's training command with ``--dry-run``, and print the script's messages."""
    end = words.index("--") if "--" in words else len(words)  # fairseq's options follow the dashes
    command = [*words[:end], "--dry-run", *words[end:]]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(
            f"{words[0]}: {error.strerror or error}; give a training script and its arguments, or "
            f"a {TRAIN} command after --"
        ) from error
    lines = result.stderr.strip().splitlines()
    if result.returncode:
        message = lines[-1].removeprefix("fairseq-posenc: error: ") if lines else ""
        raise UserError(message or f"{shlex.join(command)} failed")
    print(result.stderr, end="", file=sys.stderr)
    commands = [shlex.split(line) for line in result.stdout.splitlines()]
    commands = [command for command in commands if _is_training(command)]
    if len(commands) != 1:
        raise UserError(
            f"{words[0]} --dry-run prints {len(commands)} {TRAIN} commands, not one; for several "
            "seeds, add --seeds 1"
        )
    return commands[0]


class ProbeLog:
    """Reads the log of the probe, which has a line for each update."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []  # one for each update
        self._times: list[float] = []  # when they came, in seconds
        self._machine: dict[str, str] = {}  # the machine's devices, their memory, ...

    def read(self, text: str, time: float) -> bool:
        """Read a line that came at a time, in seconds; return whether it reports an update."""
        self._machine.update(read_machine_facts(text.rstrip()))
        entry = parse_line(text.rstrip())
        if entry is None or entry.kind != "train_inner":
            return False
        self._entries.append(entry)
        self._times.append(time)
        return True

    def measure(self, left_out: int) -> dict[str, Any]:
        """Compute the figures of all updates except the first ``left_out``, at least one.

        Raises:
            UserError: there are no other updates.
        """
        counted = [entry.figures for entry in self._entries[left_out:]]
        if not counted:
            raise UserError(
                f"the probe's log has {len(self._entries)} updates, and the first {left_out} do "
                "not count; does --log-file or --quiet hide the rest?"
            )
        times = self._times[left_out - 1 :]  # from the end of the last one that does not count
        seconds = [now - before for before, now in zip(times, times[1:])]
        tokens = [float(figures["wpb"]) for figures in counted]  # words per batch
        sequences = [float(figures["bsz"]) for figures in counted]  # batch size
        free = [float(e.figures["gb_free"]) for e in self._entries if "gb_free" in e.figures]
        numbers = {name: float(value) for name, value in self._machine.items() if name != "gpu"}
        total = numbers.get("gpu_total")
        return {  # medians; figures of GPUs are None on a processor
            "seconds_per_update": statistics.median(seconds),
            "tokens_per_second": statistics.median(n / s for n, s in zip(tokens, seconds)),
            "tokens_per_update": statistics.median(tokens),
            "sequences_per_update": statistics.median(sequences),
            "updates_per_epoch": max(entry.updates_per_epoch for entry in self._entries),
            "devices": int(numbers.get("devices", 1)),
            "gpu": self._machine.get("gpu"),
            "gpu_memory": total - min(free) if total and free else None,  # peak, in GiB
            "gpu_total": total,
            "checkpoint_seconds": numbers.get("checkpoint_seconds"),
        }


def measure_largest_process() -> float:
    """Measure the peak memory of the largest child process so far, in GiB."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)  # in bytes, on Linux in KiB
