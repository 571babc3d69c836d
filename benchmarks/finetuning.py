"""Fine-tunes the models of a comparison on GLUE, seed by seed; intervals are over the seeds.

    python benchmarks/finetuning.py compare-wiki --encodings none,rope --out glue.json -- \
        --protocol m4m --data data-bin/glue --tasks SST-2,STS-B --learning-rates 2e-3

The folder was made by `fairseq-posenc compare`; options after the dashes are those of
`fairseq-posenc glue`. Each model is fine-tuned with the seed of its training. The same command
continues after a stop.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import product
from pathlib import Path

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.workbench.experiments.text_experiment import LEARNING_RATE, name_folder
from fairseq_posenc.workbench.experiments.variants import Run, parse_variants
from fairseq_posenc.workbench.results.intervals import interval
from fairseq_posenc.workbench.results.record import Record, Row, read
from fairseq_posenc.workbench.running.folders import lock_folder
from fairseq_posenc.workbench.running.options import add_seeds, parse_around_dashes
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from measuring.commands import exit_on_error, new_parser, own_command


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("models", type=Path, help="folder of the comparison")
    add("--encodings", required=True, help="models to fine-tune, named as in the comparison")
    add("--lr", default=LEARNING_RATE, help="their learning rate (default: %(default)s)")
    add_seeds(parser, (1, 2, 3))
    add("--out", type=Path, required=True, metavar="FILE", help="the record; runs lie beside it")
    return parse_around_dashes(parser, words)


def fine_tune(args: argparse.Namespace, lock: int) -> Record:
    """Fine-tune the models, and collect the reported metric of each task, and the tasks' mean.

    The programs that fine-tune inherit ``lock``, the open lock of the folder beside the record.
    """
    scores_by_seed: dict[tuple[str, str], dict[int, float]] = {}  # (model, task) -> seed -> score
    runs: list[Row] = []
    for variant, seed in product(parse_variants(args.encodings), args.seeds):
        subfolder = name_folder(Run(variant, seed, args.lr))
        out = args.out.with_suffix("") / subfolder
        trained = args.models / "models" / subfolder / LAST
        command = ["fairseq-posenc", "glue", "--checkpoint", str(trained), "--out", str(out)]
        command += ["--name", variant.folder, "--seeds", str(seed), *args.after_dashes]
        say(f"{out}: fine-tuning")
        out.mkdir(parents=True, exist_ok=True)
        run_logged(command, out / "glue.log", lock)
        record = read(out / "results.json")
        reported = {row["task"]: row["metric"] for row in record.rows if row["reported"]}
        by_task = {run["task"]: run for run in record.figures["runs"]}
        scores = {task: by_task[task][metric] for task, metric in reported.items()}
        if len(scores) > 1:
            scores["mean"] = statistics.fmean(scores.values())
        for task, score in scores.items():
            scores_by_seed.setdefault((variant.name, task), {})[seed] = score
            row = {"model": variant.name, "task": task, "seed": seed, "score": score}
            # The mean has no run of its own: no metric, and nothing that collapsed.
            collapsed = by_task[task]["collapsed"] if task in by_task else None
            runs.append({**row, "metric": reported.get(task), "collapsed": collapsed})
    rows = [
        {"model": model, "task": task, "seeds": len(by_seed)}
        | interval(by_seed.values()).figures("score")
        for (model, task), by_seed in scores_by_seed.items()
    ]
    facts = {"models": str(args.models)}
    return Record("finetuning", {"models": rows, "runs": runs}, facts, command=own_command())


def main() -> None:
    """Fine-tune, and write the record."""
    args = parse_args(sys.argv[1:])
    with lock_folder(args.out.with_suffix("")) as lock:
        fine_tune(args, lock).write(args.out)


if __name__ == "__main__":
    exit_on_error(main)
