"""Gives a fairseq checkpoint other positions, by spec or by architecture, for ``swap``.

The new model has the size and the options of the trained one (the *source*). The result is a *start
checkpoint*: weights and configuration for ``fairseq-train --finetune-from-model``.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import SIZES as SUFFIXES
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.specs import parse
from fairseq_posenc.transformer.options import PositionConfig, resolve_positions
from fairseq_posenc.workbench.convert import random_comparison
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
from fairseq_posenc.workbench.loading.families import (
    build_default_settings,
    list_model_options,
    list_stacks,
)
from fairseq_posenc.workbench.loading.families import build_model as build_fairseq_model
from fairseq_posenc.workbench.loading.pretrained import (
    NOT_THE_MODEL,
    Pretrained,
    read_pretrained,
)
from fairseq_posenc.workbench.running.options import build_settings


class UserOptions(NamedTuple):
    """The user's options for the new model; None if an option is not set."""

    position_encoding: Optional[str] = None  # spec; default: the architecture's
    position_encoding_decoder: Optional[str] = None  # the decoder's spec; default: the same
    attention_directions: Optional[str] = None  # as in `lr,rl`; default: the architecture's
    max_positions: Optional[int] = None  # default: the source's
    arch: Optional[str] = None  # default: the architecture that needs the fewest options

    def fill_from(self, source: Pretrained) -> UserOptions:
        """Fill in the source's positions and directions for options that are not set."""
        filled = self
        if filled.position_encoding is None:
            filled = filled._replace(position_encoding=str(source.spec))
            if filled.position_encoding_decoder is None and "decoder" in source.specs:
                decoder = str(source.specs["decoder"])
                filled = filled._replace(position_encoding_decoder=decoder)
        if filled.attention_directions is None:
            filled = filled._replace(attention_directions=source.directions)
        return filled


class NewModel(NamedTuple):
    """The new model and its options."""

    options: dict[str, Any]  # all of them
    command_line: list[str]  # the options with which fairseq-train builds the same model
    model: Any  # with new parameters


def swap_checkpoint(options: Namespace) -> list[str]:
    """Write a start checkpoint; return lines that describe the origin of its parameters.

    Raises:
        UserError: the model cannot have such positions.
    """
    user_options = build_settings(UserOptions, options)
    if not (options.out or options.arch):
        raise UserError("--out: name the file of the start checkpoint")
    out = options.out or Path(f"{options.arch}.pt")
    refuse_existing_output("--out", out, options.overwrite)
    source = read_pretrained(options.checkpoint, with_weights=True, any_family=not options.arch)
    with refuse_unusable_settings(f"--checkpoint {options.checkpoint}"):
        if not options.arch:
            user_options = user_options.fill_from(source)
        new = build_new_model(user_options, source, options.seed)
        start = transfer_weights(source, new.model, options.extend)
        difference = _compare_scores(source, new) if start.permuted else None
        settings: Any = OmegaConf.to_container(source.settings, resolve=True, enum_to_str=True)
        # fairseq's language models are configured by a dataclass, the others by a Namespace.
        has_dataclass = source.family.name == "causal_lm"
        settings["model"] = new.options if has_dataclass else Namespace(**new.options)
        write_start_checkpoint(settings, start.weights, out)
    return [*_describe_parameters(source, start, difference), *_describe_training(source, new, out)]


def build_new_model(user_options: UserOptions, source: Pretrained, seed: int) -> NewModel:
    """Build the new model, with parameters initialised from a seed.

    Raises:
        UserError: the architecture is unknown or of another size, or the model cannot have such
            positions or fewer of them.
    """
    if user_options.arch is not None:
        _refuse_other_arch(user_options.arch, source)
        architectures = [user_options.arch]
    else:
        spec = parse(str(user_options.position_encoding))
        architectures = _list_architectures(spec.items[0].name, source)
    candidates = []
    for arch in architectures:
        options = _collect_options(arch, user_options, source)
        candidates.append((options, _format_command_line(arch, options, source)))
    # The architecture that needs the fewest options beside it.
    options, command_line = min(candidates, key=lambda candidate: len(candidate[1]))
    torch.manual_seed(seed)
    return NewModel(options, command_line, build_fairseq_model(options, source.dictionary_sizes))


