"""Defines the base class of the models: stacks, and the methods that transformers calls.

Exported folders hold a copy of this module (see the package).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Optional

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fairseq_posenc.encodings.base import INIT_STD
from fairseq_posenc.workbench.convert.exchange.modeling.configuration import (
    PosencConfig,
    StackConfig,
)
from fairseq_posenc.workbench.convert.exchange.modeling.heads import LMHead
from fairseq_posenc.workbench.convert.exchange.modeling.inputs import ReturnOptions
from fairseq_posenc.workbench.convert.exchange.modeling.stack import Stack


class PosencModel(PreTrainedModel):
    """Base of the models: an encoder, a decoder, or both."""

    config_class = PosencConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # For scores that are a dot product and a bias; others are computed without torch's kernels.
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
        """Add the head of the model."""

    def _init_weights(self, module: nn.Module) -> None:
        # transformers calls this for a head that is not in the file.
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()
        elif isinstance(module, LMHead):
            nn.init.zeros_(module.bias)
            if hasattr(module, "weight"):
                nn.init.normal_(module.weight, std=INIT_STD)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **kwargs: Any
    ) -> None:
        # Reentrant checkpoints would run backward through tensors that layers share once for each
        # layer. The other kind has the same gradients, and needs as little memory.
        function = partial(gradient_checkpointing_func, use_reentrant=False)
        super()._set_gradient_checkpointing(enable, function, **kwargs)

    def encode(
        self,
        input_ids: Optional[Tensor],
        attention_mask: Optional[Tensor],
        inputs_embeds: Optional[Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[ReturnOptions, Any]:
        """Run the encoder, see :meth:`Stack.forward`; also return the options of the call.

        ``kwargs`` may have ``output_attentions``, ``output_hidden_states``, ``num_items_in_batch``,
        and ``prefix_ids``, the symbols of ``inputs_embeds``.
        """
        prefix_ids = kwargs.pop("prefix_ids", None)
        options = ReturnOptions.read(self.config, kwargs)
        output = self.encoder(
            input_ids,
            attention_mask,
            prefix_ids,
            inputs_embeds=inputs_embeds,
            **options.stack_arguments,
        )
        return options, output

    @property
    def stacks(self) -> dict[str, Stack]:
        """The stacks of the model by name, ``encoder`` and ``decoder``."""
        stacks = {name: getattr(self, name, None) for name in ("encoder", "decoder")}
        return {name: stack for name, stack in stacks.items() if stack is not None}

    def get_input_embeddings(self) -> nn.Module:
        """Get the token embeddings of the first stack."""
        return next(iter(self.stacks.values())).embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embeddings of the first stack."""
        next(iter(self.stacks.values())).embed_tokens = value

    def resize_token_embeddings(
        self,
        new_num_tokens: Optional[int] = None,
        pad_to_multiple_of: Optional[int] = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the embeddings of all stacks, and the head, with transformers' arguments.

        Raises:
            ValueError: source and target have different numbers of symbols.
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
            stack.embed_tokens = table
            size = table.num_embeddings
            stack.config = stack.config._replace(vocab_size=size)
            setattr(self.config, f"{name}_stack", stack.config._asdict())
        self.resize_head(size)
        self.config.vocab_size = size
        return self.get_input_embeddings()

    def resize_head(self, size: int) -> None:
        """Resize the head to score ``size`` symbols; weights of new symbols are 0."""
