"""Averages the checkpoints of a model's last epochs.

fairseq's ``scripts/average_checkpoints.py`` does this, too, but its package does not install it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from torch import Tensor

from fairseq_posenc.checkpoints.safe_loading import open_mapped
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.workbench.loading.checkpoints import write_state
from fairseq_posenc.workbench.translation.checkpoint import load_translation


def last_checkpoints(folder: Path, count: int) -> list[Path]:
    """Find the checkpoints of a folder's last epochs, the newest first.

    Raises:
        UserError: there are fewer than ``count``.
    """
    if not folder.is_dir():
        raise UserError(f"--average {count}: {folder} is not a folder of checkpoints")
    paths = checkpoint_utils.checkpoint_paths(str(folder))
    if not 1 <= count <= len(paths):
        raise UserError(
            f"--average {count}: {folder} holds {len(paths)} checkpoints of whole epochs "
            "(checkpoint1.pt and so on)"
        )
    return [Path(path) for path in paths[:count]]


def average_checkpoints(paths: Sequence[Path], target: Path) -> None:
    """Write a checkpoint with the averaged parameters of several.

    Sums are accumulated in float32 or wider, and each mean is cast back to the dtype of its
    parameter. The settings are those of the first checkpoint. The optimizer state is dropped
    because it does not belong to the averaged parameters.

    Raises:
        UserError: a file is not a checkpoint, or the models differ in encoding or shapes.
    """
    first = load_translation(paths[0])["model"]
    sums: dict[str, Tensor] = {}
    for path in paths:
        model = load_translation(path)["model"]
        _check_same(paths[0], first, path, model)
        for name, value in model.items():
            if not is_identity(name):  # metadata, not weights
                wide = torch.promote_types(value.dtype, torch.float32)
                sums[name] = sums.get(name, 0) + value.to(wide)
    means = {
        name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value
        for name, value in first.items()
    }
    write_state({**open_mapped(paths[0]), "model": means, "last_optimizer_state": None}, target)


def _check_same(first: Path, old: dict[str, Tensor], path: Path, new: dict[str, Tensor]) -> None:
    """Check that two checkpoints have the same encoding, settings and parameter shapes."""
    for name in filter(is_identity, old):
        if name not in new:
            continue
        ours, theirs = (Identity.from_tensor(model[name]) for model in (old, new))
        differences = ours.weight_settings.differences(theirs.weight_settings, "and with")
        if ours.describe() != theirs.describe():
            differences.insert(0, f"{ours.describe()}, and {theirs.describe()}")
        if differences:
            raise UserError(f"{first} and {path} are different models: {'; '.join(differences)}")
    old_shapes, new_shapes = (
        {name: tuple(value.shape) for name, value in model.items() if not is_identity(name)}
        for model in (old, new)
    )
    names = {**old_shapes, **new_shapes}
    differing = [name for name in names if old_shapes.get(name) != new_shapes.get(name)]
    if differing:
        name = differing[0]
        raise UserError(
            f"{first} and {path} are different models: {len(differing)} parameters differ, such as "
            f"{name}: {old_shapes.get(name, 'missing')} and {new_shapes.get(name, 'missing')}"
        )
