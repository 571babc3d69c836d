"""Loads checkpoints safely: none of their code runs, and every error is one line.

torch loads only tensors and plain values (``weights_only``), and here the ``Namespace`` and numpy's
numbers that fairseq writes. Settings must be of plain types, and must not be resolved by omegaconf
(``${...}``) or instantiated by hydra (``_target_``); a speech task starts ``post_save_script``
as a program. What fairseq evaluates must be a literal (:mod:`~fairseq_posenc.host.startup`).
"""

import ast
import zipfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_posenc.checkpoints.faults import describe_damage
from fairseq_posenc.errors import UserError, shortened

# Settings that name files which fairseq's models, tasks and tokenizers open, other than the data.
_OPENED = {
    "encoder_embed_path", "decoder_embed_path", "pretrained_checkpoint", "source_dict",
    "pretrained_mlm_checkpoint", "pretrained_xlm_checkpoint", "load_pretrained_encoder_from",
    "load_pretrained_decoder_from", "sampling_weights_from_file", "label_dir", "lang_dict",
    "target_dict", "fixed_dictionary", "config_yaml", "multitask_config_yaml",
}  # fmt: skip
# Types of settings, and of their containers. No subclasses, which could run any code.
_PLAIN = (type(None), bool, int, float, str)
_HOLDERS = (dict, list, tuple, Namespace)
_MAX_DEPTH = 32  # of mappings in mappings, which may contain each other
_MAX_SETTINGS = 10_000  # a shared mapping counts wherever it is: omegaconf would copy it there
_MAX_EVALUATED = 10_000  # characters of a text that fairseq evaluates, and items of its value
_PICKLE = b"\x80"  # first byte of a checkpoint of torch before 1.6, which is not an archive


def open_whole(path: Path) -> dict[str, Any]:
    """Load a checkpoint into memory.

    It is not mapped (``mmap=True``): the process would end if the file is overwritten meanwhile.
    Errors keep their type, for callers that only try; others call :func:`open_checkpoint`.

    Raises:
        UserError: the file was written while it was read.
        Exception: the file is not a checkpoint, or would run code; the type depends on the file.
    """
    allow_safe_classes()
    before = path.stat()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    finally:  # also after an error, which a file written in part may cause
        after = path.stat()
        if (before.st_ino, before.st_mtime_ns) != (after.st_ino, after.st_mtime_ns):
            raise UserError("was written while it was read: try again")
    if not isinstance(state, dict):
        raise TypeError(f"a {type(state).__name__} instead of a mapping")
    check_settings(state)
    return state


def refuse_incomplete(state: Mapping[str, object]) -> None:
    """Refuse a checkpoint without the entries that fairseq reads, such as weights alone."""
    has_history = "optimizer_history" in state or "best_loss" in state  # `best_loss`: old files
    has_settings = state.get("cfg") or state.get("args")
    if not (isinstance(state.get("model"), dict) and has_history and has_settings):
        raise UserError("not a complete checkpoint of fairseq (it lacks weights, settings or more)")


def is_torn(path: Path) -> bool:
    """Check whether a file is empty or not an archive, like a checkpoint whose end is missing.

    An archive cannot be opened without its table of contents, which is at the end. A file of torch
    before 1.6 is only checked for being empty.
    """
    with open(path, "rb") as file:
        return file.read(1) != _PICKLE and not zipfile.is_zipfile(file)


@contextmanager
def open_checkpoint(path: Path, prefix: str = "") -> Iterator[dict[str, Any]]:
    """Open a checkpoint by :func:`open_whole`; blame it for any error in the ``with`` block, too.

    It becomes a ``UserError`` that begins with ``prefix``, such as the option that named the path.
    """
    try:
        yield open_whole(path)
    except Exception as error:  # its type in torch and fairseq depends on the file
        raise UserError(f"{prefix} {path}: {describe_damage(error)}".lstrip()) from error


