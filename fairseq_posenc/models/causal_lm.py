"""Defines the causal LMs: fairseq's decoder-only Transformer with chosen position encodings.

fairseq configures these models by a dataclass, and fairseq-hydra-train ignores architecture
functions for them. So each architecture is a model class with its own defaults, and
``--arch transformer_lm_rope`` and ``model._name=transformer_lm_rope`` mean the same.

No ``from __future__ import annotations`` here: fairseq makes options from the fields' types.
"""

import copy
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from fairseq import utils
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import Tensor

from fairseq_posenc import registry
from fairseq_posenc.errors import UserError
from fairseq_posenc.host.checks import use_gpu_for_bf16
from fairseq_posenc.host.preparation import CheckedModel, prepare_model
from fairseq_posenc.specs import parse
from fairseq_posenc.transformer.options import PositionConfig, configure_stack, read_task_options
from fairseq_posenc.transformer.stacks import PositionalDecoder


@dataclass
class PositionalLMConfig(PositionConfig, TransformerLanguageModelConfig):
    """fairseq's options of a causal LM and ours; the default size is DecBERT's."""

    activation_fn: Any = "gelu"  # fairseq's enum lacks `relu_squared`; `add_args` adds the option
    decoder_embed_dim: int = 768
    decoder_input_dim: int = field(
        default=0, metadata={"help": "decoder input dimension (default: decoder_embed_dim)"}
    )
    decoder_output_dim: int = field(
        default=0, metadata={"help": "decoder output dimension (default: decoder_embed_dim)"}
    )
    decoder_ffn_embed_dim: int = 3072
    decoder_layers: int = 8
    decoder_attention_heads: int = 12
    decoder_normalize_before: bool = field(
        default=True,  # as in all of fairseq's named causal LMs
        metadata={"help": "apply layernorm before each decoder block (default: true)"},
    )
    share_decoder_input_output_embed: bool = field(
        default=True,  # DecBERT's models only have their stated sizes with shared embeddings
        metadata={"help": "share decoder input and output embeddings (default: true)"},
    )


