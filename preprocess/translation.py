r"""Converts parallel text to a fairseq data-bin: IWSLT 2017, Multi30k, or files line by line.

  fairseq-posenc preprocess translation iwslt17 fr-en.tgz --out data-bin/iwslt17.fr-en
  fairseq-posenc preprocess translation multi30k multi30k/ --vocab-size 8000 --out data-bin/multi30k
  fairseq-posenc preprocess translation files --train text/train --valid text/dev \
      --test text/test --source-lang de --target-lang en --out data-bin/de-en

Joint BPE pieces are learnt from the training text with sentencepiece, or taken from source.spm,
target.spm and vocab.json of a model of Helsinki-NLP (--sentencepiece-model). Beside fairseq's
files, the folder has sentencepiece.model (or Helsinki-NLP's two as sentencepiece.LANGUAGE.model),
the raw validation and test sets, valid.raw.LANGUAGE and test.raw.LANGUAGE, to compute BLEU against,
and manifest.json with the options, the inputs' SHA-256, and all counts. Further sets are called
valid1, test1 and so on, as in fairseq. The test set of IWSLT 2017 is tst2010 to tst2015, joined;
test1 to test6 are these years.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from fairseq.data import Dictionary

from binarize.options import add_workers, integer
from binarize.output import Manifest, make_folder, say
from binarize.vocabulary import save_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.data_set import write_items
from fairseq_posenc.tokens.files import read_bytes
from fairseq_posenc.tokens.pieces import PieceEncoder, Pieces, learn_pieces
from fairseq_posenc.tokens.symbols import warn_of_unknown
from fairseq_posenc.tokens.tokenizer import Encoded
from parallel.corpora import (
    IWSLT_TESTS,
    NumberedLines,
    ParallelSplit,
    read_files,
    read_iwslt,
)

# argparse does not know this default, because --sentencepiece-model does not allow the option.
_VOCAB_SIZE = 16384
_VOCABULARY = "vocab.json"  # in the folder of the source language's model
_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq's special symbols, in its order


def run(args: argparse.Namespace) -> None:
    """Make the data-bin; models and sets that an interrupted run finished are kept.

    Raises:
        UserError: options contradict each other, or a file is missing or broken.
    """
    languages = args.source_lang, args.target_lang
    trained: tuple[Path, ...] = ()  # models of both languages, and their vocab.json
    if args.sentencepiece_model:
        if args.vocab_size:
            raise UserError(
                "--vocab-size: --sentencepiece-model already sets this; leave --vocab-size out"
            )
        trained = *args.sentencepiece_model, args.sentencepiece_model[0].with_name(_VOCABULARY)
        for path in trained:
            if not path.is_file():
                raise UserError(f"--sentencepiece-model: {path} is not there")
    vocab_size = None if trained else args.vocab_size or _VOCAB_SIZE
    if args.corpus == "iwslt17":
        corpus = read_iwslt(args.path, languages, args.valid, args.test)
    else:  # the sets of Multi30k are files in its folder
        prefix = f"{args.path}/" if args.path else ""
        train, *valid = (f"{prefix}{name}" for name in (args.train, *args.valid))
        corpus = read_files(train, valid, [f"{prefix}{name}" for name in args.test], languages)
    request = {
        "options": {
            "corpus": args.corpus,
            "valid": [split.name for split in corpus.valid],
            "test": [split.name for split in corpus.test],
            "source_lang": args.source_lang,
            "target_lang": args.target_lang,
            "vocab_size": vocab_size,
            "max_length": args.max_length,
            "max_ratio": args.max_ratio,
        },
        "inputs": corpus.inputs | {str(path): checksum(path) for path in trained},
    }
    choose = partial(choose_pairs, max_length=args.max_length, max_ratio=args.max_ratio)

    def fill(manifest: Manifest) -> None:
        manifest.entries["left_out"] = corpus.left_out
        if vocab_size is None:
            vocabularies = _copy_models(trained, languages, manifest.folder)
        else:
            vocabularies = [_learn_pieces(corpus.train, vocab_size, args.workers, manifest)] * 2
        for name, split in corpus.splits.items():
            if manifest.read("results", name) is None:
                folder = manifest.folder
                figures = _write_split(name, split, vocabularies, languages, choose, folder)
                manifest.save("results", name, figures)
                print(f"{name}: {_describe(figures)}", flush=True)

    make_folder(args.out, request, fill)


def _copy_models(
    trained: Sequence[Path], languages: Sequence[str], folder: Path
) -> list[SubwordVocabulary]:
    """Copy the trained models of both languages to the folder, and load them."""
    *models, vocabulary = trained
    for model, language in zip(models, languages):
        shutil.copyfile(model, folder / f"sentencepiece.{language}.model")
    pieces = read_vocabulary(vocabulary)
    return [SubwordVocabulary.load(model, pieces) for model in models]


def _learn_pieces(
    train: ParallelSplit, vocab_size: int, workers: int, manifest: Manifest
) -> SubwordVocabulary:
    """Train a sentencepiece model on both languages in the folder, unless it is finished."""
    path = manifest.folder / "sentencepiece.model"
    if manifest.read("models", path.name) is None:
        say(f"learning {vocab_size:,} sentencepieces (bpe)")
        lines = [line for side in train.sides for line in side.lines]
        path.write_bytes(train_model(lines, vocab_size, workers))
        manifest.save("models", path.name, checksum(path))
    return SubwordVocabulary.load(path)


def _write_split(
    name: str,
    split: ParallelSplit,
    vocabularies: Sequence[SubwordVocabulary],
    languages: Sequence[str],
    choose: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, dict[str, int]]],
    folder: Path,
) -> dict[str, Any]:
    """Write a split, and the raw text of a test set; return the counts.

    ``choose`` is :func:`choose_pairs` with its limits.
    """
    sides = [vocabulary.encode(text) for vocabulary, text in zip(vocabularies, split.sides)]
    figures: dict[str, Any] = {"set": split.name, "read": len(split.source.lines)}
    if name == "train":
        is_kept, figures["dropped"] = choose(*(sizes - 1 for _, sizes in sides))
        sides = [
            Encoded(tokens[np.repeat(is_kept, sizes)], sizes[is_kept]) for tokens, sizes in sides
        ]
    figures["kept"] = len(sides[0].sizes)
    if not figures["kept"]:
        raise UserError(
            f"{split.source.origin}: {_describe(figures)}, so there is nothing to train on; "
            "choose another --max-length and --max-ratio"
        )
    pair = "-".join(languages)
    for language, (_, dictionary), side, text in zip(languages, vocabularies, sides, split.sides):
        if name == "train":
            counts = np.bincount(np.concatenate([tokens for tokens, _ in sides]))
            _save_dictionary(dictionary, counts, folder / f"dict.{language}.txt")
        else:  # not NAME.SOURCE-TARGET.LANGUAGE, which fairseq would read instead of its data
            raw = "".join(f"{line}\n" for line in text.lines)
            (folder / f"{name}.raw.{language}").write_text(raw, encoding="utf-8")
        write_items(folder / f"{name}.{pair}.{language}", side)
        unknown = int((side.tokens == dictionary.unk()).sum())
        pieces = len(side.tokens) - len(side.sizes)
        figures[language] = {"pieces": pieces, "unknown": unknown}
        warn_of_unknown(f"{name}.{language}", unknown, pieces)
    return figures


def _save_dictionary(dictionary: Dictionary, counts: np.ndarray, path: Path) -> None:
    """Save a dictionary with the number of each of its symbols in the training text."""
    counted = Dictionary()
    for index in range(dictionary.nspecial, len(dictionary)):
        counted.add_symbol(dictionary[index], n=int(counts[index]) if index < len(counts) else 0)
    save_dictionary(counted, path)


def _describe(figures: dict[str, Any]) -> str:
    dropped = figures.get("dropped", {})
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
    text = f"{figures['kept']:,} pairs of {figures['read']:,} kept"
    return f"{text} (dropped: {reasons})" if reasons else text


def train_model(lines: Iterable[str], vocab_size: int, threads: int) -> bytes:
    """Train a sentencepiece model of the type BPE; return the content of its file.

    ``vocab_size`` includes the four special symbols.

    Raises:
        UserError: the text has too few or too many different pieces for that size.
    """
    model = io.BytesIO()
    learn_pieces(
        vocab_size,
        sentence_iterator=(" ".join(line.split()) for line in lines),
        model_writer=model,
        model_type="bpe",
        character_coverage=1.0,
        normalization_rule_name="identity",
        num_threads=threads,
        bos_id=0,
        pad_id=1,
        eos_id=2,
        unk_id=3,
    )
    return model.getvalue()


def read_vocabulary(path: Path) -> list[str]:
    """Read the pieces in the ``vocab.json`` of a translation model of Helsinki-NLP (opus-mt).

    It maps the pieces of both languages to ids; the result has them in this order, without the
    special symbols.

    Raises:
        UserError: the file is missing or broken.
    """
    content = read_bytes(path)
    try:
        numbers = json.loads(content)
        pieces: list[str] = sorted(numbers, key=numbers.__getitem__)
        is_whole = sorted(numbers.values()) == list(range(len(pieces)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{path}: not a vocabulary, which gives each piece a number from 0 on")
    return [piece for piece in pieces if piece not in _SYMBOLS]


class SubwordVocabulary(NamedTuple):
    """The sentencepieces of a language, and the dictionary of their ids."""

    pieces: Pieces
    dictionary: Dictionary

    @classmethod
    def load(cls, path: Path, names: Sequence[str] = ()) -> SubwordVocabulary:
        """Load a model.

        Args:
            path: the ``.model`` file.
            names: the pieces in the order of their ids, after fairseq's special symbols; by default
                all pieces of the model. Others become ``<unk>``, as in opus-mt.

        Raises:
            UserError: the file is not a model, or has none of the pieces.
        """
        pieces = Pieces(path)
        if names and set(names).isdisjoint(pieces.texts):
            raise UserError(f"{path}: none of its pieces is in {_VOCABULARY}")
        dictionary = Dictionary()
        for name in names or pieces.texts[dictionary.nspecial :]:
            dictionary.add_symbol(name)
        return cls(pieces, dictionary)

    def encode(self, text: NumberedLines) -> Encoded:
        """Encode lines, each ended by ``</s>``; white space becomes single spaces."""
        lines = [" ".join(line.split()) for line in text.lines]
        return PieceEncoder(self.pieces, self.dictionary).encode(lines)


def choose_pairs(
    source: np.ndarray, target: np.ndarray, max_length: int, max_ratio: float
) -> tuple[np.ndarray, dict[str, int]]:
    """Choose the training pairs whose lengths are fit.

    Pairs with an empty side, with more than ``max_length`` pieces, or whose longer side has more
    than ``max_ratio`` times the pieces of the shorter one are dropped.

    Args:
        source: numbers of pieces of the source sentences, ``(N,)``.
        target: the same of the target sentences.
        max_length: maximum pieces of a sentence.
        max_ratio: maximum ratio.

    Returns:
        A mask of the pairs to keep, ``(N,)``, and the number of those dropped by reason.
    """
    shorter, longer = np.minimum(source, target), np.maximum(source, target)
    is_kept = np.ones(len(source), dtype=bool)
    dropped = {}
    for reason, is_unfit in (
        ("empty", shorter == 0),
        ("too long", longer > max_length),
        ("lengths too different", longer > max_ratio * shorter),
    ):
        dropped[reason] = int((is_kept & is_unfit).sum())
        is_kept &= ~is_unfit
    return is_kept, dropped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each kind of corpus."""
    corpora = parser.add_subparsers(dest="corpus", required=True, metavar="CORPUS")
    iwslt = corpora.add_parser("iwslt17", help="a release of IWSLT 2017, for one language pair")
    iwslt.add_argument("path", type=Path, help="its .tgz, or a folder with its files")
    _add_sets(iwslt, valid=["dev2010"], test=["+".join(IWSLT_TESTS), *IWSLT_TESTS])
    multi30k = corpora.add_parser("multi30k", help="Multi30k, task 1, raw text")
    multi30k.add_argument("path", type=Path, help="folder with train.fr.gz, val.fr.gz and so on")
    multi30k.set_defaults(train="train")
    _add_sets(multi30k, valid=["val"], test=["test_2016_flickr"])
    files = corpora.add_parser("files", help="files of any other corpus, one for each language")
    text = "name of the training files before .LANGUAGE[.gz]"
    files.add_argument("--train", required=True, metavar="PREFIX", help=text)
    files.set_defaults(path=None)
    _add_sets(files, valid=None, test=None)
    for corpus in (iwslt, multi30k, files):
        _add_options(corpus)


