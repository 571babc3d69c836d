"""Registers the attention as operations of torch's library, which ``torch.compile`` can call.

It cannot trace kernels that take NamedTuples. So compiled code calls these operations, whose inputs
and outputs are plain tensors and numbers; other code calls :class:`Attention`, which is quicker.
"""

from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.triton.attention import (
    ForwardResult,
    Settings,
    run_backward,
    run_forward,
)
from fairseq_posenc.backends.triton.problem import Dropout, TrainedTables

INPUTS = 8  # tensors that may have gradients, the first fields of ``Problem``
MASKS = 4  # padding, pairs, and the seeds of dropout for queries and keys
TENSORS = ", ".join(
    [
        "Tensor query, Tensor key, Tensor value, Tensor? query_table, Tensor? key_table",
        "Tensor? value_table, Tensor? gain, Tensor? bias",
        "Tensor? padding, Tensor? pairs, Tensor? query_seeds, Tensor? key_seeds",
        "float rate, float scale, str direction, bool product",
    ]
)


@torch.library.custom_op(
    "fairseq_posenc::attention", mutates_args=(), schema=f"({TENSORS}) -> (Tensor, Tensor)"
)
def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute a :class:`ForwardResult`."""
    result = run_forward(_unpack_settings(arguments), arguments[:INPUTS])
    return result.attended, result.log_sums


@attention.register_fake
def _allocate_outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    attended = torch.empty_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
    return attended, attended.new_empty(query.shape[:3])


@torch.library.custom_op(
    "fairseq_posenc::attention_backward",
    mutates_args=(),
    schema=f"(Tensor attended, Tensor log_sums, Tensor grad, Tensor? log_sums_grad, bool[] wanted, "
    f"{TENSORS}) -> Tensor[]",
)
def attention_backward(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of the inputs; an empty tensor for those that have none."""
    *result, grad, log_sums_grad, wanted = arguments[:5]
    inputs = arguments[5:][:INPUTS]
    every = run_backward(
        _unpack_settings(arguments[5:]),
        inputs,
        ForwardResult(*result),
        grad,
        log_sums_grad,
        TrainedTables(*wanted),
    )
    return [grad.new_empty(0) if x is None else x for x in every]


@attention_backward.register_fake
def _allocate_gradients(*arguments: Any) -> list[Tensor]:
    inputs = arguments[5:][:INPUTS]
    wanted = [True] * 3 + list(arguments[4])
    return [
        arguments[0].new_empty(0)
        if x is None or not want
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, want in zip(inputs, wanted)
    ]


def _unpack_settings(arguments: tuple[Any, ...]) -> Settings:
    padding, pairs, query_seeds, key_seeds = arguments[INPUTS : INPUTS + MASKS]
    rate, scale, direction, product = arguments[INPUTS + MASKS :]
    dropout = None if query_seeds is None else Dropout(rate, query_seeds, key_seeds)
    return Settings(padding, pairs, dropout, scale, direction, product, exact=True)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[: INPUTS + MASKS])
    ctx.numbers = inputs[INPUTS + MASKS :]


def _run_backward(ctx: Any, grad: Tensor, log_sums_grad: Tensor | None) -> tuple[Any, ...]:
    if not torch.compiler.is_compiling():
        refuse_second_order("triton")
    saved = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[3:8])
    grads = attention_backward(*saved[:2], grad, log_sums_grad, wanted, *saved[2:], *ctx.numbers)
    needed = zip(grads, ctx.needs_input_grad)
    return *(x if need else None for x, need in needed), *[None] * (MASKS + len(ctx.numbers))


attention.register_autograd(_run_backward, setup_context=_save_for_backward)


def attend(settings: Settings, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute ``Attention.apply`` as an operation that ``torch.compile`` can trace."""
    drop = settings.dropout
    seeds = (None, None, 0.0) if drop is None else (drop.query_seeds, drop.key_seeds, drop.rate)
    attended, log_sums = torch.ops.fairseq_posenc.attention(
        *inputs, settings.padding, settings.pairs, *seeds, settings.scale, settings.direction,
        settings.product,
    )  # fmt: skip
    return attended if settings.exact else attended.type_as(inputs[0]), log_sums
