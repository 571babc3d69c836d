"""Records positions in state dicts, and compares the records whenever weights are loaded.

transformers' Trainer and PEFT load with ``strict=False``, which ignores missing and additional
weights. Then only these records show that weights were trained with other positions.
"""

import inspect
import logging
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fairseq_posenc.assembly import Assembly
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import POSITIONS
from fairseq_posenc.hf.settings import SPEC_FIELD
from fairseq_posenc.identity import Identity
from fairseq_posenc.specs import Spec, parse

logger = logging.getLogger(__name__)


class RecordedPositions(nn.Module):
    """Base of the positions of a stack, whose state dict records what its weights depend on."""

    assembly: Assembly
    directions: str
    is_saved = True  # False from `set_positions` until the whole model is saved

    def get_extra_state(self) -> Tensor:
        """Build the record for the state dict: the spec, and the length of the training.

        Raises:
            UserError: another model, of which this is a part, is being saved.
        """
        for call in _find_calls(PreTrainedModel.save_pretrained):
            if not hasattr(call["self"], "saves_positions"):
                raise UserError(
                    f"{type(call['self']).__name__}.save_pretrained cannot save the positions that "
                    "were set in a part of it: save that part by its own save_pretrained, or all "
                    "by torch.save(model.state_dict(), path)"
                )
        length = self.assembly.dims.trained_length
        return Identity(str(self.assembly.spec), self.directions, length).to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the record of a state dict with these positions; nothing is set.

        Raises:
            UserError: the weights were trained with other positions.
        """
        if state.dim() != 1:  # a weight of the stock model, which has this name in folders
            raise UserError("the weights are of a model whose positions were not set")
        theirs = Identity.from_tensor(state)
        ours = Identity.from_tensor(self.get_extra_state())
        if differences := theirs.position_differences(ours):  # `trained with X, the model has Y`
            raise UserError(f"weights {differences[0]}: set their positions before loading")


def is_of_positions(name: str) -> bool:
    """Check whether a state-dict key belongs to positions that were set."""
    return f".{POSITIONS}." in f".{name}"


def _find_positions(stack: nn.Module) -> RecordedPositions:
    """Find the positions of a stack, which PEFT may have wrapped to train a copy."""
    return next(part for part in stack.modules() if isinstance(part, RecordedPositions))


def _list_specs(model: nn.Module) -> dict[str, Spec]:
    """List the specs of the stacks in a model, by their keys in an adapter_config.json."""
    specs = {}
    for stack in model.modules():
        if isinstance(stack, PreTrainedModel) and hasattr(stack, POSITIONS):
            assembly = _find_positions(stack).assembly
            is_second = assembly.dims.causal and stack.config.is_encoder_decoder
            specs[f"{SPEC_FIELD}_decoder" if is_second else SPEC_FIELD] = assembly.spec
    return specs


def set_saved(model: nn.Module, *, is_saved: bool) -> None:
    """Note whether a model was saved as a whole since its positions were set.

    If it was not, saving only an adapter warns of the parameters that no file has.
    """
    for part in model.modules():
        if isinstance(part, RecordedPositions):
            part.is_saved = is_saved


def record_adapters(stack: nn.Module, *others: Any) -> None:
    """Let adapters of PEFT record a stack's positions, as a hook after its state dict was made.

    An adapter depends on the positions of its base model. PEFT does not tell a model when it saves
    or loads adapters, so the calls are looked up from which this call comes.
    """
    positions = _find_positions(stack)
    specs = {key: spec.full() for key, spec in _list_specs(stack).items()}
    for call in _find_calls(nn.Module.state_dict):  # of the stack, and of all that contains it
        for config in dict(getattr(call["self"], "peft_config", None) or {}).values():
            config.__dict__.setdefault("positions", {}).update(specs)
            config.save_pretrained = partial(_save_adapter_config, config)
    saves = any(any(_find_calls(cls.save_pretrained)) for cls in _peft_classes())
    names = [name for name, _ in stack.named_parameters() if is_of_positions(name)]
    # If PEFT has wrapped the positions, the adapter contains a trained copy.
    if names and saves and not positions.is_saved and getattr(stack, POSITIONS) is positions:
        warnings.warn(
            f"an adapter does not contain the parameters of these positions, such as {names[0]}: "
            "train them with it, by LoraConfig(modules_to_save=['positions']), or save the model "
            "before the adapter is added",
            stacklevel=3,  # the line that called the hook which is this function
        )


def _save_adapter_config(config: Any, folder: Any, **options: Any) -> None:
    """Save an adapter_config.json as PEFT does, with the positions in ``auto_mapping``."""
    mapping = {**(options.pop("auto_mapping_dict", None) or {}), **config.positions}
    type(config).save_pretrained(config, folder, auto_mapping_dict=mapping, **options)


def compare_adapters(stack: nn.Module, *others: Any) -> None:
    """Compare the adapters that PEFT is loading, as a hook of a stack before it loads weights."""
    for cls in _peft_classes():
        for call in _find_calls(cls.load_adapter):
            compare_adapter(stack, call["model_id"], call.get("hf_hub_download_kwargs", {}))


def compare_adapter(model: nn.Module, name: Any, options: dict[str, Any]) -> None:
    """Compare the positions that an adapter was trained with to those of a stack or a model.

    Args:
        model: the stack or the model.
        name: the adapter's folder or name on the hub; None if ``options`` has a ``peft_config``.
        options: options of ``load_adapter``, including those about the location of files.

    Raises:
        UserError: the positions differ.
    """
    from peft import PeftConfig  # installed wherever there are adapters

    # `load_config` has the options of `from_pretrained` when that loads an adapter's folder.
    loading = getattr(options.get("load_config"), "download_kwargs", {})
    merged = {**loading, **options, **(options.get("adapter_kwargs") or {})}
    config = merged.get("peft_config")
    if name is not None:  # it takes the options that it knows
        config = PeftConfig.from_pretrained(name, **{k: v for k, v in merged.items() if v})
    recorded = getattr(config, "auto_mapping", None) or {}
    for key, ours in _list_specs(model).items():
        if key not in recorded:
            logger.warning(
                "the adapter has no record of positions: it was trained on a model whose "
                f"positions were not set, and this model has {ours}"
            )
        elif (theirs := parse(recorded[key])) != ours:
            raise UserError(
                f"weights trained with {theirs}, the model has {ours}: set their positions before "
                "loading"
            )


def _peft_classes() -> list[Any]:
    """List PEFT's classes of models; none if PEFT was not imported, so there are no adapters."""
    peft: Any = sys.modules.get("peft")
    return [] if peft is None else [peft.PeftModel, peft.PeftMixedModel]


def _find_calls(function: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the calls of a function from which this call comes."""
    frame = inspect.currentframe()
    while frame := frame and frame.f_back:
        if frame.f_code is function.__code__:
            yield frame.f_locals
