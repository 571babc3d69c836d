"""Finds wrappers and optimizers of a model that would not notice that its positions change."""

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
    """Refuse a model that is wrapped, or whose parts are."""
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


def list_parameters(model: nn.Module) -> set[int]:
    """List the identities of a model's parameters."""
    return {id(parameter) for parameter in model.parameters()}


def make_old_optimizers_raise(model: PreTrainedModel, before: set[int]) -> None:
    """Let optimizers and DDP that were created for the old parameters raise an error when used.

    They refer to parameters, not to the model, so they are found through the garbage collector.

    Args:
        model: the model whose positions were set.
        before: its old parameters, from :func:`list_parameters`.
    """
    new = [p for p in model.parameters() if id(p) not in before]
    if not new and list_parameters(model) == before:
        return

    def refuse_step(optimizer: Optimizer, *others: Any) -> None:
        held = set(_held(optimizer))
        if any(p.requires_grad and id(p) not in held for p in new):
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
    # `isinstance` would ask arbitrary objects for their class, which may run code of theirs.
    for holder in [x for x in gc.get_objects() if type(x) in classes]:
        if isinstance(holder, DistributedDataParallel):
            if any(module is model for module in holder.modules()):
                holder.register_forward_pre_hook(refuse_pass)
        # Wrappers such as accelerate's have no hooks, but call an optimizer that has.
        elif not hasattr(holder, "optimizer") and not before.isdisjoint(_held(holder)):
            holder.register_step_pre_hook(refuse_step)


def _held(optimizer: Optimizer) -> Iterator[int]:
    """List the identities of an optimizer's parameters."""
    return (id(p) for group in optimizer.param_groups for p in group["params"])


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for derived in cls.__subclasses__():
        yield from _subclasses(derived)
