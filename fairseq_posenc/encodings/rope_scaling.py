"""Scalings of rotary positions, for inputs that are longer than in training.

Each kind of scaling is a dataclass whose fields are its settings; :data:`KINDS` lists them by name.
The text ``yarn:4:beta_fast=16`` is written by ``str()``, and read by :meth:`Scaling.parse`, which
refuses numbers that are not above 0. F is the factor; a frequency is a pair's angle per position.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError, shortened, suggest
from fairseq_posenc.option_values import format_value, parse_value

_MAX_FACTOR = 1_000_000  # times as long as in training: no input is longer
_MAX_LENGTH = 1_000_000_000  # tokens; no other setting is a whole number
TRAINED_LENGTH = "original_max_position_embeddings"  # its name in transformers
HFParameters = dict[str, Any]  # `rope_parameters` there: {"rope_type": "yarn", "factor": 4.0}


def _named_in_hf(name: str, default: Any = MISSING) -> Any:
    """Make the field of a setting that has the name ``name`` in transformers."""
    return field(default=default, metadata={"hf": name})


def plain_frequencies(base: float, width: int) -> Tensor:
    """Compute the frequency of each pair without a scaling, ``(width / 2,)``, in float32."""
    # On the CPU, where it is the same on every machine.
    return base ** -(torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)


@dataclass(frozen=True)
class Scaling(ABC):
    """Base class of the kinds of scaling; their first setting is the factor F.

    The trained length L is the setting ``length``, by default that of the model. ``dynamic`` and
    ``longrope`` also depend on n, ``dims.max_positions``. In the library and in fairseq, n is the
    model's number of positions, so that neither padding nor other sentences change a sentence, and
    decoding equals the full pass; for a model of transformers, the batch's largest position plus 1.
    """

    kind: ClassVar[str]
    factor: float

    def __post_init__(self) -> None:
        if not 1 <= self.factor <= _MAX_FACTOR:
            raise UserError(_FORM)  # specs put the option's name before such messages

    @staticmethod
    def parse(text: str) -> "Scaling | None":
        """Parse ``KIND:FACTOR`` followed by settings in any order; None for, say, ``linear:1``.

        >>> Scaling.parse("llama3:8.0:high=3")
        Llama3(factor=8.0, low=1.0, high=3.0, length=None)
        >>> str(Scaling.parse("longrope:4:long=1.50/4:short=1/1"))  # lists are written with slashes
        'longrope:4:short=1/1:long=1.5/4'
        """
        kind, _, rest = text.partition(":")
        factor, *written = rest.split(":")
        if kind not in KINDS:
            raise UserError(f"{suggest(kind, KINDS)}{_FORM}")
        cls = KINDS[kind]
        defaults = {setting.name: setting.default for setting in fields(cls)}
        settings: dict[str, Any] = {}
        for assignment in (f"factor={factor}", *written):
            name, _, value = assignment.partition("=")
            if name not in defaults:
                raise UserError(
                    f"{kind} has no setting {shortened(assignment)!r}: {suggest(name, defaults)}"
                    f"its settings: {', '.join([*defaults][1:]) or 'none'}"  # all but the factor
                )
            if name in settings:
                raise UserError(f"{name} is set twice")
            setting_type = get_type_hints(cls)[name]
            try:
                settings[name] = parse_value(value, setting_type, largest_int=_MAX_LENGTH)
            except UserError as error:
                message = _FORM if name == "factor" else f"{shortened(assignment)}: {error}"
                raise UserError(message) from None
        if missing := [x for x, y in defaults.items() if y is MISSING and x not in settings]:
            lists = ":".join(f"{name}=1/1.5/..." for name in missing)
            raise UserError(f"{kind} needs {lists}, with a number for each frequency")
        scaling = cls(**settings)
        return None if scaling in _CHANGING_NOTHING else scaling

    def write(self, with_defaults: bool) -> str:
        """Write the text of the scaling, with or without settings that have their default."""
        parts = [self.kind, format_value(self.factor)]
        for setting in fields(self)[1:]:
            value = getattr(self, setting.name)
            if value is not None and (with_defaults or value != setting.default):
                parts.append(f"{setting.name}={format_value(value)}")
        return ":".join(parts)

    def __str__(self) -> str:
        return self.write(with_defaults=False)

    @abstractmethod
    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Compute each pair's frequency, ``(width / 2,)``, in float32 on the CPU.

        Raises:
            UserError: this kind, or its settings, cannot scale ``width`` coordinates.
        """

    def gain(self, dims: Dims) -> float:
        """Compute the factor of cosines and sines, and so of rotated queries and keys."""
        return 1.0

    @classmethod
    def hf_names(cls) -> dict[str, str]:
        """Map the names of all settings, including the factor, to those in transformers."""
        return {setting.name: setting.metadata.get("hf", setting.name) for setting in fields(cls)}

    def to_hf(self, dims: Dims) -> HFParameters:
        """Describe it as ``rope_parameters``; ``rope.write_rope`` makes ``ntk`` a base instead."""
        parameters: HFParameters = {"rope_type": self.kind}
        for name, hf_name in self.hf_names().items():
            value = getattr(self, name)
            if name == "length":
                value = value or dims.trained_length
            if value is not None:
                parameters[hf_name] = list(value) if isinstance(value, tuple) else value
        return parameters


