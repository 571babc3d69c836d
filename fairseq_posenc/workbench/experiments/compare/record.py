"""Builds the record of a comparison, and refuses to replace it by one that lacks results."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment, TextResults
from fairseq_posenc.workbench.results.differences import compare_all
from fairseq_posenc.workbench.results.record import Record, RecordError, Row, own_command, read
from fairseq_posenc.workbench.running.files import checksum

RECORD = "compare.json"


def build_record(results: TextResults) -> Record:
    """Build the record of all models, their differences, and all trainings."""
    experiment = results.experiment
    models: list[Row] = [
        {
            "model": model.variant.name,
            "position_encoding": model.variant.position_encoding,
            "attention_directions": model.variant.directions,
            "updates": experiment.updates,
            "position_parameters": model.undiverged[0].figures["position_parameters"]
            if model.undiverged
            else None,
            "lr": model.lr,
            "seeds": len(model.outcomes),
            **model.perplexity.figures("perplexity"),
        }
        for model in results.models
    ]
    trainings: list[Row] = [
        {
            "model": outcome.run.variant.name,
            "lr": outcome.run.condition,
            "seed": outcome.run.seed,
            "perplexity": outcome.perplexity,
            "tokens_per_second": outcome.curve.speed,
            "seconds": outcome.seconds,
            "diverged": outcome.diverged_at or None,
        }
        for outcome in results.outcomes
    ]
    by_model = {
        model.variant.name: model.perplexity_by_seed
        for model in results.models
        if not model.divergences
    }
    differences: list[Row] = [
        {
            "model": better,
            "other": other,
            "seeds": difference.seeds,
            **difference.interval.figures("log_perplexity_difference"),
            "p": difference.p_value,
            "p_holm": difference.holm,
        }
        for (better, other), difference in compare_all(by_model).items()
    ]
    figures = {"models": models, "differences": differences, "trainings": trainings}
    data = {**_collect_shared(experiment), **results.data_figures}
    return Record("compare", figures, data, command=own_command())


def _collect_shared(experiment: TextExperiment) -> dict[str, Any]:
    """Collect the settings that all trainings of a comparison share."""
    return {
        "family": experiment.family,
        "text": str(experiment.text) if experiment.text else "the documentation inside Python",
        "text_sha256": checksum(experiment.text) if experiment.text else None,
        "vocab_size": experiment.vocab_size,
        "trained_length": experiment.trained,
        "options": shlex.join(experiment.train_args),
    }


def refuse_to_lose_report(experiment: TextExperiment) -> None:
    """Refuse a comparison whose report would lack results of the one in its folder.

    Raises:
        UserError: results would be lost; the message names the first one.
    """
    try:
        old = read(experiment.out / RECORD)
    except RecordError:  # no record yet, or a damaged one, which has no results to lose
        return
    if lost := next(_list_lost_figures(old, experiment), ""):
        raise UserError(
            f"--out {experiment.out}: holds a report on {lost}; include that, choose another "
            "--out, or add --overwrite to replace the report"
        )


def _list_lost_figures(old: Record, experiment: TextExperiment) -> Iterator[str]:
    """Describe each result of an old record that the record of an experiment would lack."""
    shared = _collect_shared(experiment)
    text_hash, old_text_hash = shared.pop("text_sha256"), old.data.get("text_sha256")
    if text_hash and text_hash == old_text_hash:
        del shared["text"]  # its path may differ
    elif text_hash and old_text_hash and shared["text"] == old.data.get("text"):
        yield f"an earlier content of {shared['text']}"
    for name, value in shared.items():
        if old.data.get(name, value) != value:  # records of earlier versions may lack a setting
            yield f"{name.replace('_', ' ')} {old.data[name]!r}"
    for row in old.rows:
        if row.get("updates", 0) > experiment.updates:
            yield f"{row['updates']:,} updates"
    kept = {(run.variant.name, run.condition, run.seed) for run in experiment.runs}
    for row in old.figures.get("trainings", ()):
        model, lr, seed = row.get("model"), row.get("lr"), row.get("seed")
        if (model, lr, seed) not in kept:
            yield f"{model} with seed {seed} and learning rate {lr}"
