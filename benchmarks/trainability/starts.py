"""Starting values of M4M's table.

A start is a function of a layer's attention, its table and a generator, and returns the new table.
A *row* is the vector ``a`` of a distance, of the head's width d.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_posenc.transformer.attention import PositionalAttention


def _sigma(attention: PositionalAttention) -> float:
    """Compute the standard deviation of a query's and a key's numbers, for inputs of variance 1."""
    q_std = attention.q_proj.weight.std().item()
    k_std = attention.k_proj.weight.std().item()
    return math.sqrt(q_std * k_std * attention.embed_dim)


def _normal(std: Callable[[PositionalAttention], float]) -> Any:
    def draw(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(table.shape, generator=generator) * std(attention)

    return draw


def _unit_std(attention: PositionalAttention) -> float:
    """Compute the deviation at which q.a and k.a have variance 1: scores spread as without M4M."""
    return 1.0 / (_sigma(attention) * math.sqrt(attention.head_dim))


def _scaled_std(attention: PositionalAttention) -> float:
    """Compute 5 / sqrt(C d): with BERT's weights (std 0.02), q.a and k.a have deviation 0.1."""
    return 5.0 / math.sqrt(attention.embed_dim * attention.head_dim)


def _constant(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
    """Start all distances with the same row, of a length at which q.a and k.a have variance 1."""
    row = torch.randn(table.size(-1), generator=generator)
    return (row / row.norm() / _sigma(attention)).expand_as(table).clone()


def _sinusoid(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
    """Start with sinusoids of the distance: near distances alike; variances as ``unit``."""
    reach, width = table.size(1) // 2, table.size(2) // 2
    frequencies = 10000.0 ** -(torch.arange(width) / width)
    angles = torch.arange(-reach, table.size(1) - reach)[:, None] * frequencies
    waves = torch.cat((angles.sin(), angles.cos()), dim=1) * math.sqrt(2)
    return (waves * _unit_std(attention)).expand_as(table).clone()


def _biased(attention: PositionalAttention, table: Tensor, generator: torch.Generator) -> Tensor:
    """Keep plain attention's scores, nearly: biases of q and k make q.a and k.a about 1.

    With both biases b = 4 sigma u (u of length 1) and every row a = u / (4 sigma), q.a and k.a are
    1, give or take a quarter.
    """
    direction = torch.randn(table.size(-1), generator=generator)
    direction = direction / direction.norm()
    size = 4 * _sigma(attention)
    for proj in (attention.q_proj, attention.k_proj):
        proj.bias.data.copy_((size * direction).repeat(attention.num_heads))
    return (direction / size).expand_as(table).clone()


STARTS: dict[str, tuple[str, Any]] = {
    "plain": ("normal, std 0.02", None),  # the package's own draw
    "std-0.05": ("normal, std 0.05", _normal(lambda attention: 0.05)),
    "scaled": ("normal, std 5/sqrt(C d), C the model's width", _normal(_scaled_std)),
    "std-0.1": ("normal, std 0.1", _normal(lambda attention: 0.1)),
    "d^-0.5": ("normal, std 1/sqrt(d)", _normal(lambda attention: attention.head_dim**-0.5)),
    "unit": ("normal, at the std that gives q.a and k.a variance 1", _normal(_unit_std)),
    "constant": ("one vector for all distances, q.a and k.a of variance 1", _constant),
    "sinusoid": ("sinusoids of the distance, q.a and k.a of variance 1", _sinusoid),
    "biased": ("one vector for all distances, and biases of q and k: q.a and k.a near 1", _biased),
}


def apply_start(model: nn.Module, start: str, seed: int) -> None:
    """Redraw the tables of ``m4m``; all other weights stay as they are."""
    _, draw = STARTS[start]
    if draw is None:
        return
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, PositionalAttention) and "m4m" in module.encodings:
            table: Any = module.encodings["m4m"].table
            table.weight.data.copy_(draw(module, table.weight.data, generator))
