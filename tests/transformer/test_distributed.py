"""Several ranks train as one does with as many batches; one that dies ends the job with a line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.commands import (
    EPOCHS,
    FAMILIES,
    TRAINING,
    USER_DIR,
    assert_positions,
    halting,
    read_log,
    script,
    train,
    trained,
)
from tests.helpers.products import some_of
from tests.helpers.tiny_models import logits, make_model, make_tokens
from tests.helpers.waiting import wait_until
from tests.transformer.test_golden_losses import CASES, IN_TURN

slow = pytest.mark.slow
# fairseq finds out about ranks by itself only where there are GPUs.
RANK = 'exec "$0" "$@" --distributed-rank "$RANK"'
PER_NODE = "--nproc_per_node=2"
MARK = "DISTRIBUTED_JOB"  # of the processes of a job
TORCHRUN = ["torchrun", "--standalone", PER_NODE, "--no-python", "sh", "-c", RANK]
DISTRIBUTED = [
    *("--distributed-world-size", 2, "--distributed-no-spawn"),
    *("--distributed-init-method", "env://", "--distributed-backend", "gloo"),
    *("--ddp-backend", "legacy_ddp"),  # the default asks for a GPU
]


def losses(trained):
    """Return the loss and the gradient's length of each update, to the digits of the log."""
    found = read_log(trained.run.log, "gnorm")
    return [each[key] for each in found for key in ("loss", "gnorm") if key in each]


def assert_same_weights(ours, theirs):
    """Sums over ranks have another order, and Adam takes the noise of a gradient of 0 for one.

    That is the gradient of the keys' biases, which move all scores of a query alike.
    """
    ours, theirs = (each.checkpoint()["model"] for each in (ours, theirs))
    for name, weight in ours.items():
        if not name.endswith("k_proj.bias"):
            torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-4)


def train_on(ranks: int, family: str, *options, **how):
    """Train on so many processes of this machine."""
    size = [f"--nproc_per_node={ranks}" if word == PER_NODE else word for word in TORCHRUN]
    given = [*DISTRIBUTED, "--distributed-world-size", ranks, *options]
    return train(family, *given, launcher=[*size, script("fairseq-train")], **how)


@slow
@pytest.mark.parametrize("options", some_of([""], ["", "--checkpoint-activations"]))
def test_two_ranks_give_the_loss_of_one_with_the_double_batch(options):
    """The masked LM has a table in each layer, whose gradients are summed over ranks, too."""
    alone = trained("masked_lm")
    together = train_on(2, "masked_lm", "--batch-size", 8, "--max-epoch", EPOCHS, *options.split())
    assert_positions(together.run, "masked_lm")
    assert "training on 2 devices" in together.run.log
    for key in ("loss", "gnorm"):
        expected = alone.figures("train", key)
        assert together.figures("train", key) == pytest.approx(expected, rel=1e-4)


@slow
@pytest.mark.parametrize(
    ("family", "ranks"), some_of([("translation", 4)], [("masked_lm", 2), ("translation", 4)])
)
def test_ranks_give_what_one_gives_with_as_many_batches(family, ranks):
    """Also with a last update in which some have a smaller batch, and some have none."""
    shared = ["--batch-size", 3, "--max-epoch", 2]
    alone = train(family, *shared, "--update-freq", ranks)
    together = train_on(ranks, family, *shared)
    assert_positions(together.run, family)
    assert f"training on {ranks} devices" in together.run.log
    assert losses(together) == pytest.approx(losses(alone), rel=2e-3)
    ours, theirs = ([x["valid_loss"] for x in run.run.valid()] for run in (together, alone))
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert_same_weights(together, alone)


@slow
def test_a_training_goes_on_with_another_number_of_ranks():
    whole = trained("causal_lm")
    middle = whole.save_dir / "checkpoint2.pt"
    options = ["--batch-size", 8, "--max-epoch", EPOCHS, "--restore-file", middle]
    resumed = train_on(2, "causal_lm", *options)
    assert resumed.figures("train") == pytest.approx(whole.figures("train")[2:], rel=1e-4)
    assert_same_weights(resumed, whole)


