"""Turn an exception into a one-line message for the user, and into an exit code."""

import errno
import os
import pickle
import re
import traceback
from types import FrameType

from fairseq_posenc.errors import RunError, UserError, chain, printable_lines, shortened

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
# Libraries in C++ and Rust, as torch, safetensors and tokenizers, say it in words alone.
_WORDS = {code: os.strerror(code) for code in (*DISK_FULL, *_TOO_MANY_FILES)}
_RANK = re.compile(r"^fairseq_posenc\.errors\.(?:User|Run)Error: (.+)$", re.MULTILINE)
_MISFIT = re.compile(r"Error\(s\) in loading state_dict for .*:\s*(.+)")
# What fairseq, torch and omegaconf raise where a setting has another type or value than it may.
UNBUILDABLE = (
    *(TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError),
    *(SyntaxError, NameError, NotImplementedError, RecursionError),
)
_MISSING = "Model file not found: "
_OTHER_PARAMETERS = "loaded state dict "  # how messages of torch's optimizers begin
_BARE = "Neither args nor cfg exist"
# Modules that the extra `fairseq` installs; the library works without them.
_EXTRA = {
    *("argcomplete", "fairseq", "fairseq_cli", "hydra", "markdown", "omegaconf", "regex"),
    *("sacrebleu", "scipy", "sentencepiece", "tiktoken", "tqdm", "zstandard"),
}
# The functions of fairseq that read checkpoints, and their local variable with the path.
_OPENS = "load_checkpoint_to_cpu"  # any error in it, or below it, is the file's fault
_BUILDS = "load_model_ensemble_and_task"  # sets up the task of a checkpoint, and its model
_CHECKPOINTS = "fairseq/checkpoint_utils.py"
_READERS = {
    (_CHECKPOINTS, _OPENS): "path",
    (_CHECKPOINTS, _BUILDS): "filename",
    ("fairseq/trainer.py", "load_checkpoint"): "filename",
}


def find_message(error: BaseException) -> str | None:
    """Find the message for a user's mistake anywhere in an exception's chain, else None.

    fairseq wraps an error in loading a checkpoint in a general exception: its cause is in the
    chain. Control characters of what it quotes are written out.
    """
    links = list(chain(error))
    messages = [_name_file(link, _get_user_message(link)) for link in links]
    # For a checkpoint, the first error says most.
    messages += [_describe_unreadable(link) for link in reversed(links)]
    found = next((message for message in messages if message), None)
    return found and printable_lines(found)


def choose_exit_code(error: BaseException) -> int:
    """Choose the exit code of a command that reported an error in one line.

    2 is a mistake that the user can mend before the run, 1 a failed run or a full disk.
    """
    cause = next((link for link in chain(error) if _get_user_message(link)), error)
    return 1 if isinstance(cause, RunError) or _is_no_room(cause) else 2


def find_full_disk(error: BaseException) -> int:
    """Find the number of the system's error for a full disk in a chain; 0 if it has none."""
    return next((_find_code(link) for link in chain(error) if _is_no_room(link)), 0)


def describe_damage(error: BaseException) -> str:
    """Describe what is wrong with a checkpoint, from the error that reading it raised."""
    if message := next(filter(None, map(_get_user_message, chain(error))), None):
        return message
    for link in chain(error):
        if _runs_code(link):
            reason = str(link.__context__ or link).strip().splitlines()[0]
            return (
                f"checkpoint refused, because loading it could run code: {reason.rstrip('. ')}. "
                "Only tensors and plain settings are loaded; use a file from a source you trust."
            )
    if isinstance(error, OSError) and error.filename:
        return f"cannot be read: {error.strerror}"
    reason = shortened(" ".join(str(error).partition(". ")[0].split()))
    kind = type(error).__name__
    return f"not a whole checkpoint of fairseq ({kind}{': ' if reason else ''}{reason})"


