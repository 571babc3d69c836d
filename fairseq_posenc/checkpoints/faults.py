"""Finds short messages for exceptions, above all for errors in reading a checkpoint."""

import pickle
import re

from fairseq_posenc.error_messages import describe_mistake
from fairseq_posenc.errors import chain, printable_lines, shortened

# What fairseq, torch and omegaconf raise for a wrong setting while a model is built from it.
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
# How messages of fairseq and torch begin. Of torch's list of missing names, the first is quoted.
_NO_FILE = "Model file not found: "
_OTHER_OPTIMIZER = "loaded state dict "  # of torch's optimizers
_OTHER_WEIGHTS = re.compile(r"Error\(s\) in loading state_dict for .*:\s*(size .+|[^,\n]+)")


def find_message(error: BaseException) -> str | None:
    """Find the message for a user's mistake in the chain of an exception that ended a command.

    fairseq wraps errors of loading a checkpoint in a general exception, so the chain is searched.
    """
    links = list(chain(error))
    # A mistake that wraps another one adds its place, so the outermost comes first; of the other
    # errors, the innermost is the most specific.
    messages = [*map(describe_mistake, links), *map(_describe_misfit, reversed(links))]
    message = next(filter(None, messages), None)
    return printable_lines(message) if message else None


def describe_damage(error: BaseException) -> str:
    """Describe the fault of a checkpoint by the error that reading it raised."""
    for link in chain(error):
        if message := describe_mistake(link):  # None: not a known mistake
            return message
    for link in filter(_is_code_refusal, chain(error)):
        # torch's own text is long; the error of its unpickler, which it handled, is the reason.
        reason = (str(link.__context__ or "").strip() or str(link)).splitlines()[0].rstrip(". ")
        if reason.startswith("Unsupported operand"):  # no pickle: text, for example
            return "not a checkpoint: torch.save did not write it; name a .pt file"
        return (
            f"checkpoint refused, because loading it could run code: {reason}. "
            "Only tensors and plain settings are loaded; use a file from a source you trust."
        )
    if isinstance(error, OSError) and error.filename:
        return f"cannot be read: {error.strerror}"
    return f"not a complete checkpoint of fairseq ({quote_error(error, first_sentence=True)})"


def _is_code_refusal(error: BaseException) -> bool:
    """Check whether torch refused a file because it would run code."""
    return isinstance(error, pickle.UnpicklingError) and "Weights only load failed" in str(error)


def _describe_misfit(error: BaseException) -> str | None:
    """Describe a checkpoint that is absent, or does not fit, by an error of fairseq or torch."""
    text = str(error)
    if text.startswith(_NO_FILE):
        return f"{text.removeprefix(_NO_FILE)}: no such file"
    if misfit := _OTHER_WEIGHTS.match(text):
        return f"the checkpoint's parameters are not the model's: {misfit[1]}"
    if text.startswith(_OTHER_OPTIMIZER):
        return (
            "the checkpoint's optimizer state is for other parameters than the model's: give the "
            "options of its training, or continue training with --reset-optimizer"
        )
    # torch also refuses files that fairseq opens elsewhere, and whose path is not known.
    return describe_damage(error) if _is_code_refusal(error) else None


def quote_error(error: BaseException, first_sentence: bool = False) -> str:
    """Quote an error with its class: the text of ``KeyError: 'cfg'`` alone would not say much."""
    text = str(error).partition(". ")[0] if first_sentence else str(error)
    reason = shortened(" ".join(text.split()))
    return f"{type(error).__name__}{': ' if reason else ''}{reason}"
