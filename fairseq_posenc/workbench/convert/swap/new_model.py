"""Builds the new model: the source's size and options, with other positions."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple, Optional

import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import SIZES as SUFFIXES
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.specs import parse
from fairseq_posenc.transformer.options import PositionConfig
from fairseq_posenc.workbench.loading.families import build, defaults, model_options
from fairseq_posenc.workbench.loading.pretrained import NOT_THE_MODEL, Pretrained

_SIZES = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
)


class Choice(NamedTuple):
    """What the user asked of the new model."""

    position_encoding: Optional[str] = None  # spec; None for the architecture's
    position_encoding_decoder: Optional[str] = None  # the decoder's; None for the same
    attention_directions: Optional[str] = None  # as in `lr,rl`; None for the architecture's
    max_positions: Optional[int] = None  # rows of the tables; None for the source's
    arch: Optional[str] = None  # architecture; None for the one that takes the fewest options

    def fill_from(self, source: Pretrained) -> Choice:
        """Fill in the source's positions and directions where the user names none."""
        encoding, decoder = self.position_encoding, self.position_encoding_decoder
        if encoding is None:
            sides = {side: str(spec) for side, spec in source.specs.items()}
            encoding, decoder = str(source.spec), decoder or sides.get("decoder")
        directions = self.attention_directions
        return self._replace(
            position_encoding=encoding,
            position_encoding_decoder=decoder,
            attention_directions=source.directions if directions is None else directions,
        )


class NewModel(NamedTuple):
    """The model that a training starts from, and how fairseq-train builds it."""

    values: dict[str, Any]  # its options, complete
    training: list[str]  # options with which fairseq-train builds the same model
    model: Any  # built, its parameters drawn


def build_new_model(choice: Choice, source: Pretrained, seed: int) -> NewModel:
    """Build the new model, its parameters drawn from a seed.

    Raises:
        UserError: an unknown architecture, one of another size, fewer positions, or positions that
            the model cannot have.
    """
    if choice.arch is not None:
        _refuse_other_arch(choice.arch, source)
    named = [choice.arch] if choice.arch else _list_architectures(choice, source)
    candidates = []
    for arch in named:
        values = _collect_options(arch, choice, source)
        candidates.append((_list_training_options(arch, values, source), values))
    training, values = min(candidates, key=lambda each: len(each[0]))
    torch.manual_seed(seed)
    return NewModel(values, training, build(values, source.sizes))


def _list_architectures(choice: Choice, source: Pretrained) -> list[str]:
    """List the architectures named after the positions, or ``none``."""
    assert choice.position_encoding is not None
    name = parse(choice.position_encoding).items[0].name
    stems = [f"{source.family.stem}{each}" for each in (name, "none")]
    stem = next(each for each in stems if each in ARCH_MODEL_REGISTRY)
    return [arch for suffix in SUFFIXES if (arch := f"{stem}{suffix}") in ARCH_MODEL_REGISTRY]


def _collect_options(arch: str, choice: Choice, source: Pretrained) -> dict[str, Any]:
    """Collect a model's options: the user's before the source's before the architecture's."""
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
    # fairseq's own way to say `none`
    names = {"arch": arch, "_name": arch, "no_token_positional_embeddings": False}
    return {**_find_model_defaults(arch, source), **sources, **users, **names}


def _find_model_defaults(arch: str, source: Pretrained) -> dict[str, Any]:
    """Look up the options of an architecture's model, with their defaults."""
    model = defaults(arch, source.family.task)["model"]
    positions = vars(PositionConfig())  # fairseq does not fill them in
    if isinstance(model, dict):
        return {**positions, **model}
    values = {**positions, **vars(model)}  # and those of the training
    names = [option.dest for option in model_options(arch)]
    return {name: values[name] for name in names if name in values}


def _list_training_options(arch: str, values: dict[str, Any], source: Pretrained) -> list[str]:
    """List the options that an architecture does not set by itself."""
    arch_sets, words = _find_model_defaults(arch, source), ["--arch", arch]
    for option in model_options(arch):
        value = values.get(option.dest)
        if value in (None, arch_sets.get(option.dest)) or option.dest in NOT_THE_MODEL:
            continue
        # By whether it says no; the first of those that say the same.
        flags = {flag.startswith("--no-"): flag for flag in option.option_strings[::-1]}
        if isinstance(value, bool):
            words.append(flags.get(not value, option.option_strings[0]))
        else:
            words += [option.option_strings[0], str(value)]
    return words


def _refuse_other_arch(arch: str, source: Pretrained) -> None:
    """Refuse an architecture of another size; names without suffix take sizes without a name."""
    if ARCH_MODEL_REGISTRY.get(arch) is not PositionalRoberta:
        raise UserError(
            f"--arch {arch}: no such masked language model; it is roberta_ENCODING, with a "
            "name that fairseq-posenc list prints, or decbert_same or decbert_diff; for another "
            "size than base, followed by _large or _tiny"
        )
    sizes = tuple(getattr(source.args, name) for name in _SIZES)
    by_suffix = {suffix: _read_sizes(setter) for suffix, setter in SUFFIXES.items()}
    wanted = next((s for s in by_suffix if s and arch.endswith(s)), "")
    fitting = next((s for s, each in by_suffix.items() if each == sizes), "")
    if wanted != fitting:
        stem = arch[: len(arch) - len(wanted)]
        raise UserError(
            f"--arch {arch} has {_describe_sizes(by_suffix[wanted])}, but {source.path} has "
            f"{_describe_sizes(sizes)}: write --arch {stem}{fitting}"
        )


def _read_sizes(setter: Any) -> tuple[Any, ...]:
    args = Namespace()
    setter(args)
    return tuple(getattr(args, name) for name in _SIZES)


def _describe_sizes(sizes: tuple[Any, ...]) -> str:
    layers, width, inner, heads = sizes
    return f"{layers} layers of width {width} and {inner}, {heads} heads"
