"""Loads the models and tokenizers in folders of transformers, which may come from strangers.

A folder is checked first: transformers runs the ``custom_generate`` of a local folder, fetches
functions that its configuration names, and follows links.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fairseq_posenc.derived import derive
from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf import record, saving
from fairseq_posenc.hf.own_positions import count_positions, read_spec
from fairseq_posenc.hf.settings import SPEC_FIELD

# Weights of heads for other tasks, which the class that a folder names may leave out.
_HEADS = re.compile(r"(^|\.)(cls|pooler|lm_head|classifier|qa_outputs|score|discriminator\w*)\.")


def load_model(folder: Path, **settings: Any) -> PreTrainedModel:
    """Load a folder's model as the class that it names; ``settings`` go to ``from_pretrained``.

    Raises:
        UserError: the folder is refused or cannot be read, or its weights are not the model's.
    """
    check_folder(folder)
    transformers.logging.set_verbosity_error()  # for the whole command: weights are checked below
    transformers.logging.disable_progress_bar()
    with _readable_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model_class = _find_class(config)
        with torch.device("meta"):  # without memory
            numbers = sum(x.numel() for x in model_class(config).parameters())
        size = sum(path.stat().st_size for path in folder.iterdir())
        if numbers > 8 * size + 2**20:  # less than a bit each; 2**20 may be in computed tables
            raise UserError(f"config.json describes {numbers:,} numbers in {size:,} bytes of files")
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            trust_remote_code=False,
            disable_mmap=True,  # SIGBUS would end the process if a mapped file is truncated
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that the info lists them; checked below
            **settings,
        )
        unexpected = [name for name in info["unexpected_keys"] if not _HEADS.search(name)]
        record.refuse_other_weights(info["missing_keys"], unexpected, info["mismatched_keys"])
        if names := [k for k, x in model.named_parameters() if not bool(x.isfinite().all())]:
            raise UserError(f"the weights are not finite: {shortened(', '.join(names))}")
    return cast(PreTrainedModel, model)


@contextmanager
def _readable_errors(folder: Path, what: str = "its model", option: str = "") -> Iterator[None]:
    """Convert any error of reading a part of a folder to one line, which begins with the option.

    Raises:
        UserError: any error inside; its type in transformers and tokenizers depends on the folder.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}{folder}: {error}") from error
    except Exception as error:
        text = str(error).replace(str(folder), folder.name)  # its path comes before the reason
        reason = shortened(" ".join(f"{type(error).__name__}: {text}".split()))
        raise UserError(f"{option}{folder}: {what} cannot be read: {reason}") from error


def check_folder(folder: Path, option: str = "", advice: str = "") -> None:
    """Check a folder, that an option named, without running or building anything of it.

    Raises:
        UserError: it would run code or open files elsewhere, or is damaged.
    """
    with _readable_errors(folder, option=option):
        if (folder / "adapter_config.json").exists():
            raise UserError("has an adapter: merge it (merge_and_unload), and save the whole model")
        if not (folder / "config.json").is_file():
            raise UserError(f"no config.json: give a model folder of transformers{advice}")
        _refuse_links(folder)
        if (folder / "custom_generate").exists():
            raise UserError("has custom_generate, whose code transformers would run: delete it")
        _check_settings(json.loads((folder / "config.json").read_bytes()))
        for path in folder.glob("*.index.json"):
            for part in map(str, json.loads(path.read_bytes())["weight_map"].values()):
                if Path(part).name != part:
                    raise UserError(f"{path.name} names a file elsewhere: {shortened(part)}")
        for path in folder.glob("*.safetensors"):
            safe_open(path, framework="pt")  # compares the sizes of file and tensors


def _refuse_links(folder: Path) -> None:
    """Refuse links that leave a folder, and pipes, which would block their reader."""
    inside = [folder.resolve()]
    if folder.parent.name == "snapshots":  # of a cache of the hub, whose files are in `blobs`
        inside.append(folder.parent.parent.resolve() / "blobs")
    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if not any(path.resolve().is_relative_to(root) for root in inside):
            raise UserError(f"{path.name} is a link that leaves the folder")
        if not (path.is_file() or path.is_dir()):
            raise UserError(f"{path.name} is not a file")


def _check_settings(config: Any) -> None:
    """Refuse settings that name code or files, and positions that a stock class would ignore."""
    if not isinstance(config, dict):
        raise UserError(f"config.json is a {type(config).__name__}, not settings by name")
    if "transformers_weights" in config:
        raise UserError("config.json names another file of weights: call it model.safetensors")
    if SPEC_FIELD in config and config.get("model_type") != saving.MODEL_TYPE:
        raise UserError(f"config.json has {SPEC_FIELD}, but the model is a stock one")
    for name, value in config.items():
        if isinstance(value, dict):
            _check_settings(value)
        if name.endswith("_implementation") and re.search("[/:]", str(value)):
            raise UserError(f"config.json: {name} names code: {shortened(repr(value))}")


def _find_class(config: transformers.PretrainedConfig) -> Any:
    """Find the model class that a configuration names (in our folders the name has a prefix)."""
    name = str(next(iter(config.architectures or ()), "")).removeprefix(saving.CLASS_PREFIX)
    cls = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise UserError(f"config.json names {shortened(name)}, a class that transformers lacks")
    is_ours = isinstance(config, saving.ConfigWithPositions)  # the class then loads positions, too
    return derive(cls, (saving.ModelWithPositions,)) if is_ours else cls


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; refuse one that runs code or cannot be read."""
    check_folder(folder)
    if not any(re.match("tokenizer|vocab|spiece|sentencepiece", x.name) for x in folder.iterdir()):
        raise UserError(f"{folder}: has no tokenizer, which --text needs: save the model's there")
    with _readable_errors(folder, "its tokenizer (for --text)"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return cast(PreTrainedTokenizerBase, tokenizer)


def check_ids(folder: Path, ids: Tensor, model: PreTrainedModel) -> None:
    """Refuse tokens for which a model has no embedding: its tokenizer is another model's."""
    largest, rows = int(ids.max()), model.get_input_embeddings().weight.size(0)
    if largest >= rows:
        raise UserError(f"{folder}: its tokenizer has the id {largest}, its model {rows} tokens")


def is_stock(folder: Path) -> bool:
    """Check whether transformers alone loads a saved folder: no (nested) model type is ours."""
    return f'"model_type": "{saving.MODEL_TYPE}"' not in (folder / "config.json").read_text("utf-8")


def read_limit(model: Any) -> int | None:
    """Count the positions of a model that has a trained row for each; None for all other models."""
    return count_positions(model) if "learned" in read_spec(model).names else None
