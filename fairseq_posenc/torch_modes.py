"""Finds the modes of torch in which results may not be shared, kept, or changed in place.

Compilers, activation checkpointing and dispatch modes run a layer again or keep its results.
"""

from typing import Any

import torch
from torch import Tensor

# torch has no public functions for these two. The first finds the innermost hooks (pack, unpack) of
# saved tensors, or None. Before 2.8 torch lacks it: then () means that there may be hooks.
_find_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())
# Without the function, a dispatch mode is assumed to be active.
_count_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_exporting() -> bool:
    """Check whether torch is exporting a model, so that one graph must serve all lengths.

    torch 2.6 has no such query, so with it every compiled graph counts as exported.
    """
    return bool(getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)())


def has_saving_hooks() -> bool:
    """Check whether hooks receive, or may receive, the tensors that autograd saves.

    Non-reentrant activation checkpointing sets them. It runs a layer again in the backward pass,
    and expects it to save the same tensors: so `Mask.cached` keeps nothing that autograd records.
    """
    return _find_hooks(True) is not None  # True: also in tracing


def is_reentrant_recomputation() -> bool:
    """Check whether reentrant activation checkpointing runs a layer again, in the backward pass.

    Tensors for several layers, which it was given, must then be computed again: the backward pass
    has freed their graph.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # The step of the backward pass that is running, or None. That of reentrant checkpointing is a
    # `CheckpointFunctionBackward` in torch and in fairseq. Non-reentrant checkpointing runs a layer
    # again in a step of one of the layer's own operations, such as `BmmBackward0`.
    return "Checkpoint" in type(torch._C._current_autograd_node()).__name__


def copy_if_kept(x: Tensor) -> Tensor:
    """Return a result that may be changed in place: a copy if a dispatch mode may keep the result.

    Selective activation checkpointing is such a mode: it keeps the results of operations such as
    matrix products, and uses them instead of computing them again.
    """
    return x.clone() if _count_modes() else x