def _get_user_message(error: BaseException) -> str | None:
    """Get the message of an error that is a user's mistake by its type."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in _EXTRA:
        return f"needs {error.name}: pip install 'fairseq-posenc[fairseq]'"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{shortened(str(error.filename))}: the name is too long for a file"
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED and error.filename:
        return f"{error.filename}: {error.strerror}; change that, or name another place"
    if _is_no_room(error):
        name = getattr(error, "filename", None) or "a file"
        return (
            f"{name} could not be written ({os.strerror(_find_code(error))}); what was written "
            "before, as earlier checkpoints, is whole. Make room and start the same command again."
        )
    if _find_code(error) in _TOO_MANY_FILES:
        return (
            f"{getattr(error, 'filename', None) or 'a file'} could not be opened: "
            f"{os.strerror(_find_code(error))}; raise the limit with `ulimit -n 1024`"
        )
    # torch passes on an error of another process as text.
    of_rank = _RANK.search(str(error)) if "Process" in type(error).__name__ else None
    return of_rank[1] if of_rank else None


def _is_no_room(error: BaseException) -> bool:
    return _find_code(error) in DISK_FULL


def _find_code(error: BaseException) -> int:
    """Find the number of a full disk or of too many files in an error; 0 if it has none."""
    if isinstance(error, OSError):
        return error.errno or 0
    text = str(error)
    return next((code for code, words in _WORDS.items() if words in text), 0)


def _runs_code(error: BaseException) -> bool:
    return isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error)


def _name_file(error: BaseException, message: str | None) -> str | None:
    """Put the checkpoint before a mistake that fairseq found while it built the model of it."""
    for frame, _ in traceback.walk_tb(error.__traceback__ if message else None):
        if _locate(frame) == (_CHECKPOINTS, _BUILDS):
            path = str(frame.f_locals.get("filename"))
            return message if path in str(message) else f"{path}: {message}"
    return message


def _describe_unreadable(error: BaseException) -> str | None:
    """Describe the fault of the checkpoint that fairseq was reading, None if it was not."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(frames):  # what opens a file is called by what builds its model
        place = _locate(frame)
        if place in _READERS:
            path = frame.f_locals.get(_READERS[place])
            here = frame is frames[-1]
            wrong = _describe_fault(error, opening=place[1] == _OPENS, here=here)
            if wrong is None and place[1] == _BUILDS and _builds_model(frames):
                wrong = _describe_unbuildable(error)
            if wrong:
                return f"{path}: {wrong}"
    return describe_damage(error) if _runs_code(error) else None


def _describe_fault(error: BaseException, opening: bool, here: bool) -> str | None:
    """Describe the fault of a file that an error shows, None if the file may be innocent.

    Args:
        error: raised in a function of ``_READERS`` or below it.
        opening: whether that function does nothing but open the file.
        here: whether that function itself raised the error.
    """
    text = str(error)
    if text.startswith(_MISSING):
        return "no such file"
    if misfit := _MISFIT.match(text):
        return f"its parameters are not the model's: {misfit[1]}"
    if text.startswith(_OTHER_PARAMETERS):
        return (
            "its optimizer's state is for other parameters than the model's: give the options of "
            "its training, or train on with --reset-optimizer"
        )
    if here and isinstance(error, AssertionError) and "--reset-optimizer" in text:
        return shortened(text)  # another optimizer or criterion
    lacks = isinstance(error, (KeyError, TypeError, AttributeError)) or text.startswith(_BARE)
    return describe_damage(error) if opening or (here and lacks) else None


def _builds_model(frames: list[FrameType]) -> bool:
    """Check whether fairseq was setting up a task or building a model of settings."""
    return not {
        ("tasks/__init__.py", "setup_task"),
        ("models/__init__.py", "build_model"),
    }.isdisjoint(map(_locate, frames))


def _describe_unbuildable(error: BaseException) -> str | None:
    """Describe an error in building the task or model of a checkpoint from its settings."""
    if not isinstance(error, UNBUILDABLE):
        return None
    return f"no model can be built of its settings: {quote_error(error)}"


def quote_error(error: BaseException) -> str:
    """Quote an error whose text alone may say nothing, as the name that a KeyError is about."""
    reason = shortened(" ".join(str(error).split()))
    return f"{type(error).__name__}{': ' if reason else ''}{reason}"


def _locate(frame: FrameType) -> tuple[str, str]:
    """Name a frame's file, with its folder, and its function."""
    return "/".join(frame.f_code.co_filename.split(os.sep)[-2:]), frame.f_code.co_name
