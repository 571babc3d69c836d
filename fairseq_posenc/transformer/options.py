"""Defines, parses and logs the options that this package adds to fairseq's models.

No ``from __future__ import annotations`` here: fairseq makes options from the fields' types.
"""

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.transformer import TransformerConfig
from fairseq.utils import safe_getattr
from omegaconf import DictConfig, OmegaConf

from fairseq_posenc.assembly import check_size
from fairseq_posenc.checkpoints.dictionary import fingerprint
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError, suggest
from fairseq_posenc.identity import WeightSettings, parse_directions
from fairseq_posenc.specs import Spec, parse


@dataclass
class PositionConfig(FairseqDataclass):
    """The options that the package adds to a model."""

    position_encoding: str = field(
        default="learned",
        metadata={
            "help": "position encodings, joined by '+', options in parentheses, as in "
            "'learned+m4m(max_distance=128)'; 'none' for no positions; different layers, joined "
            "by ',' and repeated, as in '3*rope+window(size=512),none'"
        },
    )
    position_encoding_decoder: Optional[str] = field(
        default=None,
        metadata={"help": "position encodings of the decoder (default: those of the encoder)"},
    )
    attention_directions: str = field(
        default="",
        metadata={
            "help": "what the first encoder layers see, as in 'lr,rl': lr up to the token, rl "
            "from the token on, both; layers not named are 'both' (DecBERT)"
        },
    )
    position_backend: str = field(
        default="auto",
        metadata={"help": "how attention is computed: auto, or a backend that must be used"},
    )
    init_positions: bool = field(
        default=False,
        metadata={
            "help": "accept a checkpoint with other position parameters than the model's: start "
            "the model's fresh, drop the checkpoint's, and name each in the log"
        },
    )


class StackSettings(NamedTuple):
    """What our stack and its layers read, stored in fairseq's configuration as ``position``.

    If LayerDrop's pruning keeps only some layers, ``spec`` and ``directions`` are of these.
    """

    spec: Spec
    dims: Dims
    directions: tuple[str, ...]  # of each layer: `both`, `lr` or `rl`
    backend: str
    init_positions: bool
    layers_kept: list[int] | None  # indices of the layers that pruning keeps; None for all


def add_position_args(parser: ArgumentParser) -> None:
    """Add the options to a family that uses argparse; their defaults are set by architectures."""
    gen_parser_from_dataclass(parser, PositionConfig(), delete_default=True, with_prefix="")


def refuse_unknown_settings(settings: DictConfig) -> None:
    """Refuse a model, or settings of it, that do not exist, in hydra's section ``model``.

    ``+`` adds any name to a model without a dataclass. This function exits, because hydra, whose
    callback may call it, would only warn of an exception.
    """
    name = settings.get("_name", "")
    if name not in ARCH_MODEL_REGISTRY:
        similar = suggest(name, ARCH_MODEL_REGISTRY)
        sys.exit(f"fairseq-posenc: error: model._name={name}: {similar}there is no such model")
    known = list_settings(name)
    for key in map(str, settings):
        if known and key not in known:
            fault = f"model.{key}: {suggest(key, known)}{name} has no such setting"
            sys.exit(f"fairseq-posenc: error: {fault}")


def list_settings(name: str | None) -> set[str]:
    """List the settings of one of our models by its architecture; none if hydra checks them."""
    if name not in ARCH_MODEL_REGISTRY or name in MODEL_DATACLASS_REGISTRY:
        return set()
    parser = ArgumentParser()
    ARCH_MODEL_REGISTRY[name].add_args(parser)
    # The options of fairseq's models, without those that the parser already has.
    gen_parser_from_dataclass(parser, TransformerConfig(), delete_default=True, with_prefix="")
    known = {"_name", "decoder_input_dim", *vars(parser.parse_args([]))}  # architectures set it
    return known if "position_encoding" in known else set()  # of another package: none


