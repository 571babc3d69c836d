"""The commands that the README and the pages show, and what they need to run on small data."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from fairseq_posenc.workbench import cli
from tests.helpers.commands import Training, made_once, new_directory, sentences, train, trained
from tests.helpers.hf_models import save_llama
from tests.helpers.programs import BIN
from tests.workbench.finetuning import test_glue_commands as glue
from tests.workbench.finetuning import test_squad_commands as squad
from tests.workbench.translation import test_translation_commands as translation

ROOT = Path(__file__).parents[2]
# How a command begins.
PROGRAMS = (
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:fairseq-\S+|python|pip|make|train_scripts/\S+|sbatch|wget|tensorboard|\.|for)"
)
KINDS = ("", "sh", "bash")  # of fenced blocks; those of other kinds say so
FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# Commands that tests cannot run as they stand, by how they begin, and why.
LEFT_OUT = {
    "make": "installs, or runs these tests",
    "pip install": "needs a network",
    "wget": "needs a network",
    ". .venv/bin/activate": "the tests' environment is another",
    "sbatch": "needs SLURM; test_configurations.py",
    "tensorboard": "is a server that does not end",
    "WANDB_": "needs an account",
    "fairseq-posenc lm-length --text book.txt": "a trained model; test_lm_length.py",
    "python benchmarks/transformers_host.py": "measures for minutes",
    "python benchmarks/probe.py": "trains for minutes; tests/benchmarks/test_probe.py",
    "fairseq-train $(ls": "needs the shards that sbatch made",
    "OMP_NUM_THREADS=1 fairseq-hydra-train": "takes minutes; test_configurations.py",
    "fairseq-hydra-train": "takes minutes; test_configurations.py, test_glue_metrics.py",
    "train_scripts/": "needs GPUs; test_configurations.py composes all",
    "WANDB_NAME": "needs an account",
    "OMP_NUM_THREADS=1 fairseq-posenc bleu": "needs the training before it; other pages run bleu",
    "fairseq-posenc preprocess plain_text --train docs": "needs the checkout",
}
# What stands in the text of a script, and what runs.
SMALLER = [
    (re.compile(r"hold-out=\d+"), "hold-out=1"),
    (re.compile(r"size=\d+GiB"), "size=1KiB"),
    (re.compile(r"\blines=\d+"), "lines=100"),
    (re.compile(r"512 --context-window 448"), "16 --context-window 14"),
    (re.compile(r"(?<=for )(\w+ in)(?: [\w.]+)+?((?: [\w.]+){2})(?=;)"), r"\1\2"),
]


def scripts(path: Path) -> list[str]:
    """Return the blocks of commands of a page."""
    text = path.read_text(encoding="utf-8")
    blocks = [textwrap.dedent(block) for _, kind, block in FENCED.findall(text) if kind in KINDS]
    return [prompted(block) for block in blocks]


def python_of(page: Path) -> list[str]:
    """Return the blocks of Python of a page."""
    return [code for _, kind, code in FENCED.findall(page.read_text()) if kind == "python"]


def prompted(block: str) -> str:
    """Return a block without what its commands print, if they stand behind a prompt."""
    lines = re.findall(r"^\$ (.+(?:\\\n.+)*)", block, re.MULTILINE)
    return "\n".join(lines) if lines else block


def commands(script: str) -> list[str]:
    """Return the commands of a script, one after the other, without comments."""
    joined = re.sub(r"\\\n\s*", " ", script)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def why_left_out(command: str) -> str:
    """Return why a command cannot run here, or an empty string."""
    if " --on slurm " in command:
        return "needs Slurm; test_slurm.py and test_preprocess_on_slurm.py"
    return next((why for start, why in LEFT_OUT.items() if command.startswith(start)), "")


def named(script: str, files: Iterable[str]) -> list[str]:
    """Return the files that a script reads, but for those that it writes itself."""
    found = []
    for name in files:
        here = rf"(?<![\w./-]){re.escape(name)}(?![\w-]|\.\w)"
        if re.search(here, script) and not re.search(rf"--(?:out|to) {here}", script):
            found.append(name)
    # A comparison without a text would read the documentation inside Python, which is long.
    return [*found, "my.txt"] if " compare " in script else found


# ----------------------------------------------------------------------------------- small data


# Those that commands give as a text, too.
WORDS = [*("a", "sentence", "of", "the", "text"), *("keys", "dictionary", "returned", "list")]
WORDS += ["are", "as", "w1", "w2", "w3"]


@made_once
def model(encoding: str) -> Training:
    return train("causal_lm", "--position-encoding", encoding, "--max-epoch", 2)


def checkpoint(encoding: str) -> Path:
    return model(encoding).save_dir / "checkpoint_last.pt"


@made_once
def log(encoding: str) -> Path:
    path = new_directory() / "train.log"
    path.write_text(model(encoding).run.log)
    return path


@made_once
def book() -> Path:
    path = new_directory() / "book.txt"
    rng = random.Random(0)
    lines = (" ".join(rng.choice(WORDS) for _ in range(10)) for _ in range(800))
    path.write_text("".join(f"{line}.\n\n" for line in lines))
    return path


@made_once
def exported() -> Path:
    path = new_directory() / "model"
    words = ["export", "--checkpoint", str(glue.pretrained()), "--out", str(path)]
    words += ["--tokens", "words"]
    assert cli.main(words) == 0
    return path


@made_once
def causal_lm() -> Path:
    path = new_directory() / "my-lm"
    save_llama(path, WORDS)
    return path


@made_once
def corpus() -> Path:
    """Return a folder as WikiExtractor makes it; beside it are books and the Pile."""
    folder = new_directory()
    for name in ("wikipedia", "books", "pile"):
        (folder / name).mkdir()
    for number in range(6):
        text = "\n".join(f"In {year} it was {number}." for year in range(1900, 1940))
        page = f'<doc id="{number}" url="" title="{number}">\n{number}\n\n{text}\n</doc>\n'
        (folder / "wikipedia" / f"wiki_{number:02}").write_text(page)
        (folder / "books" / f"{number}.txt").write_text(text)
        sets = ("Pile-CC", "OpenWebText2", "Books3")
        lines = [json.dumps({"text": text, "meta": {"pile_set_name": name}}) for name in sets]
        (folder / "pile" / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "wikipedia"


@made_once
def c4() -> Path:
    """Return a folder with files of C4, as it is published."""
    folder = new_directory()
    text = "\n".join(f"In {year} it was here." for year in range(1900, 1910))
    names = [f"train.{number:05}-of-01024" for number in range(16)]
    for name in (*names, "validation.00000-of-00008"):
        with gzip.open(folder / f"c4-{name}.json.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for _ in range(20))
    return folder


@cache
def own_encodings() -> Path:
    """Return the user's package that adding.md shows."""
    folder = new_directory() / "my_encodings"
    folder.mkdir()
    for name, code in zip(("root.py", "__init__.py"), python_of(ROOT / "docs" / "adding.md")):
        (folder / name).write_text(code)
    return folder


