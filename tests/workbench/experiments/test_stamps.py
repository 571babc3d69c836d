"""Steps of compare, choose and probe: folders and stamps, so that run folders of before go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.running.jobs import ALONE, RunContext, Step
from tests.workbench.experiments.test_compare import small_text

GOLDEN = Path(__file__).with_name("stamps.json")
TEXT = ["--text", "my.txt", "--vocab-size", "60", "--updates", "40"]
CALLS = {
    "compare": [*TEXT, "--encodings", "decbert_diff,m4m(max_distance=8)", "--lrs", "0.003,1e-2"],
    "compare-causal": [*TEXT, "--family", "causal-lm", "--encodings", "none"],
    "choose": [
        *("--family", "causal-lm", "--text", "my.txt", "--encodings", "none,rope"),
        *("--length", "32", "--trained", "16", "--vocab-size", "60", "--budget", "10s"),
    ],
    "probe": ["--tasks", "copy", "--encodings", "rope", "--lengths", "5,90", "--updates", "50"],
    "probe-both": [
        *("--tasks", "sort", "--encodings", "m4m(max_distance=8)", "--family", "encoder-decoder"),
        *("--updates", "50"),
    ],
}


@pytest.mark.parametrize("name", CALLS)
def test_folders_and_stamps_are_those_of_the_last_version(name, tmp_path, monkeypatch):
    steps: dict[str, Any] = {}

    def do(step: Step, context: RunContext = ALONE) -> Any:
        folder = step.folder
        steps.setdefault(folder.as_posix(), {"inputs": step.inputs, "goal": step.goal})
        folder.mkdir(parents=True, exist_ok=True)
        if folder.name == "text" or folder.parent.name == "rounds":
            facts = step.work(context)
        elif folder.name == "data":
            facts = {"train_tokens": 9, "valid_tokens": 9}
            for part in ("train", "valid"):
                (folder / f"{part}.pieces").write_text("a b\n")
        elif folder.name == "measured":
            lengths = (5, 10, 20, 40, 60, 80, 90, 120, 160, 200)
            facts = {"perplexity": 9.0, **dict.fromkeys(map(str, lengths), 0.5)}
        else:
            facts = {"position_parameters": 8, "seconds": 100.0}
            (folder / "train.log").write_text(
                '| valid | {"valid_loss": "5", "num_updates": "40"}\n'
            )
        step._write_stamp(facts)
        return facts

    monkeypatch.setattr(Step, "do", do)
    monkeypatch.chdir(tmp_path)
    small_text(tmp_path / "my.txt")
    assert main([name.partition("-")[0], *CALLS[name], "--seeds", "1,7", "--out", "run"]) == 0
    found = json.loads(json.dumps(steps).replace(f'"{__version__}"', '"VERSION"'))
    assert found == json.loads(GOLDEN.read_text("utf-8"))[name]
