"""Attention as one differentiable step: starts the kernels of both passes."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fairseq_posenc.backends.base import refuse_second_order
from fairseq_posenc.backends.triton.forward import forward_kernel
from fairseq_posenc.backends.triton.gradients import Saved, TrainedTables, compute_gradients
from fairseq_posenc.backends.triton.problem import Inputs, Settings, build_problem
from fairseq_posenc.backends.triton.sizes import build_options, choose_forward_tile


class Attention(torch.autograd.Function):
    """Flash attention with tables by distance; its tensors are those of :class:`Inputs`."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: Any) -> Tensor:
        """Compute the attended values ``(B, H, T, D)``."""
        attended, log_sums = run_forward(settings, Inputs(*tensors))
        ctx.settings = settings
        ctx.save_for_backward(attended, log_sums, *tensors)
        return attended.type_as(tensors[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of all tensors."""
        refuse_second_order("triton")
        attended, log_sums, *tensors = ctx.saved_tensors
        trained = TrainedTables(*ctx.needs_input_grad[4:])  # after settings, query, key, value
        inputs = Inputs(*tensors)
        return None, *run_backward(ctx.settings, inputs, attended, log_sums, grad, trained)


def run_forward(settings: Settings, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute attended values ``(B, H, T, D)`` and log2 of the sums of exponentials ``(B, H, T)``.

    Both are float32, because the backward pass subtracts nearly equal numbers. There is a program
    for each block of queries of a sequence.
    """
    problem = build_problem(settings, inputs)
    attended = torch.empty_like(problem.query, dtype=torch.float32)
    log_sums = attended.new_empty(problem.query.shape[:3])
    tile = choose_forward_tile(problem)
    sequences = problem.query.size(0) * problem.heads
    with torch.cuda.device_of(attended):
        forward_kernel[(sequences * triton.cdiv(problem.tgt_len, tile.queries),)](
            problem,
            build_options(problem, settings.product, tile),
            attended,
            log_sums,
            **tile.launch_options(),
        )
    return attended, log_sums


def run_backward(
    settings: Settings,
    inputs: Inputs,
    attended: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    trained: TrainedTables,
) -> list[Tensor | None]:
    """Compute the gradients of the inputs, of their types.

    Args:
        settings: of the call.
        inputs: of the call.
        attended: result of the forward pass, ``(B, H, T, D)``.
        log_sums: result of the forward pass, ``(B, H, T)``.
        grad: gradient of the attended values.
        trained: tables that need a gradient.
    """
    problem = build_problem(settings, inputs)
    # FlashAttention's delta is subtracted from the gradients of the weights. Both come from the
    # same rounded gradient, so that they cancel out if a query sees a single key.
    rounded = grad.type_as(problem.query).contiguous()
    delta = (rounded * attended).sum(-1)  # [B, H, T]
    saved = Saved(rounded, log_sums, delta)
    with torch.cuda.device_of(grad):
        grads = compute_gradients(problem, saved, settings.product, trained)
    return [
        None if gradient is None or x is None else gradient.type_as(x)
        for gradient, x in zip(grads, inputs)
    ]
