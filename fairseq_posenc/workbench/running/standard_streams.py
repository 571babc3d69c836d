"""Standard streams that survive the end of their readers.

SIGPIPE's default action, which ends a program when the reader of its output goes, would also end
the trainings of commands that are piped into ``head`` or ``less``.
"""

import io
import os
import sys
from typing import Any

from fairseq_posenc.errors import RunError

_closed: set[int] = set()  # descriptors of standard streams whose reader has gone


def outlive_readers() -> None:
    """Let the standard streams outlive their readers, and escape text that they cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            new = io.TextIOWrapper(
                io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, new)


def has_reader() -> bool:
    """Check whether standard output may still have a reader."""
    return sys.__stdout__ is None or sys.__stdout__.fileno() not in _closed


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
