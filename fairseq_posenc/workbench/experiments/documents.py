"""Texts that are on every machine: the documentation inside the Python installation."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What others installed would make the text differ from machine to machine; tests hardly have any
# documentation.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_TOPICS = Path("pydoc_data", "topics.py")


class Document(NamedTuple):
    """A piece of text that belongs together."""

    name: str  # where it is from
    paragraphs: list[str]  # its paragraphs, each without line breaks

    @property
    def words(self) -> int:
        """The number of words, as separated by spaces."""
        return sum(len(paragraph.split()) for paragraph in self.paragraphs)


def split_paragraphs(text: str) -> list[str]:
    """Cut a text at its empty lines; join the lines of each paragraph."""
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        if words := line.split():
            paragraphs[-1].extend(words)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [" ".join(words) for words in paragraphs if words]


def python_library() -> Path:
    """Find the folder of the standard library's source files."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_documents(library: Path) -> Iterator[Document]:
    """Yield the language reference's topics, then the docstrings of each source file.

    The files are read, not imported, so that nothing in them runs.
    """
    yield from _topics(library / _TOPICS)
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if _LEFT_OUT.isdisjoint(relative.parts) and relative != _TOPICS:
            document = Document(relative.as_posix(), _docstrings(path))
            if document.paragraphs:
                yield document


def _parse(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes such as "\d" in other people's strings
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the library holds files that are broken on purpose
        return ast.Module(body=[], type_ignores=[])


def _docstrings(path: Path) -> list[str]:
    paragraphs: list[str] = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraphs += split_paragraphs(ast.get_docstring(node) or "")
    return paragraphs


def _topics(path: Path) -> Iterator[Document]:
    """Yield the entries of the dictionary of texts that ``help()`` shows."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    yield Document(f"topic {key.value!r}", split_paragraphs(str(value.value)))
