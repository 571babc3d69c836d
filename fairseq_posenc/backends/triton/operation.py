"""Registers the attention as operations of torch's library, which ``torch.compile`` can call.

The compiler cannot trace kernels that take NamedTuples. So compiled code calls these operations,
whose inputs and outputs are plain tensors and numbers; other code calls :class:`Attention`, which
is quicker. The arguments of both operations are, in the order of ``ARGUMENTS``, the inputs of
:class:`Attention`, then the fields of its :class:`Settings` and :class:`Dropout`.
"""

from collections.abc import Sequence
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

INPUTS = 8  # the first arguments: tensors that may have gradients
OTHER_TENSORS = 5  # the next ones
ARGUMENTS = ", ".join(
    [
        "Tensor query, Tensor key, Tensor value, Tensor? query_table, Tensor? key_table",
        "Tensor? value_table, Tensor? gain, Tensor? bias",
        "Tensor? padding, Tensor? pairs, Tensor? first_seeds, Tensor? second_seeds",
        "Tensor? key_seeds, float rate, float scale, str direction, bool product",
    ]
)


@torch.library.custom_op(
    "fairseq_posenc::attention", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
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
    schema="(Tensor attended, Tensor log_sums, Tensor grad, Tensor? log_sums_grad, bool[] trained, "
    f"{ARGUMENTS}) -> Tensor[]",
)
def attention_backward(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of the inputs; an empty tensor for an input that has none."""
    attended, log_sums, grad, log_sums_grad, trained, *forward_arguments = arguments
    grads = run_backward(
        _unpack_settings(forward_arguments),
        forward_arguments[:INPUTS],
        ForwardResult(attended, log_sums),
        grad,
        log_sums_grad,
        TrainedTables(*trained),
    )
    return [grad.new_empty(0) if x is None else x for x in grads]


@attention_backward.register_fake
def _allocate_gradients(*arguments: Any) -> list[Tensor]:
    attended, _, _, _, trained, *forward_arguments = arguments
    is_needed = [True, True, True, *trained]  # those of query, key and value in any case
    return [
        attended.new_empty(0)
        if x is None or not needed
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip(forward_arguments[:INPUTS], is_needed)
    ]


def _unpack_settings(arguments: Sequence[Any]) -> Settings:
    padding, pairs, *seeds = arguments[INPUTS : INPUTS + OTHER_TENSORS]
    rate, scale, direction, product = arguments[INPUTS + OTHER_TENSORS :]
    first_seeds, second_seeds, key_seeds = seeds
    dropout = None if first_seeds is None else Dropout(first_seeds, second_seeds, key_seeds, rate)
    return Settings(padding, pairs, dropout, scale, direction, product, exact=True)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[: INPUTS + OTHER_TENSORS])
    ctx.numbers = inputs[INPUTS + OTHER_TENSORS :]


def _run_backward(ctx: Any, grad: Tensor, log_sums_grad: Tensor | None) -> tuple[Any, ...]:
    if not torch.compiler.is_compiling():
        refuse_second_order("triton")
    attended, log_sums, *tensors = ctx.saved_tensors
    trained = list(ctx.needs_input_grad[3:INPUTS])
    arguments = *tensors, *ctx.numbers
    grads = attention_backward(attended, log_sums, grad, log_sums_grad, trained, *arguments)
    input_grads = [x if needed else None for x, needed in zip(grads, ctx.needs_input_grad)]
    return *input_grads, *[None] * (len(arguments) - INPUTS)


attention.register_autograd(_run_backward, setup_context=_save_for_backward)


def attend(settings: Settings, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute ``Attention.apply`` as an operation that ``torch.compile`` can trace."""
    seeds_and_rate = settings.dropout or (None, None, None, 0.0)
    numbers = settings.scale, settings.direction, settings.product
    attended, log_sums = torch.ops.fairseq_posenc.attention(
        *inputs, settings.padding, settings.pairs, *seeds_and_rate, *numbers
    )
    return attended if settings.exact else attended.type_as(inputs[0]), log_sums