def read_options(args: Any) -> PositionConfig:
    """Read our options in fairseq's ``args``: a namespace, a DictConfig or a dataclass.

    An option of fairseq that leaves out all positions is refused.
    """
    if safe_getattr(args, "no_token_positional_embeddings", False):
        raise UserError("--no-token-positional-embeddings: write --position-encoding none instead")
    values = {x.name: safe_getattr(args, x.name, x.default) for x in fields(PositionConfig)}
    return PositionConfig(**values)


def parse_options(options: PositionConfig) -> tuple[Spec, Spec, tuple[str, ...]]:
    """Parse the specs of encoder and decoder, and the directions of the first encoder layers.

    Raises:
        UserError: a spec or a direction cannot be read.
    """
    # hydra also accepts null, numbers and lists instead of a text; `parse` refuses them as texts.
    encoder, decoder = parse(str(options.position_encoding)), options.position_encoding_decoder
    directions = parse_directions(str(options.attention_directions or ""), "--attention-directions")
    return encoder, parse(str(decoder)) if decoder else encoder, tuple(directions)


def as_namespace(args: Any) -> Any:
    """Convert hydra's ``args`` to a namespace: fairseq drops unknown keys of a DictConfig."""
    if not OmegaConf.is_config(args):
        return args
    values: Any = OmegaConf.to_container(args, resolve=True)
    return Namespace(**values)


def configure_stack(args: Any, side: Literal["encoder", "decoder"]) -> TransformerConfig:
    """Build fairseq's configuration of a stack, with our :class:`StackSettings` as ``position``.

    Raises:
        UserError: an option cannot be read, or does not fit the stack.
    """
    cfg = TransformerConfig.from_namespace(as_namespace(args))  # keeps our options
    given = read_options(cfg)
    causal = side == "decoder"
    stack = getattr(cfg, side)
    encoder_spec, decoder_spec, first_directions = parse_options(given)
    spec = decoder_spec if causal else encoder_spec
    # Indices of the layers that pruning keeps; `stack.layers` is then their number.
    kept = sorted(map(int, stack.layers_to_keep.split(","))) if stack.layers_to_keep else None
    if kept is not None:
        spec = spec.select_layers(kept)
    else:
        spec.check_length(stack.layers)  # refuses a list of more layers
        if not causal and len(first_directions) > stack.layers:
            raise UserError(
                f"--attention-directions names {len(first_directions)} layers, but the encoder has "
                f"{stack.layers}: leave out the others"
            )
    by_layer = {} if causal else dict(enumerate(first_directions))
    others = "lr" if causal else "both"
    directions = tuple(by_layer.get(x, others) for x in kept or range(stack.layers))
    if causal and cfg.cross_self_attention:
        raise UserError(
            "--cross-self-attention mixes two sequences: positions have no meaning; leave it out"
        )
    if causal and any(dict(item.options).get("prefill") for item in spec.items):
        raise UserError("window(prefill=true) is for models of transformers: export this one first")
    length = cfg.max_target_positions if causal else cfg.max_source_positions
    dims = Dims(stack.embed_dim, stack.attention_heads, max_positions=length, causal=causal)
    # fairseq's constructor builds a table by position, even if we replace it.
    check_size(spec, dims, stack.layers, always_allocated=length * dims.embed_dim)
    backend = given.position_backend or "auto"  # hydra may give null
    cfg.position = StackSettings(spec, dims, directions, backend, bool(given.init_positions), kept)
    return cfg


def read_weight_settings(cfg: TransformerConfig, options: Any, dictionary: Any) -> WeightSettings:
    """Read what loading compares with a checkpoint; ``options``: ``cfg.encoder`` or ``decoder``."""
    activation = str(cfg.activation_fn or "relu").replace("gelu_fast", "gelu_accurate")  # renamed
    return WeightSettings(  # stored in each checkpoint: existing values must not be renamed
        heads=int(options.attention_heads),
        activation=activation,
        norm="pre" if options.normalize_before else "post",
        embeddings="unscaled" if cfg.no_scale_embedding else "scaled",
        dictionary=fingerprint(dictionary),
    )


def read_task_options(task: Any) -> Any:
    """Read the options of a task: ``task.cfg`` or, in fairseq's older tasks, ``task.args``."""
    return getattr(task, "cfg", None) or getattr(task, "args", None)
