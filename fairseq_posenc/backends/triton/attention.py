"""Attention as one differentiable step: starts the kernels, forward and backward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from fairseq_posenc.backends.triton.backward import key_kernel, query_kernel
from fairseq_posenc.backends.triton.folding import Layout
from fairseq_posenc.backends.triton.forward import forward_kernel
from fairseq_posenc.backends.triton.problem import Problem, Saved, Table
from fairseq_posenc.backends.triton.tables import tables_kernel

SMALLEST = 16  # of the sizes of a matrix product


class Settings(NamedTuple):
    """What a call is given beside the tensors that have gradients; see :class:`Problem`."""

    first: Tensor | None
    padding: Tensor | None
    pairs: Tensor | None
    seed: int | None
    dropout: float
    scale: float
    direction: str
    product: bool


class Attention(torch.autograd.Function):
    """Flash attention with tables by distance; its inputs are the first fields of ``Problem``."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the attended values, and the weights on V's two reset rows if it has them."""
        inputs = tuple(None if x is None else x.contiguous() for x in inputs)
        problem = _problem(settings, inputs)
        shape = problem.query.shape[:3]
        resets = problem.value_table is not None and problem.first is not None
        attended = torch.empty_like(problem.query, dtype=torch.float32)
        log_sums = attended.new_empty(shape)
        value_sums = attended.new_empty(*shape, 2 if resets else 0)
        with torch.cuda.device_of(attended):
            forward_kernel[_grid(problem, problem.tgt_len)](
                problem,
                attended,
                log_sums,
                value_sums if resets else None,
                **_options(problem, settings),
            )
        ctx.settings = settings
        ctx.save_for_backward(attended, log_sums, value_sums, *inputs)
        return attended.type_as(problem.query), value_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all inputs."""
        attended, log_sums, value_sums, *inputs = ctx.saved_tensors
        problem = _problem(ctx.settings, inputs)
        dots = (grad * attended).sum(-1) + (grad_sums * value_sums).sum(-1)
        saved = Saved(grad.contiguous(), log_sums, dots, grad_sums.contiguous())
        options = _options(problem, ctx.settings)
        with torch.cuda.device_of(attended):
            query, query_reset = _query_gradients(problem, saved, options)
            key, value, key_reset = _key_gradients(problem, saved, options)
            by_head = _table_gradients(problem, saved, options, ctx.needs_input_grad[4:9])
        tables = (
            None if x is None else x.sum_to_size(table.shape).type_as(table)
            for x, table in zip(by_head, inputs[3:8])
        )
        return None, query, key, value, *tables, query_reset, key_reset


def block_size(problem: Problem) -> int:
    """Return how many queries, and keys, a tile has; by the registers that its kernels need."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return SMALLEST
    tables = (problem.query_table, problem.key_table, problem.value_table)
    size = 64 if all(table is None for table in tables) else 32
    if problem.query.dtype == torch.float32:
        size = size // 2 if problem.width <= 64 else SMALLEST
    return size


def _problem(settings: Settings, inputs: Sequence[Any]) -> Problem:
    query, key, value, *tables, query_reset, key_reset = inputs
    query_table, key_table, value_table, gain, bias = (Table.of(x) for x in tables)
    return Problem(
        query=query,
        key=key,
        value=value,
        query_table=query_table,
        key_table=key_table,
        value_table=value_table,
        gain=gain,
        bias=bias,
        query_reset=query_reset,
        key_reset=key_reset,
        first=settings.first,
        padding=settings.padding,
        pairs=settings.pairs,
        seed=settings.seed,
        dropout=settings.dropout,
        scale=settings.scale,
        heads=query.size(1),
        tgt_len=query.size(2),
        src_len=key.size(2),
        width=query.size(3),
    )


def _options(problem: Problem, settings: Settings) -> dict[str, Any]:
    width = max(SMALLEST, triton.next_power_of_2(problem.width))
    return {
        "DIRECTION": settings.direction,
        "PRODUCT": settings.product,
        "N": block_size(problem),
        "W": width,
        "num_warps": 4 if width <= 64 else 8,
        "num_stages": 2,
    }


def _grid(problem: Problem, length: int) -> tuple[int]:
    """One program for each block of queries or keys; in one dimension, the only long one."""
    blocks = triton.cdiv(length, block_size(problem))
    return (problem.query.size(0) * problem.heads * blocks,)


def _query_gradients(
    problem: Problem, saved: Saved, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    query = torch.empty_like(problem.query)
    reset = None if problem.query_reset is None else torch.empty_like(problem.query_reset)
    query_kernel[_grid(problem, problem.tgt_len)](problem, saved, query, reset, **options)
    return query, reset


def _key_gradients(
    problem: Problem, saved: Saved, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    key, value = torch.empty_like(problem.key), torch.empty_like(problem.value)
    reset = None if problem.key_reset is None else torch.empty_like(problem.key_reset)
    key_kernel[_grid(problem, problem.src_len)](problem, saved, key, value, reset, **options)
    return key, value, reset


def _table_gradients(
    problem: Problem, saved: Saved, options: dict[str, Any], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Return the gradients of the five tables by head; None for one that nobody wants."""
    if not any(wanted):
        return [None] * len(wanted)
    layout = Layout.of(problem, options["N"])
    bands = layout.empty_bands(problem, wanted)
    tables_kernel[(layout.programs,)](
        problem,
        saved,
        bands,
        problem.query.size(0),
        layout.chunks,
        layout.diagonals,
        **options,
    )
    return layout.fold(bands)
