"""``glue`` and ``squad`` hand the user's own package on to the trainings that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairseq_posenc.workbench.results.record import read
from tests.helpers.commands import TRAINING, made_once, new_directory, run
from tests.helpers.documented import own_encodings
from tests.helpers.preprocess import write_squad
from tests.workbench.finetuning.test_glue_commands import QUICK, TINY, changed, data

pytestmark = pytest.mark.slow


@made_once
def pretrained() -> Path:
    """Train a masked LM with the positions ``root`` for two updates; return its checkpoint."""
    folder = new_directory() / "tiny"
    model: list[Any] = ["--task=masked_lm", "--criterion=masked_lm", "--arch", "roberta_none_tiny"]
    model += ["--tokens-per-sample", 40, "--sample-break-mode", "none", *TINY, *TRAINING]
    own = ["--user-dir", own_encodings(), "--position-encoding", "root", "--save-dir", folder]
    end = ["--max-update", 2, "--no-epoch-checkpoints"]
    run("fairseq-train", data() / "text", *model, *own, *end)
    return folder / "checkpoint_last.pt"


def command(*words: Any) -> str:
    return run("fairseq-posenc", *words, "--user-dir", own_encodings()).out


def test_glue(tmp_path):
    given = ["--checkpoint", pretrained(), "--data", data() / "glue", "--protocol", "m4m"]
    short = [*QUICK, *changed("optimization.max_epoch=1")]
    chosen = ["--tasks", "CoLA", "--learning-rates", "3e-3", "--out", tmp_path]
    command("glue", *given, *chosen, *short)
    assert read(tmp_path / "results.json").spec == "root"
    assert (tmp_path / "submission" / "CoLA.tsv").is_file()


def test_squad(tmp_path):
    raw = write_squad(tmp_path / "birds.json")
    sizes = ["--max-length", 40, "--stride", 8, "--max-question", 12]
    tokens = ["--sentencepiece-model", data() / "pieces.model", "--dict", data() / "text/dict.txt"]
    made = ["--train", raw, "--valid", raw, *tokens, *sizes, "--out", tmp_path / "bin"]
    run("fairseq-posenc", "preprocess", "squad", *made)
    given = ["--checkpoint", pretrained(), "--data", tmp_path / "bin", "--out", tmp_path / "run"]
    command("squad", "train", *given, *changed("dataset.num_workers=0"))
    model = ["--checkpoint", tmp_path / "run" / "checkpoint_last.pt"]
    command("squad", "predict", *model, "--questions", raw, "--out", tmp_path)
    assert read(tmp_path / "score.json").spec == "root"
