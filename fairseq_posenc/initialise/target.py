"""The model that starts: the source's size and options, with other positions."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

from fairseq_posenc.errors import UserError
from fairseq_posenc.models.masked_lm import SIZES as SUFFIXES
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.running.pretrained import Pretrained
from fairseq_posenc.transformer.options import PositionConfig

SIZES = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
)


class Choice(NamedTuple):
    """What the user wants; None leaves it to the architecture or the source.

    Attributes:
        arch: architecture.
        position_encoding: spec.
        attention_directions: as in ``lr,rl``.
        max_positions: of the tables.
    """

    arch: str
    position_encoding: Optional[str]
    attention_directions: Optional[str]
    max_positions: Optional[int]


def arguments(choice: Choice, source: Pretrained) -> Namespace:
    """Return the model options of the start.

    Raises:
        UserError: an unknown architecture, one of another size, or fewer positions.
    """
    if ARCH_MODEL_REGISTRY.get(choice.arch) is not PositionalRoberta:
        raise UserError(
            f"--arch {choice.arch}: no such masked language model; it is roberta_ENCODING, with a "
            "name that fairseq-posenc list prints, or decbert_same or decbert_diff; for another "
            "size than base, followed by _large or _tiny"
        )
    _refuse_other_size(choice.arch, source)
    positions = source.max_positions if choice.max_positions is None else choice.max_positions
    if positions < source.max_positions:
        raise UserError(
            f"--max-positions {positions}: {source.path} has {source.max_positions}, and tables "
            "are extended, never cut; shorter blocks train with fairseq's --tokens-per-sample"
        )
    own = PositionConfig.__dataclass_fields__
    kept = {name: value for name, value in vars(source.args).items() if name not in own}
    chosen = {name: value for name, value in choice._asdict().items() if value is not None}
    args = Namespace(**{**kept, **chosen})
    args._name = choice.arch
    args.max_positions = positions
    args.no_token_positional_embeddings = False  # fairseq's own way to say `none`
    ARCH_CONFIG_REGISTRY[choice.arch](args)
    return args


def build(args: Namespace, symbols: int, seed: int) -> PositionalRoberta:
    """Return the model with all parameters drawn from a seed."""
    dictionary = Dictionary()
    for index in range(symbols - len(dictionary)):
        dictionary.add_symbol(f"symbol{index}")
    task = SimpleNamespace(source_dictionary=dictionary, max_positions=lambda: args.max_positions)
    torch.manual_seed(seed)
    return PositionalRoberta.build_model(args, task)


def training_options(args: Namespace) -> list[str]:
    """Return the options with which fairseq-train builds the same model."""
    by_name = Namespace()
    ARCH_CONFIG_REGISTRY[args.arch](by_name)
    shown = [*PositionConfig.__dataclass_fields__, *SIZES, *_OF_WEIGHTS]
    options = ["--arch", args.arch, "--max-positions", str(args.max_positions)]
    for name in shown:
        value = getattr(args, name, None)
        if name != "_name" and hasattr(by_name, name) and value != getattr(by_name, name):
            option = f"--{name.replace('_', '-')}"
            options += [option] if value is True else [option, str(value)]
    return options


# Options that change which parameters there are, or what they compute.
_OF_WEIGHTS = (
    "encoder_normalize_before",
    "layernorm_embedding",
    "untie_weights_roberta",
    "activation_fn",
)


def _refuse_other_size(arch: str, source: Pretrained) -> None:
    """Refuse an architecture of another size; names without suffix take sizes without a name."""
    sizes = tuple(getattr(source.args, name) for name in SIZES)
    by_suffix = {suffix: _sizes_of(setter) for suffix, setter in SUFFIXES.items()}
    asked = next((s for s in by_suffix if s and arch.endswith(s)), "")
    fitting = next((s for s, each in by_suffix.items() if each == sizes), "")
    if asked != fitting:
        stem = arch[: len(arch) - len(asked)]
        raise UserError(
            f"--arch {arch} has {_describe(by_suffix[asked])}, but {source.path} has "
            f"{_describe(sizes)}: write --arch {stem}{fitting}"
        )


def _sizes_of(setter: Any) -> tuple[Any, ...]:
    args = Namespace()
    setter(args)
    return tuple(getattr(args, name) for name in SIZES)


def _describe(sizes: tuple[Any, ...]) -> str:
    layers, width, inner, heads = sizes
    return f"{layers} layers of width {width} and {inner}, {heads} heads"
