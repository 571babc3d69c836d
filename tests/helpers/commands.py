"""fairseq's console scripts, run as users run them, on tiny data made here.

What several tests need (data, trained models) is made once for each session, at its first use,
and by one worker for all.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from fairseq_posenc.folders import LOCK
from fairseq_posenc.user_dir import USER_DIR
from fairseq_posenc.workbench.cli import main
from tests.helpers.programs import SHARED
from tests.helpers.waiting import is_locked, wait_until

HOOK = Path(__file__).resolve().parent / "fault_hook"
SENTENCES = {"train": 16, "valid": 8, "test": 5}
EPOCHS = 4
# All sentences fit into one batch, so an epoch is one update. Without the multiple of 1, fairseq
# drops the sentences left over from batches of 8. It orders a batch again when it resumes, and with
# dropout that would be another loss.
TRAINING = [
    *("--dropout", 0, "--attention-dropout", 0),
    *("--optimizer", "adam", "--lr", 0.001, "--cpu", "--num-workers", 0),
    *("--batch-size", 16, "--required-batch-size-multiple", 1),
    *("--log-format", "json", "--log-interval", 1),
]


def read_log(text: str, name: str) -> list[dict[str, float]]:
    """Return the figures of those lines of fairseq's log, as JSON, that have one of a name."""
    lines = [line[line.index("{") :] for line in text.splitlines() if f'"{name}": ' in line]
    return [{key: float(value) for key, value in json.loads(line).items()} for line in lines]


class Run(NamedTuple):
    """A finished command."""

    command: list[str]
    status: int
    out: str
    err: str

    @property
    def log(self) -> str:
        """Both streams; which of them fairseq logs to depends on the command."""
        return self.out + self.err

    def positions(self) -> list[str]:
        """Return, of each stack, its start-up line from "position encoding: " on."""
        start = "position encoding: "
        return [line.split(start)[1] for line in self.log.splitlines() if start in line]

    def valid(self) -> list[dict[str, float]]:
        """Return the loss and perplexity of each validation, to the digits of the log."""
        found = read_log(self.log, "valid_loss")
        return [{key: line[key] for key in ("valid_loss", "valid_ppl")} for line in found]

    def error(self) -> str:
        """Return the one line, all that is said, in which a command reports a mistake."""
        said = [line for line in self.err.splitlines() if not line.startswith(("INFO:", "DEBUG:"))]
        assert self.status, f"{self.command} succeeded"
        assert len(said) == 1, self.err
        assert said[0].startswith("fairseq-posenc: error: ")
        return said[0].removeprefix("fairseq-posenc: error: ")


def call(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> tuple[str, str]:
    """Call a command in this process; return what it prints to both streams."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 2) -> str:
    """Return the one line in which a command, called in this process, tells a mistake."""
    (line,) = call(capsys, *words, code=code)[1].splitlines()
    assert line.startswith("fairseq-posenc: error: ")
    return line.removeprefix("fairseq-posenc: error: ")


def script(name: str | Path) -> Path:
    """Return the path of a console script of this Python, or one that is given."""
    return Path(sys.executable).parent / name


def run(
    name: str | Path,
    *arguments: Any,
    cwd: Path | None = None,
    given: str | None = None,
    fails: bool = False,
    warnings: str = "ignore",  # fairseq's own would hide what a command says
    **variables: str,
) -> Run:
    """Run a console script, in an empty folder; it succeeds, or ``fails``; ``given`` is input."""
    command = [str(script(name)), *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=cwd or new_directory(),
        input=given,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": warnings,
            **variables,
        },
        check=False,
    )
    result = Run([str(name), *command[1:]], done.returncode, done.stdout, done.stderr)
    assert fails or result.status == 0, f"{result.command} failed:\n{result.log[-4000:]}"
    return result


def halting(folder: Path) -> tuple[dict[str, str], Path]:
    """Return an environment that halts a training's second checkpoint, and a file made then."""
    halted = new_directory() / "halted"
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    fault = {"PYTHONPATH": os.pathsep.join(paths), "HALT": f"{folder},{halted}"}
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **fault}, halted


def kill_command(words: Sequence[Any], holds: Callable[[], Any], folder: Path, **how: Any) -> None:
    """Start a command of ours, kill it once something holds, and wait until its folder is free."""
    command = [str(script("fairseq-posenc")), *map(str, words)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how
    ) as process:
        try:
            wait_until(holds, process)
        finally:
            process.kill()
    wait_until(lambda: not is_locked(folder / LOCK))


class Training(NamedTuple):
    """A run of fairseq-train and the checkpoints it left."""

    run: Run
    save_dir: Path

    def checkpoint(self, name: str = "checkpoint_last.pt") -> dict[str, Any]:
        """Return the contents of a checkpoint, loaded as fairseq does (``weights_only``)."""
        state: dict[str, Any] = torch.load(self.save_dir / name, map_location="cpu")
        return state

    def figures(self, group: str, key: str = "loss") -> list[float]:
        """Return a figure of the last batch of each epoch, in full; the log has three decimals.

        ``group`` is ``train`` or ``valid``; ``key``, ``loss`` or ``gnorm``, the gradient's length.
        """
        epochs = sorted(int(path.stem[10:]) for path in self.save_dir.glob("checkpoint?.pt"))
        states = [self.checkpoint(f"checkpoint{epoch}.pt") for epoch in epochs]
        meters = [meter for state in states for meter in state["extra_state"]["metrics"][group]]
        return [float(values["val"]) for _, name, _, values in meters if name == key]


