"""Successive halving on known curves, and ``choose`` as users call it."""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.choose import command, halving, on_text
from fairseq_posenc.workbench.experiments.choose.halving import Halving
from fairseq_posenc.workbench.experiments.corpus import unigram_perplexity
from fairseq_posenc.workbench.experiments.outcomes import Outcome
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment, TextResults
from fairseq_posenc.workbench.experiments.variants import parse_variants
from fairseq_posenc.workbench.results import record
from fairseq_posenc.workbench.running.executor import Slurm
from fairseq_posenc.workbench.running.options import parse_around_dashes
from tests.workbench.experiments.test_compare import small_text

NAMES = ["none", "learned", "rope", "alibi", "t5"]
START, SPEED = 4.0, 0.05  # seconds of a training that are not updates, and those of an update
BROKEN = -1.0  # in place of a perplexity


class Simulated(Halving):
    """Trainings whose curves and speed are known, in place of those of fairseq."""

    def __init__(
        self,
        out: Path,
        ends: dict[str, float],
        budget: float,
        jobs: int = 2,
        unigram: float = 1000.0,
    ) -> None:
        variants, seeds = parse_variants(",".join(ends)), (1, 2)
        experiment = TextExperiment(
            out=out, variants=variants, seeds=seeds, updates=1, vocab_size=512, jobs=jobs
        )
        super().__init__(experiment, budget, 0)
        self.ends, self.unigram = ends, unigram
        self.trained: list[Any] = []

    def _train(self, experiment, before):
        rows = []
        for seed in experiment.seeds:
            for each in experiment.variants:
                end = self.ends[each.name]
                if end == BROKEN:
                    rows.append([math.nan, math.nan, 7])
                    continue
                perplexity = (end + 100 / experiment.updates) * (1 + seed / 1000)
                rows.append([perplexity, SPEED * experiment.updates, 0])
        wall = len(rows) * (START + SPEED * (experiment.updates - before)) / self._experiment.jobs
        self.trained.append([each.name for each in experiment.variants])
        return {"seconds": wall, "outcomes": rows}

    def _measure_unigram(self):
        return self.unigram


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_better_half_stays_and_rounds_cost_the_same(count, tmp_path):
    ends = {name: 10.0 + place for place, name in enumerate(NAMES[:count])}
    rounds = Simulated(tmp_path, ends, 600).run()
    sizes = [len(each.models) for each in rounds[1:]]
    assert sizes == {2: [2], 3: [3, 2], 4: [4, 2], 5: [5, 3, 2]}[count]
    assert [model.variant.name for model in rounds[-1].models] == NAMES[: sizes[-1]]
    total = sum(each.seconds for each in rounds)
    assert 0.95 * 600 < total <= 600
    costs = [each.seconds for each in rounds[1:]]
    assert max(costs) < 1.1 * min(costs)


def test_what_diverges_or_cannot_be_read_leaves_first(tmp_path):
    ends = {"none": 30.0, "learned": math.inf, "rope": BROKEN, "alibi": 20.0}
    rounds = Simulated(tmp_path, ends, 600).run()
    assert [model.variant.name for model in rounds[-1].models] == ["alibi", "none"]
    found = dict(
        (model.variant.name, model.show(1)) for _, model in on_text.rank_candidates(rounds)
    )
    assert found["rope"] == "diverged at update 7 (seed 1), 7 (seed 2)"
    assert found["learned"] == "cannot be read"


def test_a_budget_that_is_too_small_ends_with_what_there_is(tmp_path):
    ends = {name: 10.0 for name in NAMES}
    (only,) = Simulated(tmp_path, ends, 10).run()
    assert only.updates == halving._FIRST_UPDATES


def test_what_is_done_is_not_repeated(tmp_path):
    ends = {name: 10.0 + place for place, name in enumerate(NAMES)}
    first = Simulated(tmp_path, ends, 600)
    again = Simulated(tmp_path, ends, 600)
    assert [each[:3] for each in first.run()] == [each[:3] for each in again.run()]
    assert not again.trained
    longer = Simulated(tmp_path, ends, 1200)
    assert longer.run()[-1].updates > 600
    assert longer.trained[0] == NAMES


@pytest.mark.parametrize(("unigram", "recommended"), [(1000.0, True), (20.0, False)])
def test_a_training_is_recommended_only_by_models_that_learned(unigram, recommended, tmp_path):
    simulated = Simulated(tmp_path, {"rope": 11.0, "alibi": 12.0}, 600, unigram=unigram)
    text = on_text.describe_rounds(simulated.run(), simulated._experiment)
    assert "Measured: masked-lm models of 2 layers of width 128 on " in text
    assert "Two seeds are too few to judge differences" in text
    assert ("train_scripts/a_small.sh task.data=DATA-BIN" in text) == recommended
    assert text.startswith("Take `rope`" if recommended else "No encoding is recommended.")


def test_a_round_on_a_cluster_takes_its_part_of_the_time_of_all_rounds(tmp_path, monkeypatch):
    """fairseq's times include earlier rounds; that of a training that diverged is not known."""
    candidates = Simulated(tmp_path, {"rope": 11.0, "alibi": 12.0}, 600)
    experiment = replace(candidates._experiment, cluster=Slurm({}, None, False), updates=50)
    ends = [{"perplexity": 9.0, "seconds": 40.0}] * 3 + [{"diverged": 7}]
    outcomes = [
        Outcome(run, end, seconds=end.get("seconds", math.nan), diverged_at=end.get("diverged", 0))
        for run, end in zip(experiment.runs, ends)
    ]
    results = TextResults(experiment, outcomes)
    monkeypatch.setattr(TextExperiment, "run", lambda *_: results)
    seconds = Halving._train(candidates, experiment, 20)["seconds"]
    assert seconds == pytest.approx(3 * 40 * (30 / 50) / experiment.jobs)