def _list_architectures(encoding: str, source: Pretrained) -> list[str]:
    """List the sizes of the architecture named after an encoding, or else after ``none``."""
    stems = [f"{source.family.stem}{name}" for name in (encoding, "none")]
    stem = next(stem for stem in stems if stem in ARCH_MODEL_REGISTRY)
    return [f"{stem}{s}" for s in SUFFIXES if f"{stem}{s}" in ARCH_MODEL_REGISTRY]


def _collect_options(arch: str, user_options: UserOptions, source: Pretrained) -> dict[str, Any]:
    """Collect a model's options: the user's override the source's, which override defaults."""
    # Not the source's positions, nor its files of initial embeddings, as its weights are loaded.
    left_out = {*vars(PositionConfig()), "encoder_embed_path", "decoder_embed_path"}
    options = _find_model_defaults(arch, source)
    options |= {name: value for name, value in vars(source.args).items() if name not in left_out}
    chosen = {name: value for name, value in user_options._asdict().items() if value is not None}
    max_positions = chosen.pop("max_positions", 0)  # not the option's name in every family
    options |= chosen
    for side, option in source.family.length_options.items():
        options[option] = max_positions or source.num_positions[side]
        if options[option] < source.num_positions[side]:
            raise UserError(
                f"--max-positions {max_positions}: {source.path} has {source.num_positions[side]}, "
                "and tables are extended, never cut; shorter samples need no shorter table"
            )
    # The last one is fairseq's option for no positions; ours is the spec `none`.
    return {**options, "arch": arch, "_name": arch, "no_token_positional_embeddings": False}


def _find_model_defaults(arch: str, source: Pretrained) -> dict[str, Any]:
    """Look up the options of an architecture's model, with their defaults."""
    model = build_default_settings(arch, source.family.task)["model"]
    positions = vars(PositionConfig())  # fairseq does not fill in these defaults
    if isinstance(model, dict):
        return {**positions, **model}
    options = {**positions, **vars(model)}
    names = [action.dest for action in list_model_options(arch)]  # without those of the training
    return {name: options[name] for name in names if name in options}


def _format_command_line(arch: str, options: dict[str, Any], source: Pretrained) -> list[str]:
    """Format the options that differ from the defaults of an architecture."""
    defaults = _find_model_defaults(arch, source)
    words = ["--arch", arch]
    for action in list_model_options(arch):
        value = options.get(action.dest)
        if value in (None, defaults.get(action.dest)) or action.dest in NOT_THE_MODEL:
            continue
        flags = action.option_strings
        if isinstance(value, bool):  # --X turns it on; if there is a --no-X, this turns it off
            fitting = [flag for flag in flags if flag.startswith("--no-") is not value]
            words.append((fitting or flags)[0])
        else:
            words += [flags[0], str(value)]
    return words


def _refuse_other_arch(arch: str, source: Pretrained) -> None:
    """Refuse an architecture whose suffix (_large, _tiny) does not name the source's size.

    A source of any other size needs a name without suffix.
    """
    if ARCH_MODEL_REGISTRY.get(arch) is not PositionalRoberta:
        raise UserError(
            f"--arch {arch}: no such masked language model; it is roberta_ENCODING, with a "
            "name that fairseq-posenc list prints, or decbert_same or decbert_diff; for another "
            "size than base, followed by _large or _tiny"
        )
    sizes = {}
    for suffix, set_size in SUFFIXES.items():
        args = Namespace()
        set_size(args)
        sizes[suffix] = _describe_size(args)
    suffix = next((suffix for suffix in SUFFIXES if suffix and arch.endswith(suffix)), "")
    size = _describe_size(source.args)
    fitting = next((suffix for suffix in SUFFIXES if sizes[suffix] == size), "")
    if suffix != fitting:
        raise UserError(
            f"--arch {arch} has {sizes[suffix]}, but {source.path} has "
            f"{size}: write --arch {arch.removesuffix(suffix)}{fitting}"
        )


