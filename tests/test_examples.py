"""Every example that a command's help ends with runs, as it stands there, on small data."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import test_glue_commands as glue
import test_squad_commands as squad
import test_translation_commands as translation
from commands import new_directory, sentences, train, trained
from fairseq_posenc import cli
from fairseq_posenc.examples import EXAMPLES
from fairseq_posenc.squad.command import ACTIONS

ROOT = Path(__file__).parents[1]
TINY = (
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --num-workers 0"
)
# Behind the examples of commands that would take hours: less of the same, or the command alone.
LESS = {
    "compare": "--updates 2 --vocab-size 40",
    "squad train": " ".join(squad.changes(**{"optimization.max_epoch": 1})),
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


@pytest.fixture(scope="module")
def folder():
    """A folder with all that the examples name."""
    here = new_directory()
    lm = {name: train("causal_lm", "--position-encoding", name) for name in ("rope", "alibi")}
    links = {
        "data-bin/wiki": sentences(),
        "data-bin/fr-en": translation.data(),
        "data-bin/squad20": squad.files().data,
        "data-bin/glue": glue.data() / "glue",
        "fr-en.pt": translation.checkpoint(),
        "old.en": translation.raw() / "test.en",
        "test.fr": translation.raw() / "test.fr",
        "a.txt": sentences().parent / "train",
        "b.txt": sentences().parent / "valid",
        "dev-v2.0.json": squad.files().raw,
        "roberta.base/model.pt": squad.files().pretrained,
        "bert.pt": glue.pretrained(),
        "checkpoints/bert": trained("masked_lm").save_dir,
        "train_scripts": ROOT / "train_scripts",
    }
    for name, model in lm.items():
        links[f"{name}.pt"] = model.save_dir / "checkpoint_last.pt"
        (here / f"{name}.log").write_text(model.run.log)
    for name, path in links.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).symlink_to(path)
    text = (sentences().parent / "train").read_text()
    (here / "book.txt").write_text(text.replace("\n", ".\n\n") * 20)
    return here


def run(name: str, folder: Path) -> None:
    for line in EXAMPLES[name]:
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
