"""Text for the comparison: checked, split by document, one paragraph on a line."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.documents import (
    Document,
    python_documents,
    python_library,
    split_paragraphs,
)
from fairseq_posenc.workbench.tokens.files import decode_text

# With fewer words the validation text has only a few hundred, and perplexities are mere chance.
LEAST_WORDS = 5_000
VALIDATION_SHARE = 0.05
# A fixed split: runs with other seeds, or of other models, are measured on the same text.
SPLIT_SEED = 1
# A file without any structure is cut into runs of this many words, which serve as documents.
_DOCUMENT_WORDS = 500
_PARAGRAPH_WORDS = 200


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


def text_documents(text: str) -> list[Document]:
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
            shortened = words[start : start + _PARAGRAPH_WORDS]
            documents[-1].paragraphs.append(" ".join(shortened))
    return documents


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """Drop paragraphs seen before: else the validation text would hold text trained on."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        fresh = [text for text in dict.fromkeys(document.paragraphs) if text not in seen]
        seen.update(fresh)
        if fresh:
            kept.append(Document(document.name, fresh))
    return kept


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
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
    source = python_documents(python_library()) if text is None else text_documents(text)
    documents = without_repeats(source)
    words = sum(document.words for document in documents)
    if words < LEAST_WORDS:
        raise UserError(
            f"{origin}: too short, {words:,} words of the {LEAST_WORDS:,} that are needed (a "
            "repeated paragraph counts once); give a longer text with --text"
        )
    facts: dict[str, Any] = {"documents": len(documents), "words": words}
    for name, part in zip(("train", "valid"), split(documents)):
        lines = [paragraph for document in part for paragraph in document.paragraphs]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        facts[f"{name}_words"] = sum(document.words for document in part)
    return facts
