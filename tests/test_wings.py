"""The wings: the library, a plugin for each host, the workbench on all; arrows run down only.

The rooms have ceilings, which only ever fall.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import fairseq_posenc
from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.cli import COMMANDS, Command

PACKAGE = Path(fairseq_posenc.__file__).resolve().parent
PREPROCESS = PACKAGE.parent / "preprocess"
LIBRARY = {
    *("api", "assembly", "position_parameters", "positions", "registry", "shared", "mask"),
    *("specs", "own_specs", "identity", "files", "folders", "locks", "errors", "error_messages"),
    *("user_dir", "version", "__init__", "option_values", "torch_modes", "precision", "derived"),
    *("encodings", "backends", "modules", "analysis"),
}
PLUGIN = {"transformer", "checkpoints", "host", "models", "tasks", "tokens"}
FOR_TRANSFORMERS = {"hf"}
SELF = "fairseq_posenc."
HOST = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


def wing(room: str) -> int:
    """Number the wings: 0 for the library, 1 for the plugins, 2 for the workbench."""
    return 0 if room in LIBRARY else 1 if room in PLUGIN | FOR_TRANSFORMERS else 2


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def job_of(command: Command) -> str:
    """Name the package of a command's module, or the module if it is in no package."""
    module = resolve_name(command.module.partition(":")[0], cli.__package__)
    package = module.rpartition(".")[0]
    return module if package in ROOMS else package


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imports(path: Path) -> list[str]:
    """Return the modules that a file imports, wherever it does."""
    found: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


# The rooms of the workbench hold several jobs each, or what jobs share.
ROOMS = {"fairseq_posenc", "fairseq_posenc.workbench"}
ROOMS |= {f"fairseq_posenc.workbench.{name}" for name in ("experiments", "training", "reports")}
ROOMS |= {f"fairseq_posenc.workbench.{name}" for name in ("finetuning", "convert")}
JOBS = set(filter(re.compile(r"fairseq_posenc\.workbench\.").match, map(job_of, COMMANDS.values())))
FILES = sorted(PACKAGE.rglob("*.py"))
TOP = {room_of(path) for path in FILES}


def test_the_rooms_are_there():
    assert {*LIBRARY, *PLUGIN, *FOR_TRANSFORMERS, "workbench"} == TOP


def test_arrows_run_down_only():
    for path, module in [(file, module) for file in FILES for module in imports(file)]:
        own, parts = room_of(path), module.split(".")
        if parts[0] != "fairseq_posenc":
            serves_fairseq = own in PLUGIN or wing(own) > 1
            serves_transformers = own in FOR_TRANSFORMERS or wing(own) > 1
            assert serves_fairseq or parts[0] not in HOST, f"{path} imports {module}"
            assert serves_transformers or parts[0] != "transformers", f"{path} imports {module}"
        elif len(parts) > 1 and parts[1] in TOP:
            assert wing(parts[1]) <= wing(own), f"{path} imports {module}, of a wing above"
            hosts = {*PLUGIN} & {own, parts[1]}, FOR_TRANSFORMERS & {own, parts[1]}
            assert not all(hosts), f"{path} imports {module}, of the other host"


# What an import brings and changes, and its processor time.
IMPORTED = """
import sys, time, logging, warnings
import torch
before = (sys.excepthook, logging.root.level, list(logging.root.handlers), list(warnings.filters))
began = time.process_time()
import fairseq_posenc, fairseq_posenc.api
seconds = time.process_time() - began
after = (sys.excepthook, logging.root.level, list(logging.root.handlers), list(warnings.filters))
print(seconds, before == after)
import fairseq_posenc.backends.triton
print(*sys.modules)
sys.stderr.write("alone")
import fairseq_posenc.hf
print(*sys.modules)
"""


