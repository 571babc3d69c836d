"""Describes mistakes of users and limits of machines, and chooses exit codes."""

import errno
import os
import re

from fairseq_posenc.errors import RunError, UserError, chain, how_to_install, shortened

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # EFBIG: beyond the user's file size limit
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
# Libraries in C++ and Rust (torch, safetensors, tokenizers) raise errors with these texts, but
# without an errno.
_ERRNO_TEXTS = {code: os.strerror(code) for code in (*DISK_FULL, *_TOO_MANY_FILES)}
# Our error in the stack trace of a rank, a process of distributed training, up to an empty line.
_ERROR_OF_RANK = re.compile(
    r"^fairseq_posenc\.errors\.(?P<kind>User|Run)Error: (?P<message>.+(\n.+)*)", re.MULTILINE
)
# Modules that messages call fairseq, and others that the extra of that name installs.
_OF_FAIRSEQ = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}
_WITH_FAIRSEQ = {"argcomplete", "markdown", "regex", "sacrebleu", "scipy", "sentencepiece", "tqdm"}
# Modules that may be missing, by the extra in pyproject.toml that installs them.
_MODULES = {
    "fairseq": _OF_FAIRSEQ | _WITH_FAIRSEQ,
    "plot": {"matplotlib", "sklearn"},
    "hf": {"huggingface_hub", "transformers"},
    "export": {"google"},
    "ctranslate2": {"ctranslate2"},
    "submitit": {"submitit"},
}
_PACKAGES = dict.fromkeys(_OF_FAIRSEQ, "fairseq") | {"google": "protobuf"}  # by module


def choose_exit_code(error: BaseException) -> int:
    """Choose the exit code of a command that reported an error in one line.

    2 is a mistake that the user can correct before the run, 1 a failed run or a full disk.
    """
    cause = next((link for link in chain(error) if describe_mistake(link)), error)
    rank_error = _match_rank(cause)
    is_run = isinstance(cause, RunError) or (rank_error and rank_error["kind"] == "Run")
    return 1 if is_run or _find_errno(cause) in DISK_FULL else 2


def find_full_disk(error: BaseException) -> int:
    """Find the errno of a full disk in an exception's chain; 0 if it has none."""
    codes = (_find_errno(link) for link in chain(error))
    return next((code for code in codes if code in DISK_FULL), 0)


def describe_mistake(error: BaseException) -> str | None:
    """Describe a user's mistake or a machine's limit in a line; None for any other error.

    It may have more lines if it comes from a rank, or is a failed run's (:class:`RunError`).
    """
    if isinstance(error, UserError):
        return str(error)
    module = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    for extra, modules in _MODULES.items():
        if module in modules:
            return f"needs {_PACKAGES.get(module, module)}: {how_to_install(extra)}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{shortened(str(error.filename))}: the name is too long for a file"
    if isinstance(error, FileNotFoundError) and error.errno and not error.filename:
        return "the working folder has been deleted; change to another one"  # os.getcwd()
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED and error.filename:
        return f"{error.filename}: {error.strerror}; allow access, or name another place"
    code = _find_errno(error)
    file = getattr(error, "filename", None) or "a file"
    if code in DISK_FULL:
        return (
            f"{file} could not be written ({os.strerror(code)}); files written before, such as "
            "earlier checkpoints, are complete. Make room and start the same command again."
        )
    if code in _TOO_MANY_FILES:
        remedy = "close other programs" if code == errno.ENFILE else "run `ulimit -n 4096` first"
        return f"{file} could not be opened: {os.strerror(code)}; {remedy}"
    rank_error = _match_rank(error)
    return rank_error["message"] if rank_error else None


def _match_rank(error: BaseException) -> re.Match[str] | None:
    """Find an error of ours in torch's ProcessRaisedException, whose text is a stack trace."""
    is_of_rank = type(error).__name__ == "ProcessRaisedException"  # importing torch takes seconds
    return _ERROR_OF_RANK.search(str(error)) if is_of_rank else None


def _find_errno(error: BaseException) -> int:
    """Find the errno of an error, or the one of `_ERRNO_TEXTS` that its text has; 0 for none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    text = str(error)
    return next((code for code, words in _ERRNO_TEXTS.items() if words in text), 0)
