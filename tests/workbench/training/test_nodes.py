"""Trainings over both nodes of a real cluster, by the script that users submit."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import pytest
import torch

from tests.helpers.commands import sentences
from tests.helpers.products import some_of
from tests.helpers.slurm import NODES, Cluster, needs_slurm
from tests.helpers.waiting import free_ports, wait_until
from tests.workbench.training.test_train_scripts_pretraining import SCRIPTS, start

pytestmark = [pytest.mark.slow, needs_slurm]

UPDATES = 40  # with a checkpoint after every fifth
# An even number of batches in an epoch: of what is left over, fairseq counts one rank's only.
SETTINGS = [
    *("--decoder-layers", 2, "--decoder-embed-dim", 128, "--decoder-ffn-embed-dim", 512),
    *("--decoder-attention-heads", 4, "--num-workers", 0, "--log-interval", 1),
    *("--tokens-per-sample", 8, "--lr", "1e-3", "--warmup-updates", 1, "--log-format", "json"),
    *("--dropout", 0, "--attention-dropout", 0, "--max-update", UPDATES),
    *("--save-interval-updates", 5, "--no-epoch-checkpoints", "--keep-interval-updates", 1),
]


def words(out: Path) -> list[Any]:
    options = ["--device", "cpu", "--per-gpu", 4, "--seeds", 1, "--out", out]
    return ["b_lm", "learned", sentences(), *options, "--", *SETTINGS]


def submit(cluster: Cluster, out: Path) -> str:
    """Submit the training as users do, but for where the nodes meet: here they have one name."""
    head = f"127.0.0.1:{free_ports(1)[0]}"
    name, *given = words(out)
    scripts = [SCRIPTS / "slurm.sh", SCRIPTS / f"{name}.sh"]
    options = ["--parsable", "--nodes=2", "--time=10", f"--output={out}.log"]
    line = [*("sbatch", *options), *scripts, "--head", head, *given]
    return cluster.ask(*map(str, line)).strip()


def state(cluster: Cluster, job: str) -> str:
    return cluster.ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip()


def wait_for_end(cluster: Cluster, job: str) -> str:
    wait_until(lambda: state(cluster, job) in ("COMPLETED", "FAILED", "NODE_FAIL"))
    return state(cluster, job)


def losses(out: Path) -> dict[int, float]:
    """Return the loss of each update, as the log has it last."""
    log = (out / "seed1" / "train.log").read_text()
    found = re.findall(r'"loss": "([\d.]+)", "ppl"[^}]*"num_updates": "(\d+)"', log)
    return {int(update): float(loss) for loss, update in found}


def resumed_update(out: Path) -> int:
    """Return the update of the checkpoint from which the training went on last; 0 without one."""
    log = (out / "seed1" / "train.log").read_text()
    return max(map(int, re.findall(r"Loaded checkpoint .* @ (\d+) updates", log)), default=0)


def last(out: Path) -> dict[str, Any]:
    return torch.load(out / "seed1" / "checkpoint_last.pt", weights_only=False)


def trainings_on(cluster: Cluster, node: str) -> Iterator[int]:
    """Yield the processes of fairseq-train on a node."""
    ours = {f"SLURM_CONF={cluster.conf}".encode(), f"SLURMD_NODENAME={node}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            named = b"fairseq-train" in (process / "cmdline").read_bytes()
            if named and ours <= {*(process / "environ").read_bytes().split(b"\0")}:
                yield int(process.name)


@pytest.fixture(scope="module", name="alone")
def train_on_one_node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    start(*words(out), cwd=out.parent)
    return out


FAULTS = ["none", "a process is killed", "a node dies", "it is queued again"]


@pytest.mark.parametrize("fault", some_of(FAULTS[1:3], FAULTS))
def test_two_nodes_give_the_losses_of_one_whatever_happens(cluster, alone, tmp_path, fault):
    out = tmp_path / "out"
    job = submit(cluster, out)
    if fault != "none":
        wait_until(lambda: is_zipfile(out / "seed1" / "checkpoint_last.pt"))  # it is whole
    if fault == "a process is killed":  # the job ends: nobody waits for the other for ever
        for process in trainings_on(cluster, NODES[1]):
            os.kill(process, signal.SIGKILL)
        assert wait_for_end(cluster, job) == "FAILED", Path(f"{out}.log").read_text()
        assert max(losses(out)) < UPDATES  # a copy of a checkpoint may be torn
        job = submit(cluster, out)
    elif fault == "a node dies":
        cluster.kill(NODES[1])
        cluster.start(NODES[1])
        time.sleep(8)  # Slurm 22.05 takes a node that has just come back out of the next job
        cluster.hasten(job)
    elif fault == "it is queued again":
        cluster.ask("scontrol", "requeue", job)
        cluster.hasten(job)
    assert wait_for_end(cluster, job) == "COMPLETED", Path(f"{out}.log").read_text()
    log = Path(f"{out}.log").read_text()
    assert "training on 2 devices" in log
    assert ("resuming from" in log) == (fault != "none")
    assert last(out)["optimizer_history"][-1]["num_updates"] == UPDATES
    logged, expected = losses(out), losses(alone)
    assert set(expected) == set(range(1, UPDATES + 1))
    # What was printed just before a node died, its log may lack: all since the checkpoint is there.
    assert set(logged) >= set(range(resumed_update(out) + 1, UPDATES + 1))
    assert logged == pytest.approx({update: expected[update] for update in logged}, rel=2e-3)