def killed_in(folder, *torchruns, **options):
    """Train on two ranks, kill one as soon as there is a checkpoint; return the status and log."""
    chosen = FAMILIES["masked_lm"]
    words = [*TORCHRUN[1:3], *torchruns, *TORCHRUN[3:], script("fairseq-train"), chosen.data()]
    words += ["--user-dir", USER_DIR, *chosen.task, *chosen.model, *TRAINING, *DISTRIBUTED]
    words += ["--batch-size", 8, "--save-dir", folder]
    words += [word for option in options.items() for word in option]
    environment, halted = halting(folder)
    environment[MARK] = str(folder)
    # Else ranks that are started again look for each other where the dead ones were.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(folder / "log", "w+") as log:
        job = subprocess.Popen(
            [str(script("torchrun")), *map(str, words)],
            **{"env": environment, "stdout": log, "stderr": log, "start_new_session": True},
        )
        try:
            wait_until(halted.exists, job)
            os.kill(rank_of(folder, 1), signal.SIGKILL)
            return job.wait(), (folder / "log").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.matrix  # a rank dies in the test below, too
@slow
def test_a_dead_rank_ends_torchrun_and_is_named(tmp_path):
    status, log = killed_in(tmp_path)
    assert status != 0
    assert "rank      : 1 (local_rank: 1)" in log


@slow
def test_a_job_that_torchrun_starts_again_ends_as_if_nothing_had_been(tmp_path):
    ends = {"--max-epoch": 6, "--save-interval": 2}
    status, log = killed_in(tmp_path, "--max-restarts=1", **ends)
    assert status == 0, log
    assert re.search(r"failed \(exitcode: -9\) local_rank: 1 ", log)  # the killed one
    assert log.count("training on 2 devices") == 2
    assert "Loaded checkpoint" in log
    words = ["--batch-size", 8, *(word for option in ends.items() for word in option)]
    whole = train_on(2, "masked_lm", *words).checkpoint()
    ours = torch.load(tmp_path / "checkpoint_last.pt")
    torch.testing.assert_close(ours["model"], whole["model"], rtol=0, atol=0)


def rank_of(folder: Path, rank: int) -> int:
    """Return the process of a rank that a marked torchrun has started."""
    wanted = {f"{MARK}={folder}".encode(), f"RANK={rank}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                return int(process.name)
    raise AssertionError(f"no process is rank {rank}")


@pytest.mark.parametrize(("family", "spec"), some_of(IN_TURN, CASES))
@pytest.mark.usefixtures("_alone")
def test_no_encoding_needs_to_look_for_unused_parameters(family, spec):
    """DDP fails in its second pass if a parameter had no gradient in the first."""
    model = make_model(family, position_encoding=spec).train()
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    for _ in range(2):
        logits(wrapped, family, make_tokens()).sum().backward()


# fairseq spawns a rank for each GPU that it counts; here the ranks are processes of the CPU.
SPAWNING = """
import sys
import torch
from fairseq_cli.train import cli_main
from fairseq_posenc.user_dir import register

register()
if __name__ == "__main__":
    torch.cuda.device_count = lambda: 2
    torch.multiprocessing.set_executable(sys.executable)  # one whose ranks start fast
    cli_main()
"""


@slow
@pytest.mark.parametrize("user_dir", some_of([USER_DIR], ["fairseq_posenc", USER_DIR]))
def test_spawned_ranks_find_the_plugin(tmp_path, user_dir):
    """A new Python for each rank gets the pickled settings; the program has the package already."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNING, encoding="utf-8")
    together = train(
        "masked_lm",
        *("--batch-size", 8, "--max-epoch", 1, "--ddp-backend", "legacy_ddp"),
        *("--distributed-world-size", 2, "--distributed-backend", "gloo"),
        *("--distributed-init-method", f"file://{tmp_path}/store"),
        user_dir=user_dir,
        launcher=["python", program],
    )
    assert "training on 2 devices" in together.run.log
    alone = trained("masked_lm").figures("train", "loss")[:1]
    assert together.figures("train", "loss") == pytest.approx(alone, rel=1e-4)
