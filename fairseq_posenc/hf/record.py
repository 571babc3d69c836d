"""Records positions in state dicts and in adapters, and compares the records when weights load.

transformers' Trainer and PEFT load with ``strict=False``, which ignores missing and additional
weights. Then only these records show that weights were trained with other positions.

PEFT gives the base model its ``peft_config``, and asks for a state dict before it saves an adapter;
then the model lets that configuration write its positions. Where PEFT does not give a model the
configuration of what it loads (prompt learning, weights for an adapter that exists), positions are
compared only if the adapter contains them (``modules_to_save=["positions"]``).
"""

import copy
import logging
import re
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.families import Family, find_family
from fairseq_posenc.hf.settings import POSITIONS, SPEC_FIELDS
from fairseq_posenc.identity import STATE_KEY, is_identity
from fairseq_posenc.specs import Spec, parse

logger = logging.getLogger(__name__)
RECORD = f"{POSITIONS}.{STATE_KEY}"  # a stack's record of its positions
# Added to the names of weights whose own names the records have: see `exchange_names`.
SUFFIX = ".fairseq_posenc_set_positions_first"  # what to do, for whoever reads such an error
# A pattern of modules that PEFT leaves alone. It warns, and quotes this, where a model has none.
_EXCLUDED = rf"(?#call fairseq_posenc.hf.set_positions first)(.*\.)?{POSITIONS}"


def stock_name_of_record(config_class: Any) -> str:
    """Write a pattern of the stock weight whose name a stack's record has in files.

    It is a projection in the first layer. The first group of the pattern is the stack's name.
    """
    family = find_family(config_class) or Family()  # an unknown type: the usual names
    guarded = family.guarded or family.projections[0]
    return "(.*)" + re.escape(f"{family.layers}.0.{family.attention}.{guarded}.weight")


def exchange_names(weights: dict[str, Any], config_class: type, *, saving: bool) -> None:
    """Give the record of each stack the name of a stock weight and this a suffix, or undo it.

    State dicts and saved files have these names, so that a stock class fails on the record's shape
    and does not ignore the positions; loading undoes it. In place: modules share a dictionary.
    """
    pattern = re.compile(stock_name_of_record(config_class))
    for name in list(weights):
        if match := pattern.fullmatch(name):
            record, suffixed = match[1] + RECORD, name + SUFFIX
            if saving and record in weights:
                weights[name], weights[suffixed] = weights.pop(record), weights[name]
            elif not saving and suffixed in weights:
                weights[name], weights[record] = weights.pop(suffixed), weights[name]


def is_of_positions(name: str) -> bool:
    """Check whether a state-dict key belongs to positions that were set."""
    return f".{POSITIONS}." in f".{name}"


def refuse_other_weights(
    missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[tuple[Any, ...]]
) -> None:
    """Refuse weights that transformers reported; a mismatched one has its name and both shapes."""
    problems = {
        "lack": missing,
        "also have": unexpected,
        "have other shapes of": map(str, mismatched),
    }
    for problem, names in problems.items():
        if listed := ", ".join(sorted(names)):
            raise UserError(f"the weights {problem} {shortened(listed)}")


def record_adapters(model: PreTrainedModel, *, is_saved: bool) -> None:
    """Let the adapters of a model record its positions when PEFT saves them.

    Args:
        model: the base model of the adapters.
        is_saved: whether a file has the model as it was before the adapters.
    """
    for config in (getattr(model, "peft_config", None) or {}).values():
        positions = {key: spec.full() for key, spec in _read_specs(model).items()}
        names = [name for name, _ in model.named_parameters() if is_of_positions(name)]
        is_whole = is_saved or any("modules_to_save" in name for name in names)  # trained copies
        left_out = names[0] if names and not is_whole else ""
        config.save_pretrained = partial(_save_adapter, config, id(config), positions, left_out)


def _save_adapter(
    config: Any, owner: int, positions: dict[str, str], left_out: str, *args: Any, **options: Any
) -> None:
    """Save an adapter_config.json as PEFT does, with the positions in ``auto_mapping``.

    Args:
        config: the configuration of the adapter, or a copy of it.
        owner: the ``id`` of that of the adapter.
        positions: specs of its base model, by their keys in the file.
        left_out: a parameter of the positions that no file has; empty if there is none.
        *args: those of PEFT's method.
        **options: those of PEFT's method.
    """
    if id(config) == owner:  # it may serve a stock model next; PEFT saves a copy twice
        del config.save_pretrained
    written = copy.copy(config)
    written.auto_mapping = {**(options.pop("auto_mapping_dict", None) or {}), **positions}
    if not getattr(config, "exclude_modules", True):  # a field of most kinds
        written.exclude_modules = _EXCLUDED
    type(config).save_pretrained(written, *args, **options)
    if left_out:
        warnings.warn(
            "an adapter does not contain the parameters of these positions, such as "
            f"{left_out}: train them with it, by LoraConfig(modules_to_save=['positions']), or "
            "save the model before the adapter is added",
            stacklevel=3,
        )


def compare_loaded_adapters(model: PreTrainedModel, weights: dict[str, Any]) -> None:
    """Compare the adapters of a model with its positions, before their weights are loaded.

    Weights without any record, such as the prompts of prompt learning, are named in a warning.

    Args:
        model: the base model of the adapters.
        weights: what is loaded. A record among them is compared when it is loaded itself.

    Raises:
        UserError: an adapter was trained with other positions.
    """
    if any(map(is_identity, weights)):
        return
    # PEFT puts the name of an adapter into the names of its weights.
    words = {word for name in weights for word in name.split(".")}
    adapters = getattr(model, "peft_config", None) or {}
    records = [config.auto_mapping or {} for name, config in adapters.items() if name in words]
    ours = _read_specs(model)
    has = f"the model has {' and '.join(map(str, ours.values()))}"
    for record in records or [{}]:  # nothing for weights of no known adapter
        theirs = {key: parse(spec) for key, spec in record.items() if key in SPEC_FIELDS}
        if not theirs:
            logger.warning("nothing shows which positions these weights were trained with; %s", has)
        elif theirs != ours:
            trained = " and ".join(map(str, theirs.values()))
            raise UserError(
                f"weights trained with {trained}, {has}: set their positions before loading"
            )


def _read_specs(model: PreTrainedModel) -> dict[str, Spec]:
    """Read the specs of a model from its configuration, by their fields."""
    config = model.config
    return {name: parse(getattr(config, name)) for name in SPEC_FIELDS if hasattr(config, name)}
