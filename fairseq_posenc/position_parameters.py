"""Fits the position parameters of a state dict to a model whose encodings or lengths differ.

Loading first extends the tables that can be extended without loss (:func:`extend_tables`), then
replaces what still does not fit (:func:`fit_positions`).
"""

import logging
from typing import Any

from torch import Tensor, nn

from fairseq_posenc.encodings.base import Encoding

logger = logging.getLogger(__name__)
KEY_MARK = ".encodings."  # marks the name of every position parameter, and of no other


def is_position_parameter(name: str) -> bool:
    """Check whether a state-dict key belongs to a position encoding."""
    return KEY_MARK in name


def extend_tables(model: nn.Module, state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Lengthen tables that are indexed by distance to the model's length: repeat their end rows.

    Distances beyond a table's end use its last row, so every distance keeps its row. Parameters of
    other kinds, which ``Encoding.extend`` returns as they are, stay.

    Args:
        model: the model that will load ``state_dict``.
        state_dict: changed in place.
        prefix: of the model's keys in ``state_dict``.

    Returns:
        A description of each extended table.
    """
    changes = []
    for name, module in model.named_modules(prefix=prefix.rstrip(".")):
        if not isinstance(module, Encoding):
            continue
        for parameter_name, parameter in module.named_parameters():
            key = f"{name}.{parameter_name}"
            if key not in state_dict or (old := state_dict[key]).dim() != parameter.dim():
                continue  # fit_positions replaces it, or loading reports it
            longer = module.extend(parameter_name, old)
            if longer.shape != old.shape:
                logger.info("%s: its ends are repeated for longer distances", key)
                changes.append(_describe_resized(key, old, longer))
                state_dict[key] = longer
    return changes


def fit_positions(state_dict: dict[str, Any], ours: dict[str, Tensor]) -> list[str]:
    """Replace position parameters that do not fit a model by the model's.

    Args:
        state_dict: changed in place.
        ours: the model's state dict.

    Returns:
        A description of each parameter that was added, dropped or replaced.
    """
    ours = _select_position_parameters(ours)
    theirs = _select_position_parameters(state_dict)
    resized = [key for key in ours if key in theirs and theirs[key].shape != ours[key].shape]
    fresh = [key for key in ours if key not in theirs]
    dropped = [key for key in theirs if key not in ours]
    for key in dropped:
        del state_dict[key]
    state_dict.update({key: ours[key] for key in (*fresh, *resized)})
    return (
        [f"{key} {tuple(ours[key].shape)} is not in the checkpoint" for key in fresh]
        + [f"{key} {tuple(theirs[key].shape)} is not in the model" for key in dropped]
        + [_describe_resized(key, theirs[key], ours[key]) for key in resized]
    )


def _select_position_parameters(weights: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in weights.items() if is_position_parameter(key)}


def _describe_resized(key: str, theirs: Tensor, ours: Tensor) -> str:
    return f"{key} is {tuple(theirs.shape)} in the checkpoint, {tuple(ours.shape)} in the model"
