"""What the records say of encodings: the figure that decides, intervals, and what nobody knows."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs.generate import choose, measured
from docs.generate.measured import Column
from fairseq_posenc import registry
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.experiments.choose import answer, from_trained
from fairseq_posenc.workbench.experiments.choose.answer import (
    BEST,
    SAME,
    UNKNOWN,
    UNREADABLE,
    WORSE,
    ChooseQuestion,
    answer_question,
    choose_candidates,
    compare_with_best,
    encodings_of,
    find_measurement,
    rank,
)
from fairseq_posenc.workbench.experiments.choose.from_trained import read_changes
from fairseq_posenc.workbench.experiments.variants import FAMILIES
from fairseq_posenc.workbench.results import terminal
from fairseq_posenc.workbench.results.differences import (
    PERPLEXITY,
    compare,
    find_different,
)
from fairseq_posenc.workbench.results.intervals import interval, interval_of_perplexity
from fairseq_posenc.workbench.results.record import Record

WITH_INTERVAL = ["model", "perplexity", "perplexity_low", "perplexity_high"]


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A folder of records: rope below alibi, learned not significantly different, nor read far."""
    rows = [("rope", 10.0, 9.0, 11.0), ("learned", 11.0, 9.5, 12.5), ("alibi", 20.0, 19.0, 21.0)]
    common = {"lr": "0.003", "updates": 300, "seeds": 3}
    compared = [{**dict(zip(WITH_INTERVAL, row)), **common} for row in rows]
    changes = {"rope": (0.99, 1.0, 1.01), "learned": (1.2, 1.0, 0.9), "alibi": (1.0, 0.99, 1.01)}
    trainings = [
        {"model": name, "lr": "0.003", "seed": seed, "perplexity": mean * changes[name][seed]}
        for name, mean, _, _ in rows
        for seed in range(3)
    ]
    data = {"family": "causal-lm", "text": "a book", "words": 9000, "trained_length": 128}
    path = tmp_path / measured.MAIN_RECORD["causal-lm"]
    record = Record("compare", {"models": compared, "trainings": trainings}, data)
    replace(record, command="compare -- --decoder-embed-dim 64").write(path)
    for seed, change in enumerate((0.99, 1.0, 1.01)):
        lines = [
            {
                "trained_length": 128,
                "model": name,
                "length": length,
                "perplexity": value and value * change,
            }
            for name, by_length in READ.items()
            for length, value in by_length.items()
        ]
        path = tmp_path / f"causal_lm_length_seed_{seed}.json"
        Record("lm-length", {"perplexity": lines}, {}).write(path)
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    monkeypatch.setattr(answer, "read_evidence", measured.collect_evidence)
    return tmp_path


READ: dict[str, dict[int, float | None]] = {
    "rope": {64: 12.0, 128: 10.0, 256: 14.0, 512: 30.0},
    "alibi": {64: 21.0, 128: 20.0, 256: 20.0, 512: 20.0},
    "learned": {64: 12.0, 128: 11.0, 256: None, 512: None},
}


def test_figures_over_the_seeds_have_the_interval_of_their_mean_loss(results):
    column = measured.at_multiple("causal-lm", 2)
    assert column.figures["rope"] == interval_of_perplexity([14.0 * 0.99, 14.0, 14.0 * 1.01])
    assert measured.multiples("causal-lm") == [2, 4]
    assert column.show("learned") == "cannot be read"
    assert column.show("t5") == measured.NOT_MEASURED