@dataclass(frozen=True)
class Linear(Scaling):
    """All frequencies are divided by F (Chen et al., 2023)."""

    kind = "linear"

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Divide all frequencies by F."""
        return plain_frequencies(base, width) / self.factor


@dataclass(frozen=True)
class Ntk(Scaling):
    """The base is multiplied by F^(d/(d-2)), d the width: the slowest pair is slowed by F."""

    kind = "ntk"

    def _slowdown(self, dims: Dims) -> float:
        """Compute the factor that slows the slowest pair."""
        return self.factor

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Compute the plain frequencies of the larger base."""
        return plain_frequencies(self.scaled_base(base, width, dims), width)

    def scaled_base(self, base: float, width: int, dims: Dims) -> float:
        """Compute the base that gives the scaled frequencies."""
        if width == 2:
            raise UserError(
                f"scaling={self.kind}:{self.factor:g} slows all pairs of coordinates but the "
                "first, and here a head has one pair: rotate at least 4 coordinates"
            )
        slowdown = self._slowdown(dims)
        return base if slowdown == 1 else base * slowdown ** (width / (width - 2))


@dataclass(frozen=True)
class Dynamic(Ntk):
    """As ``ntk``, with a factor that grows with the length n: F n/L - (F - 1)."""

    kind = "dynamic"
    length: int | None = _named_in_hf("max_position_embeddings", default=None)

    def _slowdown(self, dims: Dims) -> float:
        length = self.length or dims.trained_length
        if dims.max_positions <= length:
            return 1.0
        return self.factor * dims.max_positions / length - (self.factor - 1)


