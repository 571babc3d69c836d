"""compare on a real cluster of two nodes, begun on one machine and continued there, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.workbench.cli import main
from tests.helpers.slurm import needs_slurm
from tests.workbench.experiments.test_compare import small_text

pytestmark = [pytest.mark.slow, needs_slurm]


def compare(out: Path, models: str, *where: str) -> None:
    text = out.with_name("text.txt")
    if not text.exists():
        small_text(text)
    sizes = ["--encodings", models, "--seeds", "1", "--updates", "4", "--vocab-size", "60"]
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
        str(path.relative_to(out)): json.loads(path.read_text())["facts"]
        for path in sorted(out.rglob("measured/stamp.json"))
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
