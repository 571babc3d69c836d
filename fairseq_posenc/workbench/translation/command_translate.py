"""``fairseq-posenc translate``: translates sentences with a trained model."""

import argparse
import sys
from functools import partial
from pathlib import Path

from fairseq_posenc.tokens.files import read_arriving_lines
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import choose_dtype
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation.translator import Translator, warn_of_long

_NBEST = 3  # hypotheses of beam search that are shown, at most the size of the beam


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("sentences", nargs="*", metavar="SENTENCE", help="raw text (default: standard input)")
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="the model")
    add_model_arguments(parser)
    options.add_precision(parser)
    text = "print only the best translation, one line per line of input"
    add("--plain", action="store_true", help=text)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model's data and of beam search, which ``bleu`` has too."""
    text = "folder with dictionaries and sentencepiece model (default: the one it was trained on)"
    options.add_data(parser, text)
    options.add_count(parser, "--beam", "beam size", 5)
    text = "length penalty: below 1 favors short translations, above 1 long ones (default: 1)"
    penalty = partial(options.finite_number, most=Translator.LARGEST_PENALTY)
    parser.add_argument("--lenpen", type=penalty, default=1.0, metavar="X", help=text)


def run(args: argparse.Namespace) -> None:
    """Translate each sentence as soon as it arrives.

    Raises:
        UserError: wrong input.
    """
    translator = Translator.load(args.checkpoint, args.data, choose_dtype(args.fp16, args.bf16))
    if args.sentences:
        _print_all(translator, args.sentences, args)
        return
    if sys.stdin.isatty():
        say("one sentence per line; Ctrl-D ends")
    for sentences in read_arriving_lines(sys.stdin.fileno(), "standard input"):
        _print_all(translator, sentences, args)


def _print_all(translator: Translator, sentences: list[str], args: argparse.Namespace) -> None:
    warn_of_long(sentences, translator)
    found = translator.translate(sentences, args.beam, min(_NBEST, args.beam), args.lenpen)
    if args.plain:
        for hypotheses in found:
            print(hypotheses[0].text)
    else:
        # To compare: greedy search, which has one hypothesis.
        greedy = translator.translate(sentences, beam=1, length_penalty=args.lenpen)
        for sentence, (first,), hypotheses in zip(sentences, greedy, found):
            print(sentence)
            labels = ["greedy", *(f"beam {args.beam}, {n}" for n in range(1, len(hypotheses) + 1))]
            for label, hypothesis in zip(labels, [first, *hypotheses]):
                print(f"  {label:<{len(labels[-1])}}  {hypothesis.score:8.4f}  {hypothesis.text}")
    sys.stdout.flush()
