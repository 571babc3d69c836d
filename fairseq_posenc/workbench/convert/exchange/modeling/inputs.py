"""Reads and checks a model's inputs: a mistake raises one line that says what to do.

Symbols are token ids, as in fairseq's dictionaries. Exported folders hold a copy of this module
(see the package), so errors are ValueErrors, as in transformers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)

_INTEGERS = (torch.int64, torch.int32)
_NO_PACKING = (
    "positions are counted from the mask, and from the ends of sentences with 'documents': give "
    "each sentence a row of its own, padded"
)
# Arguments of transformers' models that are not supported -> the reason, or what to do.
_REFUSED = {
    **dict.fromkeys(("position_ids", "decoder_position_ids", "cache_position"), _NO_PACKING),
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), _NO_PACKING),
    **dict.fromkeys(("max_length_q", "max_length_k"), _NO_PACKING),
    "token_type_ids": "these models have no types of tokens, only zeros are allowed",
    **dict.fromkeys(
        ("head_mask", "decoder_head_mask", "cross_attn_head_mask"), "no head can be masked"
    ),
    # Models with a decoder read these two before.
    **dict.fromkeys(("past_key_values", "cache"), "an encoder has no cache"),
}


class ReturnOptions(NamedTuple):
    """The options of a call that determine what it returns."""

    attentions: bool  # whether to return the attention weights of each layer
    hidden_states: bool  # whether to return the output of each layer
    # number of labels by which the loss is divided, int or tensor; None for those of the batch
    num_items: Any

    @classmethod
    def read(cls, config: PretrainedConfig, arguments: dict[str, Any]) -> ReturnOptions:
        """Read the options of a call, by default those of the configuration.

        Raises:
            ValueError: there are other arguments, which would have no effect.
        """
        others = dict(arguments)
        others.pop("use_cache", None)  # models with caches have read it
        attentions = others.pop("output_attentions", None)
        hidden_states = others.pop("output_hidden_states", None)
        num_items = others.pop("num_items_in_batch", None)
        refuse_arguments(others)
        if attentions is None:
            attentions = config.output_attentions
        if hidden_states is None:
            hidden_states = config.output_hidden_states
        return cls(bool(attentions), bool(hidden_states), num_items)

    @property
    def stack_arguments(self) -> dict[str, bool]:
        """The options as arguments of a stack."""
        return {
            "output_attentions": self.attentions,
            "output_hidden_states": self.hidden_states,
            "return_dict": True,
        }


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse arguments by name, unless they are None or token types of zero."""
    for name, value in arguments.items():
        is_zeros = name == "token_type_ids" and isinstance(value, Tensor) and not value.any()
        if value is not None and not is_zeros:
            raise ValueError(f"{name} cannot be given: {_REFUSED.get(name, 'no such argument')}")


def check_one_input(ids: Any, embeds: Any, prefix: str = "") -> None:
    """Check that either symbols or vectors are given; ``prefix`` begins the arguments' names."""
    if ids is None and embeds is None:
        raise ValueError(f"no tokens: give {prefix}input_ids, or {prefix}inputs_embeds")
    if ids is not None and embeds is not None:
        raise ValueError(f"give {prefix}input_ids or {prefix}inputs_embeds, not both")


def check_ids(name: str, ids: Any) -> None:
    """Check that symbols are whole numbers ``(B, T)``."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in _INTEGERS:
        raise ValueError(f"{name} must be int64 or int32 (sentences, tokens), not {_describe(ids)}")
    _refuse_empty(name, ids)


def check_not_negative(name: str, ids: Tensor) -> None:
    """Refuse symbols below 0.

    This reads their values and so waits for a GPU: callers decide whether it is worth it.
    """
    if bool((ids < 0).any()):
        raise ValueError(
            f"{name} hold {int(ids.min())}: symbols are numbers from 0 on; -100 is for labels alone"
        )


def check_embeds(name: str, embeds: Any, width: int) -> None:
    """Check vectors ``(B, T, C)`` in place of symbols."""
    if (
        not isinstance(embeds, Tensor)
        or embeds.dim() != 3
        or embeds.size(2) != width
        or not embeds.is_floating_point()
    ):
        raise ValueError(
            f"{name} must be floats (sentences, tokens, {width}), not {_describe(embeds)}"
        )
    _refuse_empty(name, embeds)


def check_mask(name: str, mask: Any, batch: int, length: int, may_read: bool) -> None:
    """Check a mask ``(B, S)``: 1 for tokens and 0 for padding.

    Its values are checked only with ``may_read``, as reading them waits for a GPU.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.is_floating_point():
        raise ValueError(
            f"{name} must be bool or whole numbers (sentences, tokens), 0 for padding, not "
            f"{_describe(mask)}: other limits of what a query sees belong to the model"
        )
    if mask.size(0) != batch or mask.size(1) != length:
        raise ValueError(
            f"{name} is {_describe(mask)}, and must be {(batch, length)}: one number for each "
            "token, including those in a cache"
        )
    if may_read and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{name} must hold 0 for padding and 1 elsewhere; {_NO_PACKING}")


