"""Text for an experiment: checked, split by document, a paragraph a line, cut into sentencepieces.

The text is the user's, or one that is on every machine: the documentation inside Python.
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
from typing import Any, NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.tokens.files import decode_text
from fairseq_posenc.workbench.tokens.pieces import Pieces, learn_pieces

# With fewer words the validation text has only a few hundred, and perplexities are mere chance.
LEAST_WORDS = 5_000
VALIDATION_SHARE = 0.05
# A fixed split: runs with other seeds, or of other models, are measured on the same text.
SPLIT_SEED = 1
# A file without any structure is cut into runs of this many words, which serve as documents.
_DOCUMENT_WORDS = 500
_PARAGRAPH_WORDS = 200
# What others installed would make the text differ from machine to machine; tests hardly have any
# documentation.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_TOPICS = Path("pydoc_data", "topics.py")
# fairseq has words of these names; kept out of the text, or fairseq would take text for them.
_FAIRSEQ_SYMBOLS = ["<pad>", "<mask>"]


class Document(NamedTuple):
    """A piece of text that belongs together."""

    name: str  # where it is from
    paragraphs: list[str]  # its paragraphs, each without line breaks

    @property
    def words(self) -> int:
        """The number of words, as separated by spaces."""
        return sum(len(paragraph.split()) for paragraph in self.paragraphs)


def read_text(path: Path) -> str:
    """Read the content of a UTF-8 text file.

    Raises:
        UserError: it cannot be read, is empty, or is not UTF-8 text.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}; name a UTF-8 text file") from None
    if not content.strip():
        raise UserError(f"--text {path}: the file is empty; name a file with text in it")
    return decode_text(content, f"--text {path}", {b"\0": "a NUL byte, so this is not a text file"})


def split_into_documents(text: str) -> list[Document]:
    """Cut one text into runs of paragraphs, or of lines if it has no empty line."""
    paragraphs = split_paragraphs(text)
    if len(paragraphs) == 1:
        paragraphs = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    documents: list[Document] = []
    for words in map(str.split, paragraphs):
        # Long paragraphs are cut, so that a text on a single line can be split as well.
        for start in range(0, len(words), _PARAGRAPH_WORDS):
            if not documents or documents[-1].words >= _DOCUMENT_WORDS:
                documents.append(Document(f"part {len(documents) + 1}", []))
            paragraph = words[start : start + _PARAGRAPH_WORDS]
            documents[-1].paragraphs.append(" ".join(paragraph))
    return documents


def drop_repeats(documents: Iterable[Document]) -> list[Document]:
    """Drop paragraphs seen before: else the validation text would hold text trained on."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        fresh = [text for text in dict.fromkeys(document.paragraphs) if text not in seen]
        seen.update(fresh)
        if fresh:
            kept.append(Document(document.name, fresh))
    return kept


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Split documents into those for training and those for validation, in a fixed random order."""
    shuffled = random.Random(SPLIT_SEED).sample(documents, len(documents))
    wanted = VALIDATION_SHARE * sum(document.words for document in documents)
    words = count = 0
    while words < wanted and count < len(shuffled) - 1:
        words += shuffled[count].words
        count += 1
    return shuffled[count:], shuffled[:count]


def write_corpus(text: Optional[str], origin: str, folder: Path) -> dict[str, Any]:
    """Write ``train.txt`` and ``valid.txt`` of a text, None for Python's own; return their figures.

    Raises:
        UserError: there are too few words.
    """
    documents = _read_documents(text, origin)
    words = sum(document.words for document in documents)
    facts: dict[str, Any] = {"documents": len(documents), "words": words}
    for name, part in zip(("train", "valid"), split_documents(documents)):
        lines = [paragraph for document in part for paragraph in document.paragraphs]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        facts[f"{name}_words"] = sum(document.words for document in part)
    return facts


def check_text(path: Path) -> None:
    """Check that a file can be the text of an experiment.

    Raises:
        UserError: it cannot be read, is not UTF-8, or has too few words.
    """
    _read_documents(read_text(path), f"--text {path}")


def _read_documents(text: Optional[str], origin: str) -> list[Document]:
    if text is None:
        documents = drop_repeats(read_python_documents(find_python_library()))
    else:
        documents = drop_repeats(split_into_documents(text))
    words = sum(document.words for document in documents)
    if words < LEAST_WORDS:
        raise UserError(
            f"{origin}: too short, {words:,} words of the {LEAST_WORDS:,} that are needed (a "
            "repeated paragraph counts once); give a longer text with --text"
        )
    return documents


def split_paragraphs(text: str) -> list[str]:
    """Cut a text at its empty lines; join the lines of each paragraph."""
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
    """Yield the language reference's topics, then the docstrings of each source file.

    The files are read, not imported, so that nothing in them runs.
    """
    yield from _read_topics(library / _TOPICS)
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if _LEFT_OUT.isdisjoint(relative.parts) and relative != _TOPICS:
            document = Document(relative.as_posix(), _read_docstrings(path))
            if document.paragraphs:
                yield document


def _parse(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes such as "\d" in other people's strings
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the library holds files that are broken on purpose
        return ast.Module(body=[], type_ignores=[])


def _read_docstrings(path: Path) -> list[str]:
    paragraphs: list[str] = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            paragraphs += split_paragraphs(ast.get_docstring(node) or "")
    return paragraphs


def _read_topics(path: Path) -> Iterator[Document]:
    """Yield the entries of the dictionary of texts that ``help()`` shows."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                    yield Document(f"topic {key.value!r}", split_paragraphs(str(value.value)))


def train_pieces(text: Path, prefix: Path, vocab_size: int) -> None:
    """Learn sentencepieces from a text file and write ``PREFIX.model`` and ``PREFIX.vocab``.

    Raises:
        UserError: the text does not support that many pieces, or needs more.
    """
    learn_pieces(
        vocab_size, input=str(text), model_prefix=str(prefix), control_symbols=_FAIRSEQ_SYMBOLS
    )


def write_pieces(model: Path, text: Path, pieces: Path) -> int:
    """Write a text's pieces, separated by spaces, line by line; return their number."""
    cut, count = Pieces(model), 0
    with open(text, encoding="utf-8") as lines, open(pieces, "w", encoding="utf-8") as output:
        for line in lines:
            (symbols,) = cut([line.strip()])
            output.write(" ".join(symbols) + "\n")
            count += len(symbols)
    return count


def unigram_perplexity(train: Path, valid: Path) -> float:
    """Compute the perplexity of a model that knows only how often each piece of ``train`` occurs.

    Frequencies are smoothed by one; as in fairseq every line ends with one more symbol.
    """
    counts, wanted = (Counter(_read_symbols(path)) for path in (train, valid))
    total = sum(counts.values()) + len(counts | wanted)
    loss = sum(n * math.log(total / (counts[piece] + 1)) for piece, n in wanted.items())
    return math.exp(loss / sum(wanted.values()))


def _read_symbols(path: Path) -> list[str]:
    """Read the pieces of a file, with the end of each line."""
    with open(path, encoding="utf-8") as lines:
        return [symbol for line in lines for symbol in (*line.split(), "</s>")]