@pytest.mark.parametrize(
    ("length", "verdicts"),
    [
        (128, {"rope": BEST, "learned": SAME, "alibi": WORSE}),
        (129, {"rope": BEST, "alibi": WORSE, "learned": UNREADABLE}),
        (256, {"rope": BEST, "alibi": WORSE, "learned": UNREADABLE}),
        (257, {"alibi": BEST, "rope": WORSE, "learned": UNREADABLE}),
        (512, {"alibi": BEST, "rope": WORSE, "learned": UNREADABLE}),
    ],
)
def test_the_least_multiple_that_is_as_far_decides(results, length, verdicts):
    evidence = measured.collect_evidence("causal-lm")
    figures = find_measurement(ChooseQuestion("causal-lm", length, 128), evidence)
    assert [*rank(figures).verdicts.items()] == [*verdicts.items()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_figures_of_an_answer_are_those_of_the_tables(family):
    column = measured.at_trained_length(family)
    ranking = rank(measured.collect_evidence(family).figures["1"])
    assert ranking.verdicts == column.verdicts()
    assert all(ranking.show(name) == column.show(name) for name in column.figures)


def test_behind_one_that_is_worse_wide_seeds_are_not_known_well_enough():
    """`pope` of a real table: a worse mean than others that are significantly worse."""
    seeds = {
        "first": {1: 10.0, 2: 10.1, 3: 9.9},
        "second": {1: 11.0, 2: 11.1, 3: 10.9},
        "wide": {1: 10.0, 2: 30.0, 3: 12.0},
        "last": {1: 40.0, 2: 40.1, 3: 39.9},
    }
    means = {name: interval_of_perplexity(values.values()).mean for name, values in seeds.items()}
    assert compare_with_best(means, seeds, PERPLEXITY) == {
        "first": BEST,
        "second": WORSE,
        "wide": UNKNOWN,
        "last": WORSE,
    }


@pytest.mark.parametrize(("higher", "best"), [(True, "high"), (False, "low")])
def test_models_that_cannot_read_the_input_come_last(higher, best):
    values = {"none": [None] * 3, "low": [1.0, 1.1, 1.2], "high": [2.0, 2.1, 2.2]}
    ranking = rank(answer.Measurement("figure", "record", higher, values))
    assert (ranking.best, [*ranking.verdicts][-1]) == (best, "none")
    assert ranking.show("none") == UNREADABLE


def test_the_answer_is_a_sentence_and_a_table_of_all_that_was_measured(results):
    said = answer_question(ChooseQuestion("causal-lm", 512, 128))
    assert said.startswith(
        "Take `alibi` for a causal LM trained at 128 tokens and read at 512: of 3 encodings it has "
        "the lowest perplexity at 4 times the length of training, 20.00 ("
    )
    assert (
        "Measured on causal-lm models of 2 layers of width 64, trained for 300 updates at 128 "
        "tokens on a book (9,000 words), 3 seeds"
    ) in said
    others = sorted(set(encodings_of("causal-lm")) - set(READ))
    assert f"Not measured: {', '.join(f'`{name}`' for name in others)}." in said
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["`alibi`", "`rope`", "`learned`"]
    assert [row[2] for row in rows] == [BEST, WORSE, UNREADABLE]
    assert rows[0][1] == measured.at_multiple("causal-lm", 4).show("alibi")


def test_the_answer_fits_a_terminal():
    """The real tables, with their longest names, in 80 columns; only commands are longer."""
    for family in FAMILIES:
        said = terminal.format_report(answer_question(ChooseQuestion(family, 64, 64)))
        lines = [line for line in said.splitlines() if not line.startswith("    ")]
        assert max(map(len, lines)) <= 80
        assert "`" not in said
        assert "|" not in said


def test_a_fast_encoding_is_named_where_the_best_is_slow():
    said = answer_question(ChooseQuestion("masked-lm", 64, 64))
    assert said.startswith("Take `deberta_v2` for a masked LM")
    assert "If speed matters, take `rope`, 18.96 (18.54 to 19.39)" in said
    assert "`pope` at 25.35 (17.15 to 37.47) is not known well enough" in said


def test_only_the_encodings_asked_for_are_compared(results):
    said = answer_question(ChooseQuestion("causal-lm", 128, 128, ("alibi", "learned", "m4m")))
    assert said.startswith("Take `learned` for a causal LM")
    assert "of 2 encodings" in said
    assert "`rope`" not in said
    assert "Not measured: `m4m`." in said
    assert "--encodings 'alibi,learned,m4m' --text my.txt" in said
    with pytest.raises(UserError, match="--encodings m4m: none of these was measured"):
        answer_question(ChooseQuestion("causal-lm", 128, 128, ("m4m",)))
    with pytest.raises(UserError, match="--encodings learned: none of these could read such"):
        answer_question(ChooseQuestion("causal-lm", 512, 128, ("learned",)))


def test_beyond_all_that_was_read_nothing_is_said(results):
    said = answer_question(ChooseQuestion("causal-lm", 513, 128))
    assert said.startswith("No encoding can be recommended: no model was trained at 128 tokens and")
    assert "|" not in said


def test_no_winner_is_named_for_a_length_of_training_that_was_not_measured(results):
    said = answer_question(ChooseQuestion("causal-lm", 1024, 512))
    assert said.startswith(
        "No encoding can be recommended: no model was trained at 512 tokens and read at 1,024. Try "
        "`rope` first: in the nearest measurement, trained at 128 tokens, of 3 encodings it has"
    )
    assert "--length 1024 --trained 512 --text my.txt" in said


@pytest.mark.parametrize(("length", "best"), [(128, "rope"), (512, "alibi"), (513, "rope")])
def test_candidates_are_those_with_the_best_figures(results, length, best):
    """Beyond all that was measured, those at the length of training."""
    found = choose_candidates(ChooseQuestion("causal-lm", length, 128))
    assert found[0] == best
    assert {*found[:3]} == {"alibi", "rope", "learned"}
    assert len(found) == len(set(found)) == 4


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("rope", ""),  # not significantly better than `learned`, the median
        (
            "learned",
            "**Not for** causal LMs (perplexity at 4 times the length of training).",
        ),
        (
            "alibi",
            "**Take it for** causal LMs (perplexity at 4 times the length of training). "
            "**Not for** causal LMs (perplexity).",
        ),
    ],
)
def test_a_card_says_for_what_to_take_an_encoding(results, name, advice):
    before = f"{advice}\n\n" if advice else ""
    assert choose.format_card(name).startswith(f"{before}| figure | {name} |")