def _describe_size(args: Namespace) -> str:
    return (
        f"{args.encoder_layers} layers of width {args.encoder_embed_dim} and "
        f"{args.encoder_ffn_embed_dim}, {args.encoder_attention_heads} heads"
    )


def _compare_scores(source: Pretrained, new: NewModel) -> Optional[float]:
    """Compare a model with its source on random sentences, if only layouts of rotations differ.

    Returns:
        The largest difference; None if more differs, so that scores may.

    Raises:
        UserError: the scores differ by more than rounding explains.
    """
    old = build_new_model(UserOptions().fill_from(source), source, seed=1)
    transfer_weights(source, old.model, None)
    if _list_identities(old.model) != _list_identities(new.model):
        return None
    compute_before = partial(random_comparison.compute_scores, old.model.float().eval())
    compute_after = partial(random_comparison.compute_scores, new.model.float().eval())
    batches = random_comparison.draw_batches(old.model)
    difference = random_comparison.largest_difference(batches, compute_before, compute_after)
    what_differs = f"{source.path}: with the other layout its scores differ"
    random_comparison.refuse_difference(what_differs, difference)
    return difference


def _list_identities(model: Any) -> list[str]:
    """List the identities of the stacks, except for the layouts of rotations."""
    return [
        str(stack.identity._replace(positions=str(with_default_layouts(stack.assembly.spec))))
        for _, stack in list_stacks(model)
    ]


def _describe_parameters(
    source: Pretrained, start: StartWeights, difference: Optional[float]
) -> list[str]:
    """Describe in lines which of the source's parameters were kept, changed or left out.

    ``difference`` is that of the scores of the two models if they should be equal.
    """
    stacks = []
    for side, spec in source.specs.items():
        layers = getattr(source.args, f"{side}_layers")
        width = getattr(source.args, f"{side}_embed_dim")
        size = f"{layers} layers of width {width}, {source.num_positions[side]:,} positions"
        stacks.append(f"{size}, positions: {spec}")
    symbols = " and ".join(f"{size:,}" for size in dict.fromkeys(source.dictionary_sizes))
    lines = [
        f"source: {source.path}: {source.arch}, {symbols} symbols, {'; '.join(stacks)}",
        f"kept bit for bit: the {len(start.kept)} tensors that are not positions",
    ]
    if start.permuted:
        line = (
            f"permuted: {len(start.permuted)} tensors of queries and keys, from "
            f"{start.permuted[0]} on: the coordinates of each head"
        )
        if difference is not None:
            equal = f"equal to {difference:.0e} of the largest one"
            line += f"; on random sentences all scores are {equal}"
        lines.append(line)
    lines += start.positions
    if start.heads:
        lines.append(f"left out, as they belong to a task: {', '.join(start.heads)}")
    return lines


def _describe_training(source: Pretrained, new: NewModel, out: Path) -> list[str]:
    """Describe the new model, and the command that trains from it."""
    positions = resolve_positions(Namespace(**new.options))
    family, settings = source.family, source.settings
    words = ["--task", family.task]
    if family.name == "masked_lm":
        length = ["--tokens-per-sample", str(new.options["max_positions"])]
        words += ["--criterion", "masked_lm", *length]
    if family.name == "translation":
        pair = settings.task.source_lang, settings.task.target_lang
        if all(pair):  # else fairseq infers them from the names of the data
            words += ["--source-lang", pair[0], "--target-lang", pair[1]]
    words += ["--user-dir", "fairseq_posenc", *new.command_line, "--finetune-from-model", str(out)]
    decoder = positions.decoder if "decoder" in source.specs else positions.encoder
    both = f" and {decoder}" if decoder != positions.encoder else ""
    directions = ",".join(positions.directions) or "both"
    return [
        f"wrote {out}: positions: {positions.encoder}{both}, directions: {directions}",
        "train from it, and resume, with the same command: fairseq-train DATA "
        f"{shlex.join(words)} ...",
    ]
