"""Gives a fairseq checkpoint other positions, by spec or by architecture, for ``swap``.

The new model has the size and the options of the trained one (the *source*).
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
from fairseq_posenc.transformer.options import PositionConfig, resolve
from fairseq_posenc.workbench.convert.random_comparison import (
    compute_scores,
    is_rounding,
    largest_difference,
)
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
    build,
    defaults,
    list_stacks,
    model_options,
)
from fairseq_posenc.workbench.loading.pretrained import (
    NOT_THE_MODEL,
    Pretrained,
    read_pretrained,
)
from fairseq_posenc.workbench.running.options import build_settings


class Choice(NamedTuple):
    """The user's options for the new model; None if an option is not set."""

    position_encoding: Optional[str] = None  # spec; default: the architecture's
    position_encoding_decoder: Optional[str] = None  # the decoder's spec; default: the same
    attention_directions: Optional[str] = None  # as in `lr,rl`; default: the architecture's
    max_positions: Optional[int] = None  # default: the source's
    arch: Optional[str] = None  # default: the architecture that needs the fewest options

    def fill_from(self, source: Pretrained) -> Choice:
        """Fill in the source's positions and directions for options that are not set."""
        encoding, decoder = self.position_encoding, self.position_encoding_decoder
        if encoding is None:
            sides = {side: str(spec) for side, spec in source.specs.items()}
            encoding = str(source.spec)
            decoder = decoder or sides.get("decoder")
        directions = self.attention_directions
        return self._replace(
            position_encoding=encoding,
            position_encoding_decoder=decoder,
            attention_directions=source.directions if directions is None else directions,
        )


class NewModel(NamedTuple):
    """The new model, and the options with which fairseq-train builds it."""

    values: dict[str, Any]  # all options of the model
    training: list[str]  # options with which fairseq-train builds the same model
    model: Any  # with new parameters


def swap_checkpoint(options: Namespace) -> list[str]:
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
        settings["model"] = new.values if has_dataclass else Namespace(**new.values)
        write_start_checkpoint(settings, start.weights, out)
    return [*_describe_parameters(source, start, equality), *_describe_training(source, new, out)]


def build_new_model(choice: Choice, source: Pretrained, seed: int) -> NewModel:
    """Build the new model, with parameters initialised from a seed.

    Raises:
        UserError: the architecture is unknown or of another size, or the model cannot have such
            positions or fewer of them.
    """
    if choice.arch is not None:
        _refuse_other_arch(choice.arch, source)
        architectures = [choice.arch]
    else:  # the architectures that are named after the positions, or after `none`
        name = parse(str(choice.position_encoding)).items[0].name
        stems = (f"{source.family.stem}{encoding}" for encoding in (name, "none"))
        stem = next(stem for stem in stems if stem in ARCH_MODEL_REGISTRY)
        architectures = [f"{stem}{s}" for s in SUFFIXES if f"{stem}{s}" in ARCH_MODEL_REGISTRY]
    candidates = []
    for arch in architectures:
        options = _collect_options(arch, choice, source)
        candidates.append((options, _list_training_options(arch, options, source)))
    # The architecture that needs the fewest options beside it.
    values, training = min(candidates, key=lambda candidate: len(candidate[1]))
    torch.manual_seed(seed)
    return NewModel(values, training, build(values, source.sizes))


def _collect_options(arch: str, choice: Choice, source: Pretrained) -> dict[str, Any]:
    """Collect a model's options: the user's override the source's, which override defaults."""
    left_out = {*PositionConfig.__dataclass_fields__, "encoder_embed_path", "decoder_embed_path"}
    sources = {name: value for name, value in vars(source.args).items() if name not in left_out}
    users = {name: value for name, value in choice._asdict().items() if value is not None}
    max_positions = users.pop("max_positions", 0)
    for side, option in source.family.positions.items():
        sources[option] = max_positions or source.positions[side]
        if sources[option] < source.positions[side]:
            raise UserError(
                f"--max-positions {max_positions}: {source.path} has {source.positions[side]}, and "
                "tables are extended, never cut; shorter samples need no shorter table"
            )
    # The last one is fairseq's option for no positions; ours is the spec `none`.
    names = {"arch": arch, "_name": arch, "no_token_positional_embeddings": False}
    return {**_find_model_defaults(arch, source), **sources, **users, **names}


def _find_model_defaults(arch: str, source: Pretrained) -> dict[str, Any]:
    """Look up the options of an architecture's model, with their defaults."""
    model = defaults(arch, source.family.task)["model"]
    positions = vars(PositionConfig())  # fairseq does not fill in these defaults
    if isinstance(model, dict):
        return {**positions, **model}
    values = {**positions, **vars(model)}  # also contains the options of the training
    names = [option.dest for option in model_options(arch)]
    return {name: values[name] for name in names if name in values}


def _list_training_options(arch: str, values: dict[str, Any], source: Pretrained) -> list[str]:
    """List the options that differ from the defaults of an architecture, as on a command line."""
    arch_sets = _find_model_defaults(arch, source)
    words = ["--arch", arch]
    for option in model_options(arch):
        value = values.get(option.dest)
        if value in (None, arch_sets.get(option.dest)) or option.dest in NOT_THE_MODEL:
            continue
        # The first flag that turns the option off, and the first that turns it on.
        flags = {flag.startswith("--no-"): flag for flag in option.option_strings[::-1]}
        if isinstance(value, bool):
            words.append(flags.get(not value, option.option_strings[0]))
        else:
            words += [option.option_strings[0], str(value)]
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
    by_suffix = {suffix: Namespace() for suffix in SUFFIXES}
    for suffix, args in by_suffix.items():
        SUFFIXES[suffix](args)
    wanted = next((suffix for suffix in SUFFIXES if suffix and arch.endswith(suffix)), "")
    size = _describe_size(source.args)
    fitting = next((s for s, args in by_suffix.items() if _describe_size(args) == size), "")
    if wanted != fitting:
        raise UserError(
            f"--arch {arch} has {_describe_size(by_suffix[wanted])}, but {source.path} has "
            f"{size}: write --arch {arch.removesuffix(wanted)}{fitting}"
        )


def _describe_size(args: Namespace) -> str:
    return (
        f"{args.encoder_layers} layers of width {args.encoder_embed_dim} and "
        f"{args.encoder_ffn_embed_dim}, {args.encoder_attention_heads} heads"
    )


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
    compute_before = partial(compute_scores, old.model.float().eval())
    compute_after = partial(compute_scores, new.model.float().eval())
    difference = largest_difference(old.model, compute_before, compute_after)
    if not is_rounding(difference):
        raise UserError(
            f"{source.path}: with the other layout its scores differ by {difference:.1e} of the "
            "largest one, more than rounding explains: nothing was written"
        )
    return f"; on random sentences all scores are equal to {difference:.0e} of the largest one"


def _describe_parameters(source: Pretrained, start: StartWeights, equality: str) -> list[str]:
    """Describe in lines which of the source's parameters were kept, changed or left out."""
    stacks = []
    for side, spec in source.specs.items():
        layers = getattr(source.args, f"{side}_layers")
        width = getattr(source.args, f"{side}_embed_dim")
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
    positions = resolve(Namespace(**new.values))
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
