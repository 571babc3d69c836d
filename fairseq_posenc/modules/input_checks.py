"""Checks what callers pass to the library's modules, with one-line errors.

B batch, T new tokens, S all tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.modules.attention_core import Cache
from fairseq_posenc.positions import Positions
from fairseq_posenc.shared import Shared


def check_layer_input(x: Tensor, positions: Positions, cache: object, embed_dim: int) -> None:
    """Refuse an input that is not ``(batch, tgt_len, embed_dim)``, and a cache of another type."""
    check_embeddings("x", x, embed_dim)
    batch, tgt_len = positions.batch_size, positions.tgt_len
    if x.shape[:2] != (batch, tgt_len):
        raise UserError(
            f"x {tuple(x.shape)} must be ({batch}, {tgt_len}, {embed_dim}): `shared` was computed "
            f"for a batch of {batch} and {tgt_len} new tokens"
        )
    if cache is not None and not isinstance(cache, Cache):
        raise UserError(f"cache must be a Cache, one for each layer, not {type(cache).__name__}")


def check_self_cache(cache: Cache | None, shared: Shared, heads: int, head_dim: int) -> None:
    """Refuse a cache that does not fit the tokens before, or the batch and heads of the keys."""
    positions = shared.positions
    past = positions.src_len - positions.tgt_len
    kept, tokens = (None, 0) if cache is None else (cache.kept, cache.tokens)
    if kept is not None and not tokens:  # a CrossAttention stored keys, and counts no tokens
        raise UserError("the cache is not of a SelfAttention: give each layer its own")
    if tokens != past:
        raise UserError(
            f"{tokens} tokens are in the cache and {positions.tgt_len} are new, but their "
            f"positions were made for past={past} and {positions.tgt_len} new: "
            "positions(embeddings, past=...)"
        )
    if cache is None or kept is None:
        return
    if cache.ids is not None and positions.counted:  # no caller gave this call's positions
        raise UserError("the tokens in the cache had position_ids: give those of the new ones")
    # What a cache must hold before the new tokens: `last`, a number of last keys (None: all), as in
    # a window; `first`, the places of first keys that no window hides (None: there are none).
    needed = shared.mask.needed_keys(new_tokens=positions.tgt_len)
    length = tokens if needed.last is None else min(tokens, needed.last)
    if needed.first is not None:
        if lacking := int((~torch.isin(needed.first, kept.list_places(tokens))).sum()):
            raise UserError(
                f"the cache lacks {lacking} of the first keys that these positions need: give "
                "each layer its own cache"
            )
        # It may hold more: all rows keep the same places, and `Cache.reorder` may have dropped the
        # only row that needs some of them.
        length = max(length, kept.key.size(2))
    held = (*kept.key.shape[:3], kept.value.size(3))  # not the width of keys: PoPE changes it
    expected = (positions.batch_size, heads, length, head_dim)
    if held != expected:
        need = f"this layer and the positions need {expected}: give each layer its own cache"
        raise UserError(f"the cache has batch, heads, keys and width {held}, but {need}")


def check_embeddings(name: str, x: Tensor, width: int) -> None:
    """Refuse anything but vectors ``(batch, length, width)`` for at least one token."""
    check_tensor(name, x)
    if x.dim() != 3 or x.size(2) != width:
        raise UserError(f"{name} {tuple(x.shape)} must be (batch, length, {width})")
    if not x.is_floating_point():
        raise UserError(f"{name} must be floating-point vectors, not {_name_type(x)}")
    if x.size(1) == 0:
        raise UserError(f"{name} {tuple(x.shape)}: give at least one token")


def read_mask(
    name: str, mask: Tensor | None, batch: int, src_len: int, device: torch.device
) -> Tensor:
    """Check a padding mask, ``(batch, src_len)`` of bool, and move it; None: no padding."""
    if mask is None:
        return torch.zeros(batch, src_len, dtype=torch.bool, device=device)
    check_each_token(name, mask, batch, src_len)
    if mask.dtype != torch.bool:
        raise UserError(
            f"{name} must be of bool, True for padding, not {_name_type(mask)}; for a mask with 1 "
            "for tokens and 0 for padding, pass mask.eq(0)"
        )
    return mask.to(device)


def check_each_token(name: str, x: Tensor, batch: int, src_len: int) -> None:
    """Refuse a tensor that does not have a value for each token, ``(batch, src_len)``."""
    check_tensor(name, x)
    if x.shape != (batch, src_len):
        raise UserError(
            f"{name} {tuple(x.shape)} must be ({batch}, {src_len}): the batch, and all tokens, "
            "including those in a cache"
        )


def read_position_ids(
    name: str, ids: Tensor, readers: Mapping[str, Encoding], batch: int, lengths: tuple[int, ...]
) -> Tensor:
    """Check a caller's position ids, and put their axes last.

    Args:
        name: of the argument, for messages.
        ids: position ids, ``(B or 1, S)``, or ``(axes, B or 1, S)``; or those of T tokens.
        readers: the encodings of the stack that read positions, by their text in the spec.
        batch: number of sentences.
        lengths: allowed numbers of ids for each sentence: S, perhaps also T.

    Returns:
        ``(B or 1, S)``, or ``(B or 1, S, axes)``; T in place of S if the ids are of T tokens.

    Raises:
        UserError: the ids have another shape, or an encoding cannot take their type or axes.
    """
    check_tensor(name, ids)
    if not ids.is_floating_point():
        check_integers(name, ids)
    axes = ids.size(0) if ids.dim() == 3 else None  # None: one number for each token
    if ids.dim() not in (2, 3) or ids.size(-2) not in (1, batch) or ids.size(-1) not in lengths:
        allowed = " or ".join(map(str, lengths))
        raise UserError(
            f"{name} {tuple(ids.shape)} must be ({batch} or 1, {allowed}), or on several axes "
            f"(axes, {batch} or 1, {allowed})"
        )
    for item, reader in readers.items():
        if ids.is_floating_point() and not reader.takes_real_ids:
            raise UserError(
                f"{name} must be whole numbers (torch.long) for {item}, not {_name_type(ids)}"
            )
        if axes is not None and axes != reader.axes:
            raise UserError(
                f"{name} {tuple(ids.shape)} are on {axes} axes, and {item} has "
                f"{reader.axes}: set its option axes if it has one, or give one position for each "
                "token"
            )
    if axes is None:
        return ids
    return ids[0] if axes == 1 else ids.permute(1, 2, 0)  # [B or 1, S, axes]


def check_count(name: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < least:
        raise UserError(f"{name}={value!r} must be a whole number of at least {least}")


def check_tensor(name: str, x: object) -> None:
    """Refuse lists and arrays."""
    if not isinstance(x, Tensor):
        raise UserError(f"{name} must be a tensor, not {type(x).__name__}")


def check_integers(name: str, ids: Tensor) -> None:
    """Refuse ids that are not whole numbers."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"{name} must be whole numbers (torch.long), not {_name_type(ids)}")


def _name_type(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
