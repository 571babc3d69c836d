"""Mistakes of the user, each reported in one line."""

import re
from collections.abc import Iterator

_LONGEST = 200  # characters of somebody else's message, or of a user's text
_LONGEST_MESSAGE = 20_000
_LONG_WORD = re.compile(r"\S{4000,}")
# Characters that end or turn a line, or that a terminal takes for a command.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """Wrong input: the message says what is wrong, where, and what to do.

    A word of the input that is longer than any file's name is shortened, and so is a message longer
    than a list of all parameters. Control characters are written out: a message quotes files and
    checkpoints of strangers, and must not command the terminal.
    """

    def __init__(self, message: str) -> None:
        message = _LONG_WORD.sub(lambda word: shortened(word[0]), message)
        if len(message) > _LONGEST_MESSAGE:
            message = f"{shortened(message)} ... {message[-_LONGEST:]}"
        super().__init__(printable_lines(message))


class RunError(UserError):
    """A program failed in its run, whatever the cause: printed as a :class:`UserError` is.

    The exit code is 1, not 2.
    """


def printable(text: str) -> str:
    """Write control characters out by their codes, so that a text stays in its line."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Write control characters out, but for the ends of lines."""
    return "\n".join(map(printable, text.split("\n")))


def shortened(text: str) -> str:
    """Shorten a text that messages quote to its beginning, if it is long."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 50]}... ({len(text):,} characters)"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from or in, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