def allow_safe_classes() -> None:
    """Let torch load ``Namespace``, and numpy's numbers, which metrics may be."""
    scalar: Any = np.float64(0).__reduce__()[0]  # numpy's function that unpickling calls
    # numpy 1 and 2 name its module differently.
    names = [(scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    types = [type(np.dtype(number)) for number in (np.float64, np.float32, np.int64)]
    torch.serialization.add_safe_globals([Namespace, np.dtype, *types, *names])


def check_settings(state: Mapping[str, object]) -> None:
    """Refuse settings that would be run as code, or that fairseq could not read.

    They are in ``cfg``, in older checkpoints in ``args``.
    """
    cfg, args = state.get("cfg"), state.get("args")
    for name, value, types in (("settings", cfg, (dict, Namespace)), ("args", args, (Namespace,))):
        if value is not None and type(value) not in types:
            raise UserError(f"its {name} are not settings, but {quote(value)}")
    for place, _, key, value in _iterate_settings(state):
        label = shortened(f"{place}.{key}".removeprefix("cfg.").lstrip("."))
        if type(value) not in (*_PLAIN, *_HOLDERS):
            raise UserError(
                f"its setting {label} is of the type {type(value).__name__}; settings are text, "
                "numbers, true or false, none, and lists and mappings of these"
            )
        is_program = key in ("_target_", "post_save_script") and value
        if is_program or (isinstance(value, str) and "${" in value):
            raise UserError(
                f"its setting {label} would be run as code: {quote(value)}; use a file from a "
                "source you trust"
            )


def forget_files(state: Mapping[str, object]) -> None:
    """Set the settings that name files to None.

    Commands of this package do not need the files: the checkpoint has what was read from them.
    """
    for _, holder, key, value in _iterate_settings(state):
        if key in _OPENED and isinstance(value, str):
            holder[key] = None


def is_literal(text: str) -> bool:
    """Check whether Python evaluates a text to numbers, strings, and lists and mappings of them.

    Besides the literals of ``ast.literal_eval``, sums and repetitions of lists are allowed, which
    fairseq's architectures have: ``[(512, 3)] * 4 + [(256, 1)]``. So is an empty text.
    """
    if len(text) > _MAX_EVALUATED:
        return False
    try:
        return _count_parts(ast.parse(text.strip() or "None", mode="eval").body) <= _MAX_EVALUATED
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return False


def _count_parts(node: ast.expr) -> int:
    """Count the characters or items of the value of a literal, a sum or a product.

    Raises:
        ValueError or TypeError: the expression is something else.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _count_parts(node.left) + _count_parts(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [ast.literal_eval(factor) for factor in (node.left, node.right)]
        # A negative count would cancel that of the other term of a sum.
        return prod(abs(factor) if isinstance(factor, int) else len(factor) for factor in factors)
    value = ast.literal_eval(node)
    return len(value) if isinstance(value, Sized) else 1


def _iterate_settings(state: Mapping[str, object]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each setting: the path of its section (``cfg.model``), the section, key and value."""
    to_visit: list[tuple[str, Any, int]] = [("", {x: state.get(x) for x in ("args", "cfg")}, 0)]
    count = 0
    while to_visit:
        place, section, depth = to_visit.pop()
        if isinstance(section, (list, tuple)):
            section = dict(enumerate(section))  # a copy: items of lists are only read
        if not isinstance(section, (dict, Namespace)):
            continue
        holder = vars(section) if isinstance(section, Namespace) else section
        count += len(holder)
        if count > _MAX_SETTINGS:
            raise UserError(f"it has more than {_MAX_SETTINGS:,} settings")
        if depth > _MAX_DEPTH:
            raise UserError(f"its settings {shortened(place)} are nested deeper than {_MAX_DEPTH}")
        for key, value in holder.items():  # callers may replace values
            yield place, holder, key, value
            to_visit.append((f"{place}.{key}".lstrip("."), value, depth + 1))


def quote(value: Any) -> str:
    """Quote a text or a number for a message; of any other value name only the type."""
    if type(value) in (str, int, float, bool):
        return repr(shortened(" ".join(str(value).split())))
    return "None" if value is None else f"something of the type {type(value).__name__}"
