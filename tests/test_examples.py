"""Every example that a command's help ends with runs, as it stands there, on small data."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import test_glue_commands as glue
import test_squad_commands as squad
import test_translation_commands as translation
from commands import Training, new_directory, sentences, train, trained
from fairseq_posenc import cli
from fairseq_posenc.examples import EXAMPLES
from fairseq_posenc.squad.command import ACTIONS

ROOT = Path(__file__).parents[1]
TINY = (
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --num-workers 0"
)
# Behind the examples of commands that would take hours: less of the same, or the command alone;
# and what cut the text of the tests.
LESS = {
    "export": "--tokens words",
    "compare": "--updates 2 --vocab-size 30 --seeds 1",
    "bleu": "--num-shards 1",
    "squad train": " ".join(squad.changes(**{"optimization.max_epoch": 1})),
    "probe": "--updates 2 --trained 6 --lengths 4,8 --seeds 1",
    "train": "--dry-run",
    "ablation": "--dry-run",
    "plan": f"-- {TINY}",
    "glue": "--learning-rates 3e-3 --set optimization.max_epoch=1 "
    + " ".join(word for word in glue.QUICK),
}
FROM_ROOT = ("docs",)  # which is about the files of a checkout


def test_every_command_has_examples():
    assert EXAMPLES.keys() == cli.COMMANDS.keys() | {f"squad {name}" for name in ACTIONS}
    for name, lines in EXAMPLES.items():
        assert all(f"fairseq-posenc {name}" in line for line in lines)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_help_ends_with_them(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*name.split(), "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr()
    assert told.out.endswith("\n  ".join(["\nexamples:", *EXAMPLES[name]]) + "\n")
    assert not told.err


@cache
def model(encoding: str) -> Training:
    return train("causal_lm", "--position-encoding", encoding, "--max-epoch", 2)


def log(encoding: str) -> Path:
    path = new_directory() / "train.log"
    path.write_text(model(encoding).run.log)
    return path


def book() -> Path:
    path = new_directory() / "book.txt"
    rng = random.Random(0)
    lines = (" ".join(f"w{rng.randrange(20)}" for _ in range(10)) for _ in range(800))
    path.write_text("".join(f"{line}.\n\n" for line in lines))
    return path


def exported() -> Path:
    path = new_directory() / "model"
    words = ["export", "--checkpoint", str(glue.pretrained()), "--to", "hf", "--out", str(path)]
    words += ["--tokens", "words"]
    assert cli.main(words) == 0
    return path


# What the examples name, made when the first one that names it runs.
FILES: dict[str, Callable[[], Path]] = {
    "data-bin/wiki": sentences,
    "data-bin/fr-en": translation.data,
    "data-bin/squad20": lambda: squad.files().data,
    "data-bin/glue": lambda: glue.data() / "glue",
    "rope.pt": lambda: model("rope").save_dir / "checkpoint_last.pt",
    "alibi.pt": lambda: model("alibi").save_dir / "checkpoint_last.pt",
    "rope.log": lambda: log("rope"),
    "alibi.log": lambda: log("alibi"),
    "fr-en.pt": translation.checkpoint,
    "old.en": lambda: translation.raw() / "test.en",
    "test.fr": lambda: translation.raw() / "test.fr",
    "book.txt": book,
    "a.txt": lambda: sentences().parent / "train",
    "b.txt": lambda: sentences().parent / "valid",
    "dev-v2.0.json": lambda: squad.files().raw,
    "roberta.base/model.pt": lambda: squad.files().pretrained,
    "bert.pt": glue.pretrained,
    "my-model": exported,
    "checkpoints": lambda: trained("masked_lm").save_dir,
    "train_scripts": lambda: ROOT / "train_scripts",
}


@pytest.fixture(scope="module")
def folder():
    return new_directory()


def run(name: str, folder: Path) -> None:
    for line in EXAMPLES[name]:
        for file, make in FILES.items():
            if file in line and not (folder / file).exists():
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).symlink_to(make())
        if name in LESS and "--dry-run" not in line:
            line, dashes, rest = line.partition(" -- ")
            line = f"{line} {LESS[name]}{dashes}{rest}"
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=ROOT if name in FROM_ROOT else folder,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr[-4000:]}"
        if "--json" in line:
            json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if not name.startswith("squad")])
def test_they_run(name, folder):
    run(name, folder)


@pytest.mark.slow
def test_those_of_squad_run_one_after_the_other(folder):
    for name in (name for name in EXAMPLES if name.startswith("squad")):
        run(name, folder)
