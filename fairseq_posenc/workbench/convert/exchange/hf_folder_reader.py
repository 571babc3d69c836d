"""Reads a Hugging Face folder without trusting it: no code is run, and sizes are checked.

The folder has a config.json and a single model.safetensors; nothing else in it is read here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fairseq_posenc.checkpoints.faults import BUILD_ERRORS, quote_error
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import CONFIG, FAIRSEQ, WEIGHTS

# Far more than any model has.
_MAX_TENSORS = 50_000
_MAX_HEADER_BYTES = 20_000_000
_MAX_CONFIG_BYTES = 10_000_000
_TEXT_FIELDS = ("model_type", "hidden_act", "head_activation", "transformers_version")


class HFFolder(NamedTuple):
    """The content of a folder of transformers."""

    path: Path
    config: dict[str, Any]  # config.json
    settings: dict[str, Any] | None  # fairseq's options, in our exports; None in other folders
    weights: dict[str, Tensor]


def read_folder(path: Path) -> HFFolder:
    """Read a folder without running its code.

    Raises:
        UserError: a file is missing, or not what transformers writes.
    """
    if not path.is_dir():
        raise UserError(f"--from {path}: no such folder")
    config = _read_json(path / CONFIG)
    _check_types(path / CONFIG, config)
    return HFFolder(path, config, config.get(FAIRSEQ) or None, _read_weights(path / WEIGHTS))


def read_class_name(config: dict[str, Any]) -> str:
    """Read the name of a model's class in a config.json; ``None`` as text if it names no class."""
    return str((config.get("architectures") or [None])[0])


@contextmanager
def refuse_odd_values(folder: HFFolder) -> Iterator[None]:
    """Report an error in the block as one line that blames a wrong value in config.json."""
    try:
        yield
    except UserError:  # is a ValueError
        raise
    except (*BUILD_ERRORS, RuntimeError, ImportError) as e:  # ImportError: settings select xformers
        raise UserError(
            f"{folder.path / CONFIG}: has a value of another kind than transformers writes "
            f"({quote_error(e)}); export the model again, or mend the file"
        ) from e


def _check_types(path: Path, config: dict[str, Any]) -> None:
    """Check the types of the values on which nearly everything else depends."""
    for name in _TEXT_FIELDS:
        if not isinstance(config.get(name, ""), (str, type(None))):
            value = shortened(json.dumps(config[name]))
            raise UserError(f"{path}: {name} is {value}, which is not a text")
    classes = config.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        value = shortened(json.dumps(classes))
        raise UserError(f"{path}: architectures is {value}, not a list of classes")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        _refuse_pipe(path)
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("far too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no settings in it")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a folder of transformers has it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return content


def _refuse_pipe(path: Path) -> None:
    """Refuse pipes and other special files, as reading them might never end."""
    if path.exists() and not path.is_file():
        raise OSError("not a file")


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, unless its header is larger than any model's."""
    try:
        _refuse_pipe(path)
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise UserError(
                f"{path}: its header says that it has {header_bytes:,} bytes, more than any model's"
            )
        with safe_open(path, "pt") as tensors:
            names = list(tensors.keys())
            if len(names) > _MAX_TENSORS:
                raise UserError(f"{path}: holds {len(names):,} tensors: no model has so many")
            return {name: tensors.get_tensor(name) for name in names}
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; save_pretrained(..., safe_serialization=True) of transformers "
            "writes it, and max_shard_size makes it one"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no whole file of safetensors: {error}") from None
