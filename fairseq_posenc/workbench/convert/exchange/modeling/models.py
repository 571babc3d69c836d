"""The models that ``AutoModelFor...`` gives; those with a decoder have ``generate`` and caches."""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

from fairseq_posenc.encodings.base import INIT_STD, Encoding
from fairseq_posenc.transformer.heads import SpanHead
from fairseq_posenc.workbench.convert.exchange.modeling.attention import Memory
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import (
    PosencConfig,
    StackConfig,
)
from fairseq_posenc.workbench.convert.exchange.modeling.stack import Stack


class PosencModel(PreTrainedModel):
    """Base of the models: an encoder, a decoder, or both."""

    config_class = PosencConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # Wherever the scores are a dot product and a bias; elsewhere they are computed as written.
    _supports_sdpa = True

    def __init__(self, config: PosencConfig) -> None:
        super().__init__(config)
        if config.encoder_stack is not None:
            self.encoder = Stack(StackConfig(**config.encoder_stack))
        if config.decoder_stack is not None:
            self.decoder = Stack(StackConfig(**config.decoder_stack))
        self.add_head(config)
        self.post_init()

    def add_head(self, config: PosencConfig) -> None:
        """Add what the model has beside its stacks."""

    def _init_weights(self, module: nn.Module) -> None:
        # transformers builds models without memory, and fills in what a file holds: nothing that
        # is computed, such as rotary frequencies.
        if isinstance(module, Encoding):
            module.trained_at(module.dims.trained_length)
        elif isinstance(module, (nn.Linear, nn.LayerNorm)):  # of a head that is not in the file
            module.reset_parameters()
        elif isinstance(module, LMHead):
            nn.init.zeros_(module.bias)
            if hasattr(module, "weight"):
                nn.init.normal_(module.weight, std=INIT_STD)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **kwargs: Any
    ) -> None:
        # What layers share, a reentrant checkpoint would go back through once for each layer.
        function = partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, function, **kwargs)

    @property
    def stacks(self) -> dict[str, Stack]:
        """The encoder, the decoder, or both, by name."""
        stacks = {name: getattr(self, name, None) for name in ("encoder", "decoder")}
        return {name: stack for name, stack in stacks.items() if stack is not None}

    def get_input_embeddings(self) -> nn.Module:
        """Get the token embeddings of a user's input."""
        return next(iter(self.stacks.values())).embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embeddings of :meth:`get_input_embeddings`."""
        next(iter(self.stacks.values())).embed_tokens = value

    def resize_token_embeddings(
        self,
        new_num_tokens: Optional[int] = None,
        pad_to_multiple_of: Optional[int] = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the embeddings of all stacks and what scores their symbols.

        Args:
            new_num_tokens: number of symbols; new ones are the last.
            pad_to_multiple_of: as in transformers.
            mean_resizing: as in transformers.

        Raises:
            ValueError: source and target have symbols of their own.
        """
        sizes = {stack.embed_tokens.num_embeddings for stack in self.stacks.values()}
        if len(sizes) > 1:
            raise ValueError(
                f"source and target have {' and '.join(map(str, sorted(sizes)))} symbols, and one "
                "new number is given for both"
            )
        for name, stack in self.stacks.items():
            table = self._get_resized_embeddings(
                stack.embed_tokens, new_num_tokens, pad_to_multiple_of, mean_resizing
            )
            stack.embed_tokens, size = table, table.num_embeddings
            stack.config = stack.config._replace(vocab_size=size)
            setattr(self.config, f"{name}_stack", stack.config._asdict())
        self.resize_head(size)
        self.config.vocab_size = size
        return self.get_input_embeddings()

    def resize_head(self, size: int) -> None:
        """Give what scores symbols room for ``size`` of them; new ones score as a bias of 0."""


def head_loss(logits: Tensor, labels: Optional[Tensor]) -> Optional[Tensor]:
    """Compute the cross entropy of ``(..., symbols)`` where labels are not -100."""
    if labels is None:
        return None
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100)


def resize_rows(weight: Tensor, size: int) -> Tensor:
    """Cut a weight to ``size`` rows, or pad it with zeros."""
    kept = weight.detach()[:size]
    more = kept.new_zeros(size - kept.size(0), *kept.shape[1:])
    return torch.cat([kept, more])


