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
from fairseq_posenc.exchange.incoming import build, load, read_folder
from fairseq_posenc.exchange.naming import configuration, exported, generation
from fairseq_posenc.exchange.native import export
from fairseq_posenc.exchange.trained import Trained, open_trained, stacks_of
from fairseq_posenc.running.starts import check_out, start_of, write_start


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc export``."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="a trained model")
    add(
        "--to",
        choices=["hf", "hf4"],
        required=True,
        help="hf: Hugging Face's transformers; hf4: its last version before 5, whose RoBERTa still "
        "has the positions of shaw and m4",
    )
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
        unknown, notes = _write_tokenizers(trained, options.tokens, folder)
        config = _write_model(trained, options.to, unknown, folder, notes)
        if trained.family != "masked_lm":
            write_json(folder / "generation_config.json", generation(trained))
        (folder / "README.md").write_text(card(trained, config, notes), encoding="utf-8")
        _keep_for_fairseq(trained, folder)
    print("\n".join([f"wrote {options.out}: {config['architectures'][0]}", *notes]))
    return 0


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc import``."""
    add = parser.add_argument
    what = "of transformers: a RoBERTa, or what fairseq-posenc export wrote"
    add("--from", dest="source", type=Path, required=True, metavar="FOLDER", help=what)
    add("--out", type=Path, required=True, metavar="FILE", help="start checkpoint of fairseq")
    add("--overwrite", action="store_true", help="replace an older --out")


def run_import(options: argparse.Namespace) -> int:
    """Write a start checkpoint, and say how a training goes on from it.

    Raises:
        UserError: see the parts' own.
    """
    check_out(options.out, options.overwrite)
    folder = read_folder(options.source)
    built = build(folder)
    weights = load(folder, built)
    write_start(start_of(built.settings, weights), options.out)
    stacks = [f"{name} {stack.identity.told()}" for name, stack in stacks_of(built.model)]
    print(f"wrote {options.out}: {len(folder.weights):,} tensors; {'; '.join(stacks)}")
    print(f"train from it: fairseq-train DATA ... --finetune-from-model {options.out}")
    return 0


def _write_model(
    trained: Trained, target: str, unknown: int, folder: Path, notes: list[str]
) -> dict[str, Any]:
    """Write configuration, weights, and code if transformers has none; return the configuration."""
    config, weights = configuration(trained), exported(trained)
    version = 4 if target == "hf4" else None
    native, why_not = export(trained, config, weights, version)
    if unknown:
        native, why_not = None, "no class of transformers has <unk> for such pieces"
    if native is not None:
        write_model(folder, *native)
        why_not = _compare(trained, folder, native.config, notes)
        if not why_not:
            return native.config
    notes.append(f"code of its own: {why_not}")
    write_model(folder, config, weights)
    (folder / CODE).write_text(code(config), encoding="utf-8")
    if wrong := _compare(trained, folder, config, notes):
        raise UserError(f"{wrong}: nothing was written")
    return config


def _compare(trained: Trained, folder: Path, config: dict[str, Any], notes: list[str]) -> str:
    """Note how equal a written model is to the trained one; return why it is not, or nothing."""
    (name,) = config["architectures"]
    difference = largest_difference(trained, read_back(folder, name))
    if difference > ALLOWED:
        return (
            f"{name} differs from the model by {difference:.1e} of its largest score, and "
            f"{ALLOWED:g} is rounding"
        )
    notes.append(f"scores equal to {difference:.1e} of the largest one, on padded sentences")
    return ""


def _write_tokenizers(trained: Trained, given: str | None, folder: Path) -> tuple[int, list[str]]:
    """Write a tokenizer for each language; return how many pieces have no symbol, and notes."""
    notes, unknown = [], 0
    template = trained.family
    if template == "causal_lm" and trained.settings.task.get("add_bos_token"):
        template = "causal_lm with <s>"
    pads = "left" if trained.family == "causal_lm" else "right"
    longest = min(stack.max_positions() for stack in trained.stacks.values())
    for name, place in _places(trained, folder).items():
        language = "" if trained.family != "translation" else name.split(".")[1]
        way = tokens.find_way(given, trained.data, language)
        if way == "none":
            return 0, ["no tokenizer"]
        text = tokens.build(way, trained.dictionaries[name], template)
        write_tokenizer(place, text, longest, pads)
        unknown += text.unknown
        if text.unknown:
            notes.append(
                f"{text.unknown:,} pieces are not in {name}: the tokenizer gives them numbers "
                "behind its symbols, and the model reads them as <unk>, as fairseq does"
            )
    return unknown, notes


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
