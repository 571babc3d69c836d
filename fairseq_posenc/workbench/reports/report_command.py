"""``fairseq-posenc report``: tables of a user's runs, in the layout of the papers' tables.

It reads the records of ``glue``, ``squad predict`` and ``bleu``, and folders with checkpoints.
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from fairseq_posenc.checkpoints.recovery import LAST, select_training_settings
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import json_values
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.workbench.finetuning.glue_figures import STATISTIC_TITLES, select_figures
from fairseq_posenc.workbench.loading.checkpoints import load_state, read_updates
from fairseq_posenc.workbench.results.loss_stages import last_loss
from fairseq_posenc.workbench.results.markdown import code, format_number, table
from fairseq_posenc.workbench.results.record import Record, get_field, group_by, read
from fairseq_posenc.workbench.running.logs import NATS_PER_BIT, TRAIN_LOG, read_curve_file
from fairseq_posenc.workbench.running.progress import say

_GLUE_NAMES = ("MNLI-m", "MNLI-mm", *(x for x in TASKS if x != "MNLI"), "average", "collapsed runs")
_DIGITS = {"updates": 0, "seed": 0, "collapsed runs": 0}  # decimals of columns; others have two
_DIGITS |= {"train loss": 3, "valid loss": 3, "valid accuracy": 4}

Figures = dict[str, float | None]  # by column; None if unknown
_NUMBER = int | float


class Result(NamedTuple):
    """A row of a table."""

    table: str  # title of the table
    model: str  # name of the model or training run
    encoding: str  # its positions; `-` if they are not known
    figures: Figures
    path: str  # file or folder of the results
    fingerprint: str = ""  # hash of a training run's updates and settings, except the seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fairseq-posenc report``."""
    text = "results of glue, squad predict and bleu, folders of training runs, or folders of these"
    parser.add_argument("results", nargs="+", type=Path, metavar="PATH", help=text)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> None:
    """Print the tables.

    Raises:
        UserError: a path does not exist, has no results, or a checkpoint cannot be read.
    """
    results: dict[tuple[str, Path, str], Result] = {}  # links may lead twice to the same file
    for path in args.results:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if not (found := list(_find_results(path, set()))):
            raise UserError(f"{path}: no results of glue, squad predict, bleu or training yet")
        for x in found:  # a link to a training run has another name, but the same fingerprint
            results.setdefault((x.table, Path(x.path).resolve(), x.fingerprint or x.model), x)
    rows = json_values([x._asdict() for x in results.values()])
    print(json.dumps(rows, indent=1) if args.json else format_report(results.values()))


def _find_results(path: Path, known: set[Path]) -> Iterator[Result]:
    """Find the results in a file or folder, and in all folders below it that are not ``known``."""
    if path.is_dir():
        if (place := path.resolve()) not in known:  # a link may lead to a folder above it
            known.add(place)
            for below in sorted(x for x in path.iterdir() if x.name[0] != "."):
                yield from _find_results(below, known)
    elif path.name == LAST:
        yield from _read_training(path.parent)
    elif path.suffix == ".json" and path.is_file():  # not a pipe, which would be waited for
        is_named = not known  # by the user, so it must be a record; most files in folders are none
        with nullcontext() if is_named else suppress(UserError):
            record = read(path)
            if reader := _READERS.get(str(record.kind)):
                try:
                    yield from list(reader(record, path))  # all rows, or none
                except UserError as error:  # a field is missing or wrong
                    say(f"{path}: left out: {error}; run {record.kind} again")


def _read_glue(record: Record, path: Path) -> Iterator[Result]:
    """Read one row: what the paper of the protocol reports for each task, and the average."""
    figures: Figures = {**select_figures(record)}  # columns of `_GLUE_NAMES`
    runs = get_field(record.figures, "runs", list)  # fine-tunings
    if collapsed := sum(get_field(run, "collapsed", bool) for run in runs):
        figures["collapsed runs"] = collapsed  # that predict NaN, a constant, or at chance
    if unfinished := get_field(record.data, "unfinished", str):  # the labels of fine-tunings
        say(f"{path}: not finished: {unfinished}; the same glue command finishes them")
    protocol, name = record.data["protocol"], get_field(record.data, "name", str)
    title = f"GLUE, development sets, protocol {protocol} ({STATISTIC_TITLES[protocol]})"
    yield Result(title, name, str(record.spec or "-"), figures, str(path))


def _read_squad(record: Record, path: Path) -> Iterator[Result]:
    row = (get_field(record.figures, "scores", list) or [None])[0]  # None is refused below
    version, name = (get_field(record.data, field, str) for field in ("squad", "name"))
    exact, f1 = (get_field(row, metric, _NUMBER) for metric in ("exact", "f1"))
    figures: Figures = {f"SQuAD{version} EM": exact, f"SQuAD{version} F1": f1}
    yield Result("SQuAD, development sets", name, str(record.spec or "-"), figures, str(path))


