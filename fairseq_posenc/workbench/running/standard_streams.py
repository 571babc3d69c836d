"""Standard output and standard error, which outlive their readers."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from fairseq_posenc.errors import RunError

_closed: set[int] = set()  # standard streams that nobody reads any more


def outlive_readers() -> None:
    """Let the standard streams of this process outlive their readers."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = _Output(stream.fileno(), "w", closefd=False)
            new = io.TextIOWrapper(
                io.BufferedWriter(raw),
                encoding=stream.encoding,
                errors=_choose_error_handler(stream),
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, new)


def has_reader() -> bool:
    """Whether the standard output may still have a reader."""
    return sys.__stdout__ is None or sys.__stdout__.fileno() not in _closed


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
