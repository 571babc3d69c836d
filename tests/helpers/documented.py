"""The commands that the README and the pages show; some of them run, on small data."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.helpers.commands import made_once, new_directory, sentences
from tests.helpers.hf_models import MODELS, save_tokenizer
from tests.helpers.programs import BIN

ROOT = Path(__file__).parents[2]
# How a command begins.
PROGRAMS = (
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:fairseq-\S+|python|pip|make|train_scripts/\S+|sbatch|wget|tensorboard|\.|for)"
)
FENCED = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
# How commands begin that install, need a network, or are of the reader's shell.
LEFT_OUT = ("make", "pip ", ". .venv/bin/activate")


def blocks(kinds: Collection[str], page: Path) -> list[str]:
    """Return the fenced blocks of a page of some kinds."""
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(text) for _, kind, text in found if kind in kinds]


scripts = partial(blocks, ("", "sh", "bash"))  # of commands; blocks of other kinds say so
python_of = partial(blocks, ("python",))


def commands(script: str) -> list[str]:
    """Return the commands of a script, one after the other, without comments."""
    joined = re.sub(r"\\\n\s*", " ", script)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@made_once
def book() -> Path:
    path = new_directory() / "book.txt"
    lines = (f"the list {n} of keys returned a sentence of text {n * n}.\n\n" for n in range(500))
    path.write_text("".join(lines))
    return path


@cache
def llama() -> Path:
    """Return the folder of a small model, as SmolLM2 but for its sizes."""
    folder = new_directory() / "model"
    MODELS["llama"].build(num_hidden_layers=4, rope_theta=100000.0).save_pretrained(folder)
    save_tokenizer(folder, ["tell", "me", "a", "story", "of", "two", "hosts"])
    return folder


@cache
def own_encodings() -> Path:
    """Return the user's package that adding.md shows."""
    folder = new_directory() / "my_encodings"
    folder.mkdir()
    for name, code in zip(("root.py", "__init__.py"), python_of(ROOT / "docs" / "adding.md")):
        (folder / name).write_text(code)
    return folder


# What the commands name, made when the first one that names it runs.
FILES: dict[str, Callable[[], Path]] = {
    "data-bin/docs": sentences,
    "data-bin/wiki": sentences,
    "my.txt": book,
    "book.txt": book,
    "FOLDER": llama,
    "my_encodings": own_encodings,
}


@cache
def shims() -> Path:
    """Return a folder of programs for the PATH that shrink commands, before the tests' own."""
    folder = new_directory()
    python, shrink = BIN / "python", Path(__file__).with_name("shrink_command.py")
    for name in ("fairseq-posenc", "fairseq-train"):
        program = Path(sys.executable).with_name(name)
        (folder / name).write_text(f'#!/bin/sh\nexec "{python}" -IS "{shrink}" "{program}" "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def run(script: str, folder: Path) -> None:
    """Run a script in bash, with what it names in its folder; each command must succeed."""
    text = "\n".join(line for line in commands(script) if not line.startswith(LEFT_OUT))
    for name in FILES:
        if name in text and not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).symlink_to(FILES[name]())
    variables = {"PATH": f"{shims()}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    how: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **variables}, "input": ""}
    done = subprocess.run(["bash", "-ec", text], **how, capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
