"""``fairseq-posenc export`` and ``fairseq-posenc import``."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fairseq_posenc.errors import UserError
from fairseq_posenc.exchange import tokens
from fairseq_posenc.exchange.card import card
from fairseq_posenc.exchange.checking import ALLOWED, largest_difference, read_back
from fairseq_posenc.exchange.folder import (
    CODE,
    FAIRSEQ,
    TARGET,
    code,
    whole,
    write_json,
    write_model,
    write_tokenizer,
)
from fairseq_posenc.exchange.naming import configuration, exported, generation
from fairseq_posenc.exchange.trained import Trained, open_trained


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc export``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="a trained model")
    add("--to", choices=["hf"], required=True, help="hf: Hugging Face's transformers")
    add("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")
    add("--data", type=Path, metavar="FOLDER", help="with the dictionaries (default: as trained)")
    add(
        "--tokens",
        metavar="WHAT",
        help="what cut the text: a sentencepiece model, a folder with encoder.json and vocab.bpe, "
        "words, characters, or none for no tokenizer (default: what lies in the data's folder)",
    )


def run_export(options: argparse.Namespace) -> int:
    """Write a folder that transformers reads, compare the two models, and say how equal they are.

    Raises:
        UserError: see the parts' own; or the models differ.
    """
    trained = open_trained(options.checkpoint, options.data)
    with whole(options.out) as folder:
        notes = _write_tokenizers(trained, options.tokens, folder)
        config = configuration(trained)
        write_model(folder, config, exported(trained))
        if trained.family != "masked_lm":
            write_json(folder / "generation_config.json", generation(trained))
        (folder / CODE).write_text(code(config), encoding="utf-8")
        difference = largest_difference(trained, read_back(folder, config["architectures"][0]))
        if difference > ALLOWED:
            raise UserError(
                f"{config['architectures'][0]} differs from the model by {difference:.1e} of its "
                f"largest score, and {ALLOWED:g} is rounding: nothing was written"
            )
        notes += [f"scores equal to {difference:.1e} of the largest one, on padded sentences"]
        (folder / "README.md").write_text(card(trained, config, notes), encoding="utf-8")
        _keep_for_fairseq(trained, folder)
    print("\n".join([f"wrote {options.out}: {config['architectures'][0]}", *notes]))
    return 0


def _write_tokenizers(trained: Trained, given: str | None, folder: Path) -> list[str]:
    """Write a tokenizer for each language; return what a user should know of them."""
    notes = []
    template = trained.family
    if template == "causal_lm" and trained.settings.task.get("add_bos_token"):
        template = "causal_lm with <s>"
    pads = "left" if trained.family == "causal_lm" else "right"
    longest = min(stack.max_positions() for stack in trained.stacks.values())
    for name, place in _places(trained, folder).items():
        language = "" if trained.family != "translation" else name.split(".")[1]
        way = tokens.find_way(given, trained.data, language)
        if way == "none":
            return ["no tokenizer"]
        text = tokens.build(way, trained.dictionaries[name], template)
        write_tokenizer(place, text, longest, pads)
        if text.unknown:
            notes.append(
                f"{text.unknown:,} pieces are not in {name}: the tokenizer gives them numbers "
                "behind its symbols, and the model reads them as <unk>, as fairseq does"
            )
    return notes


def _places(trained: Trained, folder: Path) -> dict[str, Path]:
    """Return the folder of the tokenizer of each dictionary that there is need of."""
    first, *more = trained.dictionaries
    symbols = trained.dictionaries[first].symbols
    others = [name for name in more if trained.dictionaries[name].symbols != symbols]
    return {first: folder, **{name: folder / TARGET for name in others}}


def _keep_for_fairseq(trained: Trained, folder: Path) -> None:
    """Write what an import needs: options and dictionaries."""
    settings = {name: _plain(trained.settings[name]) for name in ("model", "task")}
    settings["task"]["data"] = "."
    write_json(folder / FAIRSEQ, settings)
    for name in trained.dictionaries:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(trained.data / name, folder / name)


def _plain(options: Any) -> dict[str, Any]:
    """Return options as JSON has them."""
    if OmegaConf.is_config(options):
        options = OmegaConf.to_container(options, resolve=True, enum_to_str=True)
    return dict(options if isinstance(options, dict) else vars(options))
