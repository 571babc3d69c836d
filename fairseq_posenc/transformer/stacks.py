"""Encoder and decoder stacks: who owns which encoding, and what each forward pass computes once.

fairseq's loops are inherited. Layers never see tokens, so a stack's forward pass is carried to them
past fairseq's code (:mod:`~fairseq_posenc.transformer.passing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_posenc.assembly import Assembly, Shared
from fairseq_posenc.encodings.base import Dims, Encoding, Encodings
from fairseq_posenc.encodings.rotation import Rotation
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, may_look
from fairseq_posenc.registry import Spec
from fairseq_posenc.transformer.attention import IncrementalState, PositionalAttention
from fairseq_posenc.transformer.cross_attention import RotaryCrossAttention
from fairseq_posenc.transformer.decoding import ahead, kept, span_of_step
from fairseq_posenc.transformer.identity import Identity
from fairseq_posenc.transformer.passing import carried, carrying, hand_over, received


class InputPositions(nn.Module):
    """Adds the input encoding's vectors to the token embeddings: fairseq's ``embed_positions``."""

    like: Tensor

    def __init__(self, encodings: Encodings, padding_idx: int, eos_idx: int) -> None:
        super().__init__()
        self.encodings = encodings  # one: a spec with two of them is refused
        (encoding,) = encodings.each()
        # An attribute, as in fairseq's modules, and what they say: how long the table is, or this
        # of sinusoids, which have no end.
        self.max_positions: int = getattr(encoding, "max_positions", int(1e5))
        self.padding_idx = padding_idx
        self.eos_idx = eos_idx
        # Only its type is used: that of the model, to which vectors made in float32 are cast.
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor, incremental_state: IncrementalState = None) -> Tensor:
        """Return vectors ``(B or 1, T, C)``; those of the last token alone when decoding."""
        shared = carried()
        if shared is None:  # outside a stack
            tgt_len = tokens.size(1) if incremental_state is None else 1
            shared = Shared(Positions.of(tokens, self.padding_idx, self.eos_idx, tgt_len))
        (encoding,) = self.encodings.each()
        vectors = encoding.embed(shared.positions)
        if vectors is None:
            raise AssertionError("a stack keeps no input encoding that adds nothing")
        return vectors.type_as(self.like)


class _PositionalLayer:
    """Lets a layer's attentions know what its stack handed over."""

    def forward(self, *args: Any, shared: Shared | None = None, **kwargs: Any) -> Any:
        """Run fairseq's layer.

        Args:
            *args: fairseq's own.
            shared: what the forward pass computes once for all layers.
            **kwargs: fairseq's own, and the shared terms one by one.
        """
        with carrying(received(shared, kwargs)):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class PositionalEncoderLayer(_PositionalLayer, TransformerEncoderLayerBase):
    """fairseq's encoder layer with our self-attention."""

    def __init__(self, cfg: Any, return_fc: bool = False) -> None:
        super().__init__(cfg, return_fc)
        # fairseq 0.12.2 skips self_attn in evaluation on its fast path: positions would vanish.
        self.can_use_fastpath = False

    def build_self_attention(self, embed_dim: int, cfg: Any) -> PositionalAttention:
        """Return the layer's attention with encodings of its own."""
        return PositionalAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            Assembly(cfg.position.encoder, encoder_dims(cfg)).for_layer(),
            backend=cfg.position.backend,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )


class PositionalDecoderLayer(_PositionalLayer, TransformerDecoderLayerBase):
    """fairseq's decoder layer with our self-attention.

    Cross-attention is fairseq's own, unless an encoding asks for rotations in it.
    """

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> PositionalAttention:
        """Return the layer's attention with encodings of its own."""
        if cfg.cross_self_attention:
            raise UserError("--cross-self-attention mixes two sequences: positions have no meaning")
        return PositionalAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            Assembly(cfg.position.decoder, decoder_dims(cfg)).for_layer(),
            backend=cfg.position.backend,
            dropout=cfg.attention_dropout,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        """Return fairseq's cross-attention, or the rotary one."""
        if not _rotates_source(cfg.position.decoder):
            stock: nn.Module = super().build_encoder_attention(embed_dim, cfg)
            return stock
        return RotaryCrossAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )


