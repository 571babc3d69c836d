"""Guards against wrappers and optimizers that hold a model's parameters as they were before."""

import gc
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError


def refuse_wrapped(model: Any) -> None:
    """Refuse a model that is wrapped, or that PEFT or FSDP has changed inside."""
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{type(model).__name__} is not a model of transformers (PreTrainedModel): set its "
            "positions before PEFT, torch.compile or DDP wraps it"
        )
    if getattr(model, "peft_config", None):
        raise UserError(
            "the model has adapters of PEFT, which belong to its positions: set positions before "
            "the adapters are added, or after merge_and_unload()"
        )
    if any(isinstance(x, (FSDPModule, FullyShardedDataParallel)) for x in model.modules()):
        raise UserError("FSDP has sharded this model: set its positions before")


def identify_parameters(model: nn.Module) -> set[int]:
    """Collect the ``id()`` of each parameter of a model."""
    return {id(parameter) for parameter in model.parameters()}


def make_old_holders_raise(model: PreTrainedModel, old_ids: set[int]) -> None:
    """Let optimizers and DDP that were created for the old parameters raise an error when used.

    The model has no references to them, so they are found through the garbage collector.

    Args:
        model: the model whose positions were set.
        old_ids: result of :func:`identify_parameters` before that.
    """
    if identify_parameters(model) == old_ids:
        return
    new = [p for p in model.parameters() if id(p) not in old_ids]

    def refuse_step(optimizer: Optimizer, *others: Any) -> None:
        held_ids = _identify_held(optimizer)
        if any(p.requires_grad and id(p) not in held_ids for p in new):
            raise UserError(
                "this optimizer was made before set_positions and does not have the new "
                "parameters: make another, or freeze them (requires_grad_(False))"
            )

    def refuse_pass(*others: Any) -> None:
        raise UserError(
            "DistributedDataParallel wrapped this model before set_positions and does not know "
            "its parameters: wrap it again"
        )

    classes = {DistributedDataParallel, *_subclasses(Optimizer)}
    # Compare types: `isinstance` would ask any object for its `__class__`, which may run its code.
    for holder in [x for x in gc.get_objects() if type(x) in classes]:
        if isinstance(holder, DistributedDataParallel):
            if any(module is model for module in holder.modules()):
                holder.register_forward_pre_hook(refuse_pass)
        # A wrapper such as accelerate's has no hooks, but it calls its `optimizer`, which has them.
        elif not hasattr(holder, "optimizer") and not old_ids.isdisjoint(_identify_held(holder)):
            holder.register_step_pre_hook(refuse_step)


def _identify_held(optimizer: Optimizer) -> set[int]:
    """Collect the ``id()`` of each parameter of an optimizer."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all classes that are derived from it."""
    yield cls
    for derived in cls.__subclasses__():
        yield from _subclasses(derived)
