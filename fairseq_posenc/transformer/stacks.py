"""Encoder and decoder stacks: who owns which encoding, and how positions reach the layers.

fairseq's loops are inherited. Layers never see tokens, so a stack notes the positions of a forward
pass, and a pre-hook on each layer passes them on as keyword arguments: as arguments, not as state,
they are there again when a layer under activation checkpointing runs a second time in the backward
pass, and gradients of shared terms reach their parameters. The hook is a bound method, which
survives deep copies and pickling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import Tensor, nn

from fairseq_posenc.backends import check
from fairseq_posenc.encodings.base import Dims, Encodings, Terms
from fairseq_posenc.errors import UserError
from fairseq_posenc.positions import Positions, Span
from fairseq_posenc.registry import Spec, build
from fairseq_posenc.transformer.attention import Given, IncrementalState, PositionalAttention
from fairseq_posenc.transformer.cross_attention import RotaryCrossAttention
from fairseq_posenc.transformer.decoding import ahead, kept, span_of_step


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
        tgt_len = tokens.size(1) if incremental_state is None else 1
        positions = Positions.of(tokens, self.padding_idx, self.eos_idx, tgt_len)
        (encoding,) = self.encodings.each()
        vectors = encoding.embed(positions)
        if vectors is None:
            raise AssertionError("a stack keeps no input encoding that adds nothing")
        return vectors.type_as(self.like)


class _PositionalLayer:
    """Gives a layer's self-attention what the stack's pre-hook passed to the layer."""

    self_attn: PositionalAttention

    def forward(
        self,
        *args: Any,
        positions: Positions | None = None,
        span: Span | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run fairseq's layer.

        Args:
            *args: fairseq's own.
            positions: of the forward pass.
            span: of the shared terms, in a step of decoding.
            **kwargs: fairseq's own, and ``shared_<field>``, terms common to all layers. They come
                one by one, because tensors inside a tuple would lose their gradients under
                activation checkpointing.
        """
        names = [name for name in Terms._fields if f"shared_{name}" in kwargs]
        shared = Terms(**{name: kwargs.pop(f"shared_{name}") for name in names})
        cross_attention = getattr(self, "encoder_attn", None)
        crossing: AbstractContextManager[None] = nullcontext()
        if isinstance(cross_attention, RotaryCrossAttention):
            crossing = cross_attention.given(positions)
        with self.self_attn.given(Given(positions, shared, span)), crossing:
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
            build(cfg.position.encoder.at("layer"), encoder_dims(cfg)),
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
            build(cfg.position.decoder.at("layer"), decoder_dims(cfg)),
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
        items = cfg.position.decoder.items
        rotary = Spec(tuple(i for i in items if dict(i.options).get("cross_attention")))
        if not rotary.items:
            stock: nn.Module = super().build_encoder_attention(embed_dim, cfg)
            return stock
        return RotaryCrossAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            build(rotary, decoder_dims(cfg)),
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
    """What encoder and decoder share: installing encodings, and handing on positions."""

    layers: nn.ModuleList
    embed_positions: nn.Module | None
    padding_idx: int
    _given: dict[str, Any] | None = None
    _get_full_incremental_state_key: Callable[[str], str]

    def install(
        self, spec: Spec, dims: Dims, eos_idx: int, directions: tuple[str, ...], backend: str
    ) -> None:
        """Put the encodings of the stack in place, and check that all of them work together."""
        self.eos_idx = eos_idx
        if len(directions) > len(self.layers):
            raise UserError(
                f"--attention-directions names {len(directions)} layers, but there are "
                f"{len(self.layers)}"
            )
        one_token = Positions.of(torch.zeros(1, 1, dtype=torch.long), -1, -1, 1)
        at_input = build(spec.at("input"), dims)
        adds = any(e.embed(one_token) is not None for e in at_input.each())
        self.embed_positions = InputPositions(at_input, self.padding_idx, eos_idx) if adds else None
        self.encodings = build(spec.at("stack"), dims)
        self.directions = directions + ("both",) * (len(self.layers) - len(directions))
        for index, direction in enumerate(self.directions):  # iterating would apply LayerDrop
            layer: Any = self.layers[index]
            layer.self_attn.direction = direction
            layer.register_forward_pre_hook(self._pass_positions, with_kwargs=True)
        # Refuses now what could not be computed. With modules of its own, as FSDP has the layers',
        # and random numbers of its own, as the model's are drawn after this.
        span = Span.of(1, 1, one_token.tokens.device)
        with torch.random.fork_rng(devices=[]):
            terms = build(spec.at("layer"), dims).terms(span, one_token)
        terms = self.encodings.terms(span, one_token) | terms
        check(backend, terms.unprojected(dims.num_heads), dims.head_dim)
        self.backend = backend
        # What depends on distance alone can be kept from step to step of any generation.
        self.by_distance = terms.pair_bias is None and terms.first is None
        self.limit = dims.max_positions  # fairseq's max_positions is a method
        self.spec = spec

    @contextmanager
    def positions_given(
        self, tokens: Tensor, tgt_len: int, state: IncrementalState = None
    ) -> Iterator[None]:
        """Note the positions of a forward pass for the layers, and forget them after it."""
        positions = Positions.of(tokens, self.padding_idx, self.eos_idx, tgt_len)
        steps = None
        # What pairs add can be kept too, where all sentences begin together.
        if state is not None and (self.by_distance or not positions.left_padded):
            steps = span_of_step(positions, self.limit)
            key = self._get_full_incremental_state_key("terms")
            shared = kept(
                state, key, steps, lambda span: self.encodings.terms(span, ahead(positions, span))
            )
        else:
            span = Span.of(tgt_len, tokens.size(1), tokens.device)
            shared = self.encodings.terms(span, positions)
        changed = {f"shared_{k}": v for k, v in shared._asdict().items() if v is not None}
        self._given = {"positions": positions, "span": steps, **changed}
        try:
            yield
        finally:
            self._given = None

    def _pass_positions(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._given is None:
            raise UserError("the layers were called past their stack's forward: no positions known")
        return args, {**kwargs, **self._given}


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
        options = cfg.position
        self.install(
            options.encoder,
            encoder_dims(cfg),
            dictionary.eos(),
            _directions_kept(options.directions, cfg.encoder.layers_to_keep),
            options.backend,
        )

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Return a layer, wrapped as fairseq does."""
        return _wrap(PositionalEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward(self, src_tokens: Tensor, *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        """Encode ``src_tokens``, ``(B, S)``; arguments and result are fairseq's."""
        with self.positions_given(src_tokens, src_tokens.size(1)):
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
        self.install(
            options.decoder, decoder_dims(cfg), dictionary.eos(), every_layer, options.backend
        )

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
        with self.positions_given(prev_output_tokens, tgt_len, incremental_state):
            features: tuple[Tensor, dict[str, Any]] = super().extract_features(
                prev_output_tokens, encoder_out, incremental_state, False, *args, **kwargs
            )
            return features

    def buffered_future_mask(self, tensor: Tensor) -> None:
        """Return no mask: the layers' direction says it, without a matrix of pairs."""

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


def _directions_kept(directions: tuple[str, ...], layers_to_keep: str | None) -> tuple[str, ...]:
    """Return the directions of the layers that fairseq's LayerDrop pruning keeps."""
    if not layers_to_keep:
        return directions
    kept = sorted(int(index) for index in layers_to_keep.split(","))
    return tuple(directions[i] if i < len(directions) else "both" for i in kept)


def _wrap(layer: nn.Module, cfg: Any) -> nn.Module:
    """Apply activation checkpointing and FSDP to a layer, as fairseq's stacks do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )
