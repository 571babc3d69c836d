"""Processes of one training find each other without a GPU, or are refused before they begin."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.processes import (
    Launch,
    check_command_line,
    check_launch,
    parse_launch,
    refuse_training_alone,
)
from tests.helpers.commands import FAMILIES, TRAINING, USER_DIR, new_directory, script
from tests.helpers.programs import true_start

RANK = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
WORKS = [
    *("--distributed-world-size", "2", "--distributed-no-spawn"),
    *("--distributed-init-method", "env://", "--distributed-backend", "gloo"),
    *("--ddp-backend", "legacy_ddp"),
]


def _without(option):
    """Return the options that work, without one and its value."""
    place = WORKS.index(option)
    return WORKS[:place] + WORKS[place + (1 if option.endswith("spawn") else 2) :]


@pytest.mark.parametrize(
    ("words", "environment", "gpus", "lacks"),
    [
        ([], RANK, 0, "--distributed-world-size 2, --distributed-init-method env://"),
        (WORKS, RANK, 0, "--distributed-rank of each process"),
        ([*WORKS, "--distributed-rank", "0"], RANK, 0, "--distributed-rank of each process"),
        *(
            ([*_without(option), "--distributed-rank", "1"], RANK, 0, f"they need {option}")
            for option in WORKS
            if option.startswith("--")
        ),
        ([*WORKS[:2]], {}, 0, "--distributed-init-method"),
        (["--distributed-init-method", "tcp://localhost:9"], {}, 0, "would start none"),
        (["--distributed-world-size=2", *WORKS[3:]], {}, 0, "--distributed-no-spawn"),
        ([], RANK, 1, "--distributed-world-size 1 each would train alone"),
    ],
)
def test_refused(words, environment, gpus, lacks):
    with pytest.raises(UserError, match=lacks.replace("(", r"\(")):
        check_launch(parse_launch(words, gpus), environment, gpus)


@pytest.mark.parametrize(
    ("words", "environment", "gpus"),
    [
        ([], {}, 0),
        ([], {}, 4),
        ([], RANK, 2),
        (["data", "--arch", "x", "--lr", "0.1"], {}, 0),
        ([*WORKS, "--distributed-rank", "1"], RANK, 0),
        ([*WORKS, "--distributed-rank", "1"], {}, 0),
        (["--distributed-world-size", "2", "--fp16"], {}, 2),
        (["--distributed-world-size", "two"], {}, 0),
        ([], {**RANK, "WORLD_SIZE": "1", "RANK": "0"}, 0),
        ([], {"WORLD_SIZE": "2"}, 0),
    ],
)
def test_taken(words, environment, gpus):
    check_launch(parse_launch(words, gpus), environment, gpus)


def test_all_options_are_read():
    launch = parse_launch([*WORKS, "--distributed-rank", "1"], 0)
    assert launch == Launch(2, 1, "env://", True, "gloo", "legacy_ddp")


@pytest.mark.parametrize("command", ["generate", "interactive", "eval-lm", "validate", "score"])
@pytest.mark.parametrize("place", ["/bin/fairseq-{}", "/lib/fairseq_cli/{}.py"])
def test_only_trainings_are_judged(command, place, monkeypatch):
    """Elsewhere the options that count processes count the shards of the data."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ["data", "--distributed-world-size", "4", "--distributed-rank", "1"]
    file = place.format(command.replace("-", "_") if place.endswith(".py") else command)
    monkeypatch.setattr("sys.argv", [file, *words])
    check_command_line()
    monkeypatch.setattr("sys.argv", [place.format("train"), *words])
    with pytest.raises(UserError, match="4 processes of one training"):
        check_command_line()


def test_a_program_of_ones_own_is_not_judged_by_its_folder(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    file = "/home/me/fairseq-experiments/train.py"
    monkeypatch.setattr("sys.argv", [file, "--distributed-world-size", "4"])
    check_command_line()


def test_hydra_has_only_the_number_of_processes():
    with pytest.raises(UserError, match="each would train alone, as rank 0"):
        refuse_training_alone(1, RANK)
    refuse_training_alone(2, RANK)


def _torchrun(*words):
    """Start two processes as torchrun does; return its exit code and all that they said."""
    torchrun = [script("torchrun"), "--standalone", "--nproc_per_node", 2, "--no-python"]
    done = subprocess.run(
        [str(word) for word in (*torchrun, *words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=new_directory(),
        env={
            **true_start(),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{script('torchrun').parent}{os.pathsep}{os.environ['PATH']}",
        },
    )
    return done.returncode, done.stdout + done.stderr


def _options(save_dir):
    chosen = FAMILIES["causal_lm"]
    words = [chosen.data(), "--user-dir", USER_DIR, *chosen.task, *chosen.model, *TRAINING]
    return [*words, "--batch-size", 4, "--max-epoch", 1, "--save-dir", save_dir]


@pytest.mark.slow
def test_two_processes_of_torchrun_are_told_what_works():
    save_dir = new_directory()
    code, said = _torchrun("fairseq-train", *_options(save_dir))
    assert code
    errors = [line for line in said.splitlines() if line.startswith("fairseq-posenc: error: ")]
    assert len(errors) == 2
    assert all("2 processes of one training" in line for line in errors)
    assert not list(save_dir.glob("*.pt"))


@pytest.mark.slow
def test_what_the_line_names_trains_with_two_ranks():
    save_dir = new_directory()
    command = ["sh", "-c", 'exec fairseq-train "$@" --distributed-rank "$RANK"', "sh"]
    code, said = _torchrun(*command, *_options(save_dir), *WORKS)
    assert code == 0, said[-3000:]
    assert "training on 2 devices" in said
    state = torch.load(save_dir / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 2  # 16 sentences, 4 on each rank