def find_padding(ids: Optional[Tensor], mask: Optional[Tensor], symbol: int) -> Optional[Tensor]:
    """Find padding, ``(B, S)`` of bool, by its symbol and by the mask; None without both."""
    by_symbol = None if ids is None else ids.eq(symbol)
    if mask is None:
        return by_symbol
    return mask.eq(0) if by_symbol is None else by_symbol | mask.eq(0)


def check_labels(labels: Any, shape: torch.Size) -> None:
    """Check that labels are int64 of a shape."""
    if not isinstance(labels, Tensor) or labels.shape != shape or labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 {tuple(shape)}, not {_describe(labels)}")


def choose_cache(past_key_values: Any, cache: Any) -> Any:
    """Choose the cache, which newer versions of transformers pass as ``cache``."""
    if cache is not None and past_key_values is not None:
        raise ValueError("give past_key_values or cache, not both")
    return past_key_values if cache is None else cache


def check_cache(cache: Any, batch: int, windows: list[Optional[int]]) -> None:
    """Refuse a cache that may lack keys that layers need, or is of another batch.

    ``windows`` has the number of last tokens that each layer sees; None for all.
    """
    if isinstance(cache, EncoderDecoderCache):
        check_cache(cache.self_attention_cache, batch, windows)
        check_cache(cache.cross_attention_cache, batch, [None] * len(windows))
        return
    # Not their subclasses, which may round keys to fewer bits.
    supported = (DynamicLayer, DynamicSlidingWindowLayer)
    if (
        not isinstance(cache, DynamicCache)
        or any(type(layer) not in supported for layer in cache.layers)
        or getattr(cache, "offloading", False)
    ):
        raise ValueError(
            f"such a {type(cache).__name__} cannot be used: it may pad, round, drop or move "
            "keys, and positions are counted by the keys. Leave the cache out, or give "
            "DynamicCache(config=model.config)"
        )
    for layer, window in zip(cache.layers, windows):  # a new cache has no layers yet
        kept = getattr(layer, "sliding_window", None)
        if kept is not None and (window is None or kept < window):
            raise ValueError(
                f"the cache keeps {kept} tokens where a layer sees {window or 'all'}: give "
                "DynamicCache(config=model.config)"
            )
        keys = getattr(layer, "keys", None)
        if keys is not None and keys.numel() and keys.size(0) != batch:
            raise ValueError(
                f"the cache is of {keys.size(0)} sentences, and {batch} are given: begin a new one"
            )


def check_cache_class(cache: Any, has_encoder: bool) -> None:
    """Check that a cache is of the class that a causal LM, or a decoder with an encoder, needs."""
    if isinstance(cache, EncoderDecoderCache) != has_encoder:
        pair = "EncoderDecoderCache(DynamicCache(), DynamicCache())"
        wanted = pair if has_encoder else "DynamicCache()"
        raise ValueError(f"{type(cache).__name__} cannot be used: this model needs {wanted}")


def _refuse_empty(name: str, x: Tensor) -> None:
    if x.size(0) == 0 or x.size(1) == 0:
        raise ValueError(f"{name} are empty, {tuple(x.shape)}: give at least one token")


def _describe(value: Any) -> str:
    """Describe the type of a value, and the shape of a tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
