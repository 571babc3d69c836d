"""Defines the models that ``AutoModelFor...`` loads; those with a decoder have ``generate``.

Positions depend on all tokens, so beside the new ones a decoder needs ``prefix_ids``, the symbols
of all tokens so far. Exported folders hold a copy of this module (see the package).
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from fairseq_posenc.models.masked_lm import SpanHead
from fairseq_posenc.workbench.convert.exchange.modeling import heads, inputs
from fairseq_posenc.workbench.convert.exchange.modeling.attention import Memory
from fairseq_posenc.workbench.convert.exchange.modeling.base import PosencModel
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import PosencConfig
from fairseq_posenc.workbench.convert.exchange.modeling.stack import Stack

# Arguments that `generate` adds, and that the models do not need.
_IGNORED_ARGUMENTS = ("cache_position", "next_sequence_length", "is_first_iteration")


def _compute_loss(
    stack: Stack, logits: Tensor, labels: Optional[Tensor], options: inputs.ReturnOptions
) -> Optional[Tensor]:
    """Compute the loss of labels, if any; those beyond the vocabulary become unknown, as inputs."""
    if labels is None:
        return None
    inputs.check_labels(labels, logits.shape[:-1])
    return heads.cross_entropy(logits, stack.replace_unknown(labels), options.num_items)


class PosencForMaskedLM(PosencModel):
    """Predicts the token under each ``<mask>``."""

    def add_head(self, config: PosencConfig) -> None:
        """Add RoBERTa's head."""
        self.lm_head = heads.LMHead(config)

    def resize_head(self, size: int) -> None:
        """See :meth:`PosencModel.resize_head`."""
        head = self.lm_head
        head.bias = nn.Parameter(heads.resize_rows(head.bias, size))
        if not self.config.tied_output:
            head.weight = nn.Parameter(heads.resize_rows(head.weight, size))

    @can_return_tuple
    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute scores ``(B, T, symbols)``; see :meth:`PosencModel.encode`."""
        options, output = self.encode(input_ids, attention_mask, inputs_embeds, kwargs)
        logits = self.lm_head(output.last_hidden_state, self.encoder.embed_tokens.weight)
        loss = _compute_loss(self.encoder, logits, labels, options)
        return MaskedLMOutput(loss, logits, output.hidden_states, output.attentions)


class PosencForSequenceClassification(PosencModel):
    """Classifies sentences or pairs of sentences; with a single class, computes a score."""

    def add_head(self, config: PosencConfig) -> None:
        """Add RoBERTa's head."""
        self.classifier = heads.ClassificationHead(config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Compute scores ``(B, classes)``; see :meth:`PosencModel.encode`."""
        options, output = self.encode(input_ids, attention_mask, inputs_embeds, kwargs)
        logits = self.classifier(output.last_hidden_state)
        compute_loss = heads.squared_error if self.config.num_labels == 1 else heads.cross_entropy
        loss = None if labels is None else compute_loss(logits, labels, options.num_items)
        return SequenceClassifierOutput(loss, logits, output.hidden_states, output.attentions)


class PosencForQuestionAnswering(PosencModel):
    """Scores each token as the first and as the last of an answer."""

    def add_head(self, config: PosencConfig) -> None:
        """Add a linear layer with two outputs."""
        self.span_head = SpanHead(config.hidden_size)

    @can_return_tuple
    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        start_positions: Optional[Tensor] = None,
        end_positions: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Compute two scores ``(B, T)``, -inf at padding; see :meth:`PosencModel.encode`."""
        options, output = self.encode(input_ids, attention_mask, inputs_embeds, kwargs)
        x = output.last_hidden_state
        padding = inputs.find_padding(input_ids, attention_mask, self.config.pad_token_id)
        if padding is None:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        starts, ends = self.span_head(x, padding)
        loss = None
        if start_positions is not None and end_positions is not None:
            start_loss = heads.cross_entropy(starts, start_positions, options.num_items)
            end_loss = heads.cross_entropy(ends, end_positions, options.num_items)
            loss = (start_loss + end_loss) / 2
        return QuestionAnsweringModelOutput(
            loss, starts, ends, output.hidden_states, output.attentions
        )


class DecoderModel(PosencModel, GenerationMixin):
    """Base of the models with a decoder."""

    step_input = "input_ids"  # the argument that takes the new tokens of a step

    def add_head(self, config: PosencConfig) -> None:
        """Add output embeddings, unless they are tied to the input embeddings."""
        if not config.tied_output:
            self.output_projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def resize_head(self, size: int) -> None:
        """See :meth:`PosencModel.resize_head`."""
        if not self.config.tied_output:
            head = self.output_projection
            head.weight = nn.Parameter(heads.resize_rows(head.weight, size))
            head.out_features = size

    def compute_scores(self, x: Tensor) -> Tensor:
        """Compute the scores ``(B, T, symbols)`` from the decoder's output."""
        if self.config.tied_output:
            return F.linear(x, self.decoder.embed_tokens.weight)
        return self.output_projection(x)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Optional[Cache] = None,
        attention_mask: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        cache: Optional[Cache] = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Select the inputs of the next step: tokens that are not in the cache, and all tokens."""
        cache = inputs.choose_cache(past_key_values, cache)
        past = 0 if cache is None else cache.get_seq_length()
        others = {name: value for name, value in kwargs.items() if name not in _IGNORED_ARGUMENTS}
        others |= {"past_key_values": cache, "attention_mask": attention_mask}
        # An encoder-decoder's vectors are its source, which the encoder has read.
        if inputs_embeds is not None and not self.config.is_encoder_decoder:
            return others | self._select_embeds(input_ids, inputs_embeds, past, attention_mask)
        if input_ids.size(1) <= past:
            raise ValueError(
                f"the cache has {past} tokens, and {input_ids.size(1)} are given: give all tokens "
                "up to now, and no prefill_chunk_size"
            )
        return {**others, self.step_input: input_ids[:, past:], "prefix_ids": input_ids}

    def _select_embeds(
        self, ids: Tensor, embeds: Tensor, past: int, mask: Optional[Tensor]
    ) -> dict[str, Any]:
        """Select the inputs of a step of decoding that began with vectors.

        Args:
            ids: generated symbols, ``(B, written)``; or, if the caller knows the symbols of the
                vectors and gives a mask, these and the generated ones, ``(B, L + written)``.
            embeds: the vectors, ``(B, L, C)``.
            past: number of tokens in the cache.
            mask: mask of vectors and generated symbols, ``(B, L + written)``.
        """
        length = embeds.size(1)
        ids_include_vectors = mask is not None and mask.size(1) == ids.size(1)
        if not ids_include_vectors:
            ids = torch.cat([self.decoder.make_placeholders(embeds), ids], 1)  # [B, L + written]
        if past >= length:
            return {"input_ids": ids[:, past:], "prefix_ids": ids}
        written = self.decoder.embed_tokens(self.decoder.replace_unknown(ids[:, length:]))
        embeds = torch.cat([embeds, written.type_as(embeds)], 1)[:, past:]
        return {"inputs_embeds": embeds, "prefix_ids": ids}


class PosencForCausalLM(DecoderModel):
    """Predicts the next token."""

    def __init__(self, config: PosencConfig) -> None:
        super().__init__(config)
        # Read by `DynamicCache(config=...)`. There is one size for all windows: the largest.
        windows = [self.decoder.window(kind) for kind in self.decoder.kind_by_layer]
        sizes = [size for size in windows if size is not None]
        config.sliding_window = max(sizes, default=None)
        config.layer_types = [
            "full_attention" if size is None else "sliding_attention" for size in windows
        ]

    @can_return_tuple
    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        prefix_ids: Optional[Tensor] = None,
        past_key_values: Optional[Cache] = None,
        use_cache: Optional[bool] = False,
        labels: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        cache: Optional[Cache] = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Compute scores ``(B, T, symbols)``; see :meth:`Stack.forward`.

        ``labels`` are the symbols, which are shifted here, with -100 for padding; ``use_cache``
        makes a cache; ``cache`` is the newer name of ``past_key_values``; ``kwargs``: see
        :class:`inputs.ReturnOptions`.
        """
        cache = inputs.choose_cache(past_key_values, cache)
        options = inputs.ReturnOptions.read(self.config, kwargs)
        if cache is not None:
            inputs.check_cache_class(cache, has_encoder=False)
        elif use_cache:
            cache = DynamicCache(config=self.config)
        output = self.decoder(
            input_ids,
            attention_mask,
            prefix_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            **options.stack_arguments,
        )
        logits = self.compute_scores(output.last_hidden_state)
        loss = None
        if labels is not None:
            inputs.check_labels(labels, logits.shape[:-1])
            loss = _compute_loss(self.decoder, logits[:, :-1], labels[:, 1:], options)
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=cache,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class PosencForSeq2SeqLM(DecoderModel):
    """Translates sentences."""

    step_input = "decoder_input_ids"

    def get_encoder(self, *args: Any, **kwargs: Any) -> Stack:
        """Get the only encoder, which ``generate`` runs once, whatever arguments would choose."""
        return self.encoder

    def read_memory(self, outputs: Any, ids: Optional[Tensor], mask: Optional[Tensor]) -> Memory:
        """Read the encoder's output; find its padding by the symbols and the mask, if any."""
        states = outputs[0]
        inputs.check_embeds("encoder_outputs[0]", states, self.encoder.config.embed_dim)
        if mask is not None:
            batch, length = states.shape[:2]
            # At each step of decoding, so without reading its values, which waits for a GPU.
            inputs.check_mask("attention_mask", mask, batch, length, may_read=False)
        return Memory(states, inputs.find_padding(ids, mask, self.config.pad_token_id))

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels by one token to make the decoder's input: ``a b </s>`` to ``</s> a b``."""
        inputs.check_ids("labels", labels)
        ended = labels.masked_fill(labels.eq(-100), self.config.pad_token_id)
        return F.pad(ended[:, :-1], (1, 0), value=self.config.eos_token_id)

    @can_return_tuple
    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        decoder_input_ids: Optional[Tensor] = None,
        decoder_attention_mask: Optional[Tensor] = None,
        prefix_ids: Optional[Tensor] = None,
        encoder_outputs: Optional[BaseModelOutput] = None,
        past_key_values: Optional[EncoderDecoderCache] = None,
        use_cache: Optional[bool] = False,
        labels: Optional[Tensor] = None,
        inputs_embeds: Optional[Tensor] = None,
        decoder_inputs_embeds: Optional[Tensor] = None,
        cache: Optional[EncoderDecoderCache] = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Compute scores ``(B, T, symbols)``; see :meth:`Stack.forward`.

        Args:
            input_ids: symbols of the source.
            attention_mask: 0 for padding of the source; the symbol of padding is padding, too.
            decoder_input_ids: the target, which begins with ``</s>``; by default from the labels.
            decoder_attention_mask: 0 for padding of the target.
            prefix_ids: all symbols of the target so far; needed if the caches are not empty.
            encoder_outputs: output of the encoder, in place of the source.
            past_key_values: caches of both attentions.
            use_cache: whether to make caches.
            labels: the target, which ends with ``</s>``; -100 for padding.
            inputs_embeds: vectors in place of ``input_ids``.
            decoder_inputs_embeds: vectors in place of ``decoder_input_ids``.
            cache: newer name of ``past_key_values``.
            **kwargs: see :class:`inputs.ReturnOptions`.
        """
        cache = inputs.choose_cache(past_key_values, cache)
        options = inputs.ReturnOptions.read(self.config, kwargs)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids,
                attention_mask,
                inputs_embeds=inputs_embeds,
                **options.stack_arguments,
            )
        memory = self.read_memory(encoder_outputs, input_ids, attention_mask)
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if cache is not None:
            inputs.check_cache_class(cache, has_encoder=True)
        elif use_cache:
            # These keep all keys: only a causal LM's configuration has windows.
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        output = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            prefix_ids,
            memory=memory,
            past_key_values=cache,
            inputs_embeds=decoder_inputs_embeds,
            **options.stack_arguments,
        )
        logits = self.compute_scores(output.last_hidden_state)
        return Seq2SeqLMOutput(
            loss=_compute_loss(self.decoder, logits, labels, options),
            logits=logits,
            past_key_values=cache,
            decoder_hidden_states=output.hidden_states,
            decoder_attentions=output.attentions,
            cross_attentions=output.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )
