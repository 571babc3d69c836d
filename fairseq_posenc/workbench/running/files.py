"""Small helpers for files: checksums, JSON, folders that the package ships, models on the hub."""

import json
import re
from pathlib import Path
from typing import Any

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.folders import checksum

__all__ = ["checksum"]

_PACKAGE = Path(__file__).resolve().parents[2]
# A model as it is named on the hub of Hugging Face, and its files besides the weights.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def read_json(path: Path) -> Any:
    """Read a JSON file that a command wrote in order to continue from it.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{path}: cannot be read ({reason}); delete it to rebuild it") from None


def refuse_link(folder: Path) -> None:
    """Refuse a link as the folder of results: the files would be written somewhere else.

    Raises:
        UserError: the folder is a link; the message names its target.
    """
    if folder.is_symlink():
        raise UserError(
            f"--out {folder}: is a link to {folder.resolve()}; name that folder itself, or another"
        )


def find_shipped_folder(name: str) -> Path:
    """Find a folder that lies inside the package in a wheel, and beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def find_model(path: Path) -> Path:
    """Return a path as it is, or the local copy of the model that it names on the hub.

    A path ``NAME/NAME`` is looked up on the hub unless a folder of the first name exists here, the
    path ends with ``.pt``, or huggingface_hub is not installed.

    Raises:
        UserError: the hub does not have it, or cannot be reached.
    """
    name = path.as_posix()
    if not _HUB_NAME.fullmatch(name) or path.suffix == ".pt" or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        return path
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
    except (OSError, ValueError) as error:
        reason = shortened(str(error).strip().partition("\n")[0])
        raise UserError(
            f"{name}: no such file or folder, nor a model that the hub of Hugging Face gives: "
            f"{reason}"
        ) from None
    return folder
