"""Keeps keys and values from step to step of decoding, in fairseq's incremental state."""

from typing import NamedTuple

from torch import Tensor

from fairseq_posenc.encodings.locality import NeededKeys
from fairseq_posenc.modules.cache import Kept


class IncrementalCache(NamedTuple):
    """Keys and values of a layer in fairseq's format, so that its beam reordering works on them.

    Attributes:
        buffer: the layer's buffer in fairseq's incremental state; changed in place.
        padding: True for padding, for all tokens, ``(B, S)``.
        tokens: S, the number of all tokens, those of this step and those of dropped keys included.
    """

    buffer: dict[str, Tensor | None]
    padding: Tensor | None
    tokens: int

    def past_decay(self) -> Tensor | None:
        """Read the kept tokens' sums of logarithms of forget gates, ``(B, G, K, 2)``, or None."""
        return self.buffer.get("prev_decay")  # G sums for each of K tokens, each in two parts

    def extend(self, key: Tensor, value: Tensor, decay: Tensor | None, needed: NeededKeys) -> Kept:
        """Append new keys and values, ``(B, H, T, D)``; ``decay`` is of kept and new tokens."""
        past_key = self.buffer.get("prev_key")
        past_value = self.buffer.get("prev_value")
        # B batch, H heads, T new of S tokens, D head size; later steps may need fewer keys.
        visible = Kept(key, value, decay)
        if past_key is not None and past_value is not None:
            places = self.buffer.get("prev_places")  # a row for each beam, all of them equal
            past = Kept(past_key, past_value, places=None if places is None else places[0].cpu())
            visible = past.append(key, value, decay, self.tokens)  # decay replaces the past one
        stored = visible.select(needed, self.tokens)  # last keys and some first ones, for later
        places = stored.places
        if places is not None:  # in each row, as fairseq reorders rows
            places = places.to(key.device).expand(key.size(0), -1)
        self.buffer.update(
            prev_key=stored.key,
            prev_value=stored.value,
            prev_key_padding_mask=self.padding,  # of all tokens, also those without a key
            prev_places=places,
            prev_decay=stored.decay,
        )
        return visible