def _read_bleu(record: Record, path: Path) -> Iterator[Result]:
    """Read the means over the checkpoints of a system, by search, and the best of them."""
    sentences = counted(get_field(record.data, "sentences", int), "sentences")
    title = f"Translation, {sentences} of {get_field(record.data, 'subset', str)}"
    scores = get_field(record.figures, "scores", list)
    groups = group_by(scores, lambda x: (get_field(x, "system", str), get_field(x, "beam", int)))
    for (system, beam), rows in groups.items():  # a row for each checkpoint
        bleu, chrf = ([get_field(x, metric, _NUMBER) for x in rows] for metric in ("BLEU", "chrF2"))
        figures: Figures = {"BLEU": statistics.fmean(bleu)}
        if len(rows) > 1:
            figures[f"best of {len(rows)}"] = max(bleu)
        figures["chrF2"] = statistics.fmean(chrf)
        yield Result(title, f"{system}, beam {beam}", "-", figures, str(path))


_READERS = {"glue": _read_glue, "squad": _read_squad, "bleu": _read_bleu}


def _read_training(folder: Path) -> Iterator[Result]:
    """Read the training run in a folder; skip a fine-tuning run, which has a record."""
    state = load_state(folder / LAST, "")  # no option named it
    settings, updates, best = state["cfg"], read_updates(state), state["extra_state"].get("best")
    task = settings.task._name
    data = Path(str(settings.task.get("data")).split(":")[0]).name  # of the first shard
    encoding = getattr(settings.model, "position_encoding", None) or "fairseq's"
    if directions := getattr(settings.model, "attention_directions", None):
        encoding += f", {directions}"
    figures: Figures = {"seed": settings.common.seed, "updates": updates}
    metric = settings.checkpoint.best_checkpoint_metric  # whose value is `best`, such as bleu
    loss = float(best) if metric == "loss" and best is not None else None  # in bits
    if kind := {"masked_lm": "masked", "language_modeling": "causal"}.get(task):
        perplexity = None if loss is None else 2.0 ** min(loss, 1000.0)  # more would overflow
        figures["perplexity"] = best if metric == "ppl" else perplexity
        title = f"Perplexity of {kind} LMs, validation text of {data}"
    elif task == "translation":
        if (log := folder / TRAIN_LOG).is_file():
            curve = read_curve_file(log)
            figures["train loss"] = last_loss(curve)  # in nats
            if metric == "loss" and curve.validations and curve.best.accuracy is not None:
                figures["valid accuracy"] = curve.best.accuracy / 100  # of the lowest loss
        figures["valid loss"] = None if loss is None else loss * NATS_PER_BIT
        title = f"Translation, losses in nats, {data}"
    else:  # a task of fine-tuning
        return
    container: Any = OmegaConf.to_container(settings, resolve=True, enum_to_str=True)  # by section
    compared = select_training_settings(container) | {"seed": None, "updates": updates}
    fingerprint = hashlib.sha256(str(sorted(compared.items())).encode()).hexdigest()[:8]
    yield Result(title, folder.name, encoding, figures, str(folder), fingerprint)


def format_report(results: Iterable[Result]) -> str:
    """Format the tables in Markdown, with means over the seeds of training runs."""
    parts = []
    for title, rows in group_by(results, lambda result: result.table).items():
        found = dict.fromkeys(name for row in rows for name in row.figures)
        columns = [x for x in _GLUE_NAMES if x in found] or list(found)  # GLUE's in papers' order
        cells = []
        for row in [*rows, *_average_seeds(rows)]:  # a mean over seeds has no path
            figures = [format_number(row.figures.get(x), _DIGITS.get(x, 2)) for x in columns]
            model = code(row.model) if row.path else row.model
            cells.append([model, code(row.encoding), *figures, code(row.path)])
        align = "ll" + "r" * len(columns) + "l"
        parts += [f"## {title}", table(["", "positions", *columns, "path"], cells, align)]
    return "\n\n".join(parts)


def _average_seeds(rows: Iterable[Result]) -> Iterator[Result]:
    """Yield the means of training runs that differ only in their seeds."""
    for group in group_by(rows, lambda row: row.fingerprint).values():
        seeds = {row.figures.get("seed") for row in group}  # of other results only None
        if len(seeds) > 1 and len(seeds) == len(group):  # several, and each seed once
            figures: Figures = {}
            for name in group[0].figures.keys() - {"seed"}:
                values: list[Any] = [row.figures.get(name) for row in group]
                figures[name] = None if None in values else statistics.fmean(values)
            yield group[0]._replace(model=f"mean of {len(group)} seeds", figures=figures, path="")
