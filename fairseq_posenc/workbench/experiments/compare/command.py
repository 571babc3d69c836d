"""``fairseq-posenc compare``: trains models that differ only in their positions.

It makes the data once, trains every model with every rate and seed, writes the page after each
training run, and prints the outcome. The same command continues where it stopped.
"""

import argparse
import shlex
from functools import partial
from pathlib import Path

from fairseq_posenc.assembly import draft_terms
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import claim, lock_folder
from fairseq_posenc.specs import parse
from fairseq_posenc.workbench.experiments import corpus, trainings, variants
from fairseq_posenc.workbench.experiments.compare import report
from fairseq_posenc.workbench.experiments.compare.outcomes import Run, rank_models
from fairseq_posenc.workbench.experiments.compare.report import ComparePlan
from fairseq_posenc.workbench.experiments.data_bin import BINARY, data_request, make_data
from fairseq_posenc.workbench.experiments.variants import CAUSAL, MASKED
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import count_cores, list_gpus
from fairseq_posenc.workbench.running.programs import run_here
from fairseq_posenc.workbench.running.progress import say

# The models are small enough for two cores to train one in minutes, and large enough to learn more
# than a bag of words. Dropout would only slow down a training run of a few epochs. The schedule
# does not depend on the number of updates, so a longer run continues a shorter one. By default,
# fairseq drops sentences to make the last batch a multiple of 8, also in validation.
_OPTIONS = """
--sample-break-mode none --tokens-per-sample 64 --max-tokens 3072 --required-batch-size-multiple 1
--{stack}-layers 2 --{stack}-embed-dim 128 --{stack}-ffn-embed-dim 512 --{stack}-attention-heads 4
--dropout 0 --attention-dropout 0 --optimizer adam --adam-betas '(0.9, 0.98)'
--lr-scheduler inverse_sqrt --warmup-updates 200
"""
_MODELS = {
    MASKED: "--task masked_lm --criterion masked_lm --arch roberta_none_tiny",
    CAUSAL: "--task language_modeling --criterion cross_entropy --arch transformer_lm_none_tiny",
}
STACKS = {MASKED: "encoder", CAUSAL: "decoder"}  # begin options such as --encoder-layers
TRAIN_OPTIONS = {
    family: shlex.split(model + _OPTIONS.format(stack=STACKS[family]))
    for family, model in _MODELS.items()
}
# Options of fairseq-train that the user cannot set, with the alternative or the reason.
RESERVED = {
    "--max-update": "use --updates",
    "--max-epoch": "use --updates",
    "--seed": "use --seeds",
    "--lr": "use --lrs",
    "--position-encoding": "use --encodings",
    "--attention-directions": "use --encodings",
    "--save-dir": "use --out",
    "--keep-interval-updates": "the newest checkpoint is kept",
    "--user-dir": "give it before the --",
    "--task": "use --family",
    "--no-save": "figures are read from the last checkpoint",
    "--no-last-checkpoints": "figures are read from the last checkpoint",
    "--log-format": "the learning curves are read from the log",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; the program's ``cli`` module adds ``--user-dir`` to them."""
    add = parser.add_argument
    options.add_out(parser, computed="demo; compare-NAME for --text NAME.txt")
    add("--text", type=Path, help="UTF-8 text file (default: Python's own documentation)")
    add("--family", choices=_MODELS, default=MASKED, help="kind of models (default: %(default)s)")
    add(
        "--encodings",
        default=variants.DEFAULT_ENCODINGS,
        help="models to compare, separated by commas (or by semicolons if a spec has commas): "
        "position-encoding specs such as 'learned+m4m(max_distance=64)', or "
        f"{', '.join(variants.SHORTHANDS)} (default: %(default)s)",
    )
    options.add_count(parser, "--updates", "training updates of each model", 250)
    options.add_count(parser, "--vocab-size", "number of sentencepieces", 512)
    options.add_seeds(parser, "1,2,3")
    text = "learning rates, as in 0.001,0.003: each model counts at its best (default: %(default)s)"
    add("--lrs", type=options.positive_numbers, default="0.003", help=text)
    jobs = "models to train at a time (default: one per GPU, or per core; with --on slurm no limit)"
    options.add_count(parser, "--jobs", jobs)
    options.add_on(parser, example="partition=gpu time=1:00:00")
    add("after_dashes", nargs="*", metavar="-- OPTION", help="for fairseq-train: -- --dropout 0.1")


def run(args: argparse.Namespace) -> None:
    """Run the comparison and write the report.

    Raises:
        UserError: wrong input.
        RunError: a command of fairseq failed.
    """
    plan = build_plan(args)
    slurm = options.parse_slurm(args.on)
    out = args.out or Path(f"compare-{args.text.stem}" if args.text else "demo")
    if ":" in str(out) or "," in str(out):
        raise UserError(f"--out {out}: fairseq splits names at ':' and ','; name another folder")
    if plan.text:
        corpus.read_documents(plan.text)  # an unusable text is refused before anything is written
    shared = {  # what all training runs in a folder must share
        **data_request(plan.text, plan.vocab_size),
        "family": plan.family,
        "options": shlex.join(plan.options),
    }
    ends: dict[Run, trainings.TrainingEnd] = {}
    with lock_folder(out):
        claim(out, shared)  # refuses a folder that was begun with another `shared`
        facts = make_data(plan.text, plan.vocab_size, out / "data")
        runs = {build_training(plan, run, out, args.user_dir): run for run in plan.runs}
        page = out / report.PAGE

        def on_end(training: trainings.TrainingRun, end: trainings.TrainingEnd) -> None:
            ends[runs[training]] = end
            result = f"perplexity {end.perplexity:,.4g}"
            if end.diverged_at:
                result = f"diverged at update {end.diverged_at:,}"
            say(f"[{len(ends)} of {len(runs)}] {training.label}: {result}")
            report.write_page(plan, facts, ends, page)

        size = f"{counted(len(runs), 'training runs')} of {counted(plan.updates, 'updates')}"
        say(f"{size}; results: {out}/")
        run_tasks = partial(run_here, jobs=args.jobs or len(list_gpus()) or count_cores())
        if slurm is not None:
            from fairseq_posenc.workbench.running.slurm import run_on_slurm  # needs submitit

            run_tasks = partial(run_on_slurm, folder=out / "slurm", options=slurm, jobs=args.jobs)
        trainings.train_all(list(runs), run_tasks, on_end)
        in_order = {run: ends[run] for run in plan.runs}  # all are finished
        report.write_page(plan, facts, in_order, page)
        text_name = str(plan.text or "the documentation inside Python")
        record = report.build_record(plan, facts, in_order, {**shared, "text": text_name})
        record.write(out / report.RECORD)
    print(report.format_screen(rank_models(in_order), facts.unigram_perplexity))
    say(f"report: {page}")


def build_plan(args: argparse.Namespace) -> ComparePlan:
    """Build the plan of a comparison from the parsed options.

    Raises:
        UserError: an option has a wrong value, or is reserved.
    """
    passed = tuple(args.after_dashes)  # options of fairseq-train
    for word in passed:
        if advice := RESERVED.get(word.split("=")[0]):
            raise UserError(f"-- {word}: this option cannot be set here; {advice}")
    # A first word without a dash is not an option; it may be meant as fairseq's data folder.
    if passed and not passed[0].startswith("-"):
        raise UserError(f"{passed[0]!r} is not an option: give --encodings SPECS or --text FILE")
    models = variants.parse_variants(args.encodings)
    # The sizes by field of `Dims`; argparse keeps the last value of a repeated option.
    stack, train_parser = STACKS[args.family], options.Parser(prog="fairseq-train", add_help=False)
    train_parser.add_argument(f"--{stack}-layers", type=int, dest="layers")
    train_parser.add_argument(f"--{stack}-embed-dim", type=int, dest="embed_dim")
    train_parser.add_argument(f"--{stack}-attention-heads", type=int, dest="num_heads")
    train_parser.add_argument("--tokens-per-sample", type=int, dest="max_positions")
    sizes = vars(train_parser.parse_known_args([*TRAIN_OPTIONS[args.family], *passed])[0])
    layers, dims = sizes.pop("layers"), Dims(**sizes, causal=args.family == CAUSAL)
    for model in models:
        spec = parse(model.position_encoding)
        try:
            if model.directions and dims.causal:
                reason = "has attention directions, and a causal LM attends from left to right only"
                raise UserError(f"{model.name!r} {reason}")
            spec.check_length(layers)  # refuses a spec of more layers
            draft_terms(spec, dims, backend="auto")  # refuses what such a model cannot have
        except UserError as error:
            is_other_family = spec.is_causal_only and not dims.causal
            advice = f"; give --family {CAUSAL}" if is_other_family else ""
            raise UserError(f"--encodings: {error}{advice}") from None
    return ComparePlan(
        text=args.text,
        family=args.family,
        variants=models,
        seeds=args.seeds,
        lrs=tuple(map(str, args.lrs)),
        updates=args.updates,
        vocab_size=args.vocab_size,
        options=passed,
    )


def build_training(plan: ComparePlan, run: Run, out: Path, user_dir: Path) -> trainings.TrainingRun:
    """Build the training run, in its own folder; the last value of a repeated option wins."""
    folder = out / "models" / run.variant.folder / f"lr-{run.lr}-seed-{run.seed}"
    defaults = (*TRAIN_OPTIONS[plan.family], *run.variant.options)
    words = ("--user-dir", str(user_dir), *defaults, *plan.options, "--lr", run.lr)
    command = trainings.train_command(out / "data" / BINARY, folder, plan.updates, run.seed, words)
    label = f"{run.variant.name}, learning rate {run.lr}, seed {run.seed}"
    return trainings.TrainingRun(label, folder, plan.updates, command)
