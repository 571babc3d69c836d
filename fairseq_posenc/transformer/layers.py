"""Builds fairseq's Transformer layers with this package's attention; the stacks use them."""

from contextlib import nullcontext
from typing import Any, cast

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.modules import transformer_layer
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fairseq_posenc.assembly import build_layer
from fairseq_posenc.checkpoints.state_dict_adapter import COPIES
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.rotation import PairRotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Spec
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.transformer.forward_context import current_context, set_context, state_of_kind


class _PositionalLayer:
    """Mixin for layer ``index`` of a stack: builds our attention, and can recompute the layer."""

    def __init__(self, cfg: Any, index: int = 0, **kwargs: Any) -> None:
        self.index = index  # first, because fairseq's constructor builds the attention
        super().__init__(cfg, **kwargs)  # type: ignore[call-arg]
        self.recomputes, self.offloads = cfg.checkpoint_activations, cfg.offload_activations

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run fairseq's layer, and with activation checkpointing again in the backward pass.

        fairseq's own checkpointing is reentrant: tensors of the position state would get no
        gradients.
        """
        forward = super().forward  # type: ignore[misc]
        if not (self.recomputes and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        states = current_context()

        def run(*args: Any, **kwargs: Any) -> Any:
            with set_context(states):  # in the backward pass, no stack sets them
                return forward(*args, **kwargs)

        with save_on_cpu() if self.offloads else nullcontext():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def build_self_attention(self, embed_dim: int, cfg: Any, **kwargs: Any) -> PositionalAttention:
        """Build self-attention with this layer's encodings; the arguments are fairseq's."""
        ours = cfg.position  # the `StackSettings` that `configure_stack` has added
        options = cfg.decoder if ours.dims.causal else cfg.encoder
        return PositionalAttention(
            embed_dim,
            options.attention_heads,
            encodings=build_layer(ours.spec, ours.dims, self.index),
            direction=ours.directions[self.index],
            backend=ours.backend,
            stack=(ours.spec, ours.dims),
            kind=ours.spec.layer_kind(self.index),
            dropout=cfg.attention_dropout,
            q_noise=cfg.quant_noise.pq,
            qn_block_size=cfg.quant_noise.pq_block_size,
            xformers_att_config=options.xformers_att_config,
            **kwargs,
        )


class PositionalEncoderLayer(_PositionalLayer, transformer_layer.TransformerEncoderLayerBase):
    """fairseq's encoder layer with our self-attention."""

    def __init__(self, cfg: Any, index: int = 0) -> None:
        super().__init__(cfg, index)
        # The fast path of fairseq 0.12.2 skips self_attn in evaluation, and positions with it. Its
        # copies of the layer's parameters are never trained, which DDP refuses.
        self.can_use_fastpath = False
        for name in COPIES:  # names of these copies, such as in_proj_weight
            self._parameters.pop(name, None)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load as any module does: the method of fairseq 0.12.2 would restore the copies."""
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class PositionalDecoderLayer(_PositionalLayer, transformer_layer.TransformerDecoderLayerBase):
    """fairseq's decoder layer with our self-attention.

    Cross-attention is fairseq's, whose queries and keys an encoding may rotate.
    """

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Build fairseq's cross-attention; let it rotate if rope(cross_attention=true) says so."""
        attention = super().build_encoder_attention(embed_dim, cfg)
        spec, dims = cfg.position.spec, cfg.position.dims
        if spec.select_layers([self.index]).rotates_source:
            if cfg.quant_noise.pq > 0:
                raise UserError(
                    "rope(cross_attention=true) does not work with --quant-noise-pq: quantized "
                    "projections would not rotate; leave out one of the two"
                )
            # Only these two are replaced: fairseq's forward, cache of keys and beam search stay.
            of_layer = attention.head_dim, (spec, dims), spec.layer_kind(self.index)
            attention.q_proj = RotatedProjection(attention.q_proj, *of_layer, is_key=False)
            attention.k_proj = RotatedProjection(attention.k_proj, *of_layer, is_key=True)
            # Otherwise fairseq would call torch's function, which only reads their weights.
            attention.skip_embed_dim_check = True
        return cast("nn.Module", attention)


def wrap_layer(layer: nn.Module, cfg: Any) -> nn.Module:
    """Apply FSDP to a layer, as fairseq's stacks do: to a checkpointed one even if it is small."""
    least = 0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    return fsdp_wrap(layer, min_num_params=least)


class RotatedProjection(nn.Linear):
    """Projects to queries or keys, and rotates them by the current position state.

    Args:
        plain: the projection that it replaces; its parameters are shared, under the same names.
        head_dim: D, the width of a head.
        stack: spec and sizes of the layer's stack; a position state of another one is refused.
        kind: index of the layer among the different ones of its spec: 0 or 1 in ``3*rope,none``.
        is_key: whether it projects to the source's keys; otherwise to the target's queries.
    """

    def __init__(
        self, plain: nn.Linear, head_dim: int, stack: tuple[Spec, Dims], kind: int, is_key: bool
    ) -> None:
        # On "meta" nothing is initialized; the parameters are replaced below.
        super().__init__(plain.in_features, plain.out_features, device="meta")
        self.weight, self.bias = plain.weight, plain.bias
        self.head_dim, self.stack, self.kind, self.is_key = head_dim, stack, kind, is_key

    def forward(self, x: Tensor) -> Tensor:
        """Project T tokens of B sentences, ``(T, B, C)``, and rotate each of the H heads."""
        shared = state_of_kind(self.stack, self.kind)
        rotation = shared.source_rotation if self.is_key else shared.rotation
        assert isinstance(rotation, PairRotation), "only rope has cross_attention"
        projected = super().forward(x)  # [T, B, C]
        heads = projected.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3)  # [B, H, T, D]
        # In beam search, fairseq projects the source's keys once for all beams of a sentence.
        rotation = rotation.select_sentences(heads.size(0))  # keeps a row for each sentence
        heads = rotation.rotate_keys(heads) if self.is_key else rotation.rotate_queries(heads)
        return heads.permute(2, 0, 1, 3).reshape(projected.shape)  # [T, B, C]
