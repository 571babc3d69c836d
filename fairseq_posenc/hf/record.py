"""What weights know of their positions: a record in state dicts, compared wherever they are loaded.

Loading without strictness, as by transformers' Trainer and PEFT, compares nothing else.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from fairseq_posenc.assembly import Assembly
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf.attention import ATTRIBUTE
from fairseq_posenc.identity import Identity

# PEFT saves what a state dict has beside the weights of an adapter's layers.
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
    """Base of the positions of a stack, whose state dict says what its weights are trained with."""

    assembly: Assembly

    def get_extra_state(self) -> Tensor:
        """Record positions, as an entry of the state dict."""
        return self.record()

    def set_extra_state(self, state: Tensor) -> None:
        """Compare a record with these positions: see :meth:`compare`."""
        self.compare(state)

    def record(self) -> Tensor:
        """Record positions and the length of the training."""
        spec, dims = self.assembly.spec, self.assembly.dims
        return Identity(str(spec), "", dims.trained_length).to_tensor()

    def compare(self, state: Tensor) -> None:
        """Compare a record with these positions.

        Raises:
            UserError: the weights were trained with others.
        """
        theirs, ours = (Identity.from_tensor(x) for x in (state, self.record()))
        for difference in theirs.differences(ours):
            raise UserError(f"weights {difference}: set these positions before loading")


def add_adapter_records(
    stack: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Add a record to each LoRA adapter in a stack's state dict, as a hook behind it.

    An adapter is trained for the positions of its base.
    """
    first: dict[str, str] = {}  # adapter -> the first layer that has it
    for name in state_dict:
        if name.startswith(prefix) and (match := _ADAPTER.fullmatch(name)):
            first.setdefault(match["adapter"], match["layer"])
    for adapter, layer in first.items():
        record = getattr(stack, ATTRIBUTE).record()[None]  # of two axes, as an adapter's are
        state_dict[f"{layer}{adapter}.positions"] = record


def check_adapter_records(
    stack: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Take the records of adapters out of a state dict and compare them, as a hook before loading.

    Raises:
        UserError: an adapter was trained on a model with other positions.
    """
    for name in [name for name in state_dict if _ADAPTER_RECORD.fullmatch(name)]:
        if name.startswith(prefix):
            getattr(stack, ATTRIBUTE).compare(state_dict.pop(name)[0])


def read_adapter(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Read the weights of an adapter, from a folder or the hub.

    Args:
        name: of the folder, or on the hub.
        options: of ``load_adapter``, with those that say where files are found.
    """
    from peft import load_peft_weights  # who has an adapter has PEFT

    files = {
        **getattr(options.get("load_config"), "download_kwargs", {}),
        **options,
        **(options.get("adapter_kwargs") or {}),
    }
    chosen = {key: files[key] for key in _FILE_OPTIONS if files.get(key) is not None}
    weights: dict[str, Tensor] = load_peft_weights(name, device="cpu", **chosen)
    return weights


def take_adapter_records(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compare the records among an adapter's weights with a model; return the other weights.

    Raises:
        UserError: the adapter was trained on a model with other positions.
    """
    positions = next(part for part in model.modules() if isinstance(part, RecordedPositions))
    for name, record in weights.items():
        if _ADAPTER_RECORD.fullmatch(name):
            positions.compare(record[0])
    return {key: x for key, x in weights.items() if not _ADAPTER_RECORD.fullmatch(key)}
