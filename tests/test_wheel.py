"""The wheel is whole: preprocessing and configurations, used far from the checkout."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fairseq_posenc.version import __version__
from tests.helpers.commands import new_directory
from tests.helpers.programs import true_start
from tests.workbench.finetuning.test_finetuning import arguments

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["fairseq_posenc", "preprocess", "finetune_configs"]
PYTHON = sys.executable  # itself, not its replacement in slow tests
KINDS = (".py", ".html", ".yaml", ".json")


def pip(*words: Any) -> None:
    command = [PYTHON, "-m", "pip", *map(str, words), "--no-deps", "--quiet"]
    done = subprocess.run(command, env=true_start(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@cache
def wheel() -> Path:
    """Build it from a copy: pip leaves what it builds among the sources."""
    copy = new_directory()
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip("wheel", copy, "--no-build-isolation", "--wheel-dir", copy / "dist")
    (found,) = (copy / "dist").glob("*.whl")
    return found


@cache
def installed() -> Path:
    folder = new_directory()
    pip("install", wheel(), "--target", folder)
    return folder


def far(*words: Any, cwd: Path | None = None) -> str:
    """Run the installed command where there is no checkout; return its standard output."""
    command = [sys.executable, *map(str, (installed() / "bin" / "fairseq-posenc", *words))]
    env = {**os.environ, "PYTHONPATH": str(installed()), "CUDA_VISIBLE_DEVICES": ""}
    cwd = cwd or new_directory()
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_of_the_sources_is_left_out():
    names = set(zipfile.ZipFile(wheel()).namelist())
    for folder in SOURCES:
        within = "" if folder == "fairseq_posenc" else "fairseq_posenc/"
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
        assert len(files) > 10
        assert {f"{within}{path.relative_to(ROOT)}" for path in files} <= names


def test_a_citation_names_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_metadata_is_that_of_a_library_with_extras():
    (path,) = installed().glob("fairseq_posenc-*.dist-info")
    about = importlib.metadata.PathDistribution(path)
    base = [line for line in about.requires or () if "extra ==" not in line]
    assert base == ["numpy", "torch>=2.6"]
    extra = [line for line in about.requires or () if 'extra == "fairseq"' in line]
    assert any(line.startswith("fairseq-fixed") for line in extra)
    assert about.metadata["License-Expression"] == "MIT"
    assert about.metadata.get_all("Classifier")
    assert about.metadata.get_all("Project-URL")
    text = about.metadata.get_payload()
    assert "# fairseq-posenc" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)


def test_the_command_is_that_of_the_wheel():
    assert Path(far("user-dir").strip()) == installed() / "fairseq_posenc"
    assert "m4m" in far("list")


def test_the_evidence_is_at_hand():
    assert "Use rope" in far("choose", "--family", "translation", "--length", 64)


def test_texts_are_made_into_data(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c\nd e f\n", encoding="utf-8")
    options = ["--train", text, "--valid", text, "--words", "--out", tmp_path / "bin"]
    assert "train: " in far("preprocess", "plain_text", *options)
    assert (tmp_path / "bin" / "dict.txt").is_file()
    assert "--max-tokens" in far("preprocess", "glue", "--help")


def test_glue_finds_its_configurations():
    commands = far(*arguments("decbert", "--dry-run"))
    folder = installed() / "fairseq_posenc" / "finetune_configs" / "glue"
    assert f"--config-dir={folder}" in commands
