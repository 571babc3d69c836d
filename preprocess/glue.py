r"""Converts GLUE's .tsv files to a data-bin for each task.

  fairseq-posenc preprocess glue glue_data/ --out data-bin/glue \
      --encoder-json encoder.json --vocab-bpe vocab.bpe --dict dict.txt
  fairseq-posenc preprocess glue glue_data/ --out data-bin/glue --tasks CoLA,RTE \
      --sentencepiece-model sentencepiece.model

The dictionary must be that of the pre-trained model: RoBERTa's dict.txt, or the one in the data-bin
of its training. Each OUT/TASK has input0, input1 and label as fairseq's sentence_prediction reads
them, the ids of the test sets, and manifest.json with all counts. GLUE's site expects two more
sets: the diagnostic set, diagnostic/diagnostic.tsv, becomes a third test set of MNLI, whose model
predicts AX; for WNLI, which is not trained, OUT/WNLI.tsv predicts the majority class.
"""

from __future__ import annotations

import argparse
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path

from binarize.options import integer
from binarize.output import Manifest, format_counts, make_folder, say
from binarize.vocabulary import PACKAGES, Vocabulary, add_vocabulary
from fairseq_posenc.checkpoints.dictionary import DICTIONARY
from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import checksum
from fairseq_posenc.tasks.glue.definitions import TASKS, WNLI, Task, parse_tasks
from glue_tasks.binary import SplitWriter
from glue_tasks.rows import find_files, read_examples

_SPLITS = ("train", "valid", "test")


def run(args: argparse.Namespace) -> None:
    """Write the data-bins; tasks that an interrupted run finished are kept.

    Raises:
        UserError: an option has a wrong value, or a file is missing or broken.
    """
    vocabulary = Vocabulary.from_args(args)
    splits = args.splits.split(",")
    if unknown := set(splits) - set(_SPLITS):
        choices = ", ".join(_SPLITS)
        raise UserError(
            f"--splits {args.splits}: unknown set {min(unknown)!r}: choose from {choices}"
        )
    tasks = parse_tasks(args.tasks)
    # Before any task is written, so that a missing file is reported at once.
    files = {task.name: find_files(args.raw, task, splits) for task in tasks}
    dictionary = vocabulary.load_dictionary()
    encoder = vocabulary.load_encoder(dictionary)
    assert encoder  # only words and characters, which are no options here, have none
    writer = SplitWriter(encoder, dictionary, vocabulary, args.max_tokens)
    for task in tasks:
        request = {
            "options": {"max_tokens": args.max_tokens},
            "files": vocabulary.checksums(),
            "inputs": {split: checksum(path) for split, path in files[task.name].items()},
            "packages": {name: version(name) for name in PACKAGES},
        }
        fill = partial(_write_task, task, files[task.name], writer)
        make_folder(args.out / task.name, request, fill)
    is_complete = len(tasks) == len(TASKS) and set(splits) == set(_SPLITS)
    if is_complete and (args.raw / WNLI.name).is_dir():
        _predict_wnli(find_files(args.raw, WNLI, splits), args.out / f"{WNLI.name}.tsv")


def _write_task(
    task: Task, files: dict[str, Path], writer: SplitWriter, manifest: Manifest
) -> None:
    """Write the data-bin of a task."""
    writer.write_dictionaries(task, manifest.folder)
    sha256 = checksum(manifest.folder / "input0" / DICTIONARY)
    manifest.entries["glue_task"] = task.name
    manifest.entries[DICTIONARY] = {"symbols": len(writer.dictionary), "sha256": sha256}
    for split, path in files.items():
        if manifest.read("splits", split) is None:
            examples = read_examples(path, task, split)
            counts = writer.write(task, split, examples, manifest.folder)
            manifest.save("splits", split, counts)
            print(f"{task.name} {split}: {format_counts(counts)}", flush=True)


def _predict_wnli(files: dict[str, Path], path: Path) -> None:
    """Write the predictions for WNLI: the majority class of its training set."""
    train = read_examples(files["train"], WNLI, "train")
    test = read_examples(files["test"], WNLI, "test")
    ((label, count),) = Counter(train.labels).most_common(1)
    rows = "".join(f"{number}\t{label}\n" for number in test.ids)
    write_whole(path, f"index\tprediction\n{rows}")
    say(f"wrote {path}: {label} for all, the label of {count:,} of {len(train.labels):,}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("raw", type=Path, help="folder with CoLA/train.tsv and so on; also .gz, .bz2, .xz, .zst")
    add("--out", type=Path, required=True, help="folder to make, with a folder for each task")
    add("--tasks", default="all", help="tasks, separated by commas (default: all eight)")
    add("--splits", default=",".join(_SPLITS), help="sets to write (default: %(default)s)")
    add_vocabulary(parser)
    add("--dict", type=Path, help="dict.txt of the pre-trained model; needed with --encoder-json")
    text = (
        "maximum tokens of an example, <s> and </s> included: the model's positions; longer "
        "ones are cut, the longer sentence first, and counted (default: %(default)s)"
    )
    # At least four special symbols of a pair, and two tokens of each sentence.
    add("--max-tokens", type=integer(8), default=512, metavar="N", help=text)
