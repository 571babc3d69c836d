r"""Converts parallel text to a fairseq data-bin: a release of IWSLT 2017, or files line by line.

  fairseq-posenc preprocess translation iwslt17 fr-en.tgz --out data-bin/iwslt17.fr-en
  fairseq-posenc preprocess translation files --train multi30k/train --valid multi30k/val \
      --test multi30k/test_2016_flickr --vocab-size 8000 --out data-bin/multi30k
  fairseq-posenc preprocess translation files --train text/train --valid text/dev \
      --test text/test --source-lang de --target-lang en --out data-bin/de-en

Joint BPE pieces are learned from the training text by sentencepiece. Besides fairseq's files, the
folder has sentencepiece.model, the raw validation and test sets, valid.raw.LANGUAGE and
test.raw.LANGUAGE, to compute BLEU against, and manifest.json with the options, the inputs' SHA-256,
and all counts. Further sets are called valid1, test1 and so on, as in fairseq. The test set of
IWSLT 2017 is tst2010 to tst2015, joined; test1 to test6 are these years.
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary

from binarize.options import add_workers, integer
from binarize.output import Manifest, make_folder, say
from binarize.vocabulary import save_dictionary
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import checksum
from fairseq_posenc.tokens.subwords import PieceEncoder, Pieces, learn_pieces
from fairseq_posenc.tokens.tokenizer import Encoded, warn_of_unknown, write_items
from parallel.corpora import IWSLT_TESTS, ParallelSplit, read_files, read_iwslt

# The options on which the content of a data-bin depends, besides its sets.
_CONTENT_OPTIONS = ("source_lang", "target_lang", "vocab_size", "max_length", "max_ratio")


def run(args: argparse.Namespace) -> None:
    """Make the data-bin; the model and the sets that an interrupted run finished are kept.

    Raises:
        UserError: a file is missing or broken.
    """
    languages = args.source_lang, args.target_lang
    if len(set(languages)) == 1:  # both sides would be the same files
        raise UserError(f"--target-lang {args.target_lang}: is the source language too")
    for sets in (args.valid, args.test):
        if len(set(sets)) < len(sets):
            raise UserError(f"{' '.join(map(str, sets))}: a set occurs twice; name each once")
    if args.corpus == "iwslt17":
        corpus = read_iwslt(args.path, languages, args.valid, args.test)
    else:
        corpus = read_files(args.train, args.valid, args.test, languages)
    request = {  # all that the folder's content depends on
        "options": {
            "corpus": args.corpus,
            "valid": [split.name for split in corpus.valid],
            "test": [split.name for split in corpus.test],
            **{name: getattr(args, name) for name in _CONTENT_OPTIONS},
        },
        "inputs": corpus.inputs,
    }

    def fill(manifest: Manifest) -> None:
        manifest.entries["left_out"] = corpus.left_out  # saved with the next entry
        pieces = _load_or_train(corpus.train, args.vocab_size, args.workers, manifest)
        for name, split in corpus.splits.items():
            if manifest.read("results", name) is None:  # an interrupted run has not finished it
                limits = args.max_length, args.max_ratio
                figures = _write_split(name, split, pieces, languages, limits, manifest.folder)
                manifest.save("results", name, figures)
                print(f"{name}: {_describe(figures)}", flush=True)

    make_folder(args.out, request, fill)


def _load_or_train(
    train: ParallelSplit, vocab_size: int, workers: int, manifest: Manifest
) -> Pieces:
    """Load the folder's sentencepiece model of both languages; train it first if it is missing."""
    path = manifest.folder / "sentencepiece.model"
    if manifest.read("models", path.name) is None:  # not trained yet
        say(f"learning {vocab_size:,} sentencepieces (bpe)")
        lines = [line for side in train.sides for line in side.lines]
        path.write_bytes(train_model(lines, vocab_size, workers))
        manifest.save("models", path.name, checksum(path))
    return Pieces(path)