def encoder_dims(cfg: Any) -> Dims:
    """Return the sizes of the encoder's encodings from fairseq's configuration."""
    return Dims(cfg.encoder.embed_dim, cfg.encoder.attention_heads, cfg.max_source_positions)


def decoder_dims(cfg: Any) -> Dims:
    """Return the sizes of the decoder's encodings from fairseq's configuration."""
    return Dims(
        cfg.decoder.embed_dim, cfg.decoder.attention_heads, cfg.max_target_positions, causal=True
    )


class _PositionalStack:
    """What encoder and decoder share: installing encodings, and what a forward pass computes."""

    layers: nn.ModuleList
    embed_positions: nn.Module | None
    padding_idx: int
    layers_kept: list[int] | None = None
    _get_full_incremental_state_key: Callable[[str], str]

    def install(
        self, assembly: Assembly, eos_idx: int, directions: tuple[str, ...], backend: str
    ) -> None:
        """Put the encodings of the stack in place, and check that all of them work together."""
        if len(directions) > len(self.layers):
            raise UserError(
                f"--attention-directions names {len(directions)} layers, but there are "
                f"{len(self.layers)}"
            )
        terms = assembly.check(backend)
        self.assembly, self.backend, self.eos_idx = assembly, backend, eos_idx
        at_input = assembly.at_input()
        self.embed_positions = (
            None if at_input is None else InputPositions(at_input, self.padding_idx, eos_idx)
        )
        self.encodings = assembly.for_stack()
        self.directions = directions + ("both",) * (len(self.layers) - len(directions))
        for index, direction in enumerate(self.directions):  # iterating would apply LayerDrop
            layer: Any = self.layers[index]
            layer.self_attn.direction = direction
            layer.register_forward_pre_hook(hand_over, with_kwargs=True)
        # What depends on distance alone can be kept from step to step of any generation.
        self.by_distance = terms.pair_bias is None and terms.first is None

    @property
    def identity(self) -> Identity:
        """What the weights of this stack are for."""
        spec, dims = self.assembly
        return Identity.of(str(spec), self.directions, dims.trained_length)

    def get_extra_state(self) -> Tensor:
        """Return what the state dict says beside the parameters: the identity."""
        return self.identity.encoded()

    def set_extra_state(self, state: Tensor) -> None:
        """Take on what loaded weights are for; that they fit has been seen to."""
        length = Identity.decoded(state).trained_length
        self.assembly = self.assembly.trained_at(length)
        for module in cast(nn.Module, self).modules():
            if isinstance(module, Encoding):
                module.trained_at(length)

    def shared(self, tokens: Tensor, tgt_len: int, state: IncrementalState = None) -> Shared:
        """Return what a forward pass computes once for all of its layers.

        Args:
            tokens: ``(B, S)``, the whole prefix when decoding.
            tgt_len: T, of which the last are queries.
            state: of a generation.
        """
        look = may_look(tokens.device, decoding=state is not None)
        positions = Positions.of(tokens, self.padding_idx, self.eos_idx, tgt_len, look)
        # What pairs add can be kept too, where all sentences begin together.
        if state is None or not (self.by_distance or not positions.left_padded):
            return Shared.of(self.encodings, positions)
        span = span_of_step(positions, self.assembly.dims.max_positions)
        terms = kept(
            state,
            self._get_full_incremental_state_key("terms"),
            span,
            lambda span: self.encodings.terms(span, ahead(positions, span)),
        )
        rotation = self.encodings.rotation(positions.queries(positions.ids))
        return Shared(positions, terms, rotation, span=span)


