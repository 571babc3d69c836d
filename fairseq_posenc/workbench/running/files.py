"""Finds folders that the package ships, and models on the hub of Hugging Face."""

import re
from pathlib import Path

from fairseq_posenc.errors import UserError, shortened

_PACKAGE = Path(__file__).resolve().parents[2]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # a model as it is named on the hub of Hugging Face
_HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors"]


def find_shipped_folder(name: str) -> Path:
    """Find a folder that lies inside the package in a wheel, and beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def find_model(path: Path) -> Path:
    """Return a path as it is, or the local copy of the model that it names on the hub.

    A path ``NAME/NAME`` is looked up on the hub unless a folder of the first name exists here, or
    the path ends with ``.pt``.

    Raises:
        UserError: the hub does not have it, or cannot be reached.
    """
    name = path.as_posix()
    if not _HUB_NAME.fullmatch(name) or path.suffix == ".pt" or path.parent.exists():
        return path
    from huggingface_hub import snapshot_download  # transformers brings it

    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
        if not any(folder.glob("*.safetensors")):  # add the older form, in the same folder
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
    except (OSError, ValueError) as error:
        reason = shortened(str(error).strip().partition("\n")[0])
        raise UserError(
            f"{name}: no such file or folder, nor a model that the hub of Hugging Face gives: "
            f"{reason}"
        ) from None
    return folder
