"""The folder that transformers reads, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.convert.exchange.standalone import Symbol, module, standalone
from fairseq_posenc.workbench.convert.exchange.tokens import Text
from fairseq_posenc.workbench.running.folders import Folder

WEIGHTS, CONFIG, CODE = "model.safetensors", "config.json", "modeling_fairseq_posenc.py"
FAIRSEQ = "fairseq"  # key of config.json: the options of the training, for the way back
TARGET = "target"  # folder of the tokenizer of a target with symbols of its own
_TITLE = """A Transformer with position encodings as parts: {spec}.

Written by fairseq-posenc {version} from its own modules; needs torch and transformers alone.
"""


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which gets its name when it is full.

    Raises:
        UserError: the folder is there and not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {folder}: is there and not empty; name another folder")
    made = Folder(folder, {})
    try:
        with made.begun():
            yield made.partial
            made.publish()
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_model(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write configuration and weights."""
    write_json(folder / CONFIG, config)
    path = folder / WEIGHTS
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod((folder / CONFIG).stat().st_mode)  # for whoever may read the rest, not for us alone


def code(config: dict[str, Any]) -> str:
    """Write the code of a model: its classes, its encodings, and what those need."""
    classes = {name.rpartition(".")[2] for name in config["auto_map"].values()}
    # A training in transformers writes the stack that a model lacks as null.
    stacks = [config[key] for key in ("encoder_stack", "decoder_stack") if config.get(key)]
    # It also sorts what it saves, so the order of encodings is that of their names.
    layers = [[sorted(layer) for layer in stack["positions"]] for stack in stacks]
    names = sorted({name for each in layers for layer in each for name in layer})
    encodings = [registry.get(name) for name in names]
    wanted = [Symbol(each.__module__, each.__name__) for each in encodings]
    for source in ("configuration", "heads", "generation"):
        name = f"fairseq_posenc.workbench.convert.exchange.modeling.{source}"
        wanted += [Symbol(name, each) for each in module(name).definitions if each in classes]
    specs = [",".join("+".join(layer) or "none" for layer in each) for each in layers]
    spec = " and ".join(dict.fromkeys(specs))
    return standalone(_TITLE.format(spec=spec, version=__version__), wanted)


def write_tokenizer(folder: Path, text: Text, longest: int, pads: str) -> None:
    """Write a tokenizer for a model of ``longest`` positions.

    ``pads`` is the side, ``left`` or ``right``.
    """
    folder.mkdir(exist_ok=True)
    text.tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>", "cls": "<s>"}
    settings: dict[str, Any] = {f"{name}_token": token for name, token in names.items()}
    settings["sep_token"] = "</s>"
    if text.tokenizer.token_to_id("<mask>") is not None:
        flags = {"lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
        settings["mask_token"] = {"__type": "AddedToken", "content": "<mask>", **flags}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "padding_side": pads,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings)
