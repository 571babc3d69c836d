"""The three wings: the library, the plugin on it, the workbench on both; arrows run down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fairseq_posenc

PACKAGE = Path(fairseq_posenc.__file__).resolve().parent
PREPROCESS = PACKAGE.parent / "preprocess"
LIBRARY = {
    *("api", "assembly", "positions", "registry", "errors", "version"),
    *("encodings", "backends", "analysis"),
}
PLUGIN = {"transformer", "models", "tasks"}
SELF = "fairseq_posenc."
HOST = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


def wing(room: str) -> int:
    """Return 0 for the library, 1 for the plugin, 2 for the workbench."""
    return 0 if room in LIBRARY else 1 if room in PLUGIN else 2


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


JOBS = {
    "choose",
    "compare",
    "curves",
    "doctor",
    "glue",
    "length",
    "plan",
    "report",
    "squad",
}
JOBS |= {"plots", "swap", "probe", "train", "translation", "exchange"}

FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {room_of(path) for path in FILES}


def test_the_rooms_are_there():
    assert ROOMS >= LIBRARY | PLUGIN


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_run_down_only(path):
    own = room_of(path)
    if own in ("__init__", "user_dir"):
        return  # they name the plugin's modules, and import none
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "fairseq_posenc":
            assert wing(own) > 0 or parts[0] not in HOST, f"the library imports {module}"
        elif (
            len(parts) > 1 and (PACKAGE / parts[1]).exists() | (PACKAGE / f"{parts[1]}.py").exists()
        ):
            assert wing(parts[1]) <= wing(own), f"imports {module}, of a wing above"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_job_imports_another(path):
    """Nor does anything that they share import one of them; the command line does so by name."""
    rooms = {module.split(".")[1] for module in imports(path) if module.startswith(SELF)}
    assert rooms & JOBS <= {room_of(path)}


# What the programs of preprocess/ are made of, and whose it is; `binarize` is for all of them.
PARTS = {"mixing": "mix", "parallel": "translation", "glue_tasks": "glue"}
PROGRAMS = sorted(PREPROCESS.rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(PREPROCESS)))
def test_a_program_of_preprocess_has_to_do_with_its_own_job_alone(path):
    """Those for GLUE and SQuAD read and write with the modules of these jobs."""
    room = path.relative_to(PREPROCESS).parts[0].removesuffix(".py")
    own = PARTS.get(room, room)
    names = {each.stem for each in PREPROCESS.glob("*.py")} | PARTS.keys()
    for module in imports(path):
        first, *rest = module.split(".")
        if first == "fairseq_posenc" and rest:
            assert rest[0] not in JOBS - {own}
        elif first in names:
            assert PARTS.get(first) == own != "binarize", f"imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_preprocess(path):
    rooms = {each.name for each in PREPROCESS.iterdir() if each.is_dir()} | {"preprocess"}
    assert not {module.split(".")[0] for module in imports(path)} & rooms


def test_fairseq_finds_what_registers_by_scanning():
    """It imports the modules of a user-dir's tasks/ and models/ itself, and no others."""
    rooms = {
        room_of(path)
        for path in FILES
        for module in imports(path)
        if module.startswith("fairseq.") and module.rpartition(".")[2].startswith("register_")
    }
    assert rooms == {"tasks", "models"}
