"""Defines the errors that commands report in one line, and helps to write their messages."""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

_MAX_QUOTED = 200  # characters of a quoted text
_MAX_MESSAGE = 20_000  # characters; more than a list of all parameters of a model
_LONG_WORD = re.compile(r"\S{4000,}")  # about the longest path on Linux
# Characters that end a line, reverse its direction, control a terminal, or cannot be encoded.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(ValueError):
    """Wrong input: the message says what is wrong, where, and what to do.

    >>> from fairseq_posenc.specs import parse
    >>> parse("rope+rope")
    Traceback (most recent call last):
    fairseq_posenc.errors.UserError: rope+rope: rope is named twice

    Messages quote files from strangers. Very long words and messages are therefore shortened, and
    control characters replaced by escapes, so that they cannot control the terminal.
    """

    def __init__(self, message: str) -> None:
        message = _LONG_WORD.sub(lambda word: shortened(word[0]), message)
        if len(message) > _MAX_MESSAGE:  # the end often says what to do
            message = f"{shortened(message)} ... {message[-_MAX_QUOTED:]}"
        super().__init__(printable_lines(message))


class RunError(UserError):
    """A started program failed: reported as a :class:`UserError`, but with exit code 1, not 2."""


def printable(text: str) -> str:
    """Replace control characters by escapes, so that a text stays on its line."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Replace control characters by escapes, except the ends of lines."""
    return "\n".join(map(printable, text.split("\n")))


def shortened(text: str) -> str:
    """Shorten a quoted text to its beginning if it is long."""
    if len(text) <= _MAX_QUOTED:
        return text
    return f"{text[: _MAX_QUOTED - 50]}... ({len(text):,} characters)"  # 50 for these words


def counted(number: int, plural: str) -> str:
    """Write a number of things, by their plural: ``1 token``, ``1,200 tokens``."""
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def how_to_install(extra: str) -> str:
    """Say how to install an extra of this package; the package is not on an index yet."""
    # The others also install fairseq, which must be built with the torch that is installed.
    how = "" if extra in ("hf", "submitit") else ", without build isolation: see docs/start.md"
    return f"pip install '.[{extra}]' in a checkout of fairseq-posenc{how}"


def suggest(name: str, known: Iterable[str]) -> str:
    """Ask whether similar names were meant, as in ``did you mean rope? ``; "" without any."""
    near = get_close_matches(name.lower(), [*known], n=2)
    return f"did you mean {' or '.join(near)}? " if near else ""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its cause or context, the cause or context of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__  # also if `from None` hides the context
