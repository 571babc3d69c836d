"""Defines the translation models: fairseq's Transformer with chosen position encodings.

``--arch transformer_alibi`` has fairseq's base size and ALiBi; ``transformer_alibi_tiny`` is small.
"""

from argparse import ArgumentParser
from typing import Any, cast

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, base_architecture
from torch import nn

from fairseq_posenc import registry
from fairseq_posenc.host.preparation import CheckedModel, prepare_model
from fairseq_posenc.models.architectures import make_architecture
from fairseq_posenc.transformer import options
from fairseq_posenc.transformer.stacks import PositionalDecoder, PositionalEncoder


@register_model("positional_transformer")
class PositionalTransformer(CheckedModel, TransformerModel):
    """fairseq's Transformer with chosen positions; its checkpoints and evaluations are checked."""

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """Add fairseq's options and ours."""
        super().add_args(parser)
        options.add_position_args(parser)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "PositionalTransformer":
        """Build a model as fairseq's class does, with the stacks that the methods below build."""
        model: Any = super().build_model(options.as_namespace(args), task)  # args: maybe hydra's
        # Recorded in checkpoints, so that weights trained on other languages are refused.
        settings = options.read_task_options(task)
        model.encoder.record(language=getattr(settings, "source_lang", None))
        model.decoder.record(language=getattr(settings, "target_lang", None))
        # Checks the data now, and the command's options when training or an evaluation begins.
        prepare_model(model, task, encoder=model.encoder, decoder=model.decoder)
        return cast(PositionalTransformer, model)

    @classmethod
    def build_encoder(
        cls, args: Any, src_dict: Any, embed_tokens: nn.Embedding
    ) -> PositionalEncoder:
        """Build an encoder with position encodings."""
        return PositionalEncoder(options.configure_stack(args, "encoder"), src_dict, embed_tokens)

    @classmethod
    def build_decoder(
        cls, args: Any, tgt_dict: Any, embed_tokens: nn.Embedding
    ) -> PositionalDecoder:
        """Build a decoder with position encodings."""
        config = options.configure_stack(args, "decoder")  # `args` itself, as fairseq converted it
        if config.adaptive_softmax_cutoff:  # else loading would add an output projection
            config.share_decoder_input_output_embed = False
        return PositionalDecoder(config, tgt_dict, embed_tokens, config.no_cross_attention)


_SIZES = {
    "": base_architecture,
    "_tiny": make_architecture(
        base_architecture,
        encoder_embed_dim=64,
        encoder_ffn_embed_dim=128,
        encoder_layers=2,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_attention_heads=4,
    ),
}
for _encoding in registry.names(encoder=True):
    for _suffix, _set_size in _SIZES.items():
        register_model_architecture("positional_transformer", f"transformer_{_encoding}{_suffix}")(
            make_architecture(_set_size, position_encoding=_encoding)
        )
