"""Records the positions of a model in adapters of PEFT; a model refuses records of others.

A record is a stack's spec as a tensor. PEFT wraps modules that are trained as a whole, and saves
with adapters of all kinds what the wrappers return: here records, by a wrapper without a module.
"""

import copy
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor

from fairseq_posenc.hf import record

# Pattern of the modules `positions` of a model, with advice as a comment in the pattern.
_EXCLUDED = rf"(?#call fairseq_posenc.hf.set_positions first)(.*\.)?{record.POSITIONS}"


class AdapterRecords(AuxiliaryTrainingWrapper):
    """The part ``positions_record`` of a model, by which PEFT saves records with its adapters.

    To PEFT, which asks all its layers, this one has no adapters; methods for them do nothing.
    """

    weight = None  # PEFT reads it where adapters are merged

    def __init__(self, model: Any) -> None:
        super().__init__(None, "")  # no module, and no name of an adapter
        self.model: Any = weakref.ref(model)  # weak, as the model contains this part

    def __reduce__(self) -> tuple[Any, ...]:
        return AdapterRecords, (self.model(),)  # a copy belongs to the copy of the model

    def adapter_state_dict(self, adapter_name: str, state_dict: Any = None) -> dict[str, Tensor]:
        """Return the records for PEFT to save; warn of parameters in neither adapter nor folder."""
        model = self.model()  # `is_saved`: to a folder, after its positions were set
        names = [name for name, _ in model.named_parameters() if record.is_of_positions(name)]
        if names and not (model.is_saved or any("modules_to_save" in name for name in names)):
            warnings.warn(
                "an adapter does not contain the parameters of these positions, such as "
                f"{names[0]}: train them with it, by LoraConfig(modules_to_save=['positions']), or "
                "save the model before the adapter is added",
                stacklevel=3,
            )
        # PEFT saves the configuration next, with our change. The model has none in prompt tuning.
        config: Any = (getattr(model, "peft_config", None) or {}).get(adapter_name)
        if not getattr(config, "exclude_modules", True):  # if there is this field, and it is empty
            config.save_pretrained = partial(_save_configuration, config)
        return {key: x.get_extra_state() for key, x in record.list_positions(model).items()}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """Return no keys to load: the model's ``_load_from_state_dict`` takes the records."""
        return {}

    def _read_layer(self, name: str, default: Any) -> Any:
        """Answer as the first layer with adapters does, as PEFT warns if parts differ."""
        layers = (x for x in self.model().modules() if isinstance(x, BaseTunerLayer))
        return next((getattr(layer, name) for layer in layers), default)

    active_adapters = property(lambda self: self._read_layer("active_adapters", []))
    disable_adapters = property(lambda self: self._read_layer("disable_adapters", False))

    def unload_and_optionally_merge_module(self, *args: Any, **options: Any) -> "AdapterRecords":
        """Return what stays in the model without adapters."""
        return self

    def _ignore(self, *args: Any, **options: Any) -> None: ...

    init_modules = check_set_adapter = delete_adapter = _ignore
    _get_available_adapters = set  # called, it returns an empty one


def _save_configuration(config: Any, folder: Any, **options: Any) -> None:
    """Save a configuration as PEFT does, after the weights of the adapter.

    If these have records, the file excludes modules that a stock model lacks: loaded into one, PEFT
    warns, and quotes our advice. The object keeps its own, as a stock model may have it, too.
    """
    # Keys in files, in plain text, are as `base_model.model.positions_record.stack_0._extra_state`.
    written, files = copy.copy(config), Path(folder).glob("adapter_model.*")
    if any(f"{record.PART}.".encode() in path.read_bytes() for path in files):
        written.exclude_modules = _EXCLUDED
    type(config).save_pretrained(written, folder, **options)
