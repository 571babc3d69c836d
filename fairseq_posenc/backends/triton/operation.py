"""Registers the attention as operations of torch's library, which ``torch.compile`` can call.

The compiler cannot trace kernels that take NamedTuples. So compiled code calls these operations,
whose inputs and outputs are plain tensors and numbers; other code calls
:class:`~fairseq_posenc.backends.triton.attention.Attention`, which is quicker. The arguments of
both operations are, in the order of ``ARGUMENTS``, the fields of
:class:`~fairseq_posenc.backends.triton.problem.Inputs` and ``Settings``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.triton.attention import run_backward, run_forward
from fairseq_posenc.backends.triton.gradients import TrainedTables
from fairseq_posenc.backends.triton.problem import Dropout, Inputs, Ranges, Settings

INPUTS = len(Inputs._fields)  # the first arguments: tensors that may have gradients
OTHER_TENSORS = 9  # the next ones
ARGUMENTS = ", ".join(
    [
        "Tensor query, Tensor key, Tensor value, Tensor? query_table, Tensor? key_table",
        "Tensor? gain, Tensor? bias, Tensor? padding, Tensor? pairs",
        "Tensor? first_keys, Tensor? last_keys, Tensor? first_queries, Tensor? last_queries",
        "Tensor? multipliers, Tensor? offsets, Tensor? key_seeds, float rate, float scale",
        "bool product, SymInt query_low, SymInt key_low",
    ]
)


@torch.library.custom_op(
    "fairseq_posenc::attention", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)"
)
def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute attended values and log2 of the sums of exponentials."""
    return run_forward(_unpack_settings(arguments), Inputs(*arguments[:INPUTS]))


@attention.register_fake
def _allocate_outputs(*arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments[0]
    attended = torch.empty_like(query, dtype=torch.float32)
    return attended, attended.new_empty(query.shape[:3])


@torch.library.custom_op(
    "fairseq_posenc::attention_backward",
    mutates_args=(),
    schema=f"(Tensor attended, Tensor log_sums, Tensor grad, bool[] trained, {ARGUMENTS})"
    " -> Tensor[]",
)
def attention_backward(*arguments: Any) -> list[Tensor]:
    """Compute the gradients of the inputs; an empty tensor for an input that has none."""
    attended, log_sums, grad, trained, *others = arguments
    settings, inputs = _unpack_settings(others), Inputs(*others[:INPUTS])
    tables = TrainedTables(*trained)
    grads = run_backward(settings, inputs, attended, log_sums, grad, tables)
    return [grad.new_empty(0) if x is None else x for x in grads]


@attention_backward.register_fake
def _allocate_gradients(*arguments: Any) -> list[Tensor]:
    attended, _, _, trained, *others = arguments
    is_needed = [True, True, True, *trained]  # those of query, key and value in any case
    return [
        attended.new_empty(0)
        if x is None or not needed
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip(others[:INPUTS], is_needed)
    ]


def _unpack_settings(arguments: Sequence[Any]) -> Settings:
    padding, pairs, *others = arguments[INPUTS : INPUTS + OTHER_TENSORS]
    rate, *numbers = arguments[INPUTS + OTHER_TENSORS :]
    ranges = None if others[0] is None else Ranges(*others[:4])
    dropout = None if others[4] is None else Dropout(others[4], others[5], others[6], rate)
    return Settings(padding, pairs, ranges, dropout, *numbers)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[: INPUTS + OTHER_TENSORS])
    ctx.numbers = inputs[INPUTS + OTHER_TENSORS :]


def _run_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    if not torch.compiler.is_compiling():
        refuse_second_order("triton")
    attended, log_sums, *tensors = ctx.saved_tensors
    trained = list(ctx.needs_input_grad[3:INPUTS])
    arguments = *tensors, *ctx.numbers
    grads = attention_backward(attended, log_sums, grad, trained, *arguments)
    input_grads = [x if needed else None for x, needed in zip(grads, ctx.needs_input_grad)]
    return *input_grads, *[None] * (len(arguments) - INPUTS)


attention.register_autograd(_run_backward, setup_context=_save_for_backward)


def attend(settings: Settings, query: Tensor, *inputs: Tensor | None) -> Tensor:
    """Compute ``Attention.apply`` as an operation that ``torch.compile`` can trace."""
    padding, pairs, ranges, dropout, *numbers = settings
    others = [*(ranges or (None,) * 4), *(dropout or (None, None, None, 0.0))]
    attended, _ = torch.ops.fairseq_posenc.attention(
        query, *inputs, padding, pairs, *others, *numbers
    )
    return attended.type_as(query)
