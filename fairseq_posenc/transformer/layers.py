"""Builds fairseq's Transformer layers with this package's attention; the stacks use them."""

from typing import Any, TypeVar, cast

from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_posenc.assembly import Assembly
from fairseq_posenc.checkpoints.state_dict_adapter import COPIES
from fairseq_posenc.errors import UserError
from fairseq_posenc.shared import LayerShared
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.cross_attention import RotaryCrossAttention
from fairseq_posenc.transformer.forward_context import pop_context, set_context

_Attention = TypeVar("_Attention", bound=nn.Module)


class _PositionalLayer:
    """Base of both layers: passes the position state to the attention inside, through a context.

    fairseq's layers have no argument for the state. Layers with equal encodings are of one kind,
    and share the terms in it.
    """

    index: int  # in the stack, from 0
    # fairseq's, set by its constructor
    embed_dim: int
    quant_noise: float
    quant_noise_block_size: int

    def forward(self, *args: Any, shared: LayerShared, **kwargs: Any) -> Any:
        """Run fairseq's layer with the arguments that :func:`inject_context` has added."""
        with set_context(layer=pop_context(shared, kwargs)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _build_positional_attention(
        self, cfg: Any, side: str, **kwargs: Any
    ) -> PositionalAttention:
        """Build self-attention with this layer's encodings; ``side`` is encoder or decoder."""
        assembly: Assembly = cfg.assembly  # spec and sizes, which the stack has put there
        return self._build_attention(
            PositionalAttention,
            cfg,
            getattr(cfg, side),
            encodings=assembly.build_layer(self.index),
            backend=cfg.position.backend,
            kind=assembly.spec.layer_kind(self.index),
            **kwargs,
        )

    def _build_attention(
        self, attention_class: type[_Attention], cfg: Any, stack_cfg: Any, **kwargs: Any
    ) -> _Attention:
        """Build an attention with fairseq's options of ``cfg.encoder`` or ``cfg.decoder``."""
        return attention_class(
            self.embed_dim,
            stack_cfg.attention_heads,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=stack_cfg.xformers_att_config,
            **kwargs,
        )


class PositionalEncoderLayer(_PositionalLayer, TransformerEncoderLayerBase):
    """fairseq's encoder layer with our self-attention; its encodings are in ``cfg.assembly``."""

    def __init__(self, cfg: Any, return_fc: bool = False, index: int = 0) -> None:
        self.index = index  # first, because fairseq's constructor builds the attention
        super().__init__(cfg, return_fc)
        # The fast path of fairseq 0.12.2 skips self_attn in evaluation, and positions with it. Its
        # copies of the attention's parameters are never trained, which DDP refuses.
        self.can_use_fastpath = False
        for name in COPIES:  # such as in_proj_weight
            self._parameters.pop(name, None)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load as any module does: the method of fairseq 0.12.2 would restore the copies."""
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)

    def build_self_attention(self, embed_dim: int, cfg: Any) -> PositionalAttention:
        """Build self-attention with this layer's encodings; the arguments are fairseq's."""
        return self._build_positional_attention(cfg, "encoder")


class PositionalDecoderLayer(_PositionalLayer, TransformerDecoderLayerBase):
    """fairseq's decoder layer with our self-attention; its encodings are in ``cfg.assembly``.

    Cross-attention is fairseq's, unless an encoding rotates its queries and keys.
    """

    def __init__(self, cfg: Any, no_encoder_attn: bool = False, index: int = 0) -> None:
        self.index = index  # first, because fairseq's constructor builds the attention
        super().__init__(cfg, no_encoder_attn)

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> PositionalAttention:
        """Build self-attention with this layer's encodings; the arguments are fairseq's."""
        if cfg.cross_self_attention:
            raise UserError(
                "--cross-self-attention mixes two sequences, so positions have no meaning: train "
                "without it"
            )
        return self._build_positional_attention(
            cfg, "decoder", add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Build fairseq's cross-attention, or the rotary one if this layer's spec says so."""
        if not cfg.assembly.spec.select_layers([self.index]).rotates_source:
            return cast("nn.Module", super().build_encoder_attention(embed_dim, cfg))
        encoder_dim = cfg.encoder.embed_dim
        return self._build_attention(
            RotaryCrossAttention, cfg, cfg.decoder, kdim=encoder_dim, vdim=encoder_dim
        )


def wrap_layer(layer: nn.Module, cfg: Any) -> nn.Module:
    """Apply activation checkpointing and FSDP to a layer, as fairseq's stacks do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )
