"""Models named as on the hub of Hugging Face, ``owner/name``, where a command takes a folder."""

from __future__ import annotations

import re
from pathlib import Path

from fairseq_posenc.errors import UserError, shortened

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def find_model(path: Path) -> Path:
    """Return a path as it is, or the local copy of the model that it names on the hub.

    Whatever exists here is taken first, and so is what would lie in a folder that exists.

    Raises:
        UserError: the hub does not have it, or cannot be reached.
    """
    name = path.as_posix()
    if not _NAME.fullmatch(name) or path.suffix == ".pt" or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        return path
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_FILES, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
    except (OSError, ValueError) as error:
        reason = shortened(str(error).strip().partition("\n")[0])
        raise UserError(
            f"{name}: no such file or folder, nor a model that the hub of Hugging Face gives: "
            f"{reason}"
        ) from None
    return folder
