"""Records what a stack's weights were trained with, in the checkpoint beside its parameters.

Names and shapes of tensors do not show it: weights trained with rotary positions load into a model
with ALiBi, or weights of four heads into a model with eight, without an error, and give nonsense.
So each stack stores a tensor that encodes its :class:`Identity`, and loading compares it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.mask import DIRECTIONS
from fairseq_posenc.specs import Spec, parse

_PHRASES = {  # fields of `WeightSettings` in messages
    "heads": "{} heads",
    "activation": "activation {}",
    "norm": "{}-norm layers",
    "embeddings": "{} token embeddings",
    "pooler": "pooler activation {}",
    "add_bos_token": "add_bos_token {}",
    "language": "language {}",
    "attention": "{} attention",
}
_OTHER_SYMBOLS = "trained with a dict.txt of other symbols, or the same in another order"
STATE_KEY = "_extra_state"  # torch's name for state that a module stores beside its parameters
_BLOCK = 1024  # bytes are padded to a multiple: models to be averaged need tensors of one size
_ROUNDING = 2e-3  # averaging equal values in float32 changes them by less


class WeightSettings(NamedTuple):
    """Settings, other than positions, that a stack's weights were trained with.

    A field is None if it is unknown, or if the stack has no such setting.
    """

    heads: int | None = None  # heads of self-attention, and of a decoder's cross-attention
    activation: str | None = None  # the feed-forward blocks' activation
    norm: str | None = None  # `pre` or `post`
    embeddings: str | None = None  # `scaled` by the root of their width, or `unscaled`
    pooler: str | None = None  # activation of classification heads
    add_bos_token: str | None = None  # causal LM: `on` if `<s>` begins each sample, else `off`
    language: str | None = None  # translation: the encoder's source or the decoder's target
    attention: str | None = None  # `causal` or `bidirectional`, if tables of positions depend on it
    dictionary: str | None = None  # hash of its symbols in their order

    @classmethod
    def parse(cls, content: dict[str, Any]) -> WeightSettings:
        """Read the fields that a checkpoint has; earlier versions wrote fewer of them.

        Raises:
            TypeError: a field has another type, or a text that a message cannot show.
        """
        values = {name: content[name] for name in cls._fields if content.get(name) is not None}
        for name, value in values.items():
            expected = int if name == "heads" else str
            if type(value) is not expected or not str(value).isprintable():
                raise TypeError(f"{name} is {value!r}")
        return cls(**values)

    def fill_unknown_from(self, other: WeightSettings) -> WeightSettings:
        """Fill in unknown fields from ``other``."""
        known = {name: value for name, value in self._asdict().items() if value is not None}
        return other._replace(**known)

    def list_unknown(self, model: WeightSettings) -> list[str]:
        """List the fields that are known of a model, but not of these weights."""
        fields = zip(self._fields, self, model)
        return [name for name, ours, theirs in fields if ours is None and theirs is not None]

    def differences(self, model: WeightSettings) -> list[str]:
        """Describe the fields in which a model differs, among those known of both."""
        differences = []
        for name, ours, theirs in zip(self._fields, self, model):
            if ours is None or theirs is None or ours == theirs:
                continue
            if name == "dictionary":  # hashes, which would say nothing
                differences.append(_OTHER_SYMBOLS)
            else:
                trained, now = (_PHRASES[name].format(value) for value in (ours, theirs))
                differences.append(f"trained with {trained}, the model has {now}")
        return differences


class Identity(NamedTuple):
    """Positions and settings that the weights of a stack were trained with."""

    positions: Spec
    directions: str  # of an encoder's first layers, as in `lr,rl` (up to the token; from it on)
    trained_length: int  # tokens
    weight_settings: WeightSettings = WeightSettings()

    def to_tensor(self) -> Tensor:
        """Encode the identity as float32, ``(bits,)``: 1 for a bit that is set, else -1.

        Programs that average state dicts or interpolate between them keep the identity if all are
        equal; if not, the mixture shows, because its bits are neither 1 nor -1.
        """
        content: dict[str, Any] = {"positions": self.positions.full()}  # defaults may change later
        content |= {"directions": self.directions, "trained_length": self.trained_length}
        content |= self.weight_settings._asdict()
        text = json.dumps({name: x for name, x in content.items() if x is not None}).encode()
        text += b" " * (-len(text) % _BLOCK)
        bits = np.unpackbits(np.frombuffer(text, dtype=np.uint8), bitorder="little")
        return torch.from_numpy(2 * bits.astype(np.float32) - 1)

    @classmethod
    def from_tensor(cls, state: Any) -> Identity:
        """Decode the tensor of :meth:`to_tensor`.

        Raises:
            UserError: the tensor is something else, or a mixture of different identities.
        """
        try:
            content = json.loads(_decode_text(state))
            positions, directions = parse(content["positions"]), str(content["directions"])
            settings = WeightSettings.parse(content)
            return cls(positions, directions, int(content["trained_length"]), settings)
        except Exception as error:  # of a type that depends on the tensor
            fault = f"the checkpoint's record of its positions cannot be read: {error}"
            raise UserError(fault) from None

    def describe(self) -> str:
        """Describe positions, directions and the maximum length in words."""
        directions = f", attention directions {self.directions}" if self.directions else ""
        return f"trained with {self.positions}{directions}, at most {self.trained_length} tokens"

    def position_differences(self, model: Identity, layers: list[int] | None = None) -> list[str]:
        """Describe how a model's positions and directions differ from those of the weights.

        The length may differ; settings are compared by :meth:`WeightSettings.differences`.

        Args:
            model: the identity of the model.
            layers: indices of the trained layers that the model has; None for all.
        """
        positions, directions = self.positions, self.directions
        if layers is not None:
            positions = positions.select_layers(layers)
            old = dict(enumerate(directions.split(",")))  # {0: ""} if all are `both`
            directions = format_directions([old.get(layer, "both") for layer in layers])
        differences = []
        if str(positions) != str(model.positions):
            differences.append(f"trained with {positions}, the model has {model.positions}")
        if directions != model.directions:
            ours, theirs = directions or "both", model.directions or "both"
            differences.append(f"trained with attention directions {ours}, the model has {theirs}")
        return differences


def _decode_text(state: Tensor) -> str:
    """Decode the bits of an identity."""
    bits = state.detach().cpu().float()
    # Means of a narrow type are rounded to it several times, each time by its eps at most.
    mixed = (bits.abs() - 1).abs() > _ROUNDING + 4 * torch.finfo(state.dtype).eps
    if bool(mixed.any()):
        fault = "the weights are a mixture of models that were trained in different ways"
        raise UserError(f"{fault}; average models of one kind")
    # A bit is set if it is above 0.
    return np.packbits(bits.numpy() > 0, bitorder="little").tobytes().decode("ascii", "replace")


def is_identity(name: str) -> bool:
    """Check whether a state-dict key is a stack's identity."""
    return name.rpartition(".")[2] == STATE_KEY


def parse_directions(text: str, option: str) -> list[str]:
    """Parse the directions of a stack's first layers, such as ``lr,rl``.

    Raises:
        UserError: a direction is unknown; the message names the option.
    """
    written = text.strip().removesuffix(",")  # as old checkpoints may have it
    directions = [part.strip() for part in written.split(",")] if text.strip() else []
    if unknown := [x for x in directions if x not in DIRECTIONS]:
        raise UserError(
            f"{option} {shortened(text)}: unknown direction {shortened(unknown[0])!r}: choose "
            f"{', '.join(DIRECTIONS[:-1])} or {DIRECTIONS[-1]}"
        )
    return directions


def format_directions(directions: Sequence[str]) -> str:
    """Join the directions of a stack's layers, and leave out ``both``, the default, at the end.

    >>> format_directions(["lr", "rl", "both", "both"])
    'lr,rl'
    """
    count = len(directions)
    while count and directions[count - 1] in ("both", ""):
        count -= 1
    return ",".join(directions[:count])
