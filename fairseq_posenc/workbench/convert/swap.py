"""Gives a transformers model other positions, and writes it to a new folder."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import whole_folder
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.saving import AUTO_CLASSES, CLASS_PREFIX
from fairseq_posenc.hf.settings import PositionSettings
from fairseq_posenc.position_parameters import LengthRule
from fairseq_posenc.workbench.hf.folders import is_stock, load_model

# Names of the only files that are copied: a tokenizer's, and a license.
_COPIED = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|sentencepiece|spiece|source|target|"
    r"sentence_bert|bpe|processor|preprocessor|tekken)[\w.-]*\.(json|txt|model|bpe|spm|tiktoken)|"
    r"chat_template\.(jinja|json)|(LICENSE|NOTICE)[\w.-]*"
)
# Ends the advice on loading a folder that transformers cannot load without this package.
_IMPORTS = " after `import fairseq_posenc.hf` (and your own encodings), or trust_remote_code=True"


def swap_folder(
    source: Path,
    out: Path,
    *,
    spec: str,
    max_positions: int | None,
    extend: LengthRule | None,
    seed: int,
) -> list[str]:
    """Write a folder whose model has other positions; return lines that describe it.

    Args:
        source: folder of a transformers model.
        out: the new folder.
        spec: the new positions, in which ``own`` means those that the model has.
        max_positions: length of the longest sequence; by default the model's.
        extend: how trained tables by position become longer.
        seed: random seed of new parameters.

    Raises:
        UserError: the seed is out of range, the folder cannot be read, or its model cannot have
            such positions.
    """
    if not 0 <= seed < 2**64:  # torch takes no larger ones
        raise UserError(f"--seed {seed}: give a number from 0 to 2^64 - 1")
    with whole_folder(out) as folder:  # renamed to `out` at the end
        torch.manual_seed(seed)
        model: Any = load_model(source)
        origin = f"source: {source}: {type(model).__name__}, positions: {read_positions(model)}"
        old = dict(model.named_parameters())
        set_positions(model, spec, max_positions, extend)
        # Positions are now new objects, even with equal values; other parameters are the same ones.
        new = dict(model.named_parameters())
        model.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # transformers lets only their owner read them
            path.chmod((folder / "config.json").stat().st_mode)
        for file in source.iterdir():  # `load_model` has refused links to files elsewhere
            if file.is_file() and _COPIED.fullmatch(file.name):
                shutil.copy2(file, folder / file.name)
        stock = is_stock(folder)  # whether transformers loads it without this package
        # If not, `CLASS_PREFIX` begins the name of its class in config.json, but not in messages.
        class_name = json.loads((folder / "config.json").read_bytes())["architectures"][0]
    others = [x for x in new if new[x] is old.get(x)]
    both = [x for x in new if x in old and x not in others]  # positions, if the source had ours
    cls = type(model).stock  # the stock class; `set_positions` gave the model one derived from it
    fit = (x for x in AUTO_CLASSES if x._model_mapping.get(cls.config_class, None) is cls)
    loader = next(fit, cls)  # an Auto class, if one loads such a model
    return [
        origin,
        f"kept bit for bit: the {len(others)} tensors that are not positions",
        *(_describe_origin(name, old[name], new[name]) for name in both),
        *(f"only in the new model: {x} {tuple(new[x].shape)}" for x in new if x not in old),
        *(f"only in the old model: {x} {tuple(old[x].shape)}" for x in old if x not in new),
        f"wrote {out}, a {'stock folder' if stock else 'folder of fairseq_posenc'} "
        f"({class_name.removeprefix(CLASS_PREFIX)}): positions: {read_positions(model)} "
        f"(max_positions {PositionSettings.read(model.config).max_positions:,})",
        f"load it by {loader.__name__}.from_pretrained" + ("" if stock else _IMPORTS),
    ]


def _describe_origin(name: str, old: torch.Tensor, new: torch.Tensor) -> str:
    """Describe what became of a position parameter that both models have."""
    if old.shape != new.shape:
        return f"resized: {name} {tuple(old.shape)} -> {tuple(new.shape)}"
    return f"{'kept' if torch.equal(old, new) else 'initialized'}: {name} {tuple(new.shape)}"
