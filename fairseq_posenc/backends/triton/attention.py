"""Attention as one differentiable step: lays out its tensors, and starts the kernels.

A kernel computes the scores tile by tile, N queries by N keys. Tables have a row for each distance:
a vector that is multiplied with queries, keys or weights, or a number, a gain or a bias.

Shapes: B batch, H heads, T queries, S keys, D head size; G heads of a table (1 or H), R distances;
W power of 2 that D is padded to, N side of a tile.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.blocked.dropout import compute_kept_factor
from fairseq_posenc.backends.triton import sizes
from fairseq_posenc.backends.triton.forward import forward_kernel
from fairseq_posenc.backends.triton.gradients import Gradients
from fairseq_posenc.backends.triton.problem import Dropout, Problem, Saved, Table, TrainedTables


class Settings(NamedTuple):
    """The arguments of a call other than its inputs, the tensors that may have gradients."""

    padding: Tensor | None  # `(B, S)` of uint8, 1 for keys that nobody may see
    pairs: Tensor | None  # `(T, S)` of uint8, 1 where a query must not see a key
    dropout: Dropout | None  # None for no dropout
    scale: float  # factor of the combined dot products
    direction: str  # `both`; `lr`, keys up to the query; `rl`, keys from the query on
    product: bool  # whether terms are multiplied, else added
    exact: bool  # whether to keep attended values in float32, because more is added to them


class Attention(torch.autograd.Function):
    """Flash attention with tables by distance.

    Its inputs are query, key, value; tables of queries, keys and values; gain and bias.
    """

    @staticmethod
    def forward(ctx: Any, settings: Settings, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the fields of a :class:`ForwardResult`."""
        result = run_forward(settings, inputs)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*result, *inputs)
        assert inputs[0] is not None
        attended = result.attended if settings.exact else result.attended.type_as(inputs[0])
        return attended, result.log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor, log_sums_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of all inputs."""
        refuse_second_order("triton")
        attended, log_sums, *inputs = ctx.saved_tensors
        result = ForwardResult(attended, log_sums)
        trained = TrainedTables(*ctx.needs_input_grad[4:9])  # behind settings, query, key, value
        return None, *run_backward(ctx.settings, inputs, result, grad, log_sums_grad, trained)


class ForwardResult(NamedTuple):
    """The result of the forward pass, of float32."""

    attended: Tensor  # values summed by weights, `(B, H, T, D)`
    log_sums: Tensor  # base-2 logarithm of each query's sum of exponentials, `(B, H, T)`


def run_forward(settings: Settings, inputs: Sequence[Tensor | None]) -> ForwardResult:
    """Start the forward kernel, a program for each N queries of a head of a sentence."""
    problem = build_problem(settings, inputs)
    attended = torch.empty_like(problem.query, dtype=torch.float32)  # [B, H, T, D]
    log_sums = attended.new_empty(problem.query.shape[:3])  # [B, H, T]
    options = compile_options(problem, settings)
    programs = log_sums[..., 0].numel() * triton.cdiv(problem.tgt_len, options["N"])
    with torch.cuda.device_of(attended):
        forward_kernel[(programs,)](problem, attended, log_sums, **options)
    return ForwardResult(attended, log_sums)


def run_backward(
    settings: Settings,
    inputs: Sequence[Tensor | None],
    result: ForwardResult,
    grad: Tensor,
    log_sums_grad: Tensor | None,
    trained: TrainedTables,
) -> list[Tensor | None]:
    """Start the backward kernels; return the gradients of the inputs.

    Args:
        settings: of the call.
        inputs: of :class:`Attention`.
        result: of the forward pass.
        grad: gradient of the attended values, ``(B, H, T, D)``.
        log_sums_grad: gradient of the logarithms, ``(B, H, T)``; None if they were not used.
        trained: tables that need a gradient.
    """
    problem = build_problem(settings, inputs)
    # `dots` are subtracted from the gradients of the weights (FlashAttention's delta). Both come
    # from the same rounded gradient, so that they cancel out if a query sees a single key.
    rounded = grad.type_as(problem.query).contiguous()
    dots = (rounded * result.attended).sum(-1)  # [B, H, T]
    if log_sums_grad is not None:  # the logarithms are to base 2
        dots = dots - log_sums_grad / math.log(2)
    saved = Saved(rounded, result.log_sums, dots * problem.scale)
    with torch.cuda.device_of(grad):
        gradients = Gradients(problem, settings.product, trained)
        gradients.run(saved, compile_options(problem, settings))
    return gradients.cast(inputs)


def _pad_table(table: Tensor, query: Tensor) -> Tensor:
    """Pad a table ``(G, R, D)`` with N rows of zeros on both sides, and D to a power of 2."""
    block = sizes.choose_block_size(query.dtype)
    columns = sizes.pad_width(query) - table.size(-1)
    return F.pad(table.type_as(query), (0, columns, block, block))  # [G, N + R + N, W]


def build_problem(settings: Settings, inputs: Sequence[Any]) -> Problem:
    """Build the arguments of the kernels from those of :class:`Attention`."""
    contiguous: list[Any] = [None if x is None else x.contiguous() for x in inputs]
    query, key, value, *tables = contiguous
    vectors = [None if x is None else _pad_table(x, query) for x in tables[:3]]
    if _share_memory(inputs[3], inputs[4]):
        vectors[1] = vectors[0]
    scalars = [None if x is None else x.float() for x in tables[3:]]
    query_table, key_table, value_table, gain, bias = map(Table.from_rows, vectors + scalars)
    return Problem(
        query=query,
        key=key,
        value=value,
        query_table=query_table,
        key_table=key_table,
        value_table=value_table,
        gain=gain,
        bias=bias,
        padding=settings.padding,
        pairs=settings.pairs,
        drop=None if settings.dropout is None else settings.dropout.for_kernels(),
        dropout_scale=1.0
        if settings.dropout is None
        else compute_kept_factor(settings.dropout.rate),
        scale=settings.scale,
        heads=query.size(1),
        tgt_len=query.size(2),
        src_len=key.size(2),
        width=query.size(3),
    )


def compile_options(problem: Problem, settings: Settings) -> dict[str, Any]:
    """Choose the compile-time options of ``forward_kernel`` and ``key_kernel``.

    ``SAME``: queries and keys have one table. See also :func:`sizes.choose_options`.
    """
    return {
        "DIRECTION": settings.direction,
        "PRODUCT": settings.product,
        "SAME": _share_memory(*(x and x.rows for x in (problem.query_table, problem.key_table))),
        **sizes.choose_options(problem),
    }


def _share_memory(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Check whether two tables are one tensor, so that its rows are loaded once."""
    if ours is None or theirs is None:
        return False
    first, second = ((x.data_ptr(), x.shape, x.stride()) for x in (ours, theirs))
    return first == second