class LMHead(nn.Module):
    """RoBERTa's head for masked tokens."""

    def __init__(self, config: PosencConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.head_activation]
        self.layer_norm = nn.LayerNorm(config.hidden_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        if not config.tied_output:
            self.weight = nn.Parameter(torch.zeros(config.vocab_size, config.hidden_size))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        """Compute scores ``(B, T, symbols)``; ``embeddings`` serve where they are tied."""
        x = self.layer_norm(self.activation(self.dense(x)))
        return F.linear(x, getattr(self, "weight", embeddings), self.bias)


class PosencForMaskedLM(PosencModel):
    """Predicts the token under each ``<mask>``."""

    def add_head(self, config: PosencConfig) -> None:
        """Add RoBERTa's head."""
        self.lm_head = LMHead(config)

    def resize_head(self, size: int) -> None:
        """See :meth:`PosencModel.resize_head`."""
        head = self.lm_head
        head.bias = nn.Parameter(resize_rows(head.bias, size))
        if hasattr(head, "weight"):
            head.weight = nn.Parameter(resize_rows(head.weight, size))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute scores ``(B, T, symbols)``; see :meth:`Stack.forward`."""
        output = self.encoder(input_ids, attention_mask, **kwargs)
        logits = self.lm_head(output.last_hidden_state, self.encoder.embed_tokens.weight)
        loss = head_loss(logits, labels)
        return MaskedLMOutput(loss, logits, output.hidden_states, output.attentions)


class ClassificationHead(nn.Module):
    """RoBERTa's head for sentences, on their first token."""

    def __init__(self, config: PosencConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.head_activation]
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``(B, classes)``."""
        return self.out_proj(self.activation(self.dense(x[:, 0])))


class PosencForSequenceClassification(PosencModel):
    """Puts sentences, or pairs of them, into classes; with one class it gives them a score."""

    def add_head(self, config: PosencConfig) -> None:
        """Add RoBERTa's head."""
        self.classifier = ClassificationHead(config)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Compute scores ``(B, classes)``; see :meth:`Stack.forward`."""
        output = self.encoder(input_ids, attention_mask, **kwargs)
        logits = self.classifier(output.last_hidden_state)
        loss = None
        if labels is not None and self.config.num_labels == 1:
            loss = F.mse_loss(logits.flatten().float(), labels.float())
        elif labels is not None:
            loss = head_loss(logits, labels)
        return SequenceClassifierOutput(loss, logits, output.hidden_states, output.attentions)


class PosencForQuestionAnswering(PosencModel):
    """Scores each token as the first and as the last of an answer."""

    def add_head(self, config: PosencConfig) -> None:
        """Add a linear layer of two outputs."""
        self.span_head = SpanHead(config.hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Optional[Tensor] = None,
        start_positions: Optional[Tensor] = None,
        end_positions: Optional[Tensor] = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Compute two scores ``(B, T)``, -inf at padding; see :meth:`Stack.forward`."""
        output = self.encoder(input_ids, attention_mask, **kwargs)
        padding = input_ids.eq(self.config.pad_token_id)
        if attention_mask is not None:
            padding = padding | attention_mask.eq(0)
        scores = self.span_head(output.last_hidden_state, padding)
        loss = None
        if start_positions is not None and end_positions is not None:
            targets = (start_positions, end_positions)
            loss = sum(F.cross_entropy(*each) for each in zip(scores, targets)) / 2
        return QuestionAnsweringModelOutput(loss, *scores, output.hidden_states, output.attentions)


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
            head.weight, head.out_features = nn.Parameter(resize_rows(head.weight, size)), size

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
        output = self.decoder(
            input_ids, attention_mask, prefix_ids, past_key_values=past_key_values, **kwargs
        )
        logits = self.scores(output.last_hidden_state)
        return CausalLMOutputWithCrossAttentions(
            loss=None if labels is None else head_loss(logits[:, :-1], labels[:, 1:]),
            logits=logits,
            past_key_values=past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
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
        output = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            prefix_ids,
            Memory(encoder_outputs[0], padding),
            past_key_values,
            **kwargs,
        )
        logits = self.scores(output.last_hidden_state)
        return Seq2SeqLMOutput(
            loss=head_loss(logits, labels),
            logits=logits,
            past_key_values=past_key_values,
            decoder_hidden_states=output.hidden_states,
            decoder_attentions=output.attentions,
            cross_attentions=output.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
        )
