"""Looks at a folder of transformers before transformers does, and refuses what could do harm.

transformers runs the ``custom_generate`` of a local folder, fetches functions that its
configuration names, follows links, and builds a model before it looks at the sizes of the weights.
"""

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fairseq_posenc.errors import UserError, shortened

# In the order in which transformers looks for them; both may be parts, which an index lists.
_WEIGHTS = [x + y for x in ("model.safetensors", "pytorch_model.bin") for y in ("", ".index.json")]
_MAX_HEADER = 1 << 26  # bytes of a JSON file, or of the header of safetensors
# Settings whose numbers are sizes: of layers at most the number of tensors, of others a dimension.
_SIZES = re.compile(
    r"(^|_)(layers?|heads?|labels|buckets|vocab|experts?|groups)(_|$)"
    "|hidden_size|intermediate|ffn|d_ff|d_model|n_embd"
)
Identities = dict[Path, tuple[int, ...]]  # the number, size and time of each file of weights


@contextmanager
def readable_errors(folder: Path, what: str = "its model") -> Iterator[None]:
    """Convert any error of reading a part of a folder to one line.

    Raises:
        UserError: any error inside; its type in transformers and tokenizers depends on the folder.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error
    except Exception as error:
        text = str(error).replace(str(folder), folder.name)  # its path stands before the reason
        reason = shortened(" ".join(f"{type(error).__name__}: {text}".split()))
        raise UserError(f"{folder}: {what} cannot be read: {reason}") from error


def check_folder(folder: Path) -> Identities:
    """Check a folder without running or building anything of it; identify its weights.

    Raises:
        UserError: it would run code or open files elsewhere, its files are damaged, or its
            configuration describes a larger model than its weights are of.
    """
    with readable_errors(folder):
        _refuse_links(folder)
        config = _read_json(folder / "config.json")
        if "transformers_weights" in config:
            raise UserError("config.json names another file of weights: call it model.safetensors")
        files = _list_weights(folder)
        identities = _identify(files)
        _check_settings(config, [shape for path in files for shape in _read_shapes(path)])
    return identities


def refuse_changed(before: Identities) -> None:
    """Refuse weights that were written after :func:`check_folder` looked at them."""
    if _identify(before) != before:
        raise UserError("its weights were written while they were read: try again")


def _refuse_links(folder: Path) -> None:
    """Refuse code, adapters, links that leave the folder, and pipes."""
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":  # of a cache of the hub, whose files are in `blobs`
        inside.append(folder.parent.parent.resolve() / "blobs")
    if (folder / "custom_generate").exists():
        raise UserError("has custom_generate, whose code transformers would run: delete it")
    if (folder / "adapter_config.json").exists():
        raise UserError("has an adapter: merge it (merge_and_unload), and save the whole model")
    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if not any(path.resolve().is_relative_to(root) for root in inside):
            raise UserError(f"{path.name} is a link that leaves the folder")
        if not (path.is_file() or path.is_dir()):
            raise UserError(f"{path.name} is no file")


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes()[:_MAX_HEADER])
    if not isinstance(content, dict):
        raise UserError(f"{path.name} is a {type(content).__name__}, not settings by name")
    return content


def _list_weights(folder: Path) -> list[Path]:
    name = next((name for name in _WEIGHTS if (folder / name).exists()), None)
    if name is None:
        raise UserError(f"has no weights ({' or '.join(_WEIGHTS[::2])})")
    names = {name}
    if name.endswith(".json"):
        names = set(map(str, _read_json(folder / name)["weight_map"].values()))
    if outside := [part for part in names if Path(part).name != part]:
        raise UserError(f"{name} names a file elsewhere: {shortened(outside[0])}")
    return [folder / part for part in sorted(names)]


def _identify(files: Iterable[Path]) -> Identities:
    facts = ((path, path.stat()) for path in files)
    return {path: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for path, fact in facts}


def _read_shapes(path: Path) -> Iterable[Iterable[int]]:
    """Read the shapes of the tensors in a file, which is not mapped into memory."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise UserError(f"{path.name} is a pointer of git-LFS: fetch the file by git lfs pull")
        if not start or start.lstrip().startswith(b"<"):
            raise UserError(f"{path.name} is {'a web page' if start else 'empty'}, not weights")
        if path.suffix == ".bin":
            if sum(part.file_size for part in zipfile.ZipFile(path).infolist()) > size:
                raise UserError(f"{path.name} would expand, and weights are not compressed")
            state = torch.load(path, map_location="meta", weights_only=True)
            return [tensor.shape for tensor in state.values()]
        length = int.from_bytes(start[:8], "little")
        file.seek(8)
        header = json.loads(file.read(min(length, _MAX_HEADER)))
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise UserError(f"{path.name} has {size:,} bytes, and should have {end:,}")
    return [entry["shape"] for entry in header.values()]


def _check_settings(config: dict[str, Any], shapes: list[Iterable[int]]) -> None:
    """Refuse settings that name code or files, and sizes above those of the weights."""
    largest = max((size for shape in shapes if 0 not in shape for size in shape), default=0)
    if "position_encoding" in config and "base_model_type" not in config:
        raise UserError("config.json has position_encoding, but the model is one of transformers")
    for name, value in config.items():
        if isinstance(value, dict):
            _check_settings(value, shapes)
        if name.endswith("_implementation") and re.search("[/:]", str(value)):
            raise UserError(f"config.json: {name} names code: {shortened(repr(value))}")
        limit = max(len(shapes) if "layer" in name else largest, 1024)  # any size may be small
        has_table = name.endswith("max_positions") and re.search(
            "learned|tupe", str(config.get("position_encoding"))
        )
        if isinstance(value, int) and value > limit and (has_table or _SIZES.search(name)):
            raise UserError(f"config.json: {name} is {value:,}, too much for the weights")
