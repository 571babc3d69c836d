"""Rotations of queries and keys by their positions, as data: computed once for all layers.

``Encoding.rotation`` makes them, and attention calls them before it computes scores.
B batch, H heads, T tokens, D head size, W coordinates that are rotated.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.precision import at_least_fp32

# How a model of transformers lays out the cosines of a head's pairs: `half`, each once; `pairs`,
# each twice in a row; `doubled` and `doubled_pairs`, all of them, then all again. The model pairs
# coordinate t with t + W/2 in `half` and `doubled`, neighbors in `pairs` and `doubled_pairs`.
CosineForm = Literal["half", "pairs", "doubled", "doubled_pairs"]


class Rotation(Protocol):
    """A map of queries and keys before their dot product, with an entry for each of T tokens."""

    def rotate_queries(self, query: Tensor) -> Tensor:
        """Map queries ``(B, H, T, D)``; computed in float32, returned in their own precision."""

    def rotate_keys(self, key: Tensor) -> Tensor:
        """Map keys ``(B, H, T, D)``; see :meth:`rotate_queries`."""


class PairRotation(NamedTuple):
    """A rotation of pairs of coordinates.

    >>> quarter_turn = PairRotation(torch.full((1, 1, 1, 1), 1j))  # of one pair, at one position
    >>> quarter_turn.rotate_queries(torch.tensor([[[[3.0, 4.0, 5.0]]]]))  # the third stays
    tensor([[[[-4.,  3.,  5.]]]])

    Attributes:
        phases: complex factors of the pairs of coordinates, ``(B or 1, 1, T, pairs)``; their
            absolute value is 1, or the gain of a scaling. Further coordinates are left unchanged.
        half: coordinate t is paired with t + pairs; otherwise, 2t with 2t + 1.
        decay: factors of xPos, ``(B or 1, 1, T, D)``: a query's coordinates are multiplied by
            them, a key's divided. None for 1.
        decay_bits: the binary logarithm of the largest of these factors, so that queries of a type
            that cannot hold it are refused; 0 if it is not known.
    """

    phases: Tensor
    half: bool = False
    decay: Tensor | None = None
    decay_bits: float = 0.0

    def rotate_queries(self, query: Tensor) -> Tensor:
        """Rotate the pairs of queries, and multiply by the decay.

        Raises:
            UserError: the type of the queries cannot hold the decay.
        """
        # fp16 reaches 2^16, others and the decay (float32) 2^128; the queries also need some bits.
        is_fp16 = query.dtype == torch.float16
        max_bits = 12 if is_fp16 else 110
        if self.decay_bits > max_bits:
            name = str(query.dtype).removeprefix("torch.")
            raise UserError(
                f"xpos: at these positions factors reach 2^{self.decay_bits:.0f}, and {name} holds "
                f"2^{max_bits} besides the numbers that they scale: read shorter inputs, or set a "
                f"larger scale_base{' or use bfloat16' if is_fp16 else ''}"
            )
        rotated = self._rotate(query)
        return rotated if self.decay is None else _clamp_as(rotated * self.decay, query)

    def rotate_keys(self, key: Tensor) -> Tensor:
        """Rotate the pairs of keys, and divide by the decay."""
        rotated = self._rotate(key)
        return rotated if self.decay is None else _clamp_as(rotated / self.decay, key)

    def has_cosines(self, form: CosineForm, num_cosines: int) -> bool:
        """Check whether :meth:`cosines` of a form and number express it; never with a decay."""
        rotates_halves = form in ("half", "doubled")
        pairs = num_cosines if form == "half" else num_cosines // 2  # other forms have each twice
        return self.decay is None and self.half == rotates_halves and self.phases.size(-1) == pairs

    def cosines(self, form: CosineForm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines in a model's form, each ``(B or 1, T, num_cosines)``."""
        # The parts are taken first, as ONNX cannot select from complex numbers.
        parts = [part[:, 0].to(dtype) for part in (self.phases.real, self.phases.imag)]
        if form in ("doubled", "doubled_pairs"):
            parts = [torch.cat([part, part], -1) for part in parts]
        elif form == "pairs":
            parts = [part.repeat_interleave(2, -1) for part in parts]
        return parts[0], parts[1]

    def select_sentences(self, batch: int) -> "PairRotation":
        """Keep a row for each of ``batch`` sentences, whose beams have equal, adjacent rows."""
        if self.phases.size(0) in (1, batch):
            return self
        return self._replace(
            phases=self.phases.unflatten(0, (batch, -1))[:, 0],
            decay=None if self.decay is None else self.decay.unflatten(0, (batch, -1))[:, 0],
        )

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate the first W of the coordinates of ``(B, H, T, D)``."""
        width = 2 * self.phases.size(-1)  # W
        exact = at_least_fp32(x[..., :width])
        if torch.compiler.is_compiling():  # a compiler, or ONNX, may lack complex products
            cos, sin = torch.view_as_real(self.phases).unbind(-1)  # each [B or 1, 1, T, W/2]
            dim = -2 if self.half else -1  # the dimension of a pair's two coordinates
            first, second = exact.unflatten(-1, (2, -1) if self.half else (-1, 2)).unbind(dim)
            turned = (first * cos - second * sin, first * sin + second * cos)
            rotated = torch.stack(turned, dim).flatten(-2)  # [B, H, T, W]
        # Complex products are faster on CPUs, several times so for neighboring pairs.
        elif self.half:
            first, second = exact.chunk(2, dim=-1)
            pairs = torch.complex(first, second) * self.phases  # [B, H, T, W/2]
            rotated = torch.cat([pairs.real, pairs.imag], dim=-1)  # [B, H, T, W]
        else:
            pairs = torch.view_as_complex(_split_pairs(exact)) * self.phases  # [B, H, T, W/2]
            rotated = torch.view_as_real(pairs).flatten(-2)  # [B, H, T, W]
        rotated = rotated.to(x.dtype)
        return rotated if width == x.size(-1) else torch.cat([rotated, x[..., width:]], dim=-1)


def _split_pairs(x: Tensor) -> Tensor:
    """Split the last dimension into pairs, ``(..., W/2, 2)``, as ``view_as_complex`` needs them."""
    *others, last = x.stride()  # a complex number starts at an even place, with no gap inside
    if last != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in others):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.unflatten(-1, (-1, 2))


def _clamp_as(x: Tensor, like: Tensor) -> Tensor:
    """Cast ``x`` to the type of ``like``; numbers beyond its range become its largest number."""
    limit = torch.finfo(like.dtype).max
    return x.clamp(-limit, limit).type_as(like)
