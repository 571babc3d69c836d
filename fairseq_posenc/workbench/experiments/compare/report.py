"""Shows a comparison: a page with a table and curves, a table for the terminal, and a record."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import jinja2
from tqdm import tqdm

from fairseq_posenc.analysis.catalogue import summarize
from fairseq_posenc.files import write_whole
from fairseq_posenc.specs import parse
from fairseq_posenc.workbench.experiments.compare import outcomes
from fairseq_posenc.workbench.experiments.data_bin import DataFacts
from fairseq_posenc.workbench.experiments.trainings import TrainingEnd
from fairseq_posenc.workbench.experiments.variants import Variant
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.markdown import align_columns, format_number
from fairseq_posenc.workbench.results.record import Record, Row, own_command

RECORD, PAGE = "compare.json", "report.html"
_SCREEN_COLUMNS = ("encoding", "validation perplexity", "each seed", "position parameters", "time")


class ComparePlan(NamedTuple):
    """What a comparison trains, and on what."""

    text: Path | None  # the user's text; None for Python's documentation
    family: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    lrs: tuple[str, ...]  # learning rates as Python writes them: 0.003 also for 3e-3
    updates: int
    vocab_size: int
    options: tuple[str, ...] = ()  # of `fairseq-train`, the user's

    @property
    def runs(self) -> list[outcomes.Run]:
        """The training runs, seed by seed, so that an interruption leaves complete seeds."""
        pairs = [(variant, lr) for variant in self.variants for lr in self.lrs]
        return [outcomes.Run(variant, seed, lr) for seed in self.seeds for variant, lr in pairs]


def write_page(
    plan: ComparePlan, facts: DataFacts, ends: Mapping[outcomes.Run, TrainingEnd], path: Path
) -> None:
    """Write the page with the runs that are finished."""
    models = outcomes.rank_models(ends)  # each variant once, at its best learning rate
    missing = len(plan.runs) - len(ends)
    conclusions = ["Differences are judged when all training runs are finished."]
    if not missing:
        conclusions = outcomes.conclude(models, facts.unigram_perplexity)
    used = {item.name for v in plan.variants for item in parse(v.position_encoding).items}
    curves = {model.variant.name: model.curve for model in models}
    picture = io.BytesIO()  # empty if there is nothing to draw
    if figure := pictures.draw_curves(curves, "validation perplexity", log=True):
        figure.savefig(picture, format="png", metadata={"Software": None})  # no version in it
    template = (Path(__file__).parent / "page.html").read_text("utf-8")
    page = jinja2.Template(template, autoescape=True).render(
        plan=plan,
        facts=facts,
        missing=missing,
        rows=[_format_row(model) for model in models],
        # Summaries are reStructuredText, with two backquotes around code.
        encodings=[(name, summarize(name).replace("``", "")) for name in sorted(used)],
        picture=base64.b64encode(picture.getvalue()).decode(),
        conclusions=conclusions,
        command=own_command(),
    )
    write_whole(path, page)


def format_screen(models: Sequence[outcomes.ModelOutcome], unigram: float) -> str:
    """Format the table and the conclusions for a terminal, the lowest perplexity first."""
    rows = [_format_row(model) for model in models]
    lines = [_SCREEN_COLUMNS, *([row[name] for name in _SCREEN_COLUMNS] for row in rows)]
    sentences = [f"- {sentence}" for sentence in outcomes.conclude(models, unigram)]
    return "\n".join([align_columns(lines, left=len(_SCREEN_COLUMNS)), "", *sentences])


def _format_row(model: outcomes.ModelOutcome) -> dict[str, str]:
    """Format the figures of a model by column; ``page.html`` shows all columns, in this order."""
    ends = model.undiverged
    parameters = ends[0].position_parameters if ends else None  # the same for all seeds
    speed = fmean(end.curve.speed for end in ends) if ends else None
    seconds = fmean(end.seconds for end in ends) if ends else None
    return {
        "encoding": model.variant.name,
        "position parameters": format_number(parameters),
        "learning rate": model.lr,
        "seeds": str(len(model.ends)),
        "validation perplexity": model.divergence or model.perplexity.show(2),
        "each seed": ", ".join(format_number(end.perplexity, 1) for end in ends) or "-",
        "tokens/s": format_number(speed),
        "time": "-" if seconds is None else tqdm.format_interval(seconds),  # minutes:seconds
    }


def build_record(
    plan: ComparePlan, facts: DataFacts, ends: Mapping[outcomes.Run, TrainingEnd], data: Row
) -> Record:
    """Build the record: models (best first), differences and runs; ``data`` are common settings."""
    ranked = outcomes.rank_models(ends)
    models: list[Row] = [
        {
            "model": model.variant.name,
            "position_encoding": model.variant.position_encoding,
            "attention_directions": model.variant.directions,
            "updates": plan.updates,
            "position_parameters": next((x.position_parameters for x in model.undiverged), None),
            "lr": model.lr,
            "seeds": len(model.ends),
            **model.perplexity.figures("perplexity"),
        }
        for model in ranked
    ]
    trainings: list[Row] = [
        {
            "model": run.variant.name,
            "lr": run.lr,
            "seed": run.seed,
            # `diverged_at` is the update at which the run diverged, or 0: it did not.
            "perplexity": None if end.diverged_at else end.perplexity,
            "tokens_per_second": end.curve.speed,
            "seconds": end.seconds,
            "diverged": end.diverged_at or None,
        }
        for run, end in ends.items()
    ]
    differences: list[Row] = [
        {
            "model": better,
            "other": other,
            "seeds": difference.seeds,
            **difference.log_ratio.figures("log_perplexity_difference"),
            "p": difference.p_value,
            "p_holm": difference.corrected_p_value,
        }
        for (better, other), difference in outcomes.compare_models(ranked).items()
    ]
    figures = {"models": models, "differences": differences, "trainings": trainings}
    return Record("compare", figures, {**data, **facts._asdict()}, command=own_command())
