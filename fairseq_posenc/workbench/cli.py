"""The command ``fairseq-posenc``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.examples import EXAMPLES
from fairseq_posenc.workbench.running.exit_codes import ended
from fairseq_posenc.workbench.running.options import Parser, show_examples


class Command(NamedTuple):
    """A subcommand: what it does in a line, and the module that has its options and runs it.

    Attributes:
        help: a line.
        module: imported only for this command, as most need fairseq. It has ``add_arguments`` and
            ``run``.
        part: of a module with several commands, whose functions are ``add_PART_arguments`` and
            ``run_PART``.
        passes: whether what follows ``--`` is for another program; ``run`` gets it as ``passed``.
    """

    help: str
    module: str
    part: str = ""
    passes: bool = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its options to a parser."""
        self._function(f"add_{self.part}_arguments" if self.part else "add_arguments")(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Run it; return the exit code."""
        code: int = self._function(f"run_{self.part}" if self.part else "run")(args)
        return code

    def _function(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(self.module, __package__), name)
        return function


COMMANDS = {
    "user-dir": Command("print the path to give fairseq as --user-dir", "..user_dir"),
    "list": Command("list the position encodings", "..analysis.listing"),
    "describe": Command(
        "say what an encoding computes and costs", "..analysis.catalogue", "describe"
    ),
    "count": Command("count position parameters, on real modules", "..analysis.catalogue", "count"),
    "compare": Command(
        "train models that differ in their positions only, on a text, and report",
        ".experiments.compare.command",
    ),
    "choose": Command(
        "say which encoding to take, by what was measured or by training on a text",
        ".experiments.choose.command",
    ),
    "probe": Command(
        "train models on tasks with known answers, and read beyond the trained length",
        ".experiments.probe.command",
    ),
    "curves": Command(
        "show the learning curves of trainings, from their logs", ".reports.curves.command"
    ),
    "translate": Command(
        "translate sentences with a trained model", ".translation.command_translate"
    ),
    "bleu": Command(
        "measure translation models on a test set, with BLEU and chrF",
        ".translation.command_bleu",
    ),
    "lm-length": Command(
        "measure the perplexity of causal language models against context length",
        ".experiments.length.command",
    ),
    "init": Command(
        "make a start checkpoint from a trained RoBERTa, with other positions",
        ".convert.swap.command",
        "init",
    ),
    "swap": Command(
        "replace the positions of a trained model of any family", ".convert.swap.command", "swap"
    ),
    "squad": Command(
        "fine-tune a model on SQuAD, answer its questions, score answers",
        ".finetuning.squad.command",
    ),
    "preprocess": Command("make data for fairseq from texts", ".preprocessing"),
    "train": Command(
        "train a model of the papers, with any encoding, or go on with it",
        ".training.train.command",
        passes=True,
    ),
    "ablation": Command(
        "train the models of one of the papers' ablations",
        ".training.train.command",
        "ablation",
        True,
    ),
    "plan": Command(
        "measure the first updates of a training: speed, memory, hours to its end",
        ".training.plan.command",
    ),
    "glue": Command(
        "fine-tune a pre-trained masked LM on the tasks of GLUE, and report",
        ".finetuning.glue.command",
    ),
    "report": Command(
        "put results into the layouts of the papers' tables, beside their numbers",
        ".reports.report.command",
    ),
    "inspect": Command(
        "show what every head of a trained model does with a text, as one HTML file",
        ".plots.inspect_command",
    ),
    "plot": Command("draw what positions do, in a checkpoint or a spec alone", ".plots.command"),
    "export": Command(
        "write a model for Hugging Face's transformers", ".convert.exchange.command", "export"
    ),
    "import": Command(
        "make a start checkpoint from a model of Hugging Face's transformers",
        ".convert.exchange.command",
        "import",
    ),
    "docs": Command("write the generated parts of the documentation", ".reports.pages"),
    "doctor": Command("say what works on this machine, and test it", ".doctor"),
}

_COMPLETING = "_ARGCOMPLETE"  # set by the function that argcomplete gives a shell


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    return ended(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="fairseq-posenc", description="Position encodings as parts of fairseq's Transformers."
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # fairseq asks for tensorboardX when it is imported; nothing here needs it. From 2.15 on torch
    # warns of a decorator that fairseq has.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*torch.jit.script", FutureWarning)
    words = _words() if argv is None else list(argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            command.add_arguments(subparser)
            show_examples(subparser, EXAMPLES[name])
    if _COMPLETING in os.environ:
        import argcomplete  # not needed for anything else

        argcomplete.autocomplete(parser)  # ends the program
    end = len(words)
    if chosen in COMMANDS and COMMANDS[chosen].passes and "--" in words:
        end = words.index("--")
    args = parser.parse_args(words[:end])
    args.passed = words[end + 1 :]
    logging.basicConfig()  # or importing fairseq does it, now or later, and turns everything on
    logging.getLogger().setLevel(logging.WARNING)
    return COMMANDS[args.command].run(args)


def _words() -> list[str]:
    """Return what follows the program's name, on the line that a shell asks about if it does."""
    if _COMPLETING in os.environ:
        return os.environ["COMP_LINE"].split()[1:]
    return sys.argv[1:]