class Family(NamedTuple):
    """How to train a tiny model of one of fairseq's families."""

    data: Callable[[], Path]
    task: list[Any]
    model: list[Any]
    positions: list[str]  # how the start-up lines begin


@cache
def workspace() -> Any:
    """Return the directory of this session, removed at its end."""
    return tempfile.TemporaryDirectory(prefix="fairseq-posenc-tests-")


_places: list[Path] = []  # where directories are made now, instead of the workspace
Made = TypeVar("Made")


def new_directory() -> Path:
    """Return a new, empty directory."""
    return Path(tempfile.mkdtemp(dir=_places[-1] if _places else workspace().name))


def made_once(function: Callable[..., Made]) -> Callable[..., Made]:
    """Have one worker make the paths that a function of texts returns, for all of a session."""

    @functools.cache
    @functools.wraps(function)
    def make(*given: str) -> Made:
        if SHARED not in os.environ:
            return function(*given)
        place = Path(os.environ[SHARED]) / "made"
        place.mkdir(exist_ok=True)
        path = place / "-".join([function.__module__, function.__qualname__, *given])
        with open(f"{path}.lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _places.append(place)
                try:
                    path.write_bytes(pickle.dumps(function(*given)))
                finally:
                    _places.pop()
        made: Made = pickle.loads(path.read_bytes())
        return made

    return make


def _write_text(directory: Path, suffixes: dict[str, int]) -> None:
    """Write sentences of 8 to 12 words; a step of -1 writes them backwards."""
    rng = random.Random(0)
    for split, count in SENTENCES.items():
        sentences = [
            [f"w{rng.randrange(20)}" for _ in range(rng.randint(8, 12))] for _ in range(count)
        ]
        for suffix, step in suffixes.items():
            text = "".join(" ".join(sentence[::step]) + "\n" for sentence in sentences)
            (directory / f"{split}{suffix}").write_text(text, encoding="utf-8")


def _preprocess(*arguments: str, suffixes: dict[str, int]) -> Path:
    directory = new_directory()
    _write_text(directory, suffixes)
    splits = [part for name in SENTENCES for part in (f"--{name}pref", directory / name)]
    run("fairseq-preprocess", *arguments, *splits, "--destdir", directory / "bin")
    return directory / "bin"


@made_once
def sentences() -> Path:
    """Return data for language models, masked and causal."""
    return _preprocess("--only-source", suffixes={"": 1})


@made_once
def pairs() -> Path:
    """Return data for translation: sentences, and the same backwards."""
    languages = ["--source-lang", "src", "--target-lang", "tgt", "--joined-dictionary"]
    return _preprocess(*languages, suffixes={".src": 1, ".tgt": -1})


# Two sentences are longer than 16 tokens, so each is a block of its own; fairseq's mode for that,
# eos, does not work with numpy 2 but with this package.
BLOCKS = ["--sample-break-mode", "complete", "--tokens-per-sample", "16"]
FAMILIES = {
    "masked_lm": Family(
        sentences,
        ["--task", "masked_lm", "--criterion", "masked_lm", *BLOCKS],
        ["--arch", "roberta_m4m_tiny", "--max-positions", 16],
        ["m4m | directions: both x2 |"],
    ),
    "causal_lm": Family(
        sentences,
        ["--task", "language_modeling", *BLOCKS],
        ["--arch", "transformer_lm_rope_tiny", "--position-encoding", "learned+rope"],
        ["learned+rope | directions: lr x2 |"],
    ),
    "translation": Family(
        pairs,
        ["--task", "translation"],
        [
            *("--arch", "transformer_m4_tiny", "--position-encoding-decoder", "learned+rope"),
            *("--max-source-positions", 16, "--max-target-positions", 16),
        ],
        ["m4 | directions: both x2 |", "learned+rope | directions: lr x2 |"],
    ),
}


def train(
    family: str,
    *more: Any,
    user_dir: str | Path | None = USER_DIR,
    save_dir: Path | None = None,
    data: Any = None,
    launcher: Sequence[Any] = ("fairseq-train",),
    **how: Any,
) -> Training:
    """Train a tiny model of a family, on its data by default; ``more`` overrides its options.

    With ``user_dir=None``, fairseq trains without this package; give ``--arch`` then. ``launcher``
    is the script to run and what its arguments begin with; ``how`` goes to :func:`run`.
    """
    chosen = FAMILIES[family]
    model = chosen.model if user_dir else []
    plugin = ["--user-dir", user_dir] if user_dir else []
    save_dir = save_dir or new_directory()
    options = [*plugin, *chosen.task, *model, *TRAINING, "--save-dir", save_dir, *more]
    return Training(run(*launcher, data or chosen.data(), *options, **how), save_dir)


@made_once
def trained(family: str) -> Training:
    """Return the model of a family that all tests share: four epochs."""
    return train(family, "--max-epoch", EPOCHS)


def assert_positions(done: Run, family: str) -> None:
    """Assert that the start-up lines say what is on in a model of a family, stack by stack."""
    found, expected = done.positions(), FAMILIES[family].positions
    assert len(found) == len(expected), found
    for line, start in zip(found, expected):
        assert line.startswith(start)


def validate(family: str, checkpoint: Path, user_dir: str | Path = USER_DIR) -> Run:
    """Validate a checkpoint; everything about the model comes from it."""
    chosen = FAMILIES[family]
    return run(
        "fairseq-validate",
        chosen.data(),
        *("--user-dir", user_dir, "--path", checkpoint, *chosen.task[:2]),
        *("--batch-size", 16, "--required-batch-size-multiple", 1, "--log-format", "json"),
    )
