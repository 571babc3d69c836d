"""Standard output and standard error, which outlive their readers and command no terminal."""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

from fairseq_posenc.errors import RunError

# Control characters but for tabs and ends of lines; on standard error also what bars move with.
_COMMANDS = {
    "stdout": re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]"),
    "stderr": re.compile("[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\\[A)"),
}
_closed: set[int] = set()  # standard streams that nobody reads any more


def outlive_readers() -> None:
    """Let the standard streams outlive their readers, and write control characters out.

    Names and texts of files and checkpoints may hold sequences that a terminal obeys.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Output(stream.fileno(), "w", closefd=False)
            new = _PrintableText(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=_choose_error_handler(stream),
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            new.commands = _COMMANDS[name]
            setattr(sys, name, new)


def has_reader() -> bool:
    """Whether the standard output may still have a reader."""
    return sys.__stdout__ is None or sys.__stdout__.fileno() not in _closed


class _PrintableText(io.TextIOWrapper):
    """A text stream that writes control characters as JSON does, which stays JSON so."""

    commands: re.Pattern[str]

    def write(self, text: str, /) -> int:
        return super().write(self.commands.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


class _Output(io.FileIO):
    """A standard stream that drops what is written once it cannot be written any more.

    The reader of a pipe that closes it has enough; all else, as a full disk, is an error once.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # for programs that are started later as well
            os.close(nowhere)
            _closed.add(self.fileno())
            if not isinstance(error, BrokenPipeError):
                name = "standard output" if self.fileno() == 1 else "standard error"
                raise RunError(f"{name} could not be written: {error.strerror}") from None
            return len(data)


def _choose_error_handler(stream: Any) -> str:
    """Choose how to write text that cannot be encoded, as file names that are not UTF-8."""
    is_utf8 = stream.encoding.lower().startswith("utf")
    return "backslashreplace" if is_utf8 and stream.errors == "strict" else str(stream.errors)