def test_nobody_is_dropped_while_ranks_mean_nothing(tmp_path):
    ends = {name: 10.0 + place for place, name in enumerate(NAMES)}
    rounds = Simulated(tmp_path, ends, 600, unigram=19.0).run()
    assert [len(each.models) for each in rounds] == [5, 5, 5, 5]
    rounds = Simulated(tmp_path, ends, 600, unigram=21.0).run()  # from 10.5 on
    sizes = [len(each.models) for each in rounds]
    assert sizes[:2] == [5, 5]
    assert sizes[-1] < 5


def test_a_budget_that_is_too_small_says_which_would_do(tmp_path):
    """The budget that is named is enough: with it, ranks mean something after the first round."""
    ends = {name: 10.0 + place for place, name in enumerate(NAMES)}
    small = Simulated(tmp_path / "small", ends, 60, unigram=22.0)  # from 11 on, at 100 updates
    rounds = small.run()
    assert not rounds[-1].has_meaning
    budget = small.estimate_budget(rounds)
    assert budget is not None
    text = on_text.describe_rounds(rounds, small._experiment, budget)
    named = on_text.format_budget(budget)
    assert f"5 encodings with 2 seeds need `--budget {named}`" in text
    assert len(rounds[-1].models) == 5
    again = Simulated(tmp_path / "again", ends, on_text._parse_seconds(named), unigram=22.0)
    assert again.run()[1].has_meaning


def test_the_unigram_perplexity_is_that_of_the_frequencies(tmp_path):
    """By hand: a, a, b and two ends of lines, add-one smoothed over three symbols."""
    train, valid = tmp_path / "train", tmp_path / "valid"
    train.write_text("a a\nb\n")
    valid.write_text("a b\n")
    found = unigram_perplexity(train, valid)
    assert found == pytest.approx((3 / 8 * 2 / 8 * 3 / 8) ** (-1 / 3))


def parse_args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parse_around_dashes(parser, words)


def test_each_candidate_has_three_seeds_by_default():
    assert parse_args("--family", "causal-lm", "--length", "64").seeds == (1, 2, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--length 64 --trained 128", "--trained 128 is more than --length 64"),
        ("--length 64 --json", "--json: needs --text"),
        ("--length 64 --budget 5m", "--budget: needs --text"),
        ("--length 64 --vocab-size 99", "--vocab-size: needs --text"),
        ("--length 64 --on slurm time=10", "--on: needs --text"),
        ("--length 64 -- --dropout 0.1", "-- --dropout: needs --text"),
        ("--length 64 --from-trained --trained 32", "--trained: leave it out; --from-trained"),
        ("--length 64 --text t -- --lr 0.01", "--lr cannot be set here; all candidates have 0.003"),
        ("--length 64 --text t -- --max-update 5", "--max-update cannot be set here; use --budget"),
        ("--length 64 --text t -- --tokens-per-sample 9", "cannot be set here; use --trained"),
        ("--length 64 --text t -- --encoder-layers x", "--encoder-layers x: must be a whole"),
        ("--length 128 --trained 64 --text t", "--trained: masked-lm candidates"),
        ("--length 64 --text t --budget soon", "--budget soon: write a time"),
        ("--length 64 --text t --budget 0m", "--budget 0m: write a time"),
        ("--length 64 --text t --encodings none", "--encodings none: name two or more"),
        ("--length 64 --text t", "--text t: No such file"),
    ],
)
def test_bad_options_are_found_before_any_work(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        command.run(parse_args("--family", "masked-lm", *words.split()))
    assert not list(tmp_path.iterdir())


def test_translation_has_no_trainings_here():
    with pytest.raises(UserError, match="--text: is for language models"):
        command.run(parse_args(*["--family", "encoder-decoder", "--length", "64", "--text", "t"]))


@pytest.mark.slow
def test_candidates_are_trained_on_a_text_and_read_further(tmp_path):
    """Learned positions cannot be read beyond the length of training; rope can."""
    call = [
        *(
            sys.executable,
            "-c",
            "import fairseq_posenc.workbench.cli as cli; raise SystemExit(cli.main())",
        ),
        *("choose", "--family", "causal-lm", "--length", "32", "--trained", "16"),
        *("--text", str(small_text(tmp_path / "text.txt")), "--encodings", "learned,rope"),
        *("--vocab-size", "60", "--seeds", "1", "--budget", "6s", "--out", str(tmp_path / "out")),
        *("--", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"),
        *("--max-tokens", "1024"),
    ]
    first = subprocess.run(call, capture_output=True, encoding="utf-8", check=True)
    rows = record.read(tmp_path / "out" / on_text.RECORD).rows
    assert [row["model"] for row in rows[:2]] == ["rope", "learned"]
    assert "Measured: causal-lm models of 2 layers of width 16 on" in first.stdout
    assert "cannot be read" in first.stdout
    # A fast machine learns the text in these seconds.
    refused = first.stdout.startswith("No encoding is recommended. Ranks mean nothing yet: after")
    assert refused or first.stdout.startswith("Take rope if fast learning matters")
    assert ("train_scripts/a_small.sh" in first.stdout) != refused
    second = subprocess.run(call, capture_output=True, encoding="utf-8", check=True)
    assert second.stdout == first.stdout
    assert "fairseq-train" not in second.stderr


def test_measurements_answer_without_fairseq():
    code = """import sys
from fairseq_posenc.workbench.cli import main
assert main(["choose", "--family", "masked-lm", "--length", "64"]) == 0
assert not {"fairseq", "hydra", "sentencepiece"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Take ")