def test_a_card_recommends_nothing_from_noise():
    """Of twelve encodings on STS-B, `m4m` is the tenth, not significantly below the best."""
    card = choose.format_card("m4m")
    advice, *_ = card.split("\n\n")
    assert "STS-B" not in advice
    assert "10 of 12" in next(line for line in card.splitlines() if "STS-B, spearman" in line)


def test_of_bleu_the_highest_is_best(results):
    names = ["system", "beam", "BLEU", "BLEU_low", "BLEU_high"]
    rows = [("t5", 1, 60.0, 59.0, 61.0), ("t5", 5, 30.0, 29.0, 31.0)]
    rows += [("rope", 5, 32.0, 31.5, 32.5), ("shaw", 5, 31.0, 30.0, 32.0)]
    means = [dict(zip(names, row)) for row in rows]
    scores = [
        {
            "system": name,
            "beam": beam,
            "training": n,
            "BLEU": bleu + change * (-1) ** (name == "shaw"),
        }
        for name, beam, bleu, *_ in rows
        for n, change in enumerate((-0.7, 0.0, 0.7))
    ]
    path = results / measured.MAIN_RECORD["encoder-decoder"]
    Record("bleu", {"scores": scores, "means": means}, {}).write(path)
    verdicts = measured.at_trained_length("encoder-decoder").verdicts()
    assert verdicts == {"rope": BEST, "shaw": SAME, "t5": WORSE}


def test_a_start_from_a_trained_model_is_read_from_greedy_search(results):
    means = [
        {"system": "rope", "beam": beam, "BLEU": bleu, "BLEU_low": bleu - 1, "BLEU_high": bleu + 1}
        for beam, bleu in ((1, 33.0), (5, 35.0))
    ]
    assert measured.after_switch("encoder-decoder").show("rope") == measured.NOT_MEASURED
    path = results / measured.SWITCH_RECORD["encoder-decoder"]
    Record("bleu", {"scores": [], "means": means}, {}).write(path)
    assert measured.after_switch("encoder-decoder").show("rope") == "33.00 (32.00 to 34.00)"
    assert measured.after_switch("causal-lm").show("rope") == measured.NOT_MEASURED