def test_the_library_is_imported_alone_and_the_host_for_transformers_without_fairseq():
    """Whatever imports stand in functions: what is loaded counts."""
    command = [sys.executable, "-c", IMPORTED]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    light, *loaded_names = run.stdout.splitlines()
    seconds, unchanged = light.split()
    assert unchanged == "True"
    assert float(seconds) < 0.5
    assert run.stderr.startswith("alone")
    for line, least, most in zip(
        loaded_names,
        ({"api", "modules", "backends"}, {"hf"}),
        (LIBRARY, LIBRARY | FOR_TRANSFORMERS),
    ):
        loaded = [name.split(".") for name in line.split()]
        rooms = {parts[1] for parts in loaded if parts[0] == "fairseq_posenc" and len(parts) > 1}
        assert least <= rooms <= most
        alone = {"transformers", "triton", "matplotlib", "sklearn"}
        others = HOST if "hf" in rooms else {*HOST, *alone}
        assert not {parts[0] for parts in loaded} & others


def folder_of(path: Path) -> str | None:
    """Name the room of a file: its folder in the package, or in the workbench; None outside."""
    *parts, _ = path.relative_to(PACKAGE).parts
    return "/".join(parts[: 2 if parts[0] == "workbench" else 1]) if parts else None


def file_of(module: str) -> Path:
    """Return where a name that is imported is defined, by the longest part of it that is a file."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    while not path.is_dir():
        if path.with_suffix(".py").exists():
            return path.with_suffix(".py")
        path = path.parent
    return path / "__init__.py"


def test_neither_files_nor_rooms_form_a_circle():
    files: dict[Path, set[Path]] = {}  # what each imports from
    rooms: dict[str, set[str]] = {}
    for path in FILES:
        named = {file_of(each) for each in imports(path) if each.startswith(SELF)} - {path}
        files[path] = {each for each in named if each.name != "__init__.py"}
        if room := folder_of(path):
            rooms.setdefault(room, set()).update(set(filter(None, map(folder_of, named))) - {room})
    assert len(rooms) > 15
    for arrows in (files, rooms):
        TopologicalSorter(arrows).prepare()  # raises for a circle, and names it


def test_every_command_has_a_job():
    assert len(JOBS) > 12
    places = [PACKAGE.parent / job.replace(".", "/") for job in JOBS]
    assert all(place.with_suffix(".py").exists() or place.is_dir() for place in places)


def test_the_library_names_no_options_of_a_command_line():
    for path in FILES:
        if room_of(path) in LIBRARY - {"user_dir", "__init__"}:  # which name --user-dir
            for node in nodes(path):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    option = re.search(r"(?<![\w-])--[a-z]", node.value)
                    assert not option, f"{path}, line {node.lineno}"


def test_no_job_imports_another():
    """Nor does anything that they share import one of them; the command line does so by name."""
    for path in FILES:
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        own = {job for job in JOBS if f"{module}.".startswith(f"{job}.")}
        for imported in imports(path):
            assert {job for job in JOBS if f"{imported}.".startswith(f"{job}.")} <= own, path


# What the programs of preprocess/ are made of, and whose it is; `binarize` is for all of them.
PARTS = {"parallel": "translation"}
PROGRAMS = sorted(PREPROCESS.rglob("*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(PREPROCESS)))
def test_a_program_of_preprocess_imports_fairseq_and_the_library_but_no_other_program(path):
    room = path.relative_to(PREPROCESS).parts[0].removesuffix(".py")
    own = PARTS.get(room, room)
    names = {each.stem for each in PREPROCESS.glob("*.py")} | PARTS.keys()
    for module in imports(path):
        assert not module.startswith("fairseq_posenc.workbench"), f"imports {module}"
        first = module.partition(".")[0]
        if first in names:
            assert PARTS.get(first) == own != "binarize", f"imports {module}"


def test_imports_name_modules_that_exist():
    """A module that has moved is noticed here, also where a function imports it."""
    for path in [*FILES, *PROGRAMS]:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(SELF):
                module = PACKAGE.parent.joinpath(*str(node.module).split("."))
                assert module.is_dir() or module.with_suffix(".py").exists(), f"{path}: {module}"


def test_nothing_imports_preprocess():
    rooms = {each.name for each in PREPROCESS.iterdir() if each.is_dir()} | {"preprocess"}
    for path in FILES:
        assert not {module.split(".")[0] for module in imports(path)} & rooms, path


def test_fairseq_finds_what_registers_by_scanning():
    """It imports the modules of a user-dir's tasks/ and models/ itself, and no others."""
    rooms = {
        room_of(path)
        for path in FILES
        for module in imports(path)
        if module.startswith("fairseq.") and module.rpartition(".")[2].startswith("register_")
    }
    assert rooms == {"tasks", "models"}


