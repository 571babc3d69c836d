"""Attention as one differentiable step: starts the kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairseq_posenc.backends.triton import sizes
from fairseq_posenc.backends.triton.dropout import Dropout
from fairseq_posenc.backends.triton.forward import forward_kernel
from fairseq_posenc.backends.triton.gradients import Gradients
from fairseq_posenc.backends.triton.problem import Drop, Problem, Saved, Table


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
        attended, log_sums, value_sums = run_forward(settings, inputs)
        ctx.settings = settings
        ctx.save_for_backward(attended, log_sums, value_sums, *inputs)
        assert inputs[0] is not None
        return attended.type_as(inputs[0]), value_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        attended, log_sums, value_sums, *inputs = ctx.saved_tensors
        found = Found(attended, log_sums, value_sums)
        wanted = ctx.needs_input_grad[4:9]
        return None, *run_backward(ctx.settings, inputs, found, grad, grad_sums, wanted)


class Found(NamedTuple):
    """What the forward pass finds.

    Attributes:
        attended: values ``(B, H, T, D)`` of float32.
        log_sums: ``(B, H, T)``; see :class:`Saved`.
        value_sums: weights on the value table's reset rows, ``(B, H, T, 2)``, or 0 without them.
    """

    attended: Tensor
    log_sums: Tensor
    value_sums: Tensor


def run_forward(settings: Settings, inputs: Sequence[Tensor | None]) -> Found:
    """Start the forward kernel."""
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
    return Found(attended, log_sums, value_sums)


def run_backward(
    settings: Settings,
    inputs: Sequence[Tensor | None],
    found: Found,
    grad: Tensor,
    grad_sums: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    """Start the backward kernels, and return the gradients of the inputs.

    Args:
        settings: as for the forward pass.
        inputs: as for the forward pass.
        found: by the forward pass.
        grad: of the attended values.
        grad_sums: of ``found.value_sums``.
        wanted: which of query table, key table, value table, gain and bias need a gradient.
    """
    problem = problem_of(settings, inputs)
    dots = (grad * found.attended).sum(-1) + (grad_sums * found.value_sums).sum(-1)
    rows = grad.type_as(problem.query).contiguous()
    saved = Saved(rows, found.log_sums, dots * problem.scale, grad_sums.contiguous())
    with torch.cuda.device_of(grad):
        gradients = Gradients(problem, settings.product, wanted)
        gradients.run(saved, options_of(problem, settings))
    return gradients.of(inputs)


def _padded(table: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a table of vectors as the kernels take it; see :class:`Table`."""
    rows = query.size(2) + key.size(2) - 1
    block = sizes.block_size(query.dtype)
    columns = sizes.width_of(query) - table.size(-1)
    return F.pad(table[:, :rows].type_as(query), (0, columns, block, block))


def threshold(rate: float) -> int:
    """Return below which number 32 random bits, read as a signed one, keep a weight."""
    return min(round((1 - rate) * 2**32) - 2**31, 2**31 - 1)


def problem_of(settings: Settings, inputs: Sequence[Any]) -> Problem:
    """Return what the kernels are given."""
    contiguous: list[Any] = [None if x is None else x.contiguous() for x in inputs]
    query, key, value, *tables, query_reset, key_reset = contiguous
    vectors = [None if x is None else _padded(x, query, key) for x in tables[:3]]
    if _same(inputs[3], inputs[4]):
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
        gained=1.0 if settings.dropout is None else settings.dropout.multiplier,
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
    return {
        "DIRECTION": settings.direction,
        "PRODUCT": settings.product,
        "SAME": _same(*(x and x.rows for x in (problem.query_table, problem.key_table))),
        **sizes.sizes_of(problem),
    }


def _same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Return whether two tables are one, whose rows then need not be loaded twice."""
    if ours is None or theirs is None:
        return False
    return (ours.data_ptr(), ours.shape, ours.stride()) == (
        *(theirs.data_ptr(), theirs.shape, theirs.stride()),
    )
