r"""Trains small models on tasks with known answers, and tests them on longer questions.

Prints the share of questions whose whole answer is right, by length, for each training. The same
command continues where it stopped.

    python benchmarks/probe.py --tasks sort,flip_flop --encodings none,alibi,rope --updates 200 \
        --trained 20 --lengths 10,20,30,40,60 --out sums -- --decoder-layers 4
"""

from __future__ import annotations

import random
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import data_file_path, index_file_path, make_builder

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import is_made, lock_folder, read_result, whole_folder, write_result
from fairseq_posenc.tasks.answers import ASKS, BLANK
from fairseq_posenc.user_dir import USER_DIR
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments import variants
from fairseq_posenc.workbench.experiments.trainings import TrainingRun, train_all, train_command
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import count_cores, list_gpus
from fairseq_posenc.workbench.running.exit_codes import run_main
from fairseq_posenc.workbench.running.programs import Environment, run_here, run_logged
from probing.tasks import TASKS, Example, Task

EXAMPLES = {"train": 50_000, "valid": 200}  # number of questions by split
TEST_EXAMPLES = 100  # of each length
_BATCHES = "--max-tokens 4096 --required-batch-size-multiple 1"
# Without the last option, a resumed training draws other batches.
_COMMON = f"""--criterion answers {_BATCHES} --dropout 0 --attention-dropout 0 --clip-norm 1.0
--max-target-positions 1024 --optimizer adam --adam-betas '(0.9, 0.98)' --lr 0.003
--lr-scheduler inverse_sqrt --warmup-updates 100 --update-epoch-batch-itr True"""
_BLOCKS = "--sample-break-mode eos --tokens-per-sample 1024"
_TASKS = {  # an encoder reads its own targets; `answers` blanks the words of an answer in them
    variants.MASKED: "--task language_modeling --self-target",
    variants.CAUSAL: "--task language_modeling",
    variants.TRANSLATION: "--task translation --source-lang question --target-lang answer",
}
_MODELS = {
    variants.MASKED: f"--arch roberta_none_tiny {_BLOCKS} --encoder-ffn-embed-dim 256",
    variants.CAUSAL: f"--arch transformer_lm_none_tiny {_BLOCKS} --decoder-ffn-embed-dim 256",
    variants.TRANSLATION: "--arch transformer_none_tiny --max-source-positions 1024 "
    "--encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256",
}
_SHARE = re.compile(r'"length-(\d+)_exact": "?([\d.]+)')  # the figure of a test split


def write_data(task: Task, family: str, longest: int, lengths: list[int], folder: Path) -> None:
    """Write the data-bin of a task: lengths up to ``longest`` in training, ``lengths`` in tests."""
    for split, count in EXAMPLES.items():
        rng = random.Random(f"1 {task.name} {split}")
        drawn = (task.make_example(rng, rng.randint(1, longest)) for _ in range(count))
        _write_split(drawn, task, family, folder, split)
    for length in lengths:
        rng = random.Random(f"1 {task.name} length-{length}")
        drawn = (task.make_example(rng, length) for _ in range(TEST_EXAMPLES))
        _write_split(drawn, task, family, folder, f"length-{length}")


def _write_split(
    examples: Iterator[Example], task: Task, family: str, folder: Path, split: str
) -> None:
    """Write a split: ``question ASKS answer``, or for an encoder-decoder in two files."""
    dictionary = Dictionary()
    for word in (ASKS, *([BLANK] if family == variants.MASKED else []), *task.words):
        dictionary.add_symbol(word)
    paths = {"": str(folder / split)}
    if family == variants.TRANSLATION:
        prefix = folder / f"{split}.question-answer"
        paths = {part: f"{prefix}.{part}" for part in ("question", "answer")}
    builders = {}
    for part, path in paths.items():
        dictionary.save(str(folder / (f"dict.{part}.txt" if part else "dict.txt")))
        builders[part] = make_builder(data_file_path(path), "mmap", vocab_size=len(dictionary))
    for question, answer in examples:
        words = {"": [*question, ASKS, *answer], "question": question, "answer": [ASKS, *answer]}
        for part, builder in builders.items():
            tokens = [*map(dictionary.index, words[part]), dictionary.eos()]
            builder.add_item(torch.tensor(tokens, dtype=torch.int32))
    for part, path in paths.items():
        builders[part].finalize(index_file_path(path))


