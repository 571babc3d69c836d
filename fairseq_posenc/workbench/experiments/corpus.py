"""Prepares the text of an experiment: checks it, splits it by document, cuts it into pieces.

The text is the user's, or one that every machine has: the documentation in Python's library. In the
files, a line is a paragraph.
"""

from __future__ import annotations

import ast
import math
import random
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import decode_text
from fairseq_posenc.tokens.pieces import Pieces, learn_pieces

# With fewer words, the validation text would have only a few hundred and its perplexity be random.
LEAST_WORDS = 5_000
VALIDATION_SHARE = 0.05
SPLIT_SEED = 1  # fixed, so that all models and seeds are validated on the same text
_DOCUMENT_WORDS = 500  # a document ends with the paragraph that reaches this length
_PARAGRAPH_WORDS = 200  # longest paragraph
# Installed packages differ between machines, and tests have hardly any documentation.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_TOPICS = Path("pydoc_data", "topics.py")  # the language reference, as a dictionary for ``help()``
# Names of fairseq's symbols; as control symbols they are never pieces of the text.
_FAIRSEQ_SYMBOLS = ["<pad>", "<mask>"]


# Paragraphs, without line breaks, that are not split between training and validation.
Document = list[str]


def count_words(document: Document) -> int:
    """Count the words, separated by spaces."""
    return sum(len(paragraph.split()) for paragraph in document)


def read_text(path: Path) -> str:
    """Read the content of a UTF-8 text file.

    Raises:
        UserError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}; name a UTF-8 text file") from None
    if not content.strip():
        raise UserError(f"--text {path}: the file is empty; name a file with text in it")
    refused = {b"\0": "a NUL byte, so this is not a text file"}
    return decode_text(content, f"--text {path}", refused)


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
        if new:
            unique.append(new)
    return unique


def hold_out(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Shuffle documents from a fixed seed; return those for training and those for validation."""
    shuffled = random.Random(SPLIT_SEED).sample(documents, len(documents))
    least_words = VALIDATION_SHARE * sum(map(count_words, documents))
    words = held_out = 0  # words of the documents that are held out, and number of these documents
    while words < least_words and held_out < len(shuffled) - 1:  # at least one is for training
        words += count_words(shuffled[held_out])
        held_out += 1
    return shuffled[held_out:], shuffled[:held_out]


def write_corpus(text: Optional[str], origin: str, folder: Path) -> dict[str, Any]:
    """Write ``train.txt`` and ``valid.txt`` into a folder, and count their documents and words.

    If the text is None, it is Python's documentation. ``origin`` names the source in messages.

    Raises:
        UserError: the text has too few words.
    """
    documents = _read_documents(text, origin)
    words = sum(map(count_words, documents))
    facts: dict[str, Any] = {"documents": len(documents), "words": words}
    for name, part in zip(("train", "valid"), hold_out(documents)):
        lines = [paragraph for document in part for paragraph in document]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        facts[f"{name}_words"] = sum(map(count_words, part))
    return facts


def check_text(path: Path) -> None:
    """Check that a file can be the text of an experiment.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has too few words.
    """
    _read_documents(read_text(path), f"--text {path}")


def _read_documents(text: Optional[str], origin: str) -> list[Document]:
    """Split the user's text, or else Python's documentation, into documents without repeats."""
    if text is None:
        documents = drop_repeats(read_python_documents(find_python_library()))
    else:
        documents = drop_repeats(split_into_documents(text))
    words = sum(map(count_words, documents))
    if words < LEAST_WORDS:
        raise UserError(
            f"{origin}: too short, {words:,} words; at least {LEAST_WORDS:,} are needed (a "
            "repeated paragraph counts once); give a longer text with --text"
        )
    return documents


def split_paragraphs(text: str) -> list[str]:
    """Split a text at its empty lines, and join the lines of each paragraph."""
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        if words := line.split():
            paragraphs[-1].extend(words)
        elif paragraphs[-1]:
            paragraphs.append([])
    return [" ".join(words) for words in paragraphs if words]


def find_python_library() -> Path:
    """Find the folder of the standard library's source files."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_python_documents(library: Path) -> Iterator[Document]:
    """Yield the topics of the language reference, then the docstrings of each source file.

    The files are parsed, not imported, so no code in them runs.
    """
    yield from _read_topics(library / _TOPICS)
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        is_source = _SKIPPED_FOLDERS.isdisjoint(relative.parts) and relative != _TOPICS
        if is_source and (document := _read_docstrings(path)):
            yield document


def _parse(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes such as "\d"
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the library has files with deliberate errors
        return ast.Module(body=[], type_ignores=[])


def _read_docstrings(path: Path) -> Document:
    paragraphs: Document = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraphs += split_paragraphs(ast.get_docstring(node) or "")
    return paragraphs


def _read_topics(path: Path) -> Iterator[Document]:
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant):
                    yield split_paragraphs(str(value.value))


def train_pieces(text: Path, prefix: Path, vocab_size: int) -> None:
    """Learn sentencepieces from a text file and write ``PREFIX.model`` and ``PREFIX.vocab``.

    Raises:
        UserError: the text has too little or too much variety for this number of pieces.
    """
    learn_pieces(
        vocab_size, input=str(text), model_prefix=str(prefix), control_symbols=_FAIRSEQ_SYMBOLS
    )


def write_pieces(model: Path, text: Path, output: Path) -> int:
    """Write the pieces of a text, separated by spaces, line by line; return their number."""
    tokenize = Pieces(model)
    count = 0
    with open(text, encoding="utf-8") as lines, open(output, "w", encoding="utf-8") as piece_lines:
        for line in lines:  # one by one, so that memory does not grow with the text
            (pieces,) = tokenize([line.strip()])
            piece_lines.write(" ".join(pieces) + "\n")
            count += len(pieces)
    return count


def unigram_perplexity(train: Path, valid: Path) -> float:
    """Compute the perplexity of a model that knows only the frequencies of pieces in ``train``.

    Frequencies have add-one smoothing; as in fairseq, every line ends with ``</s>``.
    """
    counts, valid_counts = Counter(_read_pieces(train)), Counter(_read_pieces(valid))
    total = sum(counts.values()) + len(counts | valid_counts)  # one is added for each kind of piece
    loss = sum(n * math.log(total / (counts[piece] + 1)) for piece, n in valid_counts.items())
    return math.exp(loss / valid_counts.total())


def _read_pieces(path: Path) -> list[str]:
    """Read the pieces of a file, with ``</s>`` at the end of each line."""
    with open(path, encoding="utf-8") as lines:
        return [piece for line in lines for piece in (*line.split(), "</s>")]