@dataclass(frozen=True)
class Yarn(Scaling):
    """Slow pairs are divided by F, fast ones kept, with a ramp between (Peng et al., 2023).

    Slow ones turn up to ``beta_slow`` times within the trained length, fast ones at least
    ``beta_fast`` times; with ``truncate`` the ramp starts and ends at whole pairs. The gain is
    ``attention_factor``, or else g(mscale) / g(mscale_all_dim), where g(s) = 0.1 s ln F + 1; it is
    g(1) unless both are set.
    """

    kind = "yarn"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    length: int | None = _named_in_hf(TRAINED_LENGTH, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast < self.beta_slow:
            raise UserError(
                f"beta_fast={self.beta_fast:g} must be at least beta_slow={self.beta_slow:g}"
            )

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Divide the frequencies of slow pairs by F."""
        length = self.length or dims.trained_length

        def find_pair(turns: float) -> float:
            """Find the index, a real number, of the pair that turns ``turns`` times within L."""
            return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = find_pair(self.beta_fast), find_pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # As in transformers, though there are only width / 2 pairs; 0.001 avoids a division by 0.
        low, high = max(low, 0), min(high, width - 1)
        pairs = torch.arange(width // 2, dtype=torch.float32, device="cpu")
        ramp = (pairs - low) / max(high - low, 0.001)
        return _interpolate(plain_frequencies(base, width), self.factor, 1 - ramp.clamp(0, 1))

    def gain(self, dims: Dims) -> float:
        """Compute the gain from F, unless it is set."""
        if self.attention_factor is not None:
            return self.attention_factor
        log = math.log(self.factor)
        if self.mscale is None or self.mscale_all_dim is None:
            return 0.1 * log + 1.0
        return (0.1 * self.mscale * log + 1.0) / (0.1 * self.mscale_all_dim * log + 1.0)


@dataclass(frozen=True)
class Llama3(Scaling):
    """Slow pairs are divided by F, fast ones kept, with a ramp between (Llama 3.1).

    Slow ones turn up to ``low`` times within the trained length, fast ones at least ``high`` times.
    """

    kind = "llama3"
    low: float = _named_in_hf("low_freq_factor", default=1.0)
    high: float = _named_in_hf("high_freq_factor", default=4.0)
    length: int | None = _named_in_hf(TRAINED_LENGTH, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise UserError(f"low={self.low:g} must be below high={self.high:g}")

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Divide the frequencies of slow pairs by F."""
        frequencies = plain_frequencies(base, width)
        turns = frequencies * (self.length or dims.trained_length) / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return _interpolate(frequencies, self.factor, kept)


@dataclass(frozen=True)
class LongRope(Scaling):
    """Each pair's frequency is divided by a number of its own (Ding et al., 2024).

    The numbers are ``long`` if the length n is above the trained length L, else ``short``.
    The gain is ``attention_factor``, or else sqrt(1 + ln F / ln L).
    """

    kind = "longrope"
    short: tuple[float, ...] = _named_in_hf("short_factor")
    long: tuple[float, ...] = _named_in_hf("long_factor")
    attention_factor: float | None = None
    length: int | None = _named_in_hf(TRAINED_LENGTH, default=None)

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Divide each pair's frequency by its number."""
        for setting, numbers in (("short", self.short), ("long", self.long)):
            if len(numbers) != width // 2:
                raise UserError(
                    f"scaling=longrope: {setting} has {len(numbers)} numbers, and there are "
                    f"{width // 2} frequencies"
                )
        longer = dims.max_positions > (self.length or dims.trained_length)
        numbers = self.long if longer else self.short
        divisors = torch.tensor(numbers, dtype=torch.float32, device="cpu")
        return plain_frequencies(base, width) / divisors

    def gain(self, dims: Dims) -> float:
        """Compute the gain from F and the trained length, unless it is set."""
        if self.attention_factor is not None:
            return self.attention_factor
        length = self.length or dims.trained_length
        if length == 1:
            raise UserError(
                "rope(scaling=longrope): a trained length of 1 gives no factor; set length or "
                "attention_factor"
            )
        return math.sqrt(1 + math.log(self.factor) / math.log(length))


@dataclass(frozen=True)
class Proportional(Scaling):
    """The first pairs, a fraction ``part``, turn; others have angle 0 (Barbero et al., 2024)."""

    kind = "proportional"
    part: float = _named_in_hf("partial_rotary_factor", default=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part > 1:
            raise UserError("part must be at most 1")

    def frequencies(self, base: float, width: int, dims: Dims) -> Tensor:
        """Divide all frequencies by F, and set further pairs' frequencies to 0."""
        scaled = plain_frequencies(base, width) / self.factor
        scaled[int(self.part * scaled.numel()) :] = 0
        return scaled


KINDS: dict[str, type[Scaling]] = {
    cls.kind: cls for cls in (Linear, Ntk, Dynamic, Yarn, Llama3, LongRope, Proportional)
}
_FORM = (
    f"write none or KIND:F, with a factor F of at least 1, at most {_MAX_FACTOR:,}, and one of "
    f"these kinds: {', '.join(KINDS)}"
)
# With F = 1; `dynamic` and `longrope` change frequencies even then.
_CHANGING_NOTHING = (Linear(1.0), Ntk(1.0), Yarn(1.0), Llama3(1.0), Proportional(1.0))


def _interpolate(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Mix a share ``kept`` of the frequencies with the rest of them divided by a factor."""
    return frequencies * kept + frequencies / factor * (1 - kept)
