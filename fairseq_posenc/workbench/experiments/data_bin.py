"""Makes the data of an experiment from its text: sentencepieces, in fairseq's binary form."""

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.errors import counted
from fairseq_posenc.folders import Request, checksum, is_made, whole_folder
from fairseq_posenc.tokens.subwords import Pieces, learn_pieces
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import corpus
from fairseq_posenc.workbench.experiments.corpus import Document, count_words
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say

BINARY = "binary"  # the data-bin in the folder of the data
_FACTS = "facts.json"


class DataFacts(NamedTuple):
    """Facts about the data of an experiment."""

    documents: int
    words: int
    train_words: int
    valid_words: int
    train_tokens: int
    valid_tokens: int
    unigram_perplexity: float  # of a model that knows only the frequencies of pieces


def data_request(text: Path | None, vocab_size: int) -> Request:
    """List all that the data depend on; without a text they are Python's documentation."""
    source = f"the documentation of Python {sys.version}" if text is None else checksum(text)
    return {"text": source, "vocab size": vocab_size, "version": __version__}


def make_data(text: Path | None, vocab_size: int, folder: Path) -> DataFacts:
    """Make the data-bin ``binary`` in a folder unless it was made before; return its facts.

    Raises:
        UserError: the text cannot be used.
        RunError: ``fairseq-preprocess`` failed.
    """
    request = data_request(text, vocab_size)
    if not is_made(folder, request):
        with whole_folder(folder, request) as unfinished:  # renamed to `folder` at the end
            made = _fill(unfinished, corpus.read_documents(text), vocab_size)
            (unfinished / _FACTS).write_text(json.dumps(made._asdict(), indent=1) + "\n", "utf-8")
    facts = DataFacts(**json.loads((folder / _FACTS).read_text("utf-8")))
    say(
        f"text: {facts.words:,} words in {counted(facts.documents, 'documents')}, of which "
        f"{facts.valid_words:,} words are kept for validation"
    )
    return facts


def _fill(folder: Path, documents: list[Document], vocab_size: int) -> DataFacts:
    """Write the texts, learn the pieces, encode both texts and binarize them."""
    say(f"text: learning {vocab_size:,} sentencepieces, then fairseq-preprocess")
    binary = folder / BINARY
    shutil.rmtree(binary, ignore_errors=True)  # a killed command may have left it
    binary.mkdir()
    parts = dict(zip(("train", "valid"), corpus.hold_out(documents)))
    texts = {name: [line for document in part for line in document] for name, part in parts.items()}
    for name, lines in texts.items():  # a line is a paragraph
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", "utf-8")
    model = binary / "sentencepiece.model"  # with the dictionary, where all commands look for it
    learn_pieces(
        vocab_size,
        input=str(folder / "train.txt"),
        model_prefix=str(model.with_suffix("")),
        control_symbols=["<pad>", "<mask>"],  # fairseq's: no text becomes one of them
    )
    tokenize = Pieces(model)  # unknown text becomes `<unk>`
    pieces = {name: list(tokenize(lines)) for name, lines in texts.items()}
    command = ["fairseq-preprocess", "--only-source", "--destdir", str(binary)]
    for name, encoded in pieces.items():
        (folder / f"{name}.pieces").write_text("\n".join(map(" ".join, encoded)) + "\n", "utf-8")
        command += [f"--{name}pref", str(folder / f"{name}.pieces")]
    # Short, so it need not keep the folder locked if this process is killed.
    run_logged(command, folder / "preprocess.log", lock=None)
    return DataFacts(
        documents=len(documents),
        words=sum(map(count_words, documents)),
        train_words=sum(map(count_words, parts["train"])),
        valid_words=sum(map(count_words, parts["valid"])),
        train_tokens=sum(map(len, pieces["train"])),
        valid_tokens=sum(map(len, pieces["valid"])),
        unigram_perplexity=unigram_perplexity(pieces["train"], pieces["valid"]),
    )


def unigram_perplexity(train: Sequence[Sequence[str]], valid: Sequence[Sequence[str]]) -> float:
    """Compute the perplexity of a model that knows only the frequencies of pieces in ``train``.

    Frequencies have add-one smoothing; as in fairseq, every line ends with ``</s>``.
    """
    counts, valid_counts = (
        Counter(piece for line in lines for piece in (*line, "</s>")) for lines in (train, valid)
    )
    total = counts.total() + len(counts | valid_counts)  # one is added for each different piece
    loss = sum(n * math.log(total / (counts[piece] + 1)) for piece, n in valid_counts.items())
    return math.exp(loss / valid_counts.total())
