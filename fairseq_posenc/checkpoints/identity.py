"""What a checkpoint says of its weights, which the names and shapes of tensors do not tell.

Rotary weights read as ALiBi's load without a missing tensor, and mean nothing; so do four heads
read as eight. So each stack writes, beside its parameters, what they were trained for.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.checkpoints.meaning import Meaning
from fairseq_posenc.errors import UserError
from fairseq_posenc.registry import Spec, parse

KEY = "_extra_state"  # torch's name for what a module adds to its parameters


class Identity(NamedTuple):
    """What the weights of a stack were trained for.

    Attributes:
        positions: the spec in its canonical form.
        directions: of the first layers, as in ``lr,rl``; all further ones are ``both``.
        trained_length: in tokens.
        meaning: everything but positions.
    """

    positions: str
    directions: str
    trained_length: int
    meaning: Meaning = Meaning()

    @classmethod
    def of(
        cls, positions: str, directions: tuple[str, ...], trained_length: int, meaning: Meaning
    ) -> Identity:
        """Return the identity of a stack whose layers have ``directions``."""
        return cls(positions, ",".join(_named(directions)), trained_length, meaning)

    def encoded(self) -> Tensor:
        """Return it as a tensor of code points, which every tool for checkpoints can carry."""
        content = {**self._asdict(), **self.meaning._asdict()}
        del content["meaning"]
        text = json.dumps({name: x for name, x in content.items() if x is not None})
        # int64: sums of equal numbers, as of averaged checkpoints, must not overflow.
        return torch.tensor([ord(character) for character in text])

    @classmethod
    def decoded(cls, state: Any) -> Identity:
        """Return the identity that :meth:`encoded` wrote.

        Raises:
            UserError: something else is in its place.
        """
        try:
            content = json.loads("".join(chr(int(point)) for point in state.tolist()))
            positions, directions = content["positions"], content["directions"]
            length, meaning = int(content["trained_length"]), Meaning.decoded(content)
            return cls(str(parse(positions)), str(directions), length, meaning)
        except (
            AttributeError,
            TypeError,
            ValueError,
            KeyError,
            OverflowError,
            RecursionError,
        ) as error:
            raise UserError(
                f"what the checkpoint says of its positions cannot be read: {error}"
            ) from None

    def told(self) -> str:
        """Return it in words."""
        directions = f", attention directions {self.directions}" if self.directions else ""
        return f"trained with {self.positions}{directions} at length {self.trained_length}"

    def differences(self, model: Identity, layers: list[int] | None = None) -> list[str]:
        """Return in words how a model's positions differ from what the weights are for.

        Args:
            model: what the model is.
            layers: those that it has of the trained ones; None for all.
        """
        directions = self.directions
        if layers is not None:
            old = directions.split(",")
            kept = tuple(old[i] if i < len(old) else "both" for i in layers)
            directions = ",".join(_named(kept))
        found = []
        if self.positions != model.positions:
            found.append(f"trained with {self.positions}, the model has {model.positions}")
        if directions != model.directions:
            ours, theirs = (x or "both" for x in (directions, model.directions))
            found.append(f"trained with attention directions {ours}, the model has {theirs}")
        return found


def is_identity(name: str) -> bool:
    """Return whether a state-dict key is a stack's identity."""
    return name.rpartition(".")[2] == KEY


def override_positions(weights: dict[str, Any], spec: Spec) -> None:
    """Let weights be read with other positions than they were trained with, on purpose."""
    for name in filter(is_identity, weights):
        identity = Identity.decoded(weights[name])._replace(positions=str(spec))
        weights[name] = identity.encoded()


def _named(directions: tuple[str, ...]) -> tuple[str, ...]:
    """Return directions without those that need not be named."""
    named = len(directions)
    while named and directions[named - 1] in ("both", ""):
        named -= 1
    return directions[:named]
