"""Records the positions of a model in adapters of PEFT, which this module imports.

PEFT lets each wrapper of a module that is trained as a whole add weights to an adapter that it
saves, of whatever kind. A wrapper of no module adds the records here.
"""

import copy
import warnings
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor

from fairseq_posenc.hf import record

# A pattern of modules that PEFT leaves alone. It warns, and quotes this, where a model has none.
_EXCLUDED = rf"(?#call fairseq_posenc.hf.set_positions first)(.*\.)?{record.POSITIONS}"


class AdapterRecords(AuxiliaryTrainingWrapper):
    """A part of a model by which PEFT saves records of the model's positions with its adapters.

    Methods without a description answer PEFT that no adapter trains this part.
    """

    weight = None  # which PEFT reads where adapters are merged

    def __init__(self, model: Any) -> None:
        super().__init__(None, "")
        self.model = (model,)  # in a tuple, because torch would make it a part of this part

    def adapter_state_dict(self, adapter_name: str, state_dict: Any = None) -> dict[str, Tensor]:
        """Return the records, which PEFT adds to an adapter; warn of parameters that it lacks."""
        (model,) = self.model
        names = [name for name, _ in model.named_parameters() if record.is_of_positions(name)]
        if names and not (model.is_saved or any("modules_to_save" in name for name in names)):
            warnings.warn(
                "an adapter does not contain the parameters of these positions, such as "
                f"{names[0]}: train them with it, by LoraConfig(modules_to_save=['positions']), or "
                "save the model before the adapter is added",
                stacklevel=3,
            )
        # PEFT saves the configuration next. That of prompts is not in the model.
        config: Any = (getattr(model, "peft_config", None) or {}).get(adapter_name)
        if not getattr(config, "exclude_modules", True):  # a field of most kinds
            config.save_pretrained = partial(_save_configuration, config, id(config))
        return {key: part.get_extra_state() for key, part in record.list_positions(model).items()}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """Return no keys to rename: the model itself takes the records from what it loads."""
        return {}

    @property
    def active_adapters(self) -> list[str]:
        """Those of the other parts: PEFT's ``get_model_status`` reports where they differ."""
        layers = (x for x in self.model[0].modules() if isinstance(x, BaseTunerLayer))
        return next((layer.active_adapters for layer in layers), [])

    def unload_and_optionally_merge_module(self, *args: Any, **options: Any) -> "AdapterRecords":
        """Return what stays in the model without adapters."""
        return self

    def init_modules(self, adapter_name: str, **options: Any) -> None: ...  # noqa: D102

    def check_set_adapter(self, adapter_name: Any) -> None: ...  # noqa: D102

    def delete_adapter(self, adapter_name: str, new_active_adapters: Any) -> None: ...  # noqa: D102

    def _get_available_adapters(self) -> set[str]:
        return set()


def _save_configuration(config: Any, owner: int, *args: Any, **options: Any) -> None:
    """Save a configuration as PEFT does, with an excluded module that a stock model lacks.

    ``owner`` is the ``id`` of the adapter's configuration, of which PEFT may save a copy, twice.
    """
    if id(config) == owner:  # it may serve a stock model next
        del config.save_pretrained
    written = copy.copy(config)
    written.exclude_modules = _EXCLUDED
    type(config).save_pretrained(written, *args, **options)
