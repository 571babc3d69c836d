"""Commands of several models on a real cluster of two nodes: their results are those made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.workbench.cli import main
from tests.helpers.slurm import needs_slurm
from tests.workbench.finetuning.test_squad_commands import train_words
from tests.workbench.translation.test_translation_commands import checkpoint

pytestmark = [pytest.mark.slow, needs_slurm]
ON = ["--on", "slurm", "time=10"]


def call(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


def on_cluster(out: Path) -> set[str]:
    """Return the pieces that were jobs."""
    return set(json.loads((out / "slurm" / "jobs.json").read_text()))


@pytest.mark.usefixtures("cluster")
def test_bleu_translates_with_each_model_in_a_job(tmp_path):
    words = ["bleu", f"a={checkpoint()}", f"b={checkpoint()}", "--beam", 2, "--num-shards", 1]
    words += ["--device", "cpu", "--out"]
    call(*words, tmp_path / "here")
    call(*words, tmp_path / "there", *ON, "--jobs", 1)
    assert on_cluster(tmp_path / "there") == {"a", "b"}
    (script,) = (tmp_path / "there" / "slurm").glob("*_submission.sh")
    assert "--array=0-1%1\n" in script.read_text()  # one at a time
    for name in ("bleu.md", "a/greedy.txt", "a/beam-2.txt", "b/greedy.txt", "b/beam-2.txt"):
        here, there = ((tmp_path / each / name).read_bytes() for each in ("here", "there"))
        assert there.replace(b"/there/", b"/here/") == here


@pytest.mark.usefixtures("cluster")
def test_squad_trains_in_a_job(tmp_path, capfd):
    here, there = tmp_path / "here", tmp_path / "there"
    short = {"optimization.max_epoch": 2}
    call(*train_words(here, **short))
    with pytest.raises(SystemExit):
        call(*train_words(there, **short), *ON, "--detach")
    call(*train_words(there, **short), *ON)
    assert on_cluster(there) == {"."}
    found = [torch.load(out / "checkpoint_last.pt")["model"] for out in (here, there)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    capfd.readouterr()
    call(*train_words(there, **short))  # and back
    assert f"{there}: done before" in capfd.readouterr().err
