"""``fairseq-posenc choose``: recommends an encoding, from measurements or by training on a text."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.choose.answer import ChooseQuestion, answer_question
from fairseq_posenc.workbench.experiments.choose.from_trained import answer_from_trained
from fairseq_posenc.workbench.experiments.variants import (
    ENCODER_DECODER,
    FAMILIES,
    MASKED,
    parse_variants,
)
from fairseq_posenc.workbench.results import terminal
from fairseq_posenc.workbench.running import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--family", choices=FAMILIES, required=True, help="kind of models")
    length_help = "input length in tokens"
    add("--length", type=options.positive_int, required=True, metavar="N", help=length_help)
    options.add_count(parser, "--trained", "length of training, in tokens (default: --length)")
    trained_help = "for models that are trained already, and get other positions"
    add("--from-trained", action="store_true", help=trained_help)
    text_help = "UTF-8 text to train candidates on (default: answer from measurements)"
    add("--text", type=Path, help=text_help)
    budget_help = "time for the trainings, as in 90s, 30m, 2h (default: %(default)s)"
    add("--budget", metavar="TIME", default="30m", help=budget_help)
    add("--encodings", help="candidates, separated by commas (default: the best measured ones)")
    options.add_seeds(parser, (1, 2, 3))
    options.add_count(parser, "--vocab-size", "number of sentencepieces", 512)
    options.add_jobs(parser, "one per core, or one on the GPU")
    options.add_cluster(parser)
    options.add_out(parser, computed_default="choose-NAME for --text NAME.txt")
    add("--markdown", action="store_true", help="print Markdown, as in choose.md")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the answer; return the exit code.

    Raises:
        UserError: wrong input, or a command of fairseq failed.
    """
    variants = parse_variants(args.encodings) if args.encodings else ()
    names = tuple(variant.name for variant in variants)
    question = ChooseQuestion(args.family, args.length, args.trained or args.length, names)
    show: Callable[[str], str] = str if args.markdown else terminal.format_report
    _refuse_wrong_options(question, args)
    if args.text is None:
        answer = answer_from_trained if args.from_trained else answer_question
        print(show(answer(question)))
        return 0
    # Imported only here: answers from measurements do not need fairseq.
    from fairseq_posenc.workbench.experiments.choose.on_text import train_candidates

    record, answer_of_trainings = train_candidates(question, args)
    print(record.text() if args.json else show(answer_of_trainings))
    return 0


def _refuse_options_of_trainings(args: argparse.Namespace) -> None:
    """Refuse options that have no effect without ``--text``."""
    defaults = argparse.ArgumentParser()
    add_arguments(defaults)
    for name in ("budget", "seeds", "vocab_size", "jobs", "on", "detach", "out", "json"):
        if getattr(args, name) != defaults.get_default(name):
            raise UserError(f"--{name.replace('_', '-')}: needs --text: nothing is trained here")
    if args.after_dashes:
        raise UserError(f"-- {args.after_dashes[0]}: needs --text: nothing is trained here")


def _refuse_wrong_options(question: ChooseQuestion, args: argparse.Namespace) -> None:
    if question.length < question.trained:
        raise UserError(
            f"--trained {question.trained} is more than --length {question.length}: set --length "
            "to the longest text to read"
        )
    if args.text is None:
        _refuse_options_of_trainings(args)
        if args.from_trained and args.trained:
            raise UserError("--trained: leave it out; --from-trained answers from measured models")
    elif args.from_trained:
        raise UserError("--from-trained: answers from measurements; leave out --text")
    elif question.family == ENCODER_DECODER:
        raise UserError(
            "--text: is for language models; prepare translations with 'fairseq-posenc "
            "preprocess translation', and train with train_scripts/translation_iwslt17.sh"
        )
    elif question.family == MASKED and question.length != question.trained:
        raise UserError("--trained: masked-lm candidates are evaluated at the length in training")
