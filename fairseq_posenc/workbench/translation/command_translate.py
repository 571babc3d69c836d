"""``fairseq-posenc translate``: translates sentences with a trained model."""

from __future__ import annotations

import argparse
import sys

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
_NBEST = 3  # hypotheses that are shown, or the beam size, if that is less


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    text = "raw text (default: the lines of standard input)"
    add("sentences", nargs="*", metavar="SENTENCE", help=text)
    add("--checkpoint", required=True, metavar="FILE", help="the model")
    text = "translate the example of the report on IWSLT 2017, and print its reference"
    add("--example", action="store_true", help=text)
    add_model_arguments(parser)
    add_computing(parser)
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
    """Translate each sentence as soon as it arrives; return the exit code.

    Raises:
        UserError: wrong input.
    """
    if args.sentences and args.example:
        raise UserError("--example is a sentence itself; leave it out, or the others")
    compute = ComputeOptions.choose(args.device, args.fp16, args.bf16)
    translator = Translator.load(args.checkpoint, args.data, compute)
    given = [_EXAMPLE] if args.example else args.sentences
    if not given and sys.stdin.isatty():
        say("one sentence per line; Ctrl-D ends")
    arriving = read_arriving_lines(sys.stdin.fileno(), "standard input") if not given else [given]
    for sentences in arriving:
        _print_translations(translator, sentences, args)
    if args.example and not args.plain:
        print(f"  reference             {_REFERENCE}")
    return 0


def _print_translations(
    translator: Translator, sentences: list[str], args: argparse.Namespace
) -> None:
    best = translator.translate(sentences, args.beam, min(_NBEST, args.beam), args.lenpen)
    if args.plain:
        for hypothesis, *_ in best:
            print(hypothesis.text)
    else:
        greedy = translator.translate(sentences, beam=1, length_penalty=args.lenpen)
        for sentence, (first,), hypotheses in zip(sentences, greedy, best):
            print(sentence)
            _print_hypothesis("greedy", first)
            for rank, hypothesis in enumerate(hypotheses, start=1):
                _print_hypothesis(f"beam {args.beam}, {rank}", hypothesis)
    sys.stdout.flush()


def _print_hypothesis(label: str, hypothesis: Hypothesis) -> None:
    print(f"  {label:<10}  {hypothesis.score:8.4f}  {hypothesis.text}")
