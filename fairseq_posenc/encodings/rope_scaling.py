"""Scalings of rotary positions, for inputs longer than those of the training."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError, shortened

_MAX_FACTOR = 1_000_000  # no input is so many times as long as those of the training
_LENGTH_RANGE = (1, 1_000_000_000)
# The settings of each kind beside its factor, with their defaults; () is a list that must be given.
# The kinds' sources are in the docstring of `Rope`.
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "ntk": {},
    "dynamic": {"length": None},
    "yarn": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
        "truncate": True,
        "length": None,
    },
    "llama3": {"low": 1.0, "high": 4.0, "length": None},
    "longrope": {"short": (), "long": (), "attention_factor": None, "length": None},
    "proportional": {"part": 1.0},  # share of the pairs that turn; the others have angle 0
}
# Kinds that change nothing at factor 1.
_PLAIN_AT_ONE = ("linear", "ntk", "yarn", "llama3")


class Scaling(str):
    """``none``, or ``KIND:FACTOR``, with settings behind: ``yarn:4:beta_fast=16:truncate=false``.

    Numbers of a list are separated by slashes: ``longrope:4:short=1/1:long=1.5/4``.

    Raises:
        UserError: it is neither, or a setting is unknown or out of its range.
    """

    def __new__(cls, text: str = "none") -> Scaling:
        """Normalise the text: ``yarn:4`` for ``yarn:4.0``, ``none`` for ``yarn:1``."""
        if text == "none":
            return super().__new__(cls, text)
        kind, _, rest = text.partition(":")
        number, *written = rest.split(":")
        factor = _parse_number(number)
        if kind not in SETTINGS or factor is None or not 1 <= factor <= _MAX_FACTOR:
            raise UserError(
                f"rope(scaling={shortened(text)}): write none or KIND:F, with a factor F of at "
                f"least 1, at most {_MAX_FACTOR:,}, and one of these kinds: {', '.join(SETTINGS)}"
            )
        settings = dict(_parse_setting(kind, each, text) for each in written)
        known = SETTINGS[kind]
        for name, default in known.items():
            if default == () and name not in settings:
                raise UserError(f"rope(scaling={shortened(text)}): {kind} needs {name}")
        parts = [f"{kind}:{factor:.15g}"]
        parts += [
            f"{name}={_format_value(settings[name])}"
            for name, default in known.items()
            if settings.get(name, default) != default
        ]
        plain = factor == 1 and kind in _PLAIN_AT_ONE and len(parts) == 1
        return super().__new__(cls, "none" if plain else ":".join(parts))

    def read(self) -> ScalingSettings:
        """Split the text into kind, factor and settings, defaults included."""
        kind, _, rest = self.partition(":")
        if kind == "none":
            return ScalingSettings(kind, 1.0, {})
        number, *written = rest.split(":")
        given = dict(_parse_setting(kind, each, self) for each in written)
        return ScalingSettings(kind, float(number), {**SETTINGS[kind], **given})


class ScalingSettings(NamedTuple):
    """A scaling that was read.

    The trained length L is that of the setting ``length``, or else the model's. What depends on the
    length n of the input (``dynamic``, ``longrope``) takes the positions that the model has room
    for, so that neither neighbours nor padding change a sentence, and decoding equals the full
    pass.

    Attributes:
        kind: ``none`` or one of :data:`SETTINGS`.
        factor: F.
        settings: by name.
    """

    kind: str
    factor: float
    settings: dict[str, Any]

    def check(self, name: str, rotated: int) -> None:
        """Refuse widths that the kind cannot scale.

        Args:
            name: of the encoding.
            rotated: coordinates of a head that are rotated.
        """
        if self.kind in ("ntk", "dynamic") and rotated == 2:
            raise UserError(
                f"{name}(scaling={self.kind}:{self.factor:g}) slows all pairs of coordinates but "
                "the first, and here a head has one: rotate at least 4 coordinates"
            )
        if self.kind == "llama3" and self.settings["low"] >= self.settings["high"]:
            raise UserError(
                f"{name}(scaling=llama3): low={self.settings['low']:g} must be below "
                f"high={self.settings['high']:g}"
            )
        if self.kind == "yarn" and self.settings["beta_fast"] < self.settings["beta_slow"]:
            raise UserError(
                f"{name}(scaling=yarn): beta_fast={self.settings['beta_fast']:g} must be at least "
                f"beta_slow={self.settings['beta_slow']:g}"
            )
        for each in ("short", "long"):
            if self.kind == "longrope" and len(self.settings[each]) != rotated // 2:
                raise UserError(
                    f"{name}(scaling=longrope): {each} has {len(self.settings[each])} numbers, and "
                    f"{rotated // 2} pairs of coordinates are rotated"
                )

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Compute the angle per position of each pair, ``(width / 2,)``, in float32 on the CPU."""
        with torch.device("cpu"):  # where it is the same on every machine
            return self._compute_frequencies(base, width, dims)

    def _compute_frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width  # [width/2]
        base = self.scaled_base(base, width, dims)
        frequencies = base**-exponents
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind in ("yarn", "llama3"):
            if self.kind == "yarn":
                kept_share = self._compute_yarn_ramp(base, width, dims)
            else:
                kept_share = self._compute_llama3_ramp(frequencies, dims)
            return frequencies * kept_share + frequencies / self.factor * (1 - kept_share)
        if self.kind == "longrope":
            return frequencies / torch.tensor(self.divisors(dims), dtype=torch.float32)
        if self.kind == "proportional":
            turning = int(self.settings["part"] * width // 2)
            return (frequencies / self.factor) * (torch.arange(width // 2) < turning)
        return frequencies

    def scaled_base(self, base: float, width: int, dims: Dims) -> float:
        """Compute the base of the frequencies, which ``ntk`` and ``dynamic`` raise."""
        growth = 1.0
        if self.kind == "ntk":
            growth = self.factor
        elif self.kind == "dynamic" and self._is_longer(dims):
            length = self._trained_length(dims)
            growth = self.factor * dims.max_positions / length - (self.factor - 1)
        return base if growth == 1 else base * growth ** (width / (width - 2))

    def divisors(self, dims: Dims) -> tuple[float, ...]:
        """Select the list of ``longrope`` for the model's number of positions."""
        return tuple(self.settings["long" if self._is_longer(dims) else "short"])

    def gain(self, dims: Dims) -> float:
        """Compute what cosines and sines are multiplied by."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if (given := self.settings["attention_factor"]) is not None:
            return float(given)
        if self.kind == "longrope":
            if self._trained_length(dims) == 1:
                raise UserError(
                    "rope(scaling=longrope): a trained length of 1 gives no factor; set length or "
                    "attention_factor"
                )
            growth = math.log(self.factor) / math.log(self._trained_length(dims))
            return math.sqrt(1 + growth)
        scales = self.settings["mscale"], self.settings["mscale_all_dim"]
        if None in scales:
            scales = (1.0, 0.0)
        dividend, divisor = (0.1 * scale * math.log(self.factor) + 1.0 for scale in scales)
        return dividend / divisor

    def _is_longer(self, dims: Dims) -> bool:
        return dims.max_positions > self._trained_length(dims)

    def _trained_length(self, dims: Dims) -> int:
        length: int | None = self.settings.get("length")
        return length or dims.trained_length

    def _compute_yarn_ramp(self, base: float, width: int, dims: Dims) -> Tensor:
        """Ramp from 1 for pairs that turn often within the trained length to 0 for slow ones."""

        def find_pair(turns: float) -> float:
            length = self._trained_length(dims) / (turns * 2 * math.pi)
            return width * math.log(length) / (2 * math.log(base))

        low, high = (find_pair(self.settings[name]) for name in ("beta_fast", "beta_slow"))
        if self.settings["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        pairs = torch.arange(width // 2, dtype=torch.float32)
        ramp = (pairs - low) / max(high - low, 0.001)
        return 1 - ramp.clamp(0, 1)

    def _compute_llama3_ramp(self, frequencies: Tensor, dims: Dims) -> Tensor:
        """Ramp from 1 for pairs that turn ``high`` times in the trained length to 0 for ``low``."""
        turns = frequencies * self._trained_length(dims) / (2 * math.pi)
        low, high = self.settings["low"], self.settings["high"]
        return ((turns - low) / (high - low)).clamp(0, 1)


def _parse_setting(kind: str, written: str, text: str) -> tuple[str, Any]:
    """Parse a ``name=value`` of the scaling ``text``: its name and its value."""
    name, _, value = written.partition("=")
    known = SETTINGS[kind]
    where = f"rope(scaling={shortened(text)})"
    if name not in known:
        raise UserError(
            f"{where}: {kind} has no setting {shortened(written)!r}; its settings: "
            f"{', '.join(known) or 'none'}"
        )
    if name == "truncate":
        if value not in ("true", "false"):
            raise UserError(f"{where}: truncate is true or false")
        return name, value == "true"
    numbers = [_parse_number(each) for each in value.split("/")]
    if None in numbers or (known[name] != () and len(numbers) > 1):
        raise UserError(f"{where}: {shortened(written)!r} is not a number above 0")
    if known[name] == ():
        return name, tuple(numbers)
    (number,) = numbers
    assert number is not None
    if name == "length":
        least, most = _LENGTH_RANGE
        if not number.is_integer() or not least <= number <= most:
            raise UserError(f"{where}: length must be a whole number, at least {least}")
        return name, int(number)
    if name == "part" and number > 1:
        raise UserError(f"{where}: part must be at most 1")
    return name, number


def _parse_number(text: str) -> float | None:
    """Read a finite number above 0, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _format_value(value: Any) -> str:
    """Format a flag, a number, or a list of numbers as it is written in a scaling."""
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(f"{x:.15g}" for x in (value if isinstance(value, tuple) else (value,)))
