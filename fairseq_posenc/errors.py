"""Mistakes of the user, each reported in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LONGEST = 200  # characters of somebody else's message, or of a user's text
_LONGEST_MESSAGE = 20_000
_LONG_WORD = re.compile(r"\S{4000,}")


class UserError(ValueError):
    """Wrong input: the message says what is wrong, where, and what to do.

    A word of the input that is longer than any file's name is quoted in part, and what is longer
    than a list of all parameters is told without its middle.
    """

    def __init__(self, message: str) -> None:
        message = _LONG_WORD.sub(lambda word: shortened(word[0]), message)
        if len(message) > _LONGEST_MESSAGE:
            message = f"{shortened(message)} ... {message[-_LONGEST:]}"
        super().__init__(message)


class RunError(UserError):
    """A run of a program failed, whatever was wrong: told as a mistake is, but not taken for one.

    Commands end with 1 for it.
    """


def shortened(text: str) -> str:
    """Return the beginning of a text, as messages quote it; all of it if it is not long."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 50]}... ({len(text):,} characters)"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, what it was raised from or in, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
