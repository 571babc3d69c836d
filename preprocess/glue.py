r"""GLUE's .tsv files to a data-bin for each task.

  python preprocess/glue.py glue_data/ --out data-bin/glue \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt
  python preprocess/glue.py glue_data/ --out data-bin/glue --tasks CoLA,RTE \
      --sentencepiece-model sentencepiece.model

The dictionary has to be that of the pre-trained model: RoBERTa's dict.txt, or the one in the folder
that the model was trained on. Each OUT/TASK has input0, input1 and label as fairseq's
sentence_prediction reads them, the ids of the test sets, and manifest.json with all counts.
GLUE's site wants two more sets. The diagnostic one, diagnostic/diagnostic.tsv, becomes a third test
set of MNLI, whose model predicts AX. WNLI is not trained: OUT/WNLI.tsv has its majority class.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from binarize import vocabulary
from fairseq_posenc.errors import UserError
from fairseq_posenc.glue.submission import write_predictions
from fairseq_posenc.running.ending import ended
from fairseq_posenc.running.files import checksum
from fairseq_posenc.running.folders import Folder
from fairseq_posenc.running.interruption import CONTINUES, any_end_like_ctrl_c
from fairseq_posenc.running.options import Parser
from fairseq_posenc.running.progress import format_counts, say
from fairseq_posenc.tasks.glue.definitions import WNLI, Task, parse_tasks
from fairseq_posenc.tokens.numbers import Encoder, Symbols
from glue_tasks.binary import Writer
from glue_tasks.rows import find_file, read_examples

if TYPE_CHECKING:
    from fairseq.data import Dictionary

_FORMAT = 1  # of manifest.json
_SPLITS = "train,valid,test"
_FEWEST = 8  # tokens of an example


def main() -> None:
    """Run the program.

    Raises:
        UserError: wrong input; the message says what, where, and what to do.
    """
    args = _parser().parse_args()
    _check(args)
    tasks = parse_tasks(args.tasks)
    files = {task.name: _files(task, args) for task in tasks}  # before any work is done
    dictionary = vocabulary.dictionary(args)
    encoder = vocabulary.encoder(args, dictionary)
    with any_end_like_ctrl_c(CONTINUES):
        for task in tasks:
            _write_task(task, files[task.name], args, encoder, dictionary)
        if (args.tasks, args.splits) == ("all", _SPLITS) and (args.raw / WNLI.name).is_dir():
            _write_majority(args)


def _write_task(
    task: Task,
    files: dict[str, Path],
    args: argparse.Namespace,
    encoder: Encoder,
    dictionary: Dictionary,
) -> None:
    folder = Folder(args.out / task.name, _plan(args, files))
    if folder.is_done():
        return
    with folder.begun():
        writer = Writer(folder.partial, encoder, Symbols.of(dictionary), args.max_tokens)
        writer.write_dictionaries(task, dictionary)
        splits = {}
        for split, path in files.items():
            splits[split] = writer.write(task, split, read_examples(path, task, split))
            print(f"{task.name} {split}: {format_counts(splits[split])}", flush=True)
        summary = {
            "symbols": len(dictionary),
            "sha256": checksum(folder.partial / "input0" / "dict.txt"),
        }
        folder.finish({"glue_task": task.name, "dict.txt": summary, "splits": splits})


def _write_majority(args: argparse.Namespace) -> None:
    """Write what is handed in for WNLI."""
    found = _files(WNLI, args)
    train, test = (read_examples(found[split], WNLI, split) for split in ("train", "test"))
    ((label, count),) = Counter(train.labels).most_common(1)
    path = args.out / f"{WNLI.name}.tsv"
    write_predictions(path, test.ids, [label] * len(test.ids))
    say(f"wrote {path}: {label} for all, the label of {count:,} of {len(train.labels):,}")


def _files(task: Task, args: argparse.Namespace) -> dict[str, Path]:
    found = {}
    for split in task.files:
        if split.rstrip("12") in args.splits.split(","):
            try:
                found[split] = find_file(args.raw, task, split)
            except UserError:
                if split not in task.optional:
                    raise
    return found


def _plan(args: argparse.Namespace, files: dict[str, Path]) -> dict[str, Any]:
    """Return all that the result depends on."""
    return {
        "format": _FORMAT,
        "options": {"max_tokens": args.max_tokens},
        "files": vocabulary.checksums(args),
        "inputs": {split: checksum(path) for split, path in files.items()},
        "packages": {name: version(name) for name in vocabulary.PACKAGES},
    }


def _check(args: argparse.Namespace) -> None:
    vocabulary.check(args)
    if args.max_tokens < _FEWEST:
        raise UserError(f"--max-tokens {args.max_tokens}: give {_FEWEST} or more")
    unknown = set(args.splits.split(",")) - {"train", "valid", "test"}
    if unknown:
        raise UserError(f"--splits {args.splits}: {min(unknown)!r} is none of train, valid, test")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("raw", type=Path, help="folder with CoLA/train.tsv and so on; also .gz, .bz2, .xz, .zst")
    add("--out", type=Path, required=True, help="folder to make, with a folder for each task")
    add("--tasks", default="all", help="names separated by commas (default: all eight)")
    add("--splits", default=_SPLITS, help="which sets (default: %(default)s)")
    vocabulary.add_arguments(parser)
    add("--dict", type=Path, help="dict.txt of the pre-trained model; needed with --encoder-json")
    add(
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens of an example, <s> and </s> included: the positions that the model has; "
        "longer ones are cut, the longer sentence first, and counted (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(ended(main))