# Lines of Python in each room: reached, a number that only ever falls, and the target.
LINES = {
    "fairseq_posenc": (27338, 27500),
    "fairseq_posenc/encodings": (3632, 3800),
    "fairseq_posenc/backends": (3393, 3600),
    "fairseq_posenc/backends/triton": (1192, 1200),
    "fairseq_posenc/modules": (1118, 1150),
    "fairseq_posenc/analysis": (237, 300),
    "fairseq_posenc/transformer": (894, 1100),
    "fairseq_posenc/models": (475, 520),
    "fairseq_posenc/tasks": (792, 820),
    "fairseq_posenc/checkpoints": (777, 800),
    "fairseq_posenc/host": (682, 700),
    "fairseq_posenc/hf": (2691, 2700),
    "fairseq_posenc/workbench": (8867, 10000),
    "fairseq_posenc/tokens": (771, 800),
    "fairseq_posenc/workbench/running": (667, 700),
    "fairseq_posenc/workbench/loading": (491, 520),
    "fairseq_posenc/workbench/hf": (242, 260),
    "fairseq_posenc/workbench/results": (475, 500),
    "fairseq_posenc/workbench/experiments": (1559, 1700),
    "fairseq_posenc/workbench/training": (72, 400),
    "fairseq_posenc/workbench/finetuning": (1273, 1350),
    "fairseq_posenc/workbench/translation": (578, 650),
    "fairseq_posenc/workbench/plots": (1028, 1100),
    "fairseq_posenc/workbench/convert": (1549, 1650),
    "fairseq_posenc/workbench/reports": (370, 400),
    "preprocess": (2579, 2600),
    "docs/generate": (423, 750),
    "benchmarks": (2976, 3600),
    "tests": (29716, 32000),
}
LONGEST_FILE = 401  # outside tests/
DOCSTRING_SHARE = 0.195  # of the package's lines, at least


@cache
def tracked_lines() -> dict[str, int]:
    """Count the lines of all Python files that git tracks, by path from the repository's root."""
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=PACKAGE.parent, text=True)
    paths = {x: PACKAGE.parent / x for x in listed.split() if (PACKAGE.parent / x).exists()}
    return {x: len(path.read_text(encoding="utf-8").splitlines()) for x, path in paths.items()}


@pytest.mark.parametrize("room", LINES)
def test_a_room_has_no_more_lines_than_it_had(room):
    lines = sum(count for name, count in tracked_lines().items() if name.startswith(f"{room}/"))
    assert 0 < lines <= LINES[room][0]


def test_lines_are_counted_in_formatted_files_of_readable_size():
    formatter = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "100", "."]
    assert subprocess.run(formatter, cwd=PACKAGE.parent).returncode == 0
    files = [count for name, count in tracked_lines().items() if not name.startswith("tests/")]
    assert max(files) <= LONGEST_FILE


def test_docstrings_keep_their_share_of_the_lines():
    definitions = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    lines = sum(
        node.body[0].end_lineno - node.body[0].lineno + 1
        for path in FILES
        for node in nodes(path)
        if isinstance(node, definitions) and ast.get_docstring(node) is not None
    )
    package = [n for name, n in tracked_lines().items() if name.startswith("fairseq_posenc/")]
    assert lines >= DOCSTRING_SHARE * sum(package)