def _add_sets(parser: argparse.ArgumentParser, **defaults: Optional[list[str]]) -> None:
    """Add ``--valid`` and ``--test``, which are required if they have no default."""
    add = parser.add_argument
    for name, default in defaults.items():
        text = f"one or several sets (default: {' '.join(default)})" if default else "as --train"
        add(f"--{name}", nargs="+", metavar="SET", default=default, required=not default, help=text)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all kinds of corpora share."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to make")
    add("--source-lang", default="fr", help="source language (default: fr)")
    add("--target-lang", default="en", help="target language (default: en)")
    add(
        "--sentencepiece-model",
        nargs=2,
        type=Path,
        metavar=("SOURCE", "TARGET"),
        help="trained models instead of new ones, in the format of Helsinki-NLP: source.spm and "
        "target.spm, with vocab.json beside the first",
    )
    text = f"number of pieces to learn (default: {_VOCAB_SIZE})"
    add("--vocab-size", type=integer(1), metavar="N", help=text)
    text = "maximum pieces of a training sentence (default: 250)"
    add("--max-length", type=integer(1), metavar="N", default=250, help=text)
    text = "maximum ratio of the lengths of a training pair (default: 3)"
    add("--max-ratio", type=_ratio, metavar="X", default=3, help=text)
    add_workers(parser)


def _ratio(text: str) -> float:
    """Parse a finite number of at least 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 1, not '{text}'")
    return number