def _write_split(
    name: str,
    split: ParallelSplit,
    pieces: Pieces,
    languages: Sequence[str],
    limits: tuple[int, float],
    folder: Path,
) -> dict[str, Any]:
    """Write a split, and its raw text unless it is for training; return the counts.

    ``limits`` of training pairs are the maximum length and ratio of :func:`choose_pairs`.
    """
    dictionary = pieces.build_dictionary()
    encoder = PieceEncoder(pieces, dictionary)
    # Each line is ended by </s>; white space becomes single spaces.
    sides = [
        encoder.encode([" ".join(line.split()) for line in side.lines]) for side in split.sides
    ]
    figures: dict[str, Any] = {"set": split.name, "read": len(split.source.lines)}
    if name == "train":
        source_sizes, target_sizes = (sizes - 1 for _, sizes in sides)  # without </s>
        is_kept, figures["dropped"] = choose_pairs(source_sizes, target_sizes, *limits)
        sides = [
            Encoded(tokens[np.repeat(is_kept, sizes)], sizes[is_kept]) for tokens, sizes in sides
        ]
    figures["kept"] = len(sides[0].sizes)
    if not figures["kept"]:  # only of a training set: others keep all lines, at least one
        raise UserError(
            f"{split.source.origin}: {_describe(figures)}, so there is nothing to train on; "
            "choose another --max-length and --max-ratio"
        )
    if name == "train":
        both = np.concatenate([tokens for tokens, _ in sides])
        counts = np.bincount(both, minlength=len(dictionary))
        counted = Dictionary()  # has the special symbols from the start
        for index in range(dictionary.nspecial, len(dictionary)):
            counted.add_symbol(dictionary[index], n=int(counts[index]))  # in both languages
        for language in languages:
            save_dictionary(counted, folder / f"dict.{language}.txt")
    pair = "-".join(languages)
    for language, items, side in zip(languages, sides, split.sides):
        if name != "train":  # not NAME.SOURCE-TARGET.LANGUAGE: fairseq would read that as its data
            raw = "".join(f"{line}\n" for line in side.lines)
            (folder / f"{name}.raw.{language}").write_text(raw, encoding="utf-8")
        write_items(folder / f"{name}.{pair}.{language}", items)
        unknown = int((items.tokens == dictionary.unk()).sum())
        count = len(items.tokens) - len(items.sizes)  # without </s>
        figures[language] = {"pieces": count, "unknown": unknown}
        warn_of_unknown(f"{name}.{language}", unknown, count)
    return figures


def _describe(figures: dict[str, Any]) -> str:
    dropped = figures.get("dropped", {})
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)
    text = f"{counted(figures['kept'], 'pairs')} of {figures['read']:,} kept"
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
        character_coverage=1.0,  # of the training text; its rare characters are not <unk>
        normalization_rule_name="identity",  # the text is translated as it is written
        num_threads=threads,
        bos_id=0,  # fairseq's order; tokens are looked up by text, so nothing relies on it
        pad_id=1,
        eos_id=2,
        unk_id=3,
    )
    return model.getvalue()


def choose_pairs(
    source: np.ndarray, target: np.ndarray, max_length: int, max_ratio: float
) -> tuple[np.ndarray, dict[str, int]]:
    """Choose the training pairs whose lengths are in the limits.

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
    files = corpora.add_parser("files", help="files of any other corpus, one for each language")
    text = "name of the training files before .LANGUAGE[.gz]"
    files.add_argument("--train", type=Path, required=True, metavar="PREFIX", help=text)
    tests = ["+".join(IWSLT_TESTS), *IWSLT_TESTS]
    for option, default in (("--valid", ["dev2010"]), ("--test", tests)):
        text = f"one or several sets (default: {' '.join(default)})"
        iwslt.add_argument(option, nargs="+", metavar="SET", default=default, help=text)
        add = files.add_argument
        add(option, type=Path, nargs="+", metavar="SET", required=True, help="as --train")
    for corpus in (iwslt, files):
        add = corpus.add_argument
        add("--out", type=Path, required=True, help="folder to make")
        add("--source-lang", default="fr", help="source language (default: fr)")
        add("--target-lang", default="en", help="target language (default: en)")
        text = "number of pieces to learn (default: 16384)"
        add("--vocab-size", type=integer(1), metavar="N", default=16384, help=text)
        text = "maximum pieces of a training sentence (default: 250)"
        add("--max-length", type=integer(1), metavar="N", default=250, help=text)
        text = "maximum ratio of the lengths of a training pair (default: 3)"
        add("--max-ratio", type=_ratio, metavar="X", default=3, help=text)
        add_workers(corpus)


def _ratio(text: str) -> float:
    """Parse a finite number of at least 1."""
    with suppress(ValueError):
        if 1 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"must be a finite number of at least 1, not '{text}'")