class PositionalEncoder(_PositionalStack, TransformerEncoderBase):
    """fairseq's Transformer encoder with position encodings as parts.

    Args:
        cfg: fairseq's TransformerConfig, with our options as ``cfg.position``.
        dictionary: of the source.
        embed_tokens: token embeddings.
        return_fc: fairseq's own.
    """

    def __init__(
        self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, return_fc: bool = False
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        self.layers_kept = _layers_kept(cfg.encoder.layers_to_keep)
        options = cfg.position
        self.install(
            Assembly(options.encoder, encoder_dims(cfg)),
            dictionary.eos(),
            _directions_kept(options.directions, self.layers_kept),
            options.backend,
        )

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Return a layer, wrapped as fairseq does."""
        return _wrap(PositionalEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward(self, src_tokens: Tensor, *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Encode ``src_tokens``, ``(B, S)``; arguments and result are fairseq's."""
        with carrying(self.shared(src_tokens, src_tokens.size(1))):
            encoded: dict[str, list[Tensor]] = super().forward(src_tokens, *args, **kwargs)
            return encoded


class PositionalDecoder(_PositionalStack, TransformerDecoderBase):
    """fairseq's Transformer decoder with position encodings as parts.

    Args:
        cfg: fairseq's TransformerConfig, with our options as ``cfg.position``.
        dictionary: of the target.
        embed_tokens: token embeddings.
        no_encoder_attn: True for a language model.
        output_projection: fairseq's own.
    """

    def __init__(
        self,
        cfg: Any,
        dictionary: Any,
        embed_tokens: nn.Embedding,
        no_encoder_attn: bool = False,
        output_projection: nn.Module | None = None,
    ) -> None:
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        every_layer = ("lr",) * len(self.layers)
        options = cfg.position
        assembly = Assembly(options.decoder, decoder_dims(cfg))
        self.install(assembly, dictionary.eos(), every_layer, options.backend)
        self.rotates_source = _rotates_source(options.decoder)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Return a layer, wrapped as fairseq does."""
        return _wrap(PositionalDecoderLayer(cfg, no_encoder_attn), cfg)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: IncrementalState = None,
        full_context_alignment: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Decode ``prev_output_tokens``, ``(B, S)``; arguments and result are fairseq's.

        Raises:
            UserError: ``full_context_alignment``, as a decoder's directions here are all ``lr``.
        """
        if full_context_alignment:
            raise UserError("full-context alignment is not supported: decoders see only the past")
        tgt_len = prev_output_tokens.size(1)
        if incremental_state is not None:
            self._check_step(prev_output_tokens, incremental_state)
            tgt_len = 1
        shared = self.shared(prev_output_tokens, tgt_len, incremental_state)
        if (
            self.rotates_source
            and encoder_out is not None
            and tgt_len == prev_output_tokens.size(1)
        ):
            shared = shared._replace(source=self._source_rotation(encoder_out))
        with carrying(shared):
            features: tuple[Tensor, dict[str, Any]] = super().extract_features(
                prev_output_tokens, encoder_out, incremental_state, False, *args, **kwargs
            )
            return features

    def buffered_future_mask(self, tensor: Tensor) -> None:
        """Return no mask: the layers' direction says it, without a matrix of pairs."""

    def _source_rotation(self, encoder_out: dict[str, list[Tensor]]) -> Rotation | None:
        """Return the rotation of the source's keys, which later steps have in their caches."""
        (states,) = encoder_out["encoder_out"]  # [S, B, C]
        padding = encoder_out["encoder_padding_mask"]
        tokens = padding[0].long() if padding else states.new_zeros(states.shape[1::-1]).long()
        positions = Positions.of(tokens, padding_idx=1, eos_idx=-1, tgt_len=0, look=False)
        return self.encodings.rotation(positions.ids)

    def _check_step(self, tokens: Tensor, state: Any) -> None:
        """Refuse to decode a token whose predecessors have not been decoded."""
        layer: Any = self.layers[0]
        cached = layer.self_attn._get_input_buffer(state).get("prev_key")
        steps = 0 if cached is None else cached.size(2)
        if tokens.size(1) != steps + 1:
            raise UserError(
                f"{tokens.size(1)} tokens were given to decode after {steps}: with an incremental "
                "state, decode token by token, from the first"
            )


def _rotates_source(spec: Spec) -> bool:
    """Return whether an encoding also rotates queries and keys between decoder and encoder."""
    return any(dict(item.options).get("cross_attention") for item in spec.items)


def _layers_kept(layers_to_keep: str | None) -> list[int] | None:
    """Return the layers that fairseq's LayerDrop pruning keeps; None without pruning."""
    if not layers_to_keep:
        return None
    return sorted(int(index) for index in layers_to_keep.split(","))


def _directions_kept(directions: tuple[str, ...], layers: list[int] | None) -> tuple[str, ...]:
    """Return the directions of the layers that are kept."""
    if layers is None:
        return directions
    return tuple(directions[i] if i < len(directions) else "both" for i in layers)


def _wrap(layer: nn.Module, cfg: Any) -> nn.Module:
    """Apply activation checkpointing and FSDP to a layer, as fairseq's stacks do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )
