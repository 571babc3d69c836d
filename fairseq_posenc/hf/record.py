"""Records positions in state dicts, and compares them whenever weights are loaded.

When transformers' Trainer and PEFT load weights without strictness, nothing else is compared.
"""

import logging
import re
import warnings
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from fairseq_posenc.assembly import Assembly
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import POSITIONS
from fairseq_posenc.identity import Identity

logger = logging.getLogger(__name__)
# PEFT saves only what is named like an adapter's layers, so records are `...lora_A.NAME.positions`;
# files lack the adapter's name.
_ADAPTER = re.compile(r"(?P<layer>.*\.lora_A\.)(?P<adapter>\w+)\.weight")
_ADAPTER_RECORD = re.compile(r".*\.lora_A\.(\w+\.)?positions")
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
    # Whether positions were set in this process, and the whole model was not saved since then.
    are_unsaved = False

    def get_extra_state(self) -> Tensor:
        """Build the record of the positions and the length in training, for the state dict."""
        spec = self.assembly.spec
        dims = self.assembly.dims
        return Identity(str(spec), directions="", trained_length=dims.trained_length).to_tensor()

    def set_extra_state(self, state: Tensor) -> None:
        """Compare the record of a state dict with these positions.

        Raises:
            UserError: the weights were trained with other positions.
        """
        theirs, ours = (Identity.from_tensor(x) for x in (state, self.get_extra_state()))
        for difference in theirs.differences(ours):
            raise UserError(f"weights {difference}: set these positions before loading")

    def warn_of_adapters_without_records(self, names: Iterable[str]) -> None:
        """Warn of adapters among weights with these names that were trained on a stock model."""
        lora = [name for name in names if ".lora_A." in name]
        if lora and not any(map(_ADAPTER_RECORD.fullmatch, lora)):
            logger.warning(
                "the adapter has no record of positions: it was trained on a model whose positions "
                f"were not set, and this model has {self.assembly.spec}"
            )


def is_of_positions(name: str) -> bool:
    """Check whether a state-dict key belongs to positions that were set."""
    return f".{POSITIONS}." in f".{name}"


def find_positions(module: nn.Module) -> RecordedPositions:
    """Find the positions of a stack or a model, which PEFT may have wrapped to train a copy."""
    return next(part for part in module.modules() if isinstance(part, RecordedPositions))


def mark_unsaved(model: nn.Module, are_unsaved: bool) -> None:
    """Mark whether the positions of a model were set since it was last saved."""
    for part in model.modules():
        if isinstance(part, RecordedPositions):
            part.are_unsaved = are_unsaved


def add_adapter_records(
    stack: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Add a record to each LoRA adapter in a stack's state dict, as a state-dict post-hook.

    An adapter depends on the positions of its base model, and on their parameters.
    """
    positions = find_positions(stack)
    first_layers: dict[str, str] = {}  # of each adapter; one record is enough
    for name in state_dict:
        if name.startswith(prefix) and (match := _ADAPTER.fullmatch(name)):
            first_layers.setdefault(match["adapter"], match["layer"])
    for adapter, layer in first_layers.items():
        # Two axes, like an adapter's weights.
        state_dict[f"{layer}{adapter}.positions"] = positions.get_extra_state()[None]
    if not first_layers or not positions.are_unsaved or positions is not getattr(stack, POSITIONS):
        return
    names = (name for name, _ in stack.named_parameters() if is_of_positions(name))
    if left_out := next(names, None):
        warnings.warn(
            f"an adapter does not contain the parameters of these positions, such as {left_out}: "
            "train them with it, by LoraConfig(modules_to_save=['positions']), or save the model "
            "before the adapter is added",
            stacklevel=2,
        )


def check_adapter_records(
    stack: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Remove the records of adapters from a state dict and compare them, as a loading pre-hook."""
    positions = find_positions(stack)
    names = [name for name in state_dict if name.startswith(prefix)]
    positions.warn_of_adapters_without_records(names)
    for name in filter(_ADAPTER_RECORD.fullmatch, names):
        positions.set_extra_state(state_dict.pop(name)[0])


def read_adapter(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Read the weights of an adapter, from a folder or the hub.

    Args:
        name: folder, or name on the hub.
        options: options of ``load_adapter``, including those about the location of files.
    """
    from peft import load_peft_weights  # installed wherever there are adapters

    files = {
        **getattr(options.get("load_config"), "download_kwargs", {}),
        **options,
        **(options.get("adapter_kwargs") or {}),
    }
    chosen = {key: files[key] for key in _FILE_OPTIONS if files.get(key) is not None}
    return cast("dict[str, Tensor]", load_peft_weights(name, device="cpu", **chosen))


def take_adapter_records(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compare the records among an adapter's weights with a model; return the other weights."""
    positions = find_positions(model)
    positions.warn_of_adapters_without_records(weights)
    for name, record in weights.items():
        if _ADAPTER_RECORD.fullmatch(name):
            positions.set_extra_state(record[0])
    return {key: x for key, x in weights.items() if not _ADAPTER_RECORD.fullmatch(key)}
