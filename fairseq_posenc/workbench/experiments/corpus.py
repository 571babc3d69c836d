"""Reads the text of an experiment: checks it, and splits it by document for validation.

The text is the user's, or one that every machine has: the documentation in Python's library.
"""

import ast
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics  # the language reference, which ``help()`` shows

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.tokens.files import decode_text, read_bytes

# With fewer, the validation text (5 %) would have fewer than 250 words: too few for a perplexity.
LEAST_WORDS = 5_000
VALIDATION_SHARE = 0.05
SPLIT_SEED = 1  # fixed, so that all models and seeds are validated on the same text
_DOCUMENT_WORDS = 500  # a document ends with the paragraph that reaches this length
_PARAGRAPH_WORDS = 200  # longest paragraph
# Installed packages differ between machines, and tests have hardly any documentation.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}

# Paragraphs, without line breaks, that are not split between training and validation.
Document = list[str]


def count_words(document: Document) -> int:
    """Count the words, separated by spaces."""
    return sum(len(paragraph.split()) for paragraph in document)


def read_text(path: Path) -> str:
    """Read the content of a UTF-8 text file, which may be compressed."""
    content = read_bytes(path, f"--text {path}")
    if not content.strip():
        raise UserError(f"--text {path}: the file is empty; name a file with text in it")
    return decode_text(content, f"--text {path}", {b"\0": "a NUL byte, so this is not a text file"})


def split_into_documents(text: str) -> list[Document]:
    """Split a text into documents of whole paragraphs, or of lines if it has no empty line."""
    paragraphs = split_paragraphs(text)
    if len(paragraphs) == 1:
        paragraphs = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    documents: list[Document] = []
    for words in map(str.split, paragraphs):
        # Long paragraphs are cut, so that a text on a single line can be split as well.
        for start in range(0, len(words), _PARAGRAPH_WORDS):
            if not documents or count_words(documents[-1]) >= _DOCUMENT_WORDS:
                documents.append([])
            documents[-1].append(" ".join(words[start : start + _PARAGRAPH_WORDS]))
    return documents


def drop_repeats(documents: Iterable[Document]) -> list[Document]:
    """Drop repeated paragraphs, so that the validation text is not in the training text."""
    known: set[str] = set()
    unique = []
    for document in documents:
        new = [paragraph for paragraph in dict.fromkeys(document) if paragraph not in known]
        known.update(new)
        unique.append(new)
    return [document for document in unique if document]


def hold_out(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Shuffle documents from a fixed seed; return the training and the validation documents."""
    shuffled = random.Random(SPLIT_SEED).sample(documents, len(documents))
    least_words = VALIDATION_SHARE * sum(map(count_words, documents))
    count, words = 0, 0  # of documents that are held out, and of the words in them
    while words < least_words and count < len(shuffled) - 1:  # at least one is for training
        words += count_words(shuffled[count])
        count += 1
    return shuffled[count:], shuffled[:count]


def read_documents(path: Path | None) -> list[Document]:
    """Read a text file, or else Python's documentation, as documents without repeats.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has too few words.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = split_into_documents(read_text(path)) if path else read_python_documents(library)
    documents = drop_repeats(found)
    words = sum(map(count_words, documents))
    if words < LEAST_WORDS:
        origin = f"--text {path}" if path else f"the documentation in {library}"
        needed = f"at least {LEAST_WORDS:,} are needed (repeated paragraphs count once)"
        raise UserError(f"{origin}: {counted(words, 'words')}; {needed}; name a longer --text")
    return documents


def split_paragraphs(text: str) -> list[str]:
    """Split a text at its empty lines, and join the lines of each paragraph."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(text.splitlines()))
    return [" ".join(words) for words in map(str.split, paragraphs) if words]


def read_python_documents(library: Path) -> Iterator[Document]:
    """Yield the topics of the language reference, then the docstrings of each source file.

    The files are parsed, not imported, so no code in them runs.
    """
    yield from map(split_paragraphs, topics.values())
    for path in sorted(library.rglob("*.py")):
        is_source = _SKIPPED_FOLDERS.isdisjoint(path.relative_to(library).parts)
        if is_source and (document := _read_docstrings(path)):
            yield document


def _read_docstrings(path: Path) -> Document:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes such as "\d"
            module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the library has files with deliberate errors
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(x) or "" for x in ast.walk(module) if isinstance(x, documented))
    return [paragraph for text in texts for paragraph in split_paragraphs(text)]
