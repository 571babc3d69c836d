"""Short trainings that start from a comparison's trained models with other positions.

    python benchmarks/swaps.py compare-wiki --source rope --encodings rope,none,m4m --updates 120 \
        --lr 0.002 --out masked_lm_start.json

The folder was made by `fairseq-posenc compare`. `fairseq-posenc swap` gives the source's model of
each seed each of the encodings, and it is trained on the same text with the same seed. The source's
own encoding shows the cost of the change. Options after two dashes are passed to `fairseq-train`.
The same command continues after a stop.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from fairseq_posenc.checkpoints.recovery import LAST
from fairseq_posenc.workbench.experiments.compare.record import RECORD, build_record
from fairseq_posenc.workbench.experiments.text_experiment import (
    LEARNING_RATE,
    TextExperiment,
    name_folder,
)
from fairseq_posenc.workbench.experiments.variants import Run, Variant, parse_variants
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.folders import lock_output_folder
from fairseq_posenc.workbench.running.jobs import Outputs, RunContext
from fairseq_posenc.workbench.running.options import add_seeds, parse_around_dashes
from fairseq_posenc.workbench.running.programs import run_logged
from measuring.commands import exit_on_error, new_parser, own_command


@dataclass(frozen=True, kw_only=True)
class Swaps(TextExperiment):
    """Trainings from models whose positions were changed, on the data of the comparison ``out``."""

    source: Variant  # the encoding of the models that are changed
    source_lr: str  # the learning rate at which they were trained
    trainings: Path  # folder of the trainings, beside that of the comparison

    def folder(self, run: Run) -> Path:
        """Return the folder of a training."""
        return self.trainings / name_folder(run)

    def source_checkpoint(self, run: Run) -> Path:
        """Return the comparison's checkpoint whose positions are changed."""
        return super().folder(Run(self.source, run.seed, self.source_lr)) / LAST

    def start(self, run: Run) -> Path:
        """Return the start checkpoint of a training; another source has another name."""
        source = checksum(self.source_checkpoint(run))
        return self.trainings / run.variant.folder / f"seed-{run.seed}-of-{source[:12]}.pt"

    def options(self, run: Run) -> list[str]:
        """List the options of `fairseq-train`, with the checkpoint to start from."""
        return [*super().options(run), "--finetune-from-model", str(self.start(run))]

    def prepare(self, context: RunContext) -> Outputs:
        """Change the positions of the source's models before any training.

        Returns:
            Facts for the record: the source, and how many updates it was trained.
        """
        for run in self.runs:
            start = self.start(run)
            if not start.exists():
                start.parent.mkdir(parents=True, exist_ok=True)
                source = str(self.source_checkpoint(run))
                command = ["fairseq-posenc", "swap", "--checkpoint", source]
                command += ["--out", str(start), "--seed", str(run.seed), *run.variant.options]
                run_logged(command, start.with_suffix(".swap.log"), context.lock)
        rows = read(self.out / RECORD).rows
        updates = next(row["updates"] for row in rows if row["model"] == self.source.name)
        return {"source": self.source.name, "source_updates": updates}


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("comparison", type=Path, help="folder of the comparison")
    add("--source", required=True, help="the encoding of the trained models, as named there")
    add("--source-lr", default=LEARNING_RATE, help="their learning rate (default: %(default)s)")
    add("--encodings", required=True, help="to change to")
    add("--updates", type=int, default=120, help="of each training (default: %(default)s)")
    add("--lr", default="0.002", help="learning rate (default: %(default)s)")
    add_seeds(parser, (1, 2, 3))
    add("--out", type=Path, required=True, metavar="FILE", help="the record; runs lie beside it")
    return parse_around_dashes(parser, words)


def main() -> None:
    """Change the models' positions, train them, and write the record as a comparison does."""
    args = parse_args(sys.argv[1:])
    facts = read(args.comparison / RECORD).data  # of the comparison
    (source,) = parse_variants(args.source)
    experiment = Swaps(
        out=args.comparison,
        source=source,
        source_lr=args.source_lr,
        trainings=args.out.with_suffix(""),
        variants=parse_variants(args.encodings),
        seeds=args.seeds,
        updates=args.updates,
        family=facts["family"],
        lrs=(args.lr,),
        vocab_size=facts["vocab_size"],
        train_args=(*shlex.split(facts["options"]), *args.after_dashes),
    )
    with lock_output_folder(experiment.trainings) as lock:
        record = build_record(experiment.run(lock))
    data = {**record.data, "text": facts["text"]}
    record._replace(data=data, command=own_command()).write(args.out)


if __name__ == "__main__":
    exit_on_error(main)
