"""Standard streams that survive the end of their readers, and print control characters escaped.

SIGPIPE's default action, which ends a program when the reader of its output goes, would also end
the trainings of commands that are piped into ``head`` or ``less``.
"""

import io
import os
import re
import sys
from typing import Any

from fairseq_posenc.errors import RunError

# Control characters except tabs and ends of lines; standard error keeps those that move a bar.
_CONTROLS = {
    "stdout": re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]"),
    "stderr": re.compile("[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\\[A)"),
}
_closed: set[int] = set()  # descriptors of standard streams whose reader has gone


def outlive_readers() -> None:
    """Let the standard streams outlive their readers, and escape control characters in them.

    Names and texts in files and checkpoints may contain sequences that control a terminal.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Output(stream.fileno(), "w", closefd=False)
            # Text that cannot be encoded, such as a file name that is not UTF-8, is escaped.
            is_strict_utf8 = stream.encoding.lower().startswith("utf") and stream.errors == "strict"
            new = _PrintableText(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors="backslashreplace" if is_strict_utf8 else str(stream.errors),
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            new.controls = _CONTROLS[name]
            setattr(sys, name, new)


def has_reader() -> bool:
    """Check whether standard output may still have a reader."""
    return sys.__stdout__ is None or sys.__stdout__.fileno() not in _closed


class _PrintableText(io.TextIOWrapper):
    """A text stream that escapes control characters as JSON does, so that JSON stays valid."""

    controls: re.Pattern[str]  # the characters to escape

    def write(self, text: str, /) -> int:
        return super().write(self.controls.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


class _Output(io.FileIO):
    """A standard stream that discards its output after the first write that fails.

    That the reader closes a pipe is no error; any other reason, such as a full disk, is reported.
    """

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # also for programs that are started later
            os.close(null)
            _closed.add(self.fileno())
            if not isinstance(error, BrokenPipeError):
                name = "standard output" if self.fileno() == 1 else "standard error"
                raise RunError(f"{name} could not be written: {error.strerror}") from None
            return len(data)
