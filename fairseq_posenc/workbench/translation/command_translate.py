"""``fairseq-posenc translate``: translates sentences with a trained model."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from fairseq.utils import split_paths

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.files import read_arriving_lines
from fairseq_posenc.workbench.running.devices import ComputeOptions
from fairseq_posenc.workbench.running.options import add_computing, add_count, add_data
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation.translator import Hypothesis, Translator

# The example sentence of the report on IWSLT 2017.
_EXAMPLE = (
    "Ce dont vous avez peur n’est jamais aussi grave que ce que vous imaginez. La peur que vous "
    "laissez s'accumuler dans votre esprit est pire que la situation qui existe réellement."
)
_REFERENCE = (
    "What you are afraid of is never as bad as what you imagine. The fear you let build up in your "
    "mind is worse than the situation that actually exists"
)
_DEFAULT_NBEST = 3  # or the beam size, if that is less


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = "raw text (default: the lines of --input or, without it, of standard input)"
    add("sentences", nargs="*", metavar="SENTENCE", help=text)
    text = "the model; ':' joins several to an ensemble"
    add("--checkpoint", required=True, metavar="FILE", help=text)
    add("--input", type=Path, metavar="FILE", help="UTF-8 text, one sentence per line")
    text = "translate the example of the report on IWSLT 2017, and print its reference"
    add("--example", action="store_true", help=text)
    add_model_arguments(parser)
    add_computing(parser)
    add_count(parser, "--nbest", "hypotheses to show (default: 3)")
    text = "print only the best translation, one line per line of input"
    add("--plain", action="store_true", help=text)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model's data and of beam search."""
    text = "directory with dictionaries and sentencepiece model (default: that of the training)"
    add_data(parser, text)
    add_count(parser, "--beam", "beam size", 5)
    text = "length penalty: below 1 favours short translations, above 1 long ones (default: 1)"
    parser.add_argument("--lenpen", type=float, default=1.0, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    """Translate; return the exit code.

    Raises:
        UserError: wrong input.
    """
    nbest = args.nbest or min(_DEFAULT_NBEST, args.beam)
    if nbest > args.beam:
        raise UserError(f"--nbest {nbest}: must be from 1 to the beam of {args.beam}")
    with _open_sentences(args) as batches:
        compute = ComputeOptions.choose(args.device, args.fp16, args.bf16)
        translator = Translator.load(*split_paths(args.checkpoint), data=args.data, compute=compute)
        for sentences in batches:
            _print_translations(translator, sentences, args, nbest)
        if args.example and not args.plain:
            print(f"  reference             {_REFERENCE}")
    return 0


@contextlib.contextmanager
def _open_sentences(args: argparse.Namespace) -> Iterator[Iterator[Sequence[str]]]:
    """Open the input; yield an iterator over lists of sentences, each as soon as it arrives."""
    if sum(map(bool, (args.sentences, args.input, args.example))) > 1:
        raise UserError("give only one of sentences, --input and --example")
    if args.sentences or args.example:
        yield iter([args.sentences or [_EXAMPLE]])
    elif args.input is None:
        if sys.stdin.isatty():
            say("one sentence per line; Ctrl-D ends")
        yield read_arriving_lines(sys.stdin.fileno(), "standard input")
    else:
        try:
            file = os.open(args.input, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"--input {args.input}: {error.strerror}") from None
        try:
            yield read_arriving_lines(file, f"--input {args.input}")
        finally:
            os.close(file)


def _print_translations(
    translator: Translator, sentences: Sequence[str], args: argparse.Namespace, nbest: int
) -> None:
    translate = partial(translator.translate, sentences, length_penalty=args.lenpen)
    if args.plain:
        for (best,) in translate(args.beam):
            print(best.text)
    else:
        for sentence, (greedy,), hypotheses in zip(
            sentences, translate(1), translate(args.beam, nbest)
        ):
            print(sentence)
            _print_hypothesis("greedy", greedy)
            for rank, hypothesis in enumerate(hypotheses, start=1):
                _print_hypothesis(f"beam {args.beam}, {rank}", hypothesis)
    sys.stdout.flush()


def _print_hypothesis(label: str, hypothesis: Hypothesis) -> None:
    print(f"  {label:<10}  {hypothesis.score:8.4f}  {hypothesis.text}")
