"""Finds one-line messages for exceptions, above all for those of reading a checkpoint.

:func:`find_message` explains an exception that ended a command, :func:`describe_damage` one that
was raised while this package read a checkpoint. fairseq's and torch's exceptions rarely name the
file. So the last checkpoint that fairseq opened is noted (:func:`note_opened`). Functions in a
traceback are named by their file and its folder, as :func:`locate` does.
"""

import os
import pickle
import re
import traceback
from types import FrameType

from fairseq_posenc.error_messages import describe_mistake
from fairseq_posenc.errors import chain, printable_lines, shortened

# Exceptions of fairseq, torch and omegaconf for a setting of a wrong type or value.
BUILD_ERRORS = (
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    AssertionError,
    ArithmeticError,
    SyntaxError,  # fairseq evaluates some settings
    NameError,
    NotImplementedError,  # settings that name what fairseq does not implement
    RecursionError,  # settings that contain each other
)
# How messages of fairseq and torch begin.
_NO_FILE = "Model file not found: "
_NO_SETTINGS = "Neither args nor cfg exist"
_OTHER_OPTIMIZER = "loaded state dict "  # of torch's optimizers
_OTHER_WEIGHTS = re.compile(r"Error\(s\) in loading state_dict for .*:\s*(.+)")
# Functions of fairseq, named as `locate` does.
_OPEN = ("fairseq/checkpoint_utils.py", "load_checkpoint_to_cpu")
_LOAD_MODEL = ("fairseq/checkpoint_utils.py", "load_model_ensemble_and_task")
_RESUME = ("fairseq/trainer.py", "load_checkpoint")
_READERS = {_OPEN, _LOAD_MODEL, _RESUME}  # the functions of fairseq that read a checkpoint
# The functions that set up a task, or build a model, from settings.
_BUILDERS = {("tasks/__init__.py", "setup_task"), ("models/__init__.py", "build_model")}


_opened = "a checkpoint"  # the last one that fairseq opened


def note_opened(path: str) -> None:
    """Note the path of a checkpoint that fairseq opens, for messages."""
    global _opened
    _opened = path


def find_message(error: BaseException) -> str | None:
    """Find the message for a user's mistake anywhere in an exception's chain, else None.

    fairseq wraps errors of loading a checkpoint in a general exception, so the chain is searched.
    """
    links = list(chain(error))
    # A mistake that wraps another one adds its place; so the outermost comes first.
    messages = [_name_file(link, describe_mistake(link)) for link in links]
    # Of the other errors, the innermost is the most specific.
    messages += [_describe_unreadable(link) for link in reversed(links)]
    message = next((text for text in messages if text), None)
    return None if message is None else printable_lines(message)


def describe_damage(error: BaseException) -> str:
    """Describe the fault of a checkpoint by the error that reading it raised."""
    for link in chain(error):
        if message := describe_mistake(link):
            return message
    for link in filter(_runs_code, chain(error)):
        # torch's own text is long; the error of its unpickler, which it handled, is the reason.
        reason = (str(link.__context__ or "").strip() or str(link)).splitlines()[0].rstrip(". ")
        if reason.startswith("Unsupported operand"):  # of a text, or of another program
            return f"checkpoint refused, because torch.save did not write it: {reason}"
        return (
            f"checkpoint refused, because loading it could run code: {reason}. "
            "Only tensors and plain settings are loaded; use a file from a source you trust."
        )
    if isinstance(error, OSError) and error.filename:
        return f"cannot be read: {error.strerror}"
    return f"not a complete checkpoint of fairseq ({quote_error(error, first_sentence=True)})"


def _runs_code(error: BaseException) -> bool:
    """Check whether torch refused a file because it would run code."""
    return isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error)


def _name_file(error: BaseException, message: str | None) -> str | None:
    """Put the checkpoint's path before a mistake that was found while building its model."""
    if message is None:
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if locate(frame) == _LOAD_MODEL:
            return message if _opened in message else f"{_opened}: {message}"
    return message


def _describe_unreadable(error: BaseException) -> str | None:
    """Describe what is wrong with a checkpoint that fairseq was reading; None if nothing is."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return None  # a good checkpoint can be too large for the memory
    if str(error).startswith(_NO_FILE):
        return f"{str(error).removeprefix(_NO_FILE)}: no such file"
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    functions = [locate(frame) for frame in frames]
    for depth in reversed(range(len(frames))):  # innermost first: _LOAD_MODEL calls _OPEN
        reader = functions[depth]
        if reader not in _READERS:
            continue
        if fault := _describe_fault(error, reader, called=functions[depth + 1 :]):
            return f"{_opened}: {fault}"
    # torch also refuses files that fairseq opens elsewhere, and whose path is not known.
    return describe_damage(error) if _runs_code(error) else None


def _describe_fault(
    error: BaseException, reader: tuple[str, str], called: list[tuple[str, str]]
) -> str | None:
    """Describe the fault of a file by an error; None if the error may have another cause.

    Args:
        error: the error.
        reader: the function of ``_READERS`` that read the file.
        called: the functions that it called, down to the one that raised the error.
    """
    raised_by_reader = not called
    text = str(error)
    if misfit := _OTHER_WEIGHTS.match(text):
        return f"its parameters are not the model's: {misfit[1]}"
    if text.startswith(_OTHER_OPTIMIZER):
        return (
            "its optimizer's state is for other parameters than the model's: give the options of "
            "its training, or train on with --reset-optimizer"
        )
    if raised_by_reader and isinstance(error, AssertionError) and "--reset-optimizer" in text:
        return shortened(text)  # another optimizer or criterion
    if reader == _OPEN:
        return describe_damage(error)
    # Once the file is open, it is at fault if the reader itself finds an entry absent or None.
    lacks_entry = isinstance(error, (KeyError, TypeError, AttributeError))
    if raised_by_reader and (lacks_entry or text.startswith(_NO_SETTINGS)):
        return describe_damage(error)
    is_building = reader == _LOAD_MODEL and not _BUILDERS.isdisjoint(called)
    if is_building and isinstance(error, BUILD_ERRORS):
        return f"no model can be built of its settings: {quote_error(error)}"
    return None


def quote_error(error: BaseException, first_sentence: bool = False) -> str:
    """Quote an error with its class: the text of ``KeyError: 'cfg'`` alone would not say much."""
    text = str(error).partition(". ")[0] if first_sentence else str(error)
    reason = shortened(" ".join(text.split()))
    return f"{type(error).__name__}{': ' if reason else ''}{reason}"


def locate(frame: FrameType) -> tuple[str, str]:
    """Name the function of a frame: its file, with the folder alone, and its name."""
    return "/".join(frame.f_code.co_filename.split(os.sep)[-2:]), frame.f_code.co_name
