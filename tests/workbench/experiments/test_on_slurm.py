"""compare on a real cluster of two nodes, begun on one machine and continued there, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import pytest
import torch

from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.running.logs import read_curve_file
from tests.helpers.products import some_of
from tests.helpers.slurm import needs_slurm
from tests.helpers.waiting import wait_until
from tests.workbench.experiments.test_compare import small_text

pytestmark = [pytest.mark.slow, needs_slurm]


def compare(out: Path, models: str, *where: str, updates: int = 4) -> None:
    text = out.with_name("text.txt")
    if not text.exists():
        small_text(text)
    sizes = ["--encodings", models, "--seeds", "1", "--updates", str(updates), "--vocab-size", "60"]
    tiny = ["--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--max-tokens", "1024"]
    given = ["compare", "--text", str(text), "--out", str(out), *sizes, *where]
    assert main([*given, "--", *tiny]) == 0


def models(out: Path) -> dict[str, Any]:
    return {
        str(path.parent.relative_to(out)): torch.load(path, weights_only=False)["model"]
        for path in sorted(out.rglob("checkpoint_last.pt"))
    }


def perplexities(out: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(out)): read_curve_file(path).entries[-1].perplexity
        for path in sorted(out.rglob("train.log"))
    }


@pytest.mark.usefixtures("cluster")
def test_a_sweep_goes_on_on_a_cluster_and_back(tmp_path, capsys):
    here, both = tmp_path / "here", tmp_path / "both"
    compare(here, "none,learned", "--jobs", "1")
    compare(both, "none", "--jobs", "1")
    capsys.readouterr()
    compare(both, "none,learned", "--on", "slurm", "time=10")
    said = capsys.readouterr().err
    assert "[2 of 2 ended]" in said
    assert len(json.loads((both / "slurm" / "jobs.json").read_text())) == 1  # learned
    compare(both, "none,learned", "--jobs", "1")
    assert "starting fairseq-train" not in capsys.readouterr().err
    torch.testing.assert_close(models(both), models(here), rtol=0, atol=0)
    assert perplexities(both) == perplexities(here)


LONG = 160  # updates, a checkpoint after each tenth


@pytest.fixture(scope="module", name="undisturbed")
def train_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("here") / "out"
    compare(out, "m4m", "--jobs", "1", updates=LONG)
    return out


FAULTS = ["requeued", "preempted", "dead node"]


@pytest.mark.parametrize("fault", some_of(["preempted"], FAULTS))
def test_a_training_goes_on_bit_by_bit(cluster, undisturbed, tmp_path, fault):
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        compare(out, "m4m", "--on", "slurm", "time=10", "--detach", updates=LONG)
    (job,) = json.loads((out / "slurm" / "jobs.json").read_text()).values()
    wait_until(lambda: any(map(is_zipfile, out.glob("models/*/*/checkpoint_last.pt"))))
    state, node = cluster.ask("squeue", "-hrj", job, "-o", "%T %N").split()
    assert state == "RUNNING"
    if fault == "requeued":
        cluster.ask("scontrol", "requeue", job)
    elif fault == "preempted":  # which is what it hears before its time is up, too
        cluster.ask("scancel", "--signal=USR2", job)
    else:
        cluster.kill(node)
        cluster.start(node)
    cluster.hasten(job)
    compare(out, "m4m", "--on", "slurm", "time=10", updates=LONG)
    logs = "".join(path.read_text() for path in (out / "slurm").glob("*_log.err"))
    assert "starting fairseq-train to continue at update" in logs
    torch.testing.assert_close(models(out), models(undisturbed), rtol=0, atol=0)
    assert perplexities(out) == perplexities(undisturbed)


@pytest.mark.usefixtures("cluster")
def test_choose_ends_a_round_before_it_submits_the_next(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    small_text(text)
    given = ["choose", "--family", "causal-lm", "--length", "16", "--text", str(text)]
    given += ["--encodings", "none,learned", "--vocab-size", "60", "--seeds", "1"]
    given += ["--budget", "30s", "--out", str(out), "--on", "slurm", "time=10"]
    tiny = ["--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--max-tokens", "1024"]
    assert main([*given, "--", *tiny]) == 0
    first, *rounds = capsys.readouterr().err.split("round ")[1:]
    assert len(rounds) == len(list((out / "rounds").iterdir())) - 1 > 0
    assert all("[2 of 2 ended]" in each for each in (first, *rounds))
