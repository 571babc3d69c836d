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
from fairseq_posenc.backends.blocked.dropout import compute_keep_threshold, compute_kept_factor
from fairseq_posenc.backends.triton import sizes
from fairseq_posenc.backends.triton.forward import forward_kernel
from fairseq_posenc.backends.triton.gradients import Gradients
from fairseq_posenc.backends.triton.problem import Dropout, Problem, Saved, Table, TrainedTables


class Settings(NamedTuple):
    """The arguments of a call other than its inputs, the tensors that may have gradients."""

    padding: Tensor | None  # `(B, S)` of uint8, 1 for keys that no query may see
    pairs: Tensor | None  # `(T, S)` of uint8, 1 where a query must not see a key
    dropout: Dropout | None  # None for no dropout
    scale: float  # factor of the combined dot products
    direction: str  # `both`; `lr`, keys up to the query; `rl`, keys from the query on
    product: bool  # whether the parts of a score are multiplied, else added
    exact: bool  # whether attended values stay in float32, because more is added to them


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
        trained = TrainedTables(*ctx.needs_input_grad[4:])  # after settings, query, key, value
        return None, *run_backward(ctx.settings, inputs, result, grad, log_sums_grad, trained)


class ForwardResult(NamedTuple):
    """The result of the forward pass, of float32."""

    attended: Tensor  # values summed by weights, `(B, H, T, D)`
    log_sums: Tensor  # base-2 logarithm of each query's sum of exponentials, `(B, H, T)`


def run_forward(settings: Settings, inputs: Sequence[Tensor | None]) -> ForwardResult:
    """Start the forward kernel, with a program for each N queries of a head of a sentence."""
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
    # FlashAttention's delta is subtracted from the gradients of the weights. Both come from the
    # same rounded gradient, so that they cancel out if a query sees a single key.
    rounded = grad.type_as(problem.query).contiguous()
    delta = (rounded * result.attended).sum(-1)  # [B, H, T]
    if log_sums_grad is not None:  # the logarithms are to base 2
        delta = delta - log_sums_grad / math.log(2)
    saved = Saved(rounded, result.log_sums, delta * problem.scale)
    with torch.cuda.device_of(grad):
        gradients = Gradients(problem, settings.product, trained)
        gradients.run(saved, compile_options(problem, settings))
    return gradients.cast(inputs)


def _pad_table(table: Tensor | None, query: Tensor) -> Table | None:
    """Pad a table ``(G, R, D)`` with N rows of zeros on both sides, and D to a power of 2."""
    if table is None:
        return None
    block = sizes.choose_block_size(query.dtype)
    columns = sizes.pad_width(query) - table.size(-1)
    return Table.from_rows(F.pad(table.type_as(query), (0, columns, block, block)))


def build_problem(settings: Settings, inputs: Sequence[Any]) -> Problem:
    """Build the arguments of the kernels from those of :class:`Attention`."""
    _, _, _, query_table, key_table, *_ = inputs
    is_shared = _share_memory(query_table, key_table)  # before they may be copied
    contiguous: list[Any] = [None if x is None else x.contiguous() for x in inputs]
    query, key, value, query_table, key_table, value_table, gain, bias = contiguous
    padded_query_table = _pad_table(query_table, query)
    rate = 0.0 if settings.dropout is None else settings.dropout.rate
    return Problem(
        query=query,
        key=key,
        value=value,
        query_table=padded_query_table,
        key_table=padded_query_table if is_shared else _pad_table(key_table, query),
        value_table=_pad_table(value_table, query),
        gain=None if gain is None else Table.from_rows(gain.float()),
        bias=None if bias is None else Table.from_rows(bias.float()),
        padding=settings.padding,
        pairs=settings.pairs,
        dropout=settings.dropout,
        keep_threshold=compute_keep_threshold(rate),
        dropout_scale=compute_kept_factor(rate),
        scale=settings.scale,
        heads=query.size(1),
        tgt_len=query.size(2),
        src_len=key.size(2),
        width=query.size(3),
    )


def compile_options(problem: Problem, settings: Settings) -> dict[str, Any]:
    """Choose the compile-time options of ``forward_kernel`` and ``backward_kernel``.

    ``SHARED_TABLE``: queries and keys have one table. See also :func:`sizes.choose_options`.
    """
    return {
        "DIRECTION": settings.direction,
        "PRODUCT": settings.product,
        "SHARED_TABLE": problem.query_table is not None
        and problem.query_table is problem.key_table,
        **sizes.choose_options(problem),
    }


def _share_memory(first: Tensor | None, second: Tensor | None) -> bool:
    """Check whether two tables are the same numbers, so that their rows are loaded once.

    After autograd has saved it, one table comes back as two tensors.
    """
    if first is None or second is None:
        return False
    same_layout = first.shape == second.shape and first.stride() == second.stride()
    return same_layout and first.data_ptr() == second.data_ptr()