class PositionalLM(CheckedModel, TransformerLanguageModel):
    """fairseq's causal language model with chosen position encodings."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add the options of the dataclass.

        For a field that is true by default, fairseq would make ``--X`` turn X off, although the
        same flag turns X on for fairseq's models. Here ``--X`` turns X on and ``--no-X`` turns it
        off, whatever the architecture's default.
        """
        parser.add_argument(
            "--activation-fn",
            choices=utils.get_available_activation_fns(),
            default=SUPPRESS,
            help="activation function to use",
        )
        for option in fields(PositionalLMConfig):
            if option.default is True:
                parser.add_argument(
                    f"--{option.name.replace('_', '-')}",
                    action=BooleanOptionalAction,
                    default=SUPPRESS,
                    help=option.metadata.get("help"),
                )
        super().add_args(parser)  # skips the options added above

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "PositionalLM":
        """Build a model as fairseq's class does, with our decoder.

        fairseq's method always builds its own decoder. We let it build one without layers, and
        keep the token embeddings (plain, adaptive or by character).
        """
        if getattr(args, "attention_directions", ""):
            raise UserError("--attention-directions is for encoders, not for a causal LM")
        if args.base_layers:
            raise UserError("--base-layers inserts layers without attention: not supported here")
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        args.decoder_input_dim = args.decoder_input_dim or args.decoder_embed_dim
        args.decoder_output_dim = args.decoder_output_dim or args.decoder_embed_dim
        args.share_decoder_input_output_embed = _shares_embeddings(args)
        shell_args = copy.deepcopy(args)
        shell_args.decoder_layers = 0
        shell_args.decoder_layers_to_keep = None
        shell = super().build_model(shell_args, task)
        if args.max_target_positions is None:  # fairseq has set the shell's, by tokens_per_sample
            args.max_target_positions = shell_args.max_target_positions
        args.max_target_positions += _count_positions_for_bos(args)
        decoder = PositionalDecoder(
            configure_stack(args, "decoder"),
            task.target_dictionary,
            shell.decoder.embed_tokens,
            no_encoder_attn=True,  # a decoder alone
        )
        model = cls(decoder)
        # Checkpoints record whether samples begin with `<s>`: weights trained without it do not fit
        # samples with it, and fairseq-eval-lm takes this option from its own command line.
        adds_bos = getattr(read_task_options(task), "add_bos_token", args.add_bos_token)
        decoder.record(add_bos_token="on" if adds_bos else "off")
        prepare_model(model, task, decoder=decoder)  # checks the data, and sets up later checks
        return model

    def forward(
        self, src_tokens: Tensor, *args: Any, position_ids: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Run fairseq's language model on tokens ``[B, T]``; the other arguments are passed on.

        By default tokens are counted; ``position_ids``, ``[B or 1, T]``, are other positions.

        Raises:
            UserError: the ids do not fit, or there is an incremental state.
        """
        if position_ids is None:
            return super().forward(src_tokens, *args, **kwargs)
        if kwargs.get("incremental_state") is not None:
            raise UserError(
                "position_ids: fairseq decodes with positions that it counts; leave them out, or "
                "read the whole text at once"
            )
        decoder: Any = self.decoder
        with decoder.at_positions(src_tokens, position_ids):
            return super().forward(src_tokens, *args, **kwargs)


def _shares_embeddings(args: Any) -> bool:
    """Check whether input and output embeddings are one matrix; refuse different widths."""
    # Adaptive and character embeddings are never shared.
    if args.adaptive_input or args.character_embeddings or args.adaptive_softmax_cutoff:
        return False
    input_dim, output_dim = args.decoder_input_dim, args.decoder_output_dim
    if args.share_decoder_input_output_embed and input_dim != output_dim:
        raise UserError(
            f"embeddings of widths {input_dim} (--decoder-input-dim) and {output_dim} "
            "(--decoder-output-dim) cannot be shared: --no-share-decoder-input-output-embed"
        )
    return bool(args.share_decoder_input_output_embed)


def _count_positions_for_bos(args: Any) -> int:
    """Count the positions that a table needs beyond the tokens of a sample: 1 or 0.

    ``--add-bos-token`` puts ``<s>`` before a block of ``--tokens-per-sample`` tokens, so blocks are
    one token longer than the table. fairseq's learned positions fail there with an IndexError.
    """
    spec = parse(args.position_encoding_decoder or args.position_encoding)
    has_table = any(item.encoding.has_position_table for item in spec.items)
    is_full = args.max_target_positions == args.tokens_per_sample  # no row is left for <s>
    return int(bool(args.add_bos_token) and has_table and is_full)


_TINY = {
    "decoder_embed_dim": 64,
    "decoder_ffn_embed_dim": 128,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
}


def _register(name: str, **defaults: Any) -> None:
    """Register a model class with these defaults."""
    options = [(key, type(value), field(default=value)) for key, value in defaults.items()]
    config = make_dataclass(f"Config_{name}", options, bases=(PositionalLMConfig,))
    model = type(name, (PositionalLM,), {"__doc__": PositionalLM.__doc__, "__module__": __name__})
    globals()[name] = register_model(name, dataclass=config)(model)  # where pickle looks for it
    ARCH_CONFIG_REGISTRY[name] = use_gpu_for_bf16  # fairseq calls it with the command's options


for _encoding in registry.names():
    _register(f"transformer_lm_{_encoding}", position_encoding=_encoding)
    _register(f"transformer_lm_{_encoding}_tiny", position_encoding=_encoding, **_TINY)
# As in SmolLM3, every fourth layer has no positions.
_register("transformer_lm_smol", position_encoding="3*rope(base=2000000,layout=half),none")
