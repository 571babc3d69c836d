"""The models that write text, with ``generate`` and caches."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithCrossAttentions,
    Seq2SeqLMOutput,
)

from fairseq_posenc.workbench.convert.exchange.modeling.attention import Memory
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import PosencConfig
from fairseq_posenc.workbench.convert.exchange.modeling.heads import PosencModel, head_loss, resized
from fairseq_posenc.workbench.convert.exchange.modeling.stack import Stack


class DecoderModel(PosencModel, GenerationMixin):
    """Base of the models with a decoder."""

    step_input = "input_ids"  # the argument that takes the new tokens of a step

    def add_head(self, config: PosencConfig) -> None:
        """Add output embeddings, unless those of the input serve."""
        if not config.tied_output:
            self.output_projection = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def resize_head(self, size: int) -> None:
        """See :meth:`PosencModel.resize_head`."""
        if not self.config.tied_output:
            head = self.output_projection
            head.weight, head.out_features = nn.Parameter(resized(head.weight, size)), size

    def scores(self, x: Tensor) -> Tensor:
        """Score the symbols, ``(B, T, symbols)``, from the decoder's output."""
        if self.config.tied_output:
            return F.linear(x, self.decoder.embed_tokens.weight)
        return self.output_projection(x)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Optional[Cache] = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Select the inputs of the next step: tokens that no cache has, and the prefix."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        given = ("attention_mask", "encoder_outputs", "use_cache")
        return {
            self.step_input: input_ids[:, past:],
            "prefix_ids": input_ids,
            "past_key_values": past_key_values,
            **{name: kwargs[name] for name in given if name in kwargs},
        }


class PosencForCausalLM(DecoderModel):
    """Predicts the next token."""

    def add_head(self, config: PosencConfig) -> None:
        """See :meth:`DecoderModel.add_head`; also say what a cache of transformers may drop."""
        super().add_head(config)
        windows = [self.decoder.window(kind) for kind in self.decoder.kinds]
        sizes = [size for size in windows if size is not None]
        config.sliding_window = max(sizes, default=None)
        names = ("full_attention", "sliding_attention")
        config.layer_types = [names[size is not None] for size in windows]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,
        prefix_ids: Optional[Tensor] = None,
        past_key_values: Optional[Cache] = None,
        use_cache: bool = False,
        labels: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithCrossAttentions:
        """Compute scores ``(B, T, symbols)``; see :meth:`Stack.forward`."""
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        found = self.decoder(
            input_ids, attention_mask, prefix_ids, past_key_values=past_key_values, **kwargs
        )
        logits = self.scores(found.last_hidden_state)
        return CausalLMOutputWithCrossAttentions(
            loss=None if labels is None else head_loss(logits[:, :-1], labels[:, 1:]),
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=found.hidden_states,
            attentions=found.attentions,
        )


class PosencForSeq2SeqLM(DecoderModel):
    """Translates."""

    step_input = "decoder_input_ids"

    def get_encoder(self, *args: Any, **kwargs: Any) -> Stack:
        """Get the encoder, which a generation runs once."""
        return self.encoder

    def forward(
        self,
        input_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        decoder_input_ids: Optional[Tensor] = None,
        decoder_attention_mask: Optional[Tensor] = None,
        prefix_ids: Optional[Tensor] = None,
        encoder_outputs: Optional[BaseModelOutput] = None,
        past_key_values: Optional[EncoderDecoderCache] = None,
        use_cache: bool = False,
        labels: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Compute scores ``(B, T, symbols)``; see :meth:`Stack.forward`.

        Args:
            input_ids: the source; its padding is that symbol, or is given by the mask.
            attention_mask: of the source.
            decoder_input_ids: the target, which begins with ``</s>``; by default from the labels.
            decoder_attention_mask: of the target.
            prefix_ids: all symbols of the target up to now.
            encoder_outputs: of the source, in place of it.
            past_key_values: caches.
            use_cache: whether to make caches.
            labels: the target, which ends with ``</s>``; -100 for padding.
            **kwargs: what to return beside.
        """
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids.ne(self.config.pad_token_id)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, **kwargs)
        if decoder_input_ids is None and labels is not None:
            ended = labels.masked_fill(labels.eq(-100), self.config.pad_token_id)
            decoder_input_ids = F.pad(ended[:, :-1], (1, 0), value=self.config.eos_token_id)
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        padding = None if attention_mask is None else attention_mask.eq(0)
        found = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            prefix_ids,
            Memory(encoder_outputs[0], padding),
            past_key_values,
            **kwargs,
        )
        logits = self.scores(found.last_hidden_state)
        return Seq2SeqLMOutput(
            loss=head_loss(logits, labels),
            logits=logits,
            past_key_values=past_key_values,
            decoder_hidden_states=found.hidden_states,
            decoder_attentions=found.attentions,
            cross_attentions=found.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
        )
