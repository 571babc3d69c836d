"""Safe loading of checkpoints: no code of theirs runs, and every error is one line.

torch reads only tensors and plain settings from a checkpoint (``weights_only``), and fairseq writes
``argparse.Namespace`` into it. Allowing that one class makes every command work while a file that
would run code is still refused.
"""

import argparse
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_posenc.checkpoints.error_messages import describe_damage
from fairseq_posenc.checkpoints.file_checks import check_file
from fairseq_posenc.checkpoints.trusted_settings import check_settings, is_name
from fairseq_posenc.checkpoints.weights import describe_form, refuse_large_weights
from fairseq_posenc.errors import UserError

_PICKLE = b"\x80"  # how a checkpoint of torch before 1.6 begins, which is not an archive
_DEEPEST = 64  # mappings in mappings; an optimizer's state is 6 deep


def open_mapped(path: Path, for_weights: bool = False) -> dict[str, Any]:
    """Load a checkpoint with its tensors mapped into memory: they are read when they are used.

    Args:
        path: its file.
        for_weights: the weights are about to be used. Their checksums are compared, which reads
            all of the file, and none may be too large to compute with; see
            :func:`~fairseq_posenc.checkpoints.file_checks.check_file` for what this costs.

    Raises:
        Exception: no checkpoint, or one that would run code; the type depends on the file.
    """
    allow_safe_classes()
    check_file(path, checksums=for_weights)
    mapped = zipfile.is_zipfile(path)  # not before torch 1.6
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__} in the place of a mapping")
    _refuse_strange_weights(state.get("model"))
    _refuse_expanded_tensors(state)
    if for_weights:
        refuse_large_weights(state.get("model"))
    check_settings(state)
    return state


def is_torn(path: Path) -> bool:
    """Check whether a file is empty, or a checkpoint that was not written to its end.

    The table of an archive's contents is at its end.
    """
    with open(path, "rb") as file:
        return file.read(1) != _PICKLE and not zipfile.is_zipfile(file)


def _refuse_strange_weights(weights: Any) -> None:
    """Refuse weights in a form that no training of fairseq writes, and few programs can read."""
    for name, weight in weights.items() if isinstance(weights, dict) else ():
        if type(name) is not str or not is_name(name):
            raise UserError(f"the checkpoint is damaged: a parameter is called {ascii(name)[:100]}")
        if wrong := describe_form(weight):
            raise UserError(f"the checkpoint is damaged, or of another program: {name} {wrong}")


def _refuse_expanded_tensors(state: Any) -> None:
    """Refuse tensors that claim more numbers than are stored for them, and endless mappings.

    A tensor with a stride of 0 lets a file of a few bytes cost any time. No training writes one.
    """
    left: list[tuple[Any, tuple[Any, ...]]] = [(state, ())]
    seen = set()
    while left:
        thing, place = left.pop()
        if isinstance(thing, torch.Tensor):
            if thing.layout != torch.strided or thing.is_meta:
                continue  # stored in another way
            stored = thing.untyped_storage().nbytes() // thing.element_size()
            if thing.numel() > stored:
                raise UserError(
                    f"the checkpoint is damaged: {'.'.join(map(str, place)) or 'a tensor'} says "
                    f"that it has {thing.numel():,} numbers, and {stored:,} are stored"
                )
        elif isinstance(thing, (dict, list, tuple)) and id(thing) not in seen:
            seen.add(id(thing))
            if len(place) > _DEEPEST:
                raise UserError(f"it has mappings or lists that are more than {_DEEPEST} deep")
            parts = thing.items() if isinstance(thing, dict) else enumerate(thing)
            left += [(part, (*place, key)) for key, part in parts]


@contextmanager
def open_checkpoint(
    path: Path, what: str = "", for_weights: bool = False
) -> Iterator[dict[str, Any]]:
    """Open a checkpoint by :func:`open_mapped`; errors in what is read of it are one line, too.

    ``what`` introduces the path in messages, as the option that named it.

    Raises:
        UserError: whatever went wrong.
    """
    with readable_errors(f"{what} {path}".lstrip()):
        yield open_mapped(path, for_weights)


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Convert every error of reading a checkpoint, as in ``--checkpoint PATH``, to one line.

    Raises:
        UserError: whatever went wrong; what torch and fairseq raise depends on what the file holds.
    """
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}: {describe_damage(error)}") from error


class _NumberType:
    """Stands for numpy's type of a number: ``float64``, ``float32`` or ``int64``, and no other.

    numpy's own is not allowed: a file could give it a size that takes all of the memory.
    """

    def __init__(self, code: Any, *options: Any) -> None:
        if code not in ("f8", "f4", "i8"):
            raise pickle.UnpicklingError(f"a number of numpy's type {ascii(code)[:50]}")
        self._code = code
        self._order = "<"

    def __setstate__(self, state: Any) -> None:
        self._order = state[1] if state[1] in ("<", ">") else "<"

    def read(self, content: Any) -> Any:
        """Read a number from its bytes, as numpy writes them."""
        (number,) = np.frombuffer(content, np.dtype(self._order + self._code))
        return number


def _read_number(kind: Any, content: Any) -> Any:
    """Read a number of numpy's, in the place of numpy's own ``scalar``."""
    if type(kind) is not _NumberType or type(content) is not bytes:
        raise pickle.UnpicklingError("a number of numpy's without its type or its bytes")
    return kind.read(content)


def allow_safe_classes() -> None:
    """Let torch load what fairseq's files hold beside tensors and settings.

    That is ``argparse.Namespace``, and numpy's numbers, which scikit-learn's metrics are.
    """
    # The module has another name in numpy 1. torch finds the functions by these names alone.
    names: list[Any] = [(_NumberType, "numpy.dtype"), _NumberType]
    names += [(_read_number, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    torch.serialization.add_safe_globals([argparse.Namespace, *names])
