"""Names the records of positions in state dicts and adapters, and refuses weights that do not fit.

transformers' Trainer and PEFT load with ``strict=False``, which ignores missing and additional
weights. Then only the records, which ``set_extra_state`` compares, show other positions.
"""

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError, shortened
from fairseq_posenc.hf.families import Family, find_family
from fairseq_posenc.hf.settings import POSITIONS
from fairseq_posenc.identity import STATE_KEY

KEY = f"{POSITIONS}.{STATE_KEY}"  # of a stack's record of its positions, in its state dict
SUFFIX = ".fairseq_posenc_set_positions_first"  # of names (`exchange_names`); errors quote it
PART = f"{POSITIONS}_record"  # name of the part of a model that adds records to adapters


def stock_name_pattern(config_class: Any) -> str:
    """Write a pattern of the name under which files store a stack's record: that of a stock weight.

    The weight is in the first layer's attention. The first group is the stack's path: ``model.``.
    """
    family = find_family(config_class) or Family()  # an unknown type: the usual names
    guarded = family.guarded or family.projections[0]  # the weight that makes stock classes fail
    paths = "|".join(re.escape(f"{x}.".lstrip(".")) for x in family.stacks)  # not Whisper's encoder
    return f"(.*(?:{paths}))" + re.escape(f"{family.layers}.0.{family.attention}.{guarded}.weight")


def exchange_names(weights: dict[str, Any], config_class: type, *, saving: bool) -> None:
    """Give each stack's record the name of a stock weight, which gets a suffix, or undo that.

    In state dicts and files, ``q_proj.weight`` is then the record, and ``q_proj.weight`` + SUFFIX
    the weight, so that a stock class fails on the record's shape and does not ignore the positions;
    loading undoes it. In place: modules share a dictionary.
    """
    pattern = re.compile(stock_name_pattern(config_class))
    for name in list(weights):
        if match := pattern.fullmatch(name):
            names = (match[1] + KEY, name + SUFFIX)  # before and after it is saved
            old, new = names if saving else reversed(names)
            if old in weights:
                weights[new] = weights[name]
                weights[name] = weights.pop(old)


def is_of_positions(name: str) -> bool:
    """Check whether a state-dict key belongs to positions that were set."""
    return f".{POSITIONS}." in f".{name}"


def refuse_other_weights(
    missing: Iterable[str], unexpected: Iterable[str], mismatched: Iterable[tuple[Any, ...]]
) -> None:
    """Refuse weights that transformers reported; a mismatched one has its name and both shapes."""
    found = {"lack": missing, "also have": unexpected, "have other shapes of": map(str, mismatched)}
    for fault, names in found.items():
        if listed := ", ".join(sorted(names)):
            raise UserError(f"the weights {fault} {shortened(listed)}")


def list_positions(model: PreTrainedModel) -> dict[str, Any]:
    """List the positions of a model's stacks by the keys of their records in adapters."""
    stacks = find_family(type(model.config)).find_stacks(model)  # type: ignore[union-attr]
    parts = [getattr(stack.module, POSITIONS) for stack in stacks]
    plain = [getattr(part, "original_module", part) for part in parts]  # in PEFT's wrappers
    # PEFT might take a key that is a number for an adapter's name, and remove it.
    return {f"stack_{number}.{STATE_KEY}": part for number, part in enumerate(plain)}
