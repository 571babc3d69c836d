"""The probe: tasks against brute force, the loss of answers only, ranks, runs through fairseq."""

from __future__ import annotations

import argparse
import filecmp
import itertools
import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq import criterions
from fairseq.data import Dictionary
from scipy import stats

from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.answers import ASKS, BLANK, ENDS
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.experiments.outcomes import Outcome
from fairseq_posenc.workbench.experiments.probe import (
    command,
    data,
    experiment,
    picture,
    report,
    tasks,
)
from fairseq_posenc.workbench.experiments.probe.experiment import TaskExperiment, TaskResults
from fairseq_posenc.workbench.experiments.probe.report import reciprocal_ranks
from fairseq_posenc.workbench.experiments.variants import (
    CAUSAL,
    ENCODER_DECODER,
    FAMILIES,
    Run,
    parse_variants,
)
from fairseq_posenc.workbench.results import differences, intervals, record
from fairseq_posenc.workbench.running.logs import Curve, Entry
from fairseq_posenc.workbench.running.options import Parser, parse_around_dashes
from tests.helpers.products import some_of

NAMES = sorted(tasks.TASKS)


def search(alphabet: str, length: int, is_right) -> list[str]:
    """Return the only word of a length that is right, by trying all."""
    found = [word for word in itertools.product(alphabet, repeat=length) if is_right(word)]
    assert len(found) == 1
    return list(found[0])


def by_copying(question: list[str]) -> list[str]:
    return [question[place] for place in range(len(question))]


def by_stack(question: list[str]) -> list[str]:
    stack, answer = list(question), []
    while stack:
        answer.append(stack.pop())
    return answer


def by_bubbles(question: list[str]) -> list[str]:
    found = list(question)
    while swaps := [i for i in range(len(found) - 1) if found[i] > found[i + 1]]:
        found[swaps[0]], found[swaps[0] + 1] = found[swaps[0] + 1], found[swaps[0]]
    return found


def by_school_addition(question: list[str]) -> list[str]:
    plus = question.index("+")
    carry, answer = 0, []
    for one, other in zip(reversed(question[:plus]), reversed(question[plus + 1 :])):
        carry, digit = divmod(int(one) + int(other) + carry, 10)
        answer.append(str(digit))
    return [*answer, str(carry)][::-1]


def by_flipping(question: list[str]) -> list[str]:
    state = False
    for bit in question:
        state ^= bit == "1"
    return ["1" if state else "0"]