def measure(training: TrainingRun, data: Path, family: str, splits: str, _: Environment) -> None:
    """Write the shares of right answers by length beside a trained model, unless they exist."""
    result, log = training.folder / "answers.json", training.folder / "validate.log"
    request = {"updates": training.updates}
    if result.exists() and read_result(result, request):
        return
    passed = f"{_TASKS[family]} {_BATCHES} --valid-subset {splits} --log-format json"
    command = ["fairseq-validate", str(data), "--path", str(training.folder / LAST)]
    command += [*shlex.split(passed), "--num-workers", "0", "--user-dir", str(USER_DIR)]
    log.unlink(missing_ok=True)
    run_logged(command, log, None, environment={"OMP_NUM_THREADS": "1"})
    write_result(result, request, dict(_SHARE.findall(log.read_text("utf-8"))))


def main() -> int:
    """Train and test all models, and print the shares of right answers."""
    parser = options.Parser(prog="probe.py", description=__doc__)
    parser.add_argument("--tasks", default="all", help=f"some of {', '.join(TASKS)}")
    parser.add_argument("--encodings", default="none,learned,sinusoidal,t5,alibi,rope")
    parser.add_argument("--family", choices=variants.FAMILIES, default=variants.CAUSAL)
    options.add_seeds(parser, "1,2,3")
    options.add_count(parser, "--updates", "training updates of each model", 1000)
    options.add_count(parser, "--trained", "words of the longest training question", 40)
    lengths = "10,20,40,60,80,120,160,200"  # words of the test questions
    parser.add_argument("--lengths", type=options.positive_ints, default=lengths)
    options.add_out(parser, "probe")
    parser.add_argument("after_dashes", nargs="*", metavar="-- OPTION")
    args = parser.parse_args()
    names = list(TASKS) if args.tasks == "all" else args.tasks.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"--tasks {unknown[0]}: choose from {', '.join(TASKS)}")
    shared = {name: getattr(args, name) for name in ("family", "trained", "lengths")}
    shared |= {"options": args.after_dashes, "version": __version__}
    trainings: dict[TrainingRun, Path] = {}  # with their data
    for name, model, seed in product(names, variants.parse_variants(args.encodings), args.seeds):
        data = args.out / "data" / name
        folder = args.out / "models" / name / model.folder / f"seed-{seed}"
        words = shlex.split(f"{_TASKS[args.family]} {_MODELS[args.family]} {_COMMON}")
        words += ["--user-dir", str(USER_DIR), *model.options, *args.after_dashes]
        command = train_command(data, folder, args.updates, seed, words)
        training = TrainingRun(f"{name} {model.name} {seed}", folder, args.updates, command)
        trainings[training] = data
    with lock_folder(args.out):
        for name in names:
            if not is_made(args.out / "data" / name, shared):
                with whole_folder(args.out / "data" / name, shared) as new:
                    write_data(TASKS[name], args.family, args.trained, args.lengths, new)
        jobs = len(list_gpus()) or count_cores()
        train_all([*trainings], partial(run_here, jobs=jobs), lambda training, end: None)
        splits = ",".join(f"length-{length}" for length in args.lengths)
        tests = {
            training.label: partial(measure, training, data, args.family, splits)
            for training, data in trainings.items()
        }
        run_here(tests, jobs)
    print("task encoding seed:", *args.lengths)
    for training in trainings:
        figures = read_result(training.folder / "answers.json", {"updates": args.updates}) or {}
        print(f"{training.label}:", *(figures[str(length)] for length in args.lengths))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