def test_scores_of_fine_tuned_models_are_a_column_for_each_task(results):
    scores = {"rope": (70.0, 71.0, 72.0), "none": (60.0, 61.5, 62.0)}
    runs = [
        {"model": name, "task": task, "metric": metric, "seed": seed, "score": score}
        for task, metric in (("SST-2", "accuracy"), ("mean", None))
        for name, values in scores.items()
        for seed, score in enumerate(values)
    ]
    models = [
        {"model": name, "task": task, **interval(values).figures("score")}
        for task in ("SST-2", "mean")
        for name, values in scores.items()
    ]
    assert measured.fine_tuned("masked-lm") == []
    Record("starts-glue", {"models": models, "runs": runs}, {}).write(
        results / measured.GLUE_RECORDS["masked-lm"][0]
    )
    first, mean = measured.fine_tuned("masked-lm")
    assert (first.title, mean.title) == ("GLUE: SST-2, accuracy", "GLUE: mean of SST-2")
    assert first.show("rope") == "71.0 (68.5 to 73.5)"
    assert first.verdicts() == {"rope": BEST, "none": WORSE}
    assert measured.fine_tuned("causal-lm") == []


def test_a_start_of_a_language_model_names_its_source(results):
    record = Record("compare", *_record_of({"rope": 10.0, "none": 12.0}))
    record.data.update(source="learned")
    record.write(results / measured.SWITCH_RECORD["causal-lm"])
    column = measured.after_switch("causal-lm")
    assert column.title.endswith("perplexity, 120 updates after `learned`")
    assert column.verdicts() == {"rope": BEST, "none": WORSE}


def test_ranks_on_other_texts_are_correlated_with_those_on_the_first(results, monkeypatch):
    record = Record("compare", *_record_of({"rope": 50.0, "alibi": 20.0, "learned": 30.0}))
    texts = [(text, name) for text, name, _ in measured.ANOTHER_TEXT["causal-lm"]]
    for _, name in texts:
        record.write(results / name)
    found = [measured.at_trained_length("causal-lm"), *measured.on_another_text("causal-lm")]
    assert [each.title for each in found[1:]] == [f"perplexity on {text}" for text, _ in texts]
    assert choose._format_correlations(found) == []  # of three encodings
    monkeypatch.setattr(choose, "_FEW", 3)
    (table,) = choose._format_correlations(found)  # ranks 1, 2, 3 and 3, 2, 1
    assert table.splitlines()[-1].endswith("| 3 | -1.00 |")