def by_trying_letters(question: list[str]) -> list[str]:
    def is_double(word: tuple[str, ...]) -> bool:
        whole = [word[0] if each == "_" else each for each in question]
        return whole[: len(whole) // 2] == whole[len(whole) // 2 :]

    return search("abcdefghijklmnopqrstuvwxyz", 1, is_double)


def by_scanning_pairs(question: list[str]) -> list[str]:
    end = question.index("?")
    answer = []
    for key in question[end + 1 :]:
        answer += [question[i + 1] for i in range(0, end, 2) if question[i] == key]
    return answer


def by_walking_back(question: list[str]) -> list[str]:
    assert question[-1] == "r"
    places = [i for i in range(0, len(question) - 1, 2) if question[i] == "w"]
    for place in range(0, len(question) - 1, 2):
        if question[place] == "r":  # what was read on the way is right as well
            before = [i for i in places if i < place]
            assert question[place + 1] == question[before[-1] + 1]
    return [question[places[-1] + 1]]


def by_counting(question: list[str]) -> list[str]:
    end = question.index("?")
    place = int("".join(question[end + 1 :]))
    return [letter for count, letter in enumerate(question[:end]) if count == place]


def by_counting_changes(question: list[str]) -> list[str]:
    changes = [pair for pair in itertools.pairwise(question) if pair[0] != pair[1]]
    return ["0" if len(changes) % 2 else "1"]


def by_going_round(question: list[str]) -> list[str]:
    circle = ["0", "1", "2", "3", "4"]
    for step in question:
        if step == "right":
            circle = circle[1:] + circle[:1]
        elif step == "left":
            circle = circle[-1:] + circle[:-1]
    return circle[:1]


def by_python(question: list[str]) -> list[str]:
    return [str(eval("".join(question)) % 5)]


def by_replaying(question: list[str]) -> list[str]:
    stack = ""
    for word in question:
        stack = stack[1:] if word == "pop" else word.removeprefix("push") + stack
    return list(stack.ljust(len(question) + 1, "."))


def by_places(question: list[str]) -> list[str]:
    odd = [word for place, word in enumerate(question, 1) if place % 2 == 1]
    return odd + [word for place, word in enumerate(question, 1) if place % 2 == 0]


def by_searching_words(question: list[str]) -> list[str]:
    *words, ask, given, shift = question
    assert ask == "?"
    assert len(set(words)) == len(words)
    pairs = itertools.product(enumerate(words), repeat=2)
    return [found for (i, word), (j, found) in pairs if word == given and j - i == int(shift)]


def by_following(question: list[str]) -> list[str]:
    *words, ask, value = question
    assert ask == "?"
    found: list[str] = []
    for name, is_assigned, source in zip(words, words[1:], words[2:]):
        if is_assigned == ":=" and source in (value, *found):
            found.append(name)
    return found


def by_reading_all(question: list[str]) -> list[str]:
    """Answers on the way must be right as well."""
    end = question.index("?")
    words, asked = question[:end], question[end + 1 :]
    found: dict[str, list[str]] = {}
    for key, is_needle, value in zip(words, words[1:], words[2:]):
        if is_needle == "is":
            found.setdefault(key, []).append(value)
    while len(asked) > 1:
        key, asks, value, ends, *asked = asked
        assert (asks, found[key], ends) == ("=", [value], ";")
    return found[asked[0]]


def by_recalling(question: list[str]) -> list[str]:
    """The first words are the pairs; each of their keys is asked once, and its value is right."""
    asked = [key for key, asks in zip(question, question[1:]) if asks == "="] + question[-1:]
    pairs = question[: 2 * len(asked)]
    known = dict(zip(pairs[::2], pairs[1::2]))
    assert sorted(known) == sorted(asked)
    for key, asks, value in zip(question, question[1:], question[2:]):
        assert asks != "=" or known[key] == value
    return [known[question[-1]]]


BRUTE_FORCE = {
    "addition": by_school_addition,
    "bucket_sort": by_bubbles,
    "cycle_navigation": by_going_round,
    "even_pairs": by_counting_changes,
    "indirect_indexing": by_searching_words,
    "modular_arithmetic": by_python,
    "mqar": by_recalling,
    "needle": by_reading_all,
    "needle_multi_key": by_reading_all,
    "needle_multi_query": by_reading_all,
    "needle_multi_value": by_reading_all,
    "odds_first": by_places,
    "stack_manipulation": by_replaying,
    "variable_tracking": by_following,
    "copy": by_copying,
    "flip_flop": by_walking_back,
    "look_up": by_counting,
    "missing_duplicate": by_trying_letters,
    "parity": by_flipping,
    "recall": by_scanning_pairs,
    "reverse": by_stack,
    "sort": by_bubbles,
}


def test_every_task_has_an_independent_check():
    assert sorted(BRUTE_FORCE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_what_brute_force_finds(name):
    task, chance = tasks.get(name), random.Random(5)
    for length in [*range(1, 41), 100, 200]:
        question, answer = task.make_example(chance, length)
        assert answer == BRUTE_FORCE[name](question)
        assert {*question, *answer} <= {*task.words, ASKS}
        assert ASKS not in task.words
        assert answer, "nothing to learn"
        asked_on_the_way = 3 * question.count(ASKS) + (length if name == "mqar" else 0)
        assert length <= 5 or abs(len(question) - length) <= 5 + asked_on_the_way


@pytest.mark.parametrize("name", NAMES)
def test_answers_differ(name):
    """So that nobody is right by always saying the same."""
    task, chance = tasks.get(name), random.Random(5)
    answers = [tuple(task.make_example(chance, 20)[1]) for _ in range(200)]
    assert max(answers.count(each) for each in set(answers)) < 140


def dictionary(*words: str) -> Dictionary:
    found = Dictionary()
    for word in words:
        found.add_symbol(word)
    return found


def criterion(words: Dictionary, targets: list[str] | None = None):
    task = SimpleNamespace(target_dictionary=words, targets=targets)
    return criterions.CRITERION_REGISTRY["answers"](task)


class Scores:
    """A model whose scores are given."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores

    def __call__(self, **kwargs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.scores,)


def lines(words: Dictionary, *texts: str) -> torch.Tensor:
    numbers = [torch.tensor([words.index(word) for word in text.split()]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(numbers, batch_first=True, padding_value=words.pad())


class TestCriterion:
    WORDS = dictionary(ASKS, *"abc")

    def causal(self) -> dict:
        given = lines(self.WORDS, "</s> a b = b a", "</s> c = c")
        target = lines(self.WORDS, "a b = b a </s>", "c = c </s>")
        return {"net_input": {"src_tokens": given}, "target": target, "ntokens": 10}

    def test_only_answers_count_in_a_causal_model(self):
        counted = criterion(self.WORDS).mask_answers(self.causal()).int().tolist()
        assert counted == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]]

    def test_answers_on_the_way_end(self):
        words = dictionary(ASKS, ENDS, *"abc")
        given = lines(words, "</s> a = b ; c = b a", "</s> a = b ; c")
        target = lines(words, "a = b ; c = b a </s>", "a = b ; c </s>")
        sample = {"net_input": {"src_tokens": given}, "target": target}
        counted = criterion(words).mask_answers(sample).int().tolist()
        assert counted == [[0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0]]

    def test_an_encoder_sees_blanks_in_place_of_answers(self):
        words = dictionary(ASKS, BLANK, ENDS, *"abc")
        given = lines(words, "</s> a = b ; c = b a", "</s> c = c")
        sample = {"net_input": {"src_tokens": given}, "target": given, "ntokens": 13}
        seen = []

        def model(src_tokens):
            seen.append(src_tokens)
            return (torch.zeros(*src_tokens.shape, len(words)),)

        _, count, _ = criterion(words, ["self"])(model, sample)
        blanks = lines(words, f"</s> a = {BLANK} ; c = {BLANK} {BLANK}", f"</s> c = {BLANK}")
        assert torch.equal(seen[0], blanks)
        assert count == 4
        with pytest.raises(UserError, match="the dictionary has no '<blank>'"):
            criterion(self.WORDS, ["self"])

    def test_only_answers_count_in_a_decoder(self):
        given = lines(self.WORDS, "</s> = b a", "</s> = c")
        target = lines(self.WORDS, "= b a </s>", "= c </s>")
        net_input = {"src_tokens": lines(self.WORDS, "a b", "c"), "prev_output_tokens": given}
        sample = {"net_input": net_input, "target": target}
        assert criterion(self.WORDS).mask_answers(sample).int().tolist() == [
            [0, 1, 1, 1],
            [0, 1, 1, 0],
        ]

    def test_loss_and_exact_match(self):
        """The second answer is right but for its end; what is said of questions is all wrong."""
        sample, size = self.causal(), len(self.WORDS)
        said = sample["target"].clone()
        said[:, 0] = self.WORDS.index("b")
        said[1, 3] = self.WORDS.index("a")
        scores = 3.0 * F.one_hot(said, size).float() + torch.rand(2, 6, size)
        loss, tokens, logged = criterion(self.WORDS)(Scores(scores), sample)
        rows = [(0, 3), (0, 4), (0, 5), (1, 2), (1, 3)]
        terms = [-scores[row].log_softmax(-1)[sample["target"][row]] for row in rows]
        torch.testing.assert_close(loss, torch.stack(terms).sum())
        assert (tokens, int(logged["exact"])) == (5, 1)
        said[1, 3] = self.WORDS.eos()
        right = Scores(F.one_hot(said, size).float())
        assert int(criterion(self.WORDS)(right, sample)[2]["exact"]) == 2

    def test_gradients_of_questions_are_zero(self):
        sample = self.causal()
        scores = torch.rand(2, 6, len(self.WORDS), requires_grad=True)
        criterion(self.WORDS)(Scores(scores), sample)[0].backward()
        moved = scores.grad.abs().sum(-1) > 0
        assert torch.equal(moved, criterion(self.WORDS).mask_answers(sample))

    def test_a_dictionary_without_the_symbol_is_refused(self):
        with pytest.raises(UserError, match="the dictionary has no '='"):
            criterion(dictionary("a"))


class TestData:
    @pytest.mark.parametrize("family", [CAUSAL, ENCODER_DECODER])
    def test_the_same_whenever_made(self, family, tmp_path, monkeypatch):
        monkeypatch.setattr(data, "EXAMPLES", {"train": 30, "valid": 5})
        folders = [tmp_path / name for name in ("one", "other")]
        for folder in folders:
            folder.mkdir()
            data.write_train_splits(tasks.get("sort"), family, 8, folder)
            data.write_test_splits(tasks.get("sort"), family, [3, 20], folder)
        names = sorted(path.name for path in folders[0].iterdir())
        assert filecmp.cmpfiles(*folders, names, shallow=False) == (names, [], [])
        assert len(names) == (9 if family == CAUSAL else 18)

    def test_splits_differ(self, tmp_path):
        """What is read was not made by the randomness that made what is trained on."""
        task = tasks.get("copy")
        made = [
            task.make_example(data._new_generator(task, split), 20)
            for split in ("train", "length-20")
        ]
        assert made[0] != made[1]


class TestIntervals:
    @pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.2, 0.4, 0.3], [5.0] * 4])
    def test_students_t(self, values):
        mean, low, high = intervals.interval(values)
        if low < high:
            theirs = stats.ttest_1samp(values, 0).confidence_interval(0.95)
            assert (low, high) == pytest.approx((theirs.low, theirs.high))
        assert mean == pytest.approx(sum(values) / len(values))

    @pytest.mark.parametrize("values", [[1.0], [1.0, 1.2]])
    def test_fewer_than_three_values_have_no_bounds(self, values):
        assert "(" not in intervals.interval(values).show(1)

    def test_perplexity_is_that_of_the_mean_loss(self):
        found = intervals.interval_of_perplexity([10.0, 20.0, 40.0])
        assert found.mean == pytest.approx(20.0)
        assert found.low > 0

    def test_shares_end_at_zero_and_one(self):
        assert intervals.interval_of_share([0.0, 0.5, 1.0])[1:] == (0.0, 1.0)


SEEDS = [[82.0, 55.0, 46.0], [84.0, 60.0, 47.0], [81.0, 90.0, 20.0], [82.5, 55.4, 46.2]]
SAMPLES = {name: dict(enumerate(values)) for name, values in zip("abcd", SEEDS)}


class TestDifferences:
    def test_pairs_are_those_of_scipy_on_the_log_scale(self):
        for pair, found in differences.compare_all(SAMPLES).items():
            values = [list(map(math.log, SAMPLES[name].values())) for name in pair]
            theirs = stats.ttest_rel(*values)
            assert found.p_value == pytest.approx(theirs.pvalue)
            bounds = theirs.confidence_interval(0.95)
            assert found.interval[1:] == pytest.approx((bounds.low, bounds.high))
            assert found.is_significant == (theirs.pvalue < 0.05)

    def test_holm_is_that_of_its_definition(self):
        found = sorted(differences.compare_all(SAMPLES).values(), key=lambda each: each.p_value)
        steps = [(len(found) - place) * each.p_value for place, each in enumerate(found)]
        wanted = [min(1.0, max(steps[: place + 1])) for place in range(len(steps))]
        assert [each.holm for each in found] == pytest.approx(wanted)

    def test_two_seeds_are_never_significant(self):
        two = {name: {0: values[0], 1: values[1]} for name, values in SAMPLES.items()}
        assert not any(each.is_significant for each in differences.compare_all(two).values())
        (only,) = differences.describe_differences(two)
        assert only.startswith("Not judged, fewer than 3 seeds in common: ")

    def test_only_seeds_that_both_have_count(self):
        one, other = {1: 2.0, 2: 3.0, 3: 4.0, 4: 99.0}, {0: 1.0, 1: 4.0, 2: 6.1, 3: 8.0}
        found = differences.compare(one, other)
        assert found.seeds == 3
        assert found.interval.mean == pytest.approx(-(2 * math.log(2) + math.log(6.1 / 3)) / 3)

    def test_models_that_are_one_are_not_different(self):
        same = {"m1": {1: 3.0, 2: 4.0, 3: 5.0}, "m2": {1: 3.0, 2: 4.0, 3: 5.0}}
        (found,) = differences.compare_all(same).values()
        assert (found.p_value, found.is_significant) == (1.0, False)


def settings(out: Path, **changes: Any) -> TaskExperiment:
    values: dict[str, Any] = {
        "family": CAUSAL,
        "tasks": (tasks.get("copy"), tasks.get("sort")),
        "variants": parse_variants("none,rope,alibi"),
        "seeds": (1, 2, 3),
        "updates": 10,
        "trained": 40,
        "lengths": (20, 40, 80, 160),
        **changes,
    }
    return TaskExperiment(out=out, **values)


def made_up(out: Path) -> TaskResults:
    """Return results in which alibi is best at both tasks, and rope and none tie at one."""
    chosen = settings(out)
    long = {"none": (0.0, 0.1), "rope": (0.0, 0.3), "alibi": (0.9, 0.8)}
    outcomes = [
        Outcome(
            Run(model, seed, task.name),
            {"20": 1.0, "40": 0.9, "80": share, "160": share},
            Curve([Entry("valid", n, 1.0, 2.0, None, 0.0, exact=n / 10) for n in (5, 10)], 0.0),
            seconds=9.0,
        )
        for seed in chosen.seeds
        for number, task in enumerate(chosen.tasks)
        for model in chosen.variants
        for share in [long[model.name][number]]
    ]
    return TaskResults(chosen, outcomes)


class TestReport:
    def test_mean_reciprocal_rank(self, tmp_path):
        found = made_up(tmp_path)
        ranks = {each.name: mean for each, (mean, _, _) in reciprocal_ranks(found).items()}
        assert ranks == pytest.approx(
            {"alibi": 1.0, "rope": (1 / 2.5 + 1 / 2) / 2, "none": (1 / 2.5 + 1 / 3) / 2}
        )

    def test_tables_sentences_picture_and_record(self, tmp_path):
        found = made_up(tmp_path)
        text = report.format_tables(found)
        assert (
            "| `rope` | 0.45 (0.45 to 0.45) | 0.00 (0.00 to 0.00) | 0.30 (0.30 to 0.30) |" in text
        )
        assert "- copy: `alibi` is right in 90%, significantly above `none`, `rope`." in text
        picture.draw_lengths(found, tmp_path / "probe.png")
        assert (tmp_path / "probe.png").read_bytes().startswith(b"\x89PNG")
        report.build_record(found).write(tmp_path / report.RECORD)
        rows = record.read(tmp_path / report.RECORD).figures
        assert len(rows["lengths"]) == 2 * 3 * 4
        assert len(rows["trainings"]) == 2 * 3 * 3
        assert rows["curves"][-1] == {
            **{"model": "alibi", "task": "sort", "seed": 3, "updates": 10, "exact": 1.0}
        }
        picture.draw_learning(found, tmp_path / report.LEARNING)
        assert (tmp_path / report.LEARNING).read_bytes() != (tmp_path / "probe.png").read_bytes()
        drawn = picture.draw_all(found)
        assert report.write_report(found, drawn).read_text().count("probe.png") == 1

    def test_depths_are_drawn_and_recorded(self, tmp_path):
        chosen = settings(tmp_path, tasks=(tasks.get("needle"),), lengths=(20, 80))
        shares = {f"{n}@{depth:g}": 1 - depth * n / 80 for n in (20, 80) for depth in data.DEPTHS}
        figures = {"20": 0.9, "80": 0.5, **shares}
        outcomes = [Outcome(run, figures, seconds=9.0) for run in chosen.runs]
        found = TaskResults(chosen, outcomes)
        drawn = picture.draw_all(found)
        assert (tmp_path / "probe-needle.png").stat().st_size > 10_000
        assert set(drawn.values()) <= set(report.FILES)  # a copy of the results takes a new run
        rows = report.build_record(found).figures["depths"]
        assert len(rows) == 3 * 2 * len(data.DEPTHS)
        assert {row["exact"] for row in rows if row["length"] == 80} == {1, 0.75, 0.5, 0.25, 0}
        assert "probe-needle.png" in report.write_report(found, drawn).read_text()

    def test_without_longer_questions_there_are_no_ranks(self, tmp_path):
        found = made_up(tmp_path)
        short = TaskResults(settings(tmp_path, lengths=(20, 40)), found.outcomes)
        assert "rank" not in report.format_tables(short)
        assert report.build_record(short).figures["ranks"] == []

    def test_shares_are_read_from_the_log(self):
        log = [
            '| INFO | length-20 | {"epoch": 1, "length-20_loss": "1", "length-20_exact": "0.25"}'
        ]
        assert experiment.parse_accuracies([*log, "noise"]) == {"20": 0.25}
        log = [
            f'{{"length-20-depth-{depth}_exact": "{share}"}}'
            for depth, share in ((0, 1), (0.25, 0.5))
        ]
        assert experiment.parse_accuracies(log) == {"20": 0.75, "20@0": 1.0, "20@0.25": 0.5}


def parse(*words: str) -> argparse.Namespace:
    parser = Parser()
    command.add_arguments(parser)
    return parse_around_dashes(parser, words)


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--tasks", "copy,chess"], "--tasks: unknown task 'chess': choose from addition"),
            (["--encodings", "quantum"], "quantum"),
            (["--encodings", "decbert_diff"], "directions, which are for encoders"),
            (["--lengths", "10,x"], "--lengths: must be a whole number of at least 1, not 'x'"),
            (["--lengths", "10,501"], "--lengths 501: must be at most 500"),
            (["--trained", "0"], "--trained: must be a whole number of at least 1, not '0'"),
            (["--updates", "0"], "--updates: must be a whole number of at least 1, not '0'"),
            (["--seeds", "one"], "--seeds: must be whole numbers"),
            (["--", "--max-update", "5"], "--max-update cannot be set here; use --updates"),
            (["--", "elsewhere"], "'elsewhere' is not an option; set the folder with --out"),
            (["--jobs", "0"], "--jobs: must be a whole number of at least 1, not '0'"),
        ],
    )
    def test_bad_options_are_found_before_any_work(self, tmp_path, words, message):
        with pytest.raises(UserError, match=re.escape(message)):
            command.run(parse("--out", str(tmp_path / "out"), *words))
        assert not (tmp_path / "out").exists()

    def test_a_task_that_is_named_twice_is_trained_once(self):
        found = command._build_experiment(parse("--tasks", "copy, sort,copy , copy"))
        assert [task.name for task in found.tasks] == ["copy", "sort"]

    @pytest.mark.parametrize("family", FAMILIES)
    def test_all_are_those_of_the_family(self, family):
        found = command._build_experiment(parse("--encodings", "all", "--family", family))
        names = [variant.name for variant in found.variants]
        assert {"rope", "t5", "none"} <= set(names)
        assert [task.name for task in found.tasks] == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_probe_learns_and_is_not_repeated(family, tmp_path, monkeypatch, capsys):
    """Flip-flops of up to two instructions are learned in seconds, by any order of work."""
    monkeypatch.setattr(data, "EXAMPLES", {"train": 10_000, "valid": 200})  # more are not used up
    call = [
        *("probe", "--tasks", "flip_flop", "--encodings", "rope", "--family", family),
        *("--trained", "5", "--lengths", "4,5,9", "--updates", "48", "--seeds", "1", "--json"),
    ]

    def probed(out: str) -> tuple[list[dict], str]:
        assert main([*call, "--out", str(tmp_path / out), "--", "--max-tokens", "1024"]) == 0
        told = capsys.readouterr()
        found = json.loads(told.out)
        assert found["data"]["options"] == "--max-tokens 1024"
        assert [row["updates"] for row in found["figures"]["curves"]] == [*range(4, 49, 4)]
        assert (tmp_path / out / report.LEARNING).stat().st_size > 10_000
        return found["figures"]["lengths"], told.err

    rows, told = probed("one")
    assert "fairseq-train" in told
    assert rows[0]["exact"] > 0.9, rows
    if family in some_of([CAUSAL], FAMILIES):
        assert [row["exact"] for row in probed("other")[0]] == [row["exact"] for row in rows]
    again, told = probed("one")
    assert "fairseq-train" not in told
    assert again == rows
