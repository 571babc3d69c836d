"""The command ``fairseq-posenc``: lists its subcommands, and imports the one that is run."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fairseq_posenc.errors import UserError, printable, suggest
from fairseq_posenc.user_dir import USER_DIR, import_user_dir
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.examples import add_examples
from fairseq_posenc.workbench.running.exit_codes import run_main
from fairseq_posenc.workbench.running.options import Parser


class Command(NamedTuple):
    """A subcommand, and the module that defines its options and runs it.

    The module has the functions ``add_arguments`` and ``run`` or, if it serves several commands,
    ``add_PART_arguments`` and ``run_PART``; the first is missing for a command without options. It
    is imported only for its command, as most of them import fairseq.
    """

    help: str  # description in one line
    module: str  # path of the module relative to this package; after a colon, PART

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to a parser."""
        module, part = self._import()
        if add := getattr(module, f"add_{part}_arguments" if part else "add_arguments", None):
            add(parser)

    def run(self, args: argparse.Namespace) -> int | None:
        """Run the command; return the exit code, None for success."""
        module, part = self._import()
        return getattr(module, f"run_{part}" if part else "run")(args)

    def _import(self) -> tuple[ModuleType, str]:
        path, _, part = self.module.partition(":")
        return import_module(path, __package__), part


# Commands by the user's purpose, in the order of the help.
GROUPS: dict[str, dict[str, Command]] = {
    "look at encodings and models": {
        "list": Command("list the position encodings", ".encodings_command:list"),
        "describe": Command("show an encoding's formula and cost", ".encodings_command:describe"),
        "count": Command("count the position parameters of a model", ".encodings_command:count"),
        "plot": Command("plot the positions of a checkpoint or of a spec", ".plots.command:plot"),
        "inspect": Command("show attention to a text on an HTML page", ".plots.command:inspect"),
    },
    "compare encodings": {
        "choose": Command(
            "recommend an encoding by results of small models", ".experiments.choose"
        ),
        "compare": Command("train and compare position encodings", ".experiments.compare.command"),
        "learning-curves": Command("plot learning curves from logs", ".reports.curves_command"),
    },
    "prepare and train": {
        "preprocess": Command("binarize texts for fairseq", ".preprocessing"),
    },
    "fine-tune and evaluate": {
        "glue": Command("fine-tune on GLUE, and write the results", ".finetuning.glue.command"),
        "squad": Command(
            "fine-tune on SQuAD, predict and score answers", ".finetuning.squad.command"
        ),
        "translate": Command("translate sentences", ".translation.command_translate"),
        "bleu": Command("score translation models by BLEU and chrF", ".translation.command_bleu"),
        "lm-length": Command(
            "measure the perplexity of causal LMs of transformers by context length",
            ".experiments.length.command",
        ),
        "report": Command("print results as in the papers' tables", ".reports.report_command"),
    },
    "convert": {
        "swap": Command("replace the positions of a transformers model", ".convert.commands:swap"),
        "export": Command("export to Hugging Face or CTranslate2", ".convert.commands:export"),
        "import": Command("convert a Hugging Face model for fairseq", ".convert.commands:import"),
    },
    "maintain": {
        "doctor": Command("check and test this installation", ".doctor"),
        "user-dir": Command("print the path for fairseq's option --user-dir", ".cli:user_dir"),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
# Commands that use no encoding. All others have --user-dir, for the user's own encodings.
_WITHOUT_ENCODINGS = {"choose", "learning-curves", "preprocess", "user-dir"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    return run_main(lambda: _run(argv))  # prints a UserError as one line


def _run(argv: Sequence[str] | None) -> int | None:
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):  # surrogates: not UTF-8
            raise UserError(f"{word!a} is not UTF-8; rename the file, or change the text")
    is_completing = "_ARGCOMPLETE" in os.environ  # on Tab, argcomplete's shell function sets it
    if is_completing:  # the shell passes the words typed so far in a variable
        words = os.environ["COMP_LINE"].split()[1:]
    name = next((word for word in words if not word.startswith("-")), "")  # on Tab, only its start
    if name and name not in COMMANDS and not is_completing:
        meant = suggest(name, COMMANDS)  # "did you mean NAME? ", or ""
        raise UserError(f"there is no command '{name}': {meant}fairseq-posenc --help lists all")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # fairseq would show INFO
    warnings.formatwarning = lambda text, *_: f"fairseq-posenc: warning: {printable(str(text))}\n"
    os.environ["MPLBACKEND"] = "agg"  # all pictures are written to files
    parser = _build_parser(name)
    if is_completing:
        import argcomplete  # not needed for anything else

        argcomplete.autocomplete(parser)  # ends the program
    args, unknown = parser.parse_known_args(words)
    if unknown:  # argparse would name the help of all commands
        help_of = f"fairseq-posenc {args.command} --help"
        raise UserError(f"unrecognized arguments: {' '.join(unknown)} (see {help_of})")
    import_user_dir(getattr(args, "user_dir", USER_DIR))  # the user's encodings; USER_DIR adds none
    return COMMANDS[args.command].run(args)


def _build_parser(chosen: str) -> Parser:
    """Build the parser of all commands, with options only for the chosen one."""
    width = max(map(len, COMMANDS))
    listed = [
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {group[name].help}" for name in group)])
        for title, group in GROUPS.items()
    ]
    parser = Parser(  # keeps line breaks, and raises its errors as UserErrors
        prog="fairseq-posenc",
        description="Compare position encodings, and train fairseq's Transformers with them.",
        epilog="\n\n".join(listed),
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, description=command.help)
        if name == chosen:
            command.add_arguments(subparser)
            if name not in _WITHOUT_ENCODINGS:
                _add_user_dir(subparser)
            add_examples(subparser, name)
    return parser


def run_user_dir(args: argparse.Namespace) -> None:
    """Print the path of the package; fast, as this module imports no torch."""
    print(USER_DIR)


def _add_user_dir(parser: argparse.ArgumentParser) -> None:
    """Add ``--user-dir`` to a parser, or to its subcommands' parsers."""
    if parser._subparsers:  # argparse has no public way to ask
        for subparser in parser._subparsers._group_actions[0].choices.values():  # type: ignore
            _add_user_dir(subparser)
        return
    parser.add_argument("--user-dir", type=Path, default=USER_DIR, help="folder of your encodings")
