"""Attention as one differentiable step: starts the kernels, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_posenc.backends.blocked.dropout import Dropout
from fairseq_posenc.backends.triton.forward import forward_kernel
from fairseq_posenc.backends.triton.gradients import Gradients
from fairseq_posenc.backends.triton.problem import Drop, Problem, Saved, Table

SMALLEST = 16  # of the sizes of a matrix product


class Settings(NamedTuple):
    """What a call is given beside the tensors that have gradients; see :class:`Problem`."""

    first: Tensor | None
    padding: Tensor | None
    pairs: Tensor | None
    dropout: Dropout | None
    scale: float
    direction: str
    product: bool


class Attention(torch.autograd.Function):
    """Flash attention with tables by distance; its inputs are the first fields of ``Problem``."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the attended values, and the weights on V's two reset rows if it has them."""
        problem = problem_of(settings, inputs)
        shape = problem.query.shape[:3]
        resets = problem.value_table is not None and problem.first is not None
        attended = torch.empty_like(problem.query, dtype=torch.float32)
        log_sums = attended.new_empty(shape)
        value_sums = attended.new_empty(*shape, 2 if resets else 0)
        options = options_of(problem, settings)
        blocks = shape[0] * shape[1] * triton.cdiv(problem.tgt_len, options["N"])
        with torch.cuda.device_of(attended):
            forward_kernel[(blocks,)](
                problem, attended, log_sums, value_sums if resets else None, **options
            )
        ctx.settings = settings
        ctx.save_for_backward(attended, log_sums, value_sums, *inputs)
        return attended.type_as(problem.query), value_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        attended, log_sums, value_sums, *inputs = ctx.saved_tensors
        problem = problem_of(ctx.settings, inputs)
        dots = (grad * attended).sum(-1) + (grad_sums * value_sums).sum(-1)
        saved = Saved(grad.contiguous(), log_sums, dots * problem.scale, grad_sums.contiguous())
        wanted = ctx.needs_input_grad[4:9]
        with torch.cuda.device_of(attended):
            found = Gradients(problem, ctx.settings.product, wanted)
            found.run(saved, options_of(problem, ctx.settings))
        return None, *found.of(inputs)


def block_size(dtype: torch.dtype) -> int:
    """Return how many queries, and keys, a tile has: what matrix units take at full width."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return SMALLEST
    return 32 if dtype == torch.float32 else 64


def width_of(query: Tensor) -> int:
    """Return D up to a power of 2 that a matrix product can have."""
    return int(max(SMALLEST, triton.next_power_of_2(query.size(-1))))


def _padded(table: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a table of vectors as the kernels take it; see :class:`Table`."""
    rows = query.size(2) + key.size(2) - 1
    block = block_size(query.dtype)
    columns = width_of(query) - table.size(-1)
    return F.pad(table[:, :rows].type_as(query), (0, columns, block, block))


def threshold(rate: float) -> int:
    """Return below which number 32 random bits, read as a signed one, keep a weight."""
    return min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)


def problem_of(settings: Settings, inputs: Sequence[Any]) -> Problem:
    """Return what the kernels are given."""
    contiguous: list[Any] = [None if x is None else x.contiguous() for x in inputs]
    query, key, value, *tables, query_reset, key_reset = contiguous
    vectors = [None if x is None else _padded(x, query, key) for x in tables[:3]]
    if inputs[3] is not None and inputs[3] is inputs[4]:
        vectors[1] = vectors[0]
    scalars = [None if x is None else x.float() for x in tables[3:]]
    values: dict[str, Any] = dict(zip(Problem._fields, (query, key, value)))
    values.update(zip(Problem._fields[3:], map(Table.of, vectors + scalars)))
    return Problem(
        **values,
        query_reset=query_reset,
        key_reset=key_reset,
        first=settings.first,
        padding=settings.padding,
        pairs=settings.pairs,
        drop=_drop(settings.dropout),
        gained=1.0 if settings.dropout is None else settings.dropout.gain,
        scale=settings.scale,
        heads=values["query"].size(1),
        tgt_len=values["query"].size(2),
        src_len=values["key"].size(2),
        width=values["query"].size(3),
    )


def _drop(dropout: Dropout | None) -> Drop | None:
    """Return dropout as the kernels take it."""
    if dropout is None:
        return None
    first, second = dropout.queries
    return Drop(first, second, dropout.keys, threshold(dropout.rate))


def options_of(problem: Problem, settings: Settings) -> dict[str, Any]:
    """Return what the two large kernels are compiled for."""
    width, block = width_of(problem.query), block_size(problem.query.dtype)
    return {
        "DIRECTION": settings.direction,
        "PRODUCT": settings.product,
        "SAME": _same(problem.query_table, problem.key_table),
        "FULL": not (problem.tgt_len % block or problem.src_len % block or problem.width != width),
        "N": block,
        "W": width,
        "num_warps": 4 if width <= 64 else 8,
        "num_stages": 2,
    }


def _same(ours: Table | None, theirs: Table | None) -> bool:
    """Return whether two tables are one, whose rows then need not be loaded twice."""
    if ours is None or theirs is None:
        return False
    return ours.rows.data_ptr() == theirs.rows.data_ptr() and ours.head_stride == theirs.head_stride
