"""Gives a fairseq checkpoint other positions, by spec or by architecture, for ``swap``."""

from __future__ import annotations

import argparse
import shlex
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fairseq_posenc.errors import UserError
from fairseq_posenc.transformer.options import resolve
from fairseq_posenc.workbench.convert.random_comparison import (
    ALLOWED,
    compute_scores,
    largest_difference,
)
from fairseq_posenc.workbench.convert.swap.new_model import Choice, NewModel, build_new_model
from fairseq_posenc.workbench.convert.swap.weights import (
    StartWeights,
    transfer_weights,
    with_default_layouts,
)
from fairseq_posenc.workbench.loading.checkpoints import (
    refuse_existing_output,
    refuse_unusable_settings,
    write_start_checkpoint,
)
from fairseq_posenc.workbench.loading.families import list_stacks
from fairseq_posenc.workbench.loading.pretrained import Pretrained, read_pretrained
from fairseq_posenc.workbench.running.options import build_settings


def swap_checkpoint(options: argparse.Namespace) -> list[str]:
    """Write a start checkpoint; return lines that describe the origin of its parameters.

    Raises:
        UserError: the model cannot have such positions.
    """
    choice = build_settings(Choice, options)
    if not (options.out or options.arch):
        raise UserError("--out: name the file of the start checkpoint")
    out = options.out or Path(f"{options.arch}.pt")
    refuse_existing_output("--out", out, options.overwrite)
    source = read_pretrained(
        options.checkpoint, "--checkpoint", with_weights=True, any_family=not options.arch
    )
    with refuse_unusable_settings(f"--checkpoint {options.checkpoint}"):
        choice = choice if options.arch else choice.fill_from(source)
        new = build_new_model(choice, source, options.seed)
        start = transfer_weights(source, new.model, options.extend)
        equality = _check_equality(source, new) if start.permuted else ""
        settings: Any = OmegaConf.to_container(source.settings, resolve=True, enum_to_str=True)
        # fairseq's language models are configured by a dataclass, the others by a Namespace.
        has_dataclass = source.family.name == "causal_lm"
        settings["model"] = new.values if has_dataclass else argparse.Namespace(**new.values)
        write_start_checkpoint(settings, start.weights, out)
    return [*_describe_parameters(source, start, equality), *_describe_training(source, new, out)]


def _check_equality(source: Pretrained, new: NewModel) -> str:
    """Compare a model with its source on random sentences, if only layouts of rotations differ.

    Returns:
        A note for the line about the layouts; empty if more differs, so that scores may.

    Raises:
        UserError: the scores differ by more than rounding explains.
    """
    old = build_new_model(Choice().fill_from(source), source, seed=1)
    transfer_weights(source, old.model, None)
    # The identities of the stacks, except for the layouts of rotations.
    identities = [
        [
            str(stack.identity._replace(positions=str(with_default_layouts(stack.assembly.spec))))
            for _, stack in list_stacks(built.model)
        ]
        for built in (old, new)
    ]
    if identities[0] != identities[1]:
        return ""
    before, after = (partial(compute_scores, built.model.float().eval()) for built in (old, new))
    difference = largest_difference(old.model, before, after)
    if difference > ALLOWED:
        raise UserError(
            f"{source.path}: with the other layout its scores differ by {difference:.1e} of the "
            "largest one, more than rounding explains: nothing was written"
        )
    return f"; on random sentences all scores are equal to {difference:.0e} of the largest one"


def _describe_parameters(source: Pretrained, start: StartWeights, equality: str) -> list[str]:
    """Describe in lines which of the source's parameters were kept, changed or left out."""
    stacks = []
    for side, spec in source.specs.items():
        layers, width = (getattr(source.args, f"{side}_{n}") for n in ("layers", "embed_dim"))
        size = f"{layers} layers of width {width}, {source.positions[side]:,} positions"
        stacks.append(f"{size}, positions: {spec}")
    symbols = " and ".join(f"{size:,}" for size in dict.fromkeys(source.sizes))
    lines = [
        f"source: {source.path}: {source.arch}, {symbols} symbols, {'; '.join(stacks)}",
        f"kept bit for bit: the {len(start.kept)} tensors that are not positions",
    ]
    if start.permuted:
        lines.append(
            f"permuted: {len(start.permuted)} tensors of queries and keys, from "
            f"{start.permuted[0]} on: the coordinates of each head{equality}"
        )
    lines += start.positions
    if start.heads:
        lines.append(f"left out, as they belong to a task: {', '.join(start.heads)}")
    return lines


def _describe_training(source: Pretrained, new: NewModel, out: Path) -> list[str]:
    """Describe the new model, and the command that trains from it."""
    positions = resolve(argparse.Namespace(**new.values))
    family, settings = source.family, source.settings
    words = ["--task", family.task]
    if family.name == "masked_lm":
        length = ["--tokens-per-sample", str(new.values["max_positions"])]
        words += ["--criterion", "masked_lm", *length]
    if family.name == "translation":
        pair = settings.task.source_lang, settings.task.target_lang
        if all(pair):  # else fairseq infers them from the names of the data
            words += ["--source-lang", pair[0], "--target-lang", pair[1]]
    words += ["--user-dir", "fairseq_posenc", *new.training, "--finetune-from-model", str(out)]
    decoder = positions.decoder if "decoder" in source.specs else positions.encoder
    both = f" and {decoder}" if decoder != positions.encoder else ""
    directions = ",".join(positions.directions) or "both"
    return [
        f"wrote {out}: positions: {positions.encoder}{both}, directions: {directions}",
        "train from it, and resume, with the same command: fairseq-train DATA "
        f"{shlex.join(words)} ...",
    ]
