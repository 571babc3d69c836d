"""Imports the package of ``--user-dir``, in which users register encodings of their own."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from fairseq_posenc.errors import UserError


def add_user_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--user-dir``."""
    text = "folder of a Python package that registers encodings, as for the training"
    parser.add_argument("--user-dir", type=Path, metavar="DIR", help=text)


def import_user_dir(folder: Path | None) -> None:
    """Import a package by its folder; None imports nothing.

    Raises:
        UserError: the folder has no package.
    """
    if folder is None:
        return
    folder = folder.resolve()
    if not (folder / "__init__.py").is_file():
        raise UserError(f"--user-dir {folder}: name a folder of a Python package, with __init__.py")
    sys.path.insert(0, str(folder.parent))
    import_module(folder.name)