@cache
def checkpoints() -> Path:
    """Return a folder of trainings."""
    folder = new_directory()
    shutil.copytree(trained("masked_lm").save_dir, folder / "b_small")
    return folder


@cache
def shards() -> Path:
    folder = new_directory()
    for shard in range(2):
        (folder / f"shard{shard}-of-2").symlink_to(sentences())
    return folder


@cache
def multi30k() -> Path:
    """Return a folder with the files of Multi30k."""
    folder = new_directory()
    for name, ours in {"train": "train", "val": "valid", "test_2016_flickr": "test"}.items():
        for language in ("fr", "en"):
            (folder / f"{name}.{language}").symlink_to(translation.raw() / f"{ours}.{language}")
    return folder


def beside_squad(name: str) -> Callable[[], Path]:
    return lambda: squad.files().raw.with_name(name)


# What the commands name, made when the first one that names it runs.
FILES: dict[str, Callable[[], Path]] = {
    "data-bin/wikitext-103": sentences,
    "data-bin/wikitext-2": sentences,
    "data-bin/wiki": sentences,
    "data-bin/books-wiki": sentences,
    "data-bin/fr-en": translation.data,
    "data-bin/iwslt17.fr-en": translation.data,
    "data-bin/multi30k": translation.data,
    "data-bin/squad20": lambda: squad.files().data,
    "data-bin/squad11": lambda: squad.files().data,
    "data-bin/glue": lambda: glue.data() / "glue",
    "glue_data": lambda: glue.data() / "raw",
    "rope.pt": lambda: checkpoint("rope"),
    "alibi.pt": lambda: checkpoint("alibi"),
    "rope.log": lambda: log("rope"),
    "alibi.log": lambda: log("alibi"),
    "fr-en.pt": translation.checkpoint,
    "alibi/checkpoint_best.pt": translation.checkpoint,
    "old.en": lambda: translation.raw() / "test.en",
    "test.fr": lambda: translation.raw() / "test.fr",
    "fr-en": translation.raw,
    "multi30k": multi30k,
    "wiki.train.raw": lambda: sentences().parent / "train",
    "wiki.valid.raw": lambda: sentences().parent / "valid",
    "wiki.test.raw": lambda: sentences().parent / "test",
    "books": lambda: corpus().with_name("books"),
    "extracts": corpus,
    "enwiki": corpus,
    "zhwiki": corpus,
    "pile": lambda: corpus().with_name("pile"),
    "c4": c4,
    "checkpoints/": checkpoints,
    "my_encodings": own_encodings,
    "data-bin/c4": shards,
    "data-bin/my": lambda: squad.files().data,
    "roberta.base.m4m.pt": lambda: squad.files().pretrained,
    "book.txt": book,
    "my.txt": book,
    "my-valid.txt": lambda: sentences().parent / "valid",
    "a.txt": lambda: sentences().parent / "train",
    "b.txt": lambda: sentences().parent / "valid",
    "train-v1.1.json": lambda: squad.files().raw,
    "dev-v1.1.json": lambda: squad.files().raw,
    "dev-v2.0.json": lambda: squad.files().raw,
    "encoder.json": beside_squad("encoder.json"),
    "vocab.bpe": beside_squad("vocab.bpe"),
    "dict.txt": beside_squad("dict.txt"),
    "roberta.base/model.pt": lambda: squad.files().pretrained,
    "roberta.base/dict.txt": beside_squad("dict.txt"),
    "pretrained.pt": lambda: squad.files().pretrained,
    "checkpoint_best.pt": lambda: squad.files().pretrained,
    "bert.pt": glue.pretrained,
    "my-model": exported,
    "my-lm": causal_lm,
    "train_scripts": lambda: ROOT / "train_scripts",
    "docs/vectors": lambda: ROOT / "docs" / "vectors",
}


# ------------------------------------------------------------------------------------- running


@cache
def shims() -> Path:
    """Return a folder of programs for the PATH that shrink commands, before the tests' own."""
    folder = new_directory()
    for name in ("fairseq-posenc", "fairseq-train", "python"):
        program = Path(sys.executable).with_name(name)
        shrink = Path(__file__).with_name("shrink_command.py")
        call = f'exec "{BIN / "python"}" -IS "{shrink}" "{program}" "$@"'
        (folder / name).write_text(f"#!/bin/sh\n{call}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


def run(script: str, folder: Path, files: Mapping[str, Callable[[], Path]] = FILES) -> str:
    """Run a script in bash, with what it names in its folder; return its standard output.

    Raises:
        AssertionError: a command failed.
    """
    lines = [line for line in commands(script) if not why_left_out(line)]
    text = "\n".join(lines).replace(" ...", "")
    for pattern, fewer in SMALLER:
        text = pattern.sub(fewer, text)
    (folder / "docs" / "encodings").mkdir(parents=True, exist_ok=True)
    (folder / "docs" / "plots").mkdir(exist_ok=True)
    for name in named(text, files):
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(files[name]())
    done = subprocess.run(
        ["bash", "-ec", text],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{shims()}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout
