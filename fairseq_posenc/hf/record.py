"""Records positions in state dicts, and compares the records whenever weights are loaded.

transformers' Trainer and PEFT load with ``strict=False``, which ignores missing and additional
weights. Then only these records show that weights were trained with other positions.
"""

import logging
import re
import warnings
from typing import Any, cast

from torch import Tensor, nn

from fairseq_posenc.assembly import Assembly
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import POSITIONS
from fairseq_posenc.identity import Identity

logger = logging.getLogger(__name__)
# The record of adapter NAME is called `...lora_A.NAME.positions`, because PEFT saves only what is
# named like an adapter's weights. PEFT leaves NAME out of all names in the file.
_ADAPTER_WEIGHT = re.compile(r"(?P<layer>.*\.lora_A\.)(?P<adapter>[^.]+)\.weight")
# Those options of `load_adapter` that `load_peft_weights` takes, too.
_FILE_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
)


class RecordedPositions(nn.Module):
    """Base of the positions of a stack, whose state dict records what its weights depend on."""

    assembly: Assembly
    directions: str
    is_saved = True  # False from `set_positions` until the whole model is saved

    def get_extra_state(self) -> Tensor:
        """Build the record for the state dict: the spec, and the length of the training."""
        length = self.assembly.dims.trained_length
        return Identity(str(self.assembly.spec), self.directions, length).to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the record of a state dict with these positions; nothing is set.

        Raises:
            UserError: the weights were trained with other positions.
        """
        theirs = Identity.from_tensor(state)
        ours = Identity.from_tensor(self.get_extra_state())
        if differences := theirs.position_differences(ours):  # `trained with X, the model has Y`
            raise UserError(f"weights {differences[0]}: set their positions before loading")


def is_of_positions(name: str) -> bool:
    """Check whether a state-dict key belongs to positions that were set."""
    return f".{POSITIONS}." in f".{name}"


def _find_positions(module: nn.Module) -> RecordedPositions:
    """Find the positions of a stack, or of a model's first stack, as all stacks have one spec.

    They are searched for, because PEFT may have wrapped them to train a copy.
    """
    return next(part for part in module.modules() if isinstance(part, RecordedPositions))


def set_saved(model: nn.Module, *, is_saved: bool) -> None:
    """Note whether a model was saved as a whole since its positions were set.

    If it was not, saving only an adapter warns of the parameters that no file has.
    """
    for part in model.modules():
        if isinstance(part, RecordedPositions):
            part.is_saved = is_saved


def add_adapter_records(
    stack: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Add a record to each LoRA adapter in a stack's state dict, as a state-dict post-hook.

    An adapter depends on the positions of its base model, and on their parameters.
    """
    positions = _find_positions(stack)
    # The beginning of the name of each adapter's first weight: one record for an adapter is enough.
    first_layers: dict[str, str] = {}
    for name in state_dict:
        if name.startswith(prefix) and (match := _ADAPTER_WEIGHT.fullmatch(name)):
            first_layers.setdefault(match["adapter"], match["layer"])
    for adapter, layer in first_layers.items():
        # `[None]` gives it two axes, as an adapter's weights have; loading takes `[0]`.
        state_dict[f"{layer}{adapter}.positions"] = positions.get_extra_state()[None]
    if first_layers and not positions.is_saved:
        _warn_of_left_out_parameters(stack)


def _warn_of_left_out_parameters(stack: nn.Module) -> None:
    """Warn of parameters of positions that neither the base model's file nor the adapter's has."""
    if not isinstance(getattr(stack, POSITIONS), RecordedPositions):
        return  # PEFT has wrapped the positions, so the adapter contains a trained copy
    names = (name for name, _ in stack.named_parameters() if is_of_positions(name))
    if left_out := next(names, None):
        warnings.warn(
            f"an adapter does not contain the parameters of these positions, such as {left_out}: "
            "train them with it, by LoraConfig(modules_to_save=['positions']), or save the model "
            "before the adapter is added",
            stacklevel=3,  # the line that called the hook which calls this function
        )


def pop_adapter_records(
    model: nn.Module, state_dict: dict[str, Any], prefix: str = "", *others: Any
) -> None:
    """Remove the records of adapters from a state dict, and compare them with the positions.

    This is also a hook of a stack before it loads.

    Args:
        model: a stack, or a model.
        state_dict: weights that are about to be loaded.
        prefix: beginning of the names of the weights of ``model``.
        *others: arguments that torch passes to such a hook, which are not needed.

    Raises:
        UserError: an adapter was trained with other positions.
    """
    positions = _find_positions(model)
    names = [name for name in state_dict if name.startswith(prefix) and ".lora_A." in name]
    records = [name for name in names if name.endswith(f".{POSITIONS}")]
    if names and not records:
        logger.warning(
            "the adapter has no record of positions: it was trained on a model whose positions "
            f"were not set, and this model has {positions.assembly.spec}"
        )
    for name in records:
        positions.set_extra_state(state_dict.pop(name)[0])


def read_adapter(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Read the weights of an adapter, from a folder or the hub.

    Args:
        name: folder, or name on the hub.
        options: options of ``load_adapter``, including those about the location of files.
    """
    from peft import load_peft_weights  # installed wherever there are adapters

    # As in `load_adapter`, the later of these three win. `load_config` has the options of
    # `from_pretrained` when that loads an adapter's folder.
    merged = {
        **getattr(options.get("load_config"), "download_kwargs", {}),
        **options,
        **(options.get("adapter_kwargs") or {}),
    }
    file_options = {key: merged[key] for key in _FILE_OPTIONS if merged.get(key) is not None}
    return cast("dict[str, Tensor]", load_peft_weights(name, device="cpu", **file_options))
