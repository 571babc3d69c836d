"""Defines layers and stacks: fairseq's Transformer, with fairseq's names of parameters.

A call is given the last T of S tokens; when decoding, the keys of the others are in a cache. Layers
with equal encodings are of one kind: what depends on positions alone, such as rotations, is
computed once for each kind. Exported folders hold a copy of this module (see the package).
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from fairseq_posenc.encodings.base import Encodings
from fairseq_posenc.positions import Positions, may_sync
from fairseq_posenc.shared import Shared
from fairseq_posenc.workbench.convert.exchange.modeling import inputs
from fairseq_posenc.workbench.convert.exchange.modeling.attention import (
    Attention,
    CrossAttention,
    Memory,
)
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import StackConfig

# The encodings that depend on the ends of sentences, which vectors in place of ids do not show.
_READ_ENDS = ("documents", "sentence_learned")


class Layer(GradientCheckpointingLayer):
    """Self-attention, attention to the memory if there is one, and a feed-forward network."""

    def __init__(self, config: StackConfig, index: int) -> None:
        super().__init__()
        width = config.embed_dim
        self.norm_before = config.norm_before
        self.self_attn = Attention(config, index, config.build_encodings("layer", index))
        self.self_attn_layer_norm = nn.LayerNorm(width)
        if config.memory_dim is not None:
            self.encoder_attn = CrossAttention(config, index, Encodings({}), config.memory_dim)
            self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.activation = ACT2FN[config.activation]
        self.dropout = nn.Dropout(config.dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)

    def forward(
        self,
        x: Tensor,
        shared: Shared,
        cache: Optional[Cache],
        need_weights: bool,
        memory: Optional[Memory],
    ) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
        """Compute ``(B, T, C)``, and the weights of both attentions."""
        normed = self._norm_input(x, self.self_attn_layer_norm)
        attended, weights = self.self_attn(normed, shared, cache, need_weights)
        x = self._add_output(x, attended, self.self_attn_layer_norm)
        cross_weights = None
        if memory is not None:
            normed = self._norm_input(x, self.encoder_attn_layer_norm)
            attended, cross_weights = self.encoder_attn(normed, shared, cache, need_weights, memory)
            x = self._add_output(x, attended, self.encoder_attn_layer_norm)
        inner = self.activation(self.fc1(self._norm_input(x, self.final_layer_norm)))
        x = self._add_output(x, self.fc2(self.activation_dropout(inner)), self.final_layer_norm)
        return x, weights, cross_weights

    def _norm_input(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.norm_before else x

    def _add_output(self, x: Tensor, output: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(output)
        return x if self.norm_before else norm(x)


class Stack(nn.Module):
    """An encoder or a decoder, from token ids to the output of its last layer."""

    main_input_name = "input_ids"  # transformers' `generate` reads it

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        width = config.embed_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, width, config.padding_idx)
        # The names of these two attributes are parts of weights' names in exported folders.
        self.positions = config.build_encodings("input")  # added to the token embeddings
        self.encodings = config.build_encodings("stack")  # shared by the attention of all layers
        self.layernorm_embedding = nn.LayerNorm(width) if config.embedding_norm else None
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(width) if config.final_norm else None
        self.dropout = nn.Dropout(config.dropout)
        layers = (config.layer(index) for index in range(config.num_layers))
        self.kind_by_layer = [config.layer_kinds.index(layer) for layer in layers]

    def window(self, kind: int) -> Optional[int]:
        """Find the number of last tokens that a kind of layer sees; None for all.

        A cache may drop the keys before them, so a window with ``first`` keys, which all later
        queries see, does not count.
        """
        # Recognised without the class of windows, which would then be in every exported folder.
        encodings: list[Any] = self.encodings.select(kind).as_list()
        sizes = [
            encoding.size
            for encoding in encodings
            if encoding.acts_on == "mask"
            and hasattr(encoding, "size")
            and not getattr(encoding, "first", None)
        ]
        return min(sizes, default=None)

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        prefix_ids: Optional[Tensor] = None,
        memory: Optional[Memory] = None,
        past_key_values: Optional[Cache] = None,
        inputs_embeds: Optional[Tensor] = None,
        output_attentions: Optional[bool] = None,
        output_hidden_states: Optional[bool] = None,
        return_dict: Optional[bool] = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Compute the output of the last layer, ``(B, T, C)``.

        Args:
            input_ids: ids of the last T of S tokens, ``(B, T)``.
            attention_mask: 0 for padding, ``(B, S)``; tokens with the id of padding are, too.
            prefix_ids: ids of all S tokens, ``(B, S)``; needed if the cache is not empty.
            memory: output of the encoder.
            past_key_values: cache of keys and values.
            inputs_embeds: rows of the token embeddings, ``(B, T, C)``, in place of the ids.
            output_attentions: whether to return the attention weights of each layer.
            output_hidden_states: whether to return the output of each layer.
            return_dict: False for a tuple.
            **kwargs: other arguments of transformers, which must be None.
        """
        inputs.refuse_arguments(kwargs)
        tokens, num_new, may_read = self._find_tokens(
            input_ids, inputs_embeds, attention_mask, prefix_ids, memory, past_key_values
        )
        pad, eos = self.config.padding_idx, self.config.eos_idx
        positions = Positions.from_tokens(tokens, pad, eos, num_new, may_read)
        shared = Shared.compute(self.encodings, positions)
        recomputes = self.training and any(layer.gradient_checkpointing for layer in self.layers)
        if recomputes and past_key_values is not None:
            raise ValueError("gradient checkpointing keeps no caches: call eval() to generate")
        if input_ids is not None:
            inputs_embeds = self.embed_tokens(self.replace_unknown(input_ids))
        assert inputs_embeds is not None
        x = self._add_positions(inputs_embeds, shared.positions)
        if memory is not None:
            shared = self._add_source_positions(shared, memory)
        states, weights, cross_weights = [], [], []
        for layer, kind in zip(self.layers, self.kind_by_layer):
            if output_hidden_states:
                states.append(x)
            x, layer_weights, layer_cross_weights = layer(
                x, shared.of_kind(kind), past_key_values, bool(output_attentions), memory
            )
            if output_attentions:
                weights.append(layer_weights)
                cross_weights.append(layer_cross_weights)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        output = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if output_hidden_states else None,
            attentions=tuple(weights) if output_attentions else None,
            cross_attentions=tuple(cross_weights) if output_attentions and memory else None,
        )
        return output.to_tuple() if return_dict is False else output

    def _add_positions(self, embeds: Tensor, positions: Positions) -> Tensor:
        """Add the vectors of positions to embeddings ``(B, T, C)``: the first layer's input."""
        x = embeds.type_as(self.embed_tokens.weight) * self.config.embed_scale
        for encoding in self.positions.as_list():
            vectors = encoding.embed(positions)
            if vectors is not None:
                x = x + vectors.type_as(x)
        return self.dropout(x if self.layernorm_embedding is None else self.layernorm_embedding(x))

    def _add_source_positions(self, shared: Shared, memory: Memory) -> Shared:
        """Add the positions of the source if the attention to it rotates queries and keys."""
        layers: list[Any] = [*self.layers]
        if not any(layer.encoder_attn.rotates for layer in layers):
            return shared
        padding = memory.padding
        if padding is None:
            padding = memory.states.new_zeros(memory.states.shape[:2], dtype=torch.bool)
        source = Positions.from_padding(padding, tgt_len=0)  # the source has no queries
        return shared.with_source(self.encodings, source.ids)

    def replace_unknown(self, ids: Tensor) -> Tensor:
        """Replace ids beyond the vocabulary, as a tokenizer gives to unknown pieces, by unknown."""
        return ids.masked_fill(ids.ge(self.config.vocab_size), self.config.unk_idx)

    def make_placeholders(self, embeds: Tensor) -> Tensor:
        """Make ids for vectors ``(B, T, C)``, as positions are counted from ids.

        They are all unknown: no vector is padding or ends a sentence.

        Raises:
            ValueError: positions depend on the ends of sentences.
        """
        names = {name for specs in self.config.positions for name in specs if name in _READ_ENDS}
        if names:
            raise ValueError(
                f"{min(names)} counts from the ends of sentences, which inputs_embeds do not "
                "show: give input_ids, or all symbols up to now as prefix_ids beside inputs_embeds"
            )
        return embeds.new_full(embeds.shape[:2], self.config.unk_idx, dtype=torch.long)

    def _find_tokens(
        self,
        input_ids: Optional[Tensor],
        inputs_embeds: Optional[Tensor],
        attention_mask: Optional[Tensor],
        prefix_ids: Optional[Tensor],
        memory: Optional[Memory],
        cache: Optional[Cache],
    ) -> tuple[Tensor, int, bool]:
        """Check the inputs of a call, and find its tokens.

        Returns:
            The ids of all tokens, ``(B, S)``, where those that the mask hides are padding; the
            number T of new tokens; and whether values may be read, which waits for a GPU.
        """
        # transformers' names of a decoder's inputs, beside those of an encoder
        prefix = "" if self.config.memory_dim is None else "decoder_"
        inputs.check_one_input(input_ids, inputs_embeds, prefix)
        new_tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        if inputs_embeds is None:
            inputs.check_ids(f"{prefix}input_ids", input_ids)
        else:
            inputs.check_embeds(f"{prefix}inputs_embeds", inputs_embeds, self.config.embed_dim)
        batch, num_new = new_tokens.shape[:2]
        if cache is not None:
            windows = [self.window(kind) for kind in self.kind_by_layer]
            inputs.check_cache(cache, batch, windows)
        past = 0 if cache is None else cache.get_seq_length()
        may_read = may_sync(new_tokens.device, decoding=past > 0)
        if may_read and input_ids is not None:
            inputs.check_not_negative(f"{prefix}input_ids", input_ids)
        tokens = input_ids if prefix_ids is None else prefix_ids
        if tokens is None:
            assert inputs_embeds is not None
            tokens = self.make_placeholders(inputs_embeds)
        elif prefix_ids is not None:
            inputs.check_ids("prefix_ids", prefix_ids)
        if tokens.size(1) != past + num_new or tokens.size(0) != batch:
            raise ValueError(
                f"{past} tokens are in the cache and {num_new} are new: give all {past + num_new} "
                f"of {batch} sentences as prefix_ids, because positions are counted from the first"
            )
        if memory is not None and memory.states.size(0) != batch:
            raise ValueError(
                f"the encoder's output is of {memory.states.size(0)} sentences, and the decoder "
                f"is given {batch}"
            )
        if attention_mask is not None:
            name = f"{prefix}attention_mask"
            inputs.check_mask(name, attention_mask, batch, past + num_new, may_read)
            tokens = tokens.masked_fill(attention_mask.eq(0), self.config.padding_idx)
        return tokens, num_new, may_read