def _record_of(perplexities):
    changes = {1: 0.99, 2: 1.0, 3: 1.01}
    rows = [
        {"model": name, "lr": "0.002", "updates": 120}
        | interval_of_perplexity([value * change for change in changes.values()]).figures(
            "perplexity"
        )
        for name, value in perplexities.items()
    ]
    trainings = [
        {"model": name, "lr": "0.002", "seed": seed, "perplexity": value * change}
        for name, value in perplexities.items()
        for seed, change in changes.items()
    ]
    return {"models": rows, "trainings": trainings}, {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_evidence_is_that_of_the_records(family):
    assert answer.read_evidence(family) == measured.collect_evidence(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_changes_of_trained_models_are_those_of_the_records(family):
    assert read_changes(family) == measured.list_changes(family)


def test_what_a_trained_model_can_be_given(capsys):
    words = ["choose", "--family", "causal-lm", "--length", "4096", "--from-trained"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Keep the positions that the model has")
    assert "lm-length --text my.txt --lengths 4096" in printed
    rows = [line.split() for line in printed.splitlines() if "(kept)" in line]
    # without training, after a little, and of small models
    kept = [(row[0], row[-1]) for row in rows]
    assert kept == [("own", "best"), ("own", "best"), ("rope", "best")]
    assert main([*words[:-2], "16384", "--from-trained"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Significantly better than the kept positions: own(scaling=yarn:2)")
    assert main([*words, "--encodings", "m4", "--markdown"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\| `m4` \| .* \| significantly worse \|", printed)
    assert "`own`" not in printed  # the model of another table, in which `m4` is not
    assert main([*words, "--encodings", "cope"]) == 2
    assert "none of these was measured after a change" in capsys.readouterr().err
    assert main([*words, "--text", "book.txt"]) == 2
    assert "--from-trained: answers from measurements" in capsys.readouterr().err


def test_a_better_encoding_than_the_kept_one_is_named(monkeypatch):
    values = {"rope": [10.0, 10.1, 10.2], "alibi": [5.0, 5.1, 5.2]}
    measurement = answer.Measurement("perplexity", "", False, values)
    changes = [from_trained.Change("small models", "rope", math.inf, measurement)]
    monkeypatch.setattr(from_trained, "read_changes", lambda family: changes)
    text = from_trained.answer_from_trained(ChooseQuestion("causal-lm", 8, 8))
    assert text.startswith(
        "Significantly better than the kept positions: `alibi` in place of `rope`"
    )


def test_the_figures_for_texts_of_a_length_answer():
    measurement = answer.Measurement("perplexity", "", False, {})
    changes = [
        from_trained.Change(models, "own", up_to, measurement)
        for models, up_to in [("a", 2048), ("b", math.inf), ("a", 8192), ("a", 4096), ("b", 2048)]
    ]
    for length, of_a, of_b in (
        (128, 2048, 2048),
        (2048, 2048, 2048),
        (2049, 4096, math.inf),
        (9000, 8192, math.inf),
    ):
        selected = [*from_trained.select_for_length(changes, length)]
        assert [(x.models, x.up_to) for x in selected] == [("a", of_a), ("b", of_b)]


def test_one_seed_is_not_judged():
    figures = {name: interval_of_perplexity([value]) for name, value in (("a", 1.0), ("b", 9.0))}
    column = Column("", "", 1, figures, {"a": {1: 1.0}, "b": {1: 9.0}})
    assert column.verdicts() == {"a": BEST, "b": SAME}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_have_every_encoding_that_was_measured_in_a_family(family):
    text = "\n".join(choose._format_family(family))
    names = set(encodings_of(family)) - (set() if family == "causal-lm" else {"inkling", "lerope"})
    if family == "encoder-decoder":
        names = (
            measured.at_trained_length(family).figures.keys()
            | measured.after_switch(family).figures.keys()
        )
        assert len(names) == 8
    for name in registry.names():
        assert (f"| `{name}` |" in text) == (name in names)


def test_a_page_without_a_place_is_an_error(tmp_path):
    (tmp_path / "choose.md").write_text("nothing")
    with pytest.raises(UserError, match="has no line"):
        choose.fill_page(tmp_path / "choose.md")


def test_a_column_ranks_no_number_last():
    column = Column("", "", 1, {name: interval_of_perplexity([v]) for name, v in NUMBERS.items()})
    assert column.ranked() == ["c", "b", "a"]


NUMBERS = {"a": math.nan, "b": 3.0, "c": 2.0}


def test_what_is_behind_the_best_is_corrected_for_all_comparisons():
    """By the rule of Benjamini and Hochberg, written out: the largest k with p_k <= 0.05 k / m."""
    chance = random.Random(1)
    best = {seed: 10.0 + seed for seed in range(4)}
    others = {
        f"m{n}": {seed: x * math.exp(0.01 * n + chance.gauss(0, 0.03)) for seed, x in best.items()}
        for n in range(12)
    }
    p_values = {name: compare(values, best).p_value for name, values in others.items()}
    ranked = sorted(p_values, key=p_values.__getitem__)
    last = max(k for k, name in enumerate(ranked, 1) if p_values[name] <= 0.05 * k / len(ranked))
    uncorrected = [name for name in ranked if p_values[name] < 0.05]
    assert 0 < last < len(uncorrected)
    assert find_different(best, {**others, "one seed": {1: 99.0}}) == {*ranked[:last]}


def test_a_picture_for_each_family(tmp_path):
    choose.draw(tmp_path)
    names = {choose._list_parts(family)[0][1] for family in FAMILIES}
    assert {each.name for each in tmp_path.iterdir()} == {*names, "choose_masked_lm_fine_tuned.png"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
