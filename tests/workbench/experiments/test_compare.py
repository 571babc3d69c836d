"""The comparison: text, specs, steps, logs, report, bad input, and one run through fairseq."""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments import corpus, variants
from fairseq_posenc.workbench.experiments.compare import command, live, report, statements
from fairseq_posenc.workbench.experiments.compare.record import (
    RECORD,
    build_record,
    refuse_to_lose_report,
)
from fairseq_posenc.workbench.experiments.outcomes import Outcome, aggregate
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment, TextResults
from fairseq_posenc.workbench.experiments.variants import Run, parse_variants
from fairseq_posenc.workbench.results import record
from fairseq_posenc.workbench.running import logs as curves
from fairseq_posenc.workbench.running.executor import Slurm
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from fairseq_posenc.workbench.running.logs import TRAIN_LOG, Curve, Entry
from fairseq_posenc.workbench.running.options import Parser, parse_around_dashes
from fairseq_posenc.workbench.running.progress import format_time
from tests.helpers.commands import halting
from tests.helpers.waiting import wait_until

UNIGRAM = 200.0
DEMO = "none,learned,decbert_diff,m4m"


def parse_args(*words: str) -> argparse.Namespace:
    parser = Parser()
    command.add_arguments(parser)
    return parse_around_dashes(parser, words)


def make_curve(points: list[tuple[int, float]], speed: float) -> Curve:
    entries = [Entry("valid", x, math.log2(y), y, None, 0.0) for x, y in points]
    return Curve(entries, speed)


def make_settings(out: Path, encodings: str = DEMO, **changes: Any) -> TextExperiment:
    values: dict[str, Any] = {"jobs": 2, "updates": 800, "seeds": (1, 2), "vocab_size": 512}
    values |= changes
    return TextExperiment(out=out, variants=parse_variants(encodings), **values)


def make_results(
    out: Path, curves_by_name: dict[str, list[tuple[int, float]]], seeds: int = 3
) -> TextResults:
    """Return results in which the seeds differ by a thousandth, every other model's downwards."""
    settings = make_settings(out, ",".join(curves_by_name), seeds=tuple(range(1, seeds + 1)))
    outcomes = []
    for number, variant in enumerate(settings.variants):
        for seed in settings.seeds:
            change = 1 + (-1) ** number * seed / 1000
            points = [(x, y * change) for x, y in curves_by_name[variant.name]]
            curve = make_curve(points, 1000.0 * (number + 1))
            end = points[-1][1]
            figures = {"perplexity": end, "position_parameters": 8192 * number}
            outcomes.append(Outcome(Run(variant, seed, "0.003"), figures, curve, 61.0))
    facts = {
        "words": 300_000,
        "documents": 700,
        "valid_words": 15_000,
        "train_words": 285_000,
        "unigram_perplexity": UNIGRAM,
    }
    return TextResults(settings, outcomes, facts)


FOUR = {
    "none": [(100, 150.0), (200, 100.0)],
    "learned": [(100, 140.0), (200, 80.0)],
    "decbert_diff": [(100, 90.0), (200, 50.0)],
    "m4m": [(100, 70.0), (200, 40.0)],
}


@pytest.mark.parametrize(
    ("device", "words", "jobs"),
    [
        ("cpu", ["--encodings", DEMO], 4),  # at once, to compare their live curves
        ("cpu", ["--encodings", "none,learned,rope,alibi,t5,m4"], 5),
        ("cpu", ["--encodings", "none,learned"], 3),  # one for each core, with several seeds
        ("cpu", ["--jobs", "2"], 2),
        ("cuda", ["--encodings", DEMO], 3),
    ],
)
def test_on_a_processor_models_are_trained_together(device, words, jobs, monkeypatch):
    monkeypatch.setattr(command, "choose_device", lambda: device)
    monkeypatch.setattr(command, "default_jobs", lambda: 3)
    assert command._build_experiment(parse_args(*words)).jobs == jobs


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ([], "demo"),
        (["--text", "texts/my.txt"], "compare-my"),
        (["--text", "my.txt", "--out", "there"], "there"),
    ],
)
def test_results_of_a_text_do_not_replace_the_demo(words, folder):
    assert command._build_experiment(parse_args(*words)).out == Path(folder)


class TestContenders:
    def test_commas_inside_brackets_do_not_split(self) -> None:
        text = "none, learned+m4m(max_distance=64,per_head=true),rope"
        assert variants.split_list(text) == [
            "none",
            "learned+m4m(max_distance=64,per_head=true)",
            "rope",
        ]

    @pytest.mark.parametrize(
        "specs",
        [["none", "rope"], ["3*rope,none"], ["none", "m4m(per_head=true,max_distance=8),t5"]],
    )
    def test_a_list_that_is_written_is_read_as_it_was(self, specs) -> None:
        assert variants.split_list(variants.join_list(specs)) == specs

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("none", ["--position-encoding", "none"]),
            ("decbert_diff", ["--position-encoding", "learned", "--attention-directions", "lr,rl"]),
            (
                "decbert_same_nope",
                ["--position-encoding", "none", "--attention-directions", "lr,lr"],
            ),
        ],
    )
    def test_options(self, name: str, options: list[str]) -> None:
        assert parse_variants(name)[0].options == options

    def test_folder_needs_no_quoting(self) -> None:
        (variant,) = parse_variants("learned + m4m(max_distance=64)")
        assert variant.folder == "learned+m4m-max_distance=64"
        assert shlex.quote(variant.folder) == variant.folder

    def test_specs_with_commas_are_separated_by_semicolons(self) -> None:
        variants = parse_variants("none; 3*rope,none;m4m(max_distance=3,per_head=true)")
        assert [each.position_encoding for each in variants[:2]] == ["none", "3*rope,none"]
        assert variants[1].folder == "3xrope--none"
        assert shlex.quote(variants[1].folder) == variants[1].folder

    def test_a_list_of_layers_fits_the_stack(self, tmp_path: Path) -> None:
        deeper = {"train_args": ("--encoder-layers", "4")}
        assert make_settings(tmp_path, "none;3*rope,none", **deeper).runs
        with pytest.raises(UserError, match="is a list of 4 layers, but the stack has 2"):
            make_settings(tmp_path, "none;3*rope,none")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("none,quantum", "unknown position encoding 'quantum'"),
            ("none,m4n", "unknown position encoding 'm4n': did you mean m4 or m4m? "),
            ("decbert_dif,m4m", "unknown name 'decbert_dif': did you mean decbert_diff or decb"),
            ("m4m(max_distance=far)", "expected a whole number"),
            ("none,,m4m", "an empty name"),
            ("", "an empty name"),
            ("none,none", "'none' would train the same model twice"),
            ("m4m,m4m()", "'m4m' and 'm4m()' would train the same model twice"),
        ],
    )
    def test_bad_list_is_one_line_about_the_option(self, text: str, message: str) -> None:
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            parse_variants(text)
        assert str(caught.value).startswith("--encodings")
        assert "\n" not in str(caught.value)


class TestDocuments:
    @pytest.fixture
    def library(self, tmp_path: Path) -> Path:
        files = {
            "pydoc_data/topics.py": "topics = {'assert': 'Assertions are\\nhandy.\\n\\nUse them.'}",
            "tool.py": (
                '"""About the tool."""\n'
                "raise SystemExit('imported')\n"
                "class A:\n"
                '    """About A.\n\n    More about A.\n    """\n'
                "    async def f(self):\n"
                '        """About f."""\n'
                "x = 'not a docstring'\n"
            ),
            "package/broken.py": "def (:\n",
            "package/nul.py": "x = '\0'\n",
            "package/undocumented.py": "x = 1\n",
            "test/test_tool.py": '"""A test."""\n',
            "site-packages/other.py": '"""Somebody else\'s."""\n',
        }
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    def test_topics_and_docstrings_are_read_and_nothing_is_imported(self, library: Path) -> None:
        found = list(corpus.read_python_documents(library))
        assert found == [
            ["Assertions are handy.", "Use them."],
            ["About the tool.", "About A.", "More about A.", "About f."],
        ]
        assert corpus.count_words(found[0]) == 5

    def test_this_python_has_enough(self) -> None:
        path = corpus.find_python_library()
        texts = list(corpus._read_topics(path / "pydoc_data" / "topics.py"))
        assert sum(map(corpus.count_words, texts)) > corpus.LEAST_WORDS


class TestCorpus:
    def test_text_is_cut_at_empty_lines(self) -> None:
        (document,) = corpus.split_into_documents("one\ntwo\n\n \nthree\n")
        assert document == ["one two", "three"]

    def test_text_without_empty_lines_is_cut_at_lines(self) -> None:
        (document,) = corpus.split_into_documents("one\ntwo\n")
        assert document == ["one", "two"]

    def test_text_on_one_line_gives_many_documents(self) -> None:
        found = corpus.split_into_documents("word " * 5000)
        assert len(found) > 5
        assert sum(map(corpus.count_words, found)) == 5000

    def test_repeats_are_kept_once(self) -> None:
        assert corpus.drop_repeats([["x", "y", "x"], ["x"]]) == [["x", "y"]]

    def test_split_is_by_document_fixed_and_about_a_twentieth(self) -> None:
        all_documents = [[f"{n} word"] for n in range(200)]
        train, valid = corpus.hold_out(all_documents)
        assert sorted(train + valid) == sorted(all_documents)
        assert len(valid) == 10
        assert corpus.hold_out(all_documents) == (train, valid)

    def test_split_leaves_something_to_train_on(self) -> None:
        train, valid = corpus.hold_out([["x"], ["y " * 99]])
        assert len(train) == len(valid) == 1

    def test_byte_order_mark_is_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "text.txt"
        path.write_bytes(b"\xef\xbb\xbfhello")
        assert corpus.read_text(path) == "hello"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "No such file"),
            (b"", "the file is empty"),
            (b" \n\n", "the file is empty"),
            (b"fine\nbad \xff byte\n", "line 2: byte 0xff is not UTF-8"),
            (b"fine\nfine\n\0\n", "line 3: a NUL byte"),
            (b"fine\n\xff\n\0\n", "line 2: byte 0xff"),
            ("text".encode("utf-16"), "line 1: byte 0xff is not UTF-8"),
        ],
    )
    def test_bad_file(self, tmp_path: Path, content: bytes | None, message: str) -> None:
        path = tmp_path / "text.txt"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message) as caught:
            corpus.read_text(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_folder_is_not_a_text(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="Is a directory"):
            corpus.read_text(tmp_path)

    def test_too_few_words_are_counted(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="too short, 3 words; at least 5,000"):
            corpus.write_corpus("only three words", "--text my.txt", tmp_path)


class TestPieces:
    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "train.txt"
        chance = random.Random(3)
        words = ["".join(chance.choices("abcdefgh", k=3)) for _ in range(200)]
        lines = [" ".join([*chance.choices(words, k=6), "<mask> <pad>"]) for _ in range(300)]
        path.write_text("\n".join(lines))
        return path

    def test_symbols_of_fairseq_stay_out_of_the_text(self, text: Path, tmp_path: Path) -> None:
        corpus.train_pieces(text, tmp_path / "sp", 60)
        count = corpus.write_pieces(tmp_path / "sp.model", text, tmp_path / "out")
        words = (tmp_path / "out").read_text().split()
        assert len(words) == count
        assert not {"<mask>", "<pad>", "<s>", "</s>"} & set(words)

    def test_vocabulary_too_large(self, text: Path, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"--vocab-size 5000: .* use --vocab-size (\d+)") as err:
            corpus.train_pieces(text, tmp_path / "sp", 5000)
        corpus.train_pieces(text, tmp_path / "sp", int(re.findall(r"\d+", str(err.value))[1]))

    def test_vocabulary_too_small(self, text: Path, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"--vocab-size 9: .* use --vocab-size (\d+)") as err:
            corpus.train_pieces(text, tmp_path / "sp", 9)
        corpus.train_pieces(text, tmp_path / "sp", int(re.findall(r"\d+", str(err.value))[1]))


def log_line(kind: str, updates: int, loss: float, speed: float = 1000.0) -> str:
    prefix = "valid_" if kind == "valid" else ""
    figures = {"epoch": 1, "loss": f"{loss}", "num_updates": f"{updates}", "wps": f"{speed}"}
    shown = {f"{prefix}{key}": value for key, value in figures.items()}
    return f"2025-01-01 00:00:00 | INFO | {kind} | {json.dumps(shown)}\n"


class TestCurves:
    def test_figures_of_a_line(self) -> None:
        entry = curves.parse_line(log_line("train_inner", 20, 7.0, 512.5))
        assert entry is not None
        assert entry[:8] == (
            "train_inner",
            20,
            7.0,
            128.0,
            None,
            512.5,
            1,
            None,
        )

    @pytest.mark.parametrize(
        "line",
        ["Traceback", log_line("train", 3, 1.0), log_line("valid", 3, 1.0)[:60], "| valid | {]}"],
    )
    def test_other_lines(self, line: str) -> None:
        assert curves.parse_line(line) is None

    def test_diverged_training_is_no_error(self) -> None:
        entry = curves.parse_line(log_line("valid", 3, float("inf")))
        assert entry is not None
        assert entry.perplexity > 1e300

    def test_continued_training_repeats_updates(self) -> None:
        log = [
            log_line("valid", 10, 8.0),
            log_line("train_inner", 12, 1.0, 100.0),
            log_line("valid", 20, 6.0),
            "$ fairseq-train again\n",
            log_line("train_inner", 12, 1.0, 300.0),
            log_line("valid", 20, 5.0),
        ]
        curve = curves.read_curve(log)
        assert (curve.points, curve.speed) == ([(10, 256.0), (20, 32.0)], 300.0)

    def test_first_below(self) -> None:
        curve = make_curve([(10, 9.0), (20, 5.0), (30, 6.0)], 0.0)
        assert [curve.first_below(value) for value in (9.0, 6.5, 1.0)] == [10, 20, None]


class TestStatements:
    def test_computed_from_the_figures(self, tmp_path: Path) -> None:
        ranks, falling, *order, holm, bag, race = statements.derive_statements(
            make_results(tmp_path, FOUR).models, UNIGRAM
        )
        assert ranks == (
            "Ranks mean something here: `m4m` has 39.9, below 100.0, half the perplexity of a "
            "model that only counts pieces."
        )
        assert falling == (
            "Validation perplexity still fell in the last quarter of the training: `none` by "
            "33%, `learned` by 43%, `decbert_diff` by 44%, `m4m` by 43%."
        )
        assert order[0] == (
            "`m4m` has a significantly lower perplexity than `decbert_diff`, `learned`, `none`."
        )
        assert order[2] == "`learned` has a significantly lower perplexity than `none`."
        assert len(order) == 3
        assert holm == (
            "After Holm's correction for 6 comparisons, 6 of the 6 significant differences "
            "remain significant."
        )
        assert "Its lowest perplexity is 100.2" in bag
        assert "Others reach 50% of that (50.1): `learned` not in this run" in bag
        assert "`m4m` after 200 updates" in bag
        assert "`learned` ends at perplexity 79.8 after 200 updates" in race
        assert "`decbert_diff` after 200 updates, `m4m` after 100 updates" in race

    def test_the_other_way_round(self, tmp_path: Path) -> None:
        """No conclusion is written in advance: with other figures the sentences turn round."""
        reverse = dict(zip(FOUR, reversed(FOUR.values())))
        models = make_results(tmp_path, reverse).models
        _, _, first, *_, bag = statements.derive_statements(models, UNIGRAM)
        assert first.startswith("`none` has a significantly lower perplexity than `learned`")
        alone = statements._compare_with_bag(models[0], models[1:])
        assert "No other model is significantly below it" in alone
        assert "`learned` ends at" not in bag

    def test_a_paired_difference_whose_interval_has_0_is_not_significant(self, tmp_path) -> None:
        near = {"none": [(100, 80.0)], "m4m": [(100, 40.0)], "t5": [(100, 40.01)]}
        order = statements.derive_statements(make_results(tmp_path, near).models, UNIGRAM)
        assert order[1:3] == [
            "`m4m` has a significantly lower perplexity than `none`.",
            "`t5` has a significantly lower perplexity than `none`.",
        ]
        assert order[3] == (
            "Not significantly different (95% interval of the paired difference contains 0): "
            "`m4m` and `t5`."
        )

    def test_a_causal_model_without_positions_is_no_bag_of_words(self, tmp_path: Path) -> None:
        found = statements.derive_statements(
            make_results(tmp_path, FOUR).models, UNIGRAM, masked=False
        )
        assert not any("bag of words" in sentence for sentence in found)

    def test_a_seed_that_diverged_is_told_and_the_others_are_compared(self, tmp_path: Path) -> None:
        results = make_results(tmp_path, FOUR)
        broken = next(each for each in results.outcomes if each.run.variant.name == "learned")
        broken = Outcome(broken.run, {}, broken.curve, diverged_at=140)
        outcomes = [each for each in results.outcomes if each.run != broken.run]
        models = replace(results, outcomes=[*outcomes, broken]).models
        _, first, _, second, *_ = statements.derive_statements(models, UNIGRAM)
        assert first == "`learned` diverged at update 140 (seed 1)."
        assert second == ("`m4m` has a significantly lower perplexity than `decbert_diff`, `none`.")
        shown = report.format_table(replace(results, outcomes=[*outcomes, broken]))
        (row,) = (line for line in shown.splitlines() if "`learned`" in line)
        assert "| diverged at update 140 (seed 1) |" in row
        learned = next(model for model in models if model.variant.name == "learned")
        assert math.isnan(dict(report._build_line(learned).mean)[140].mean)

    @pytest.mark.parametrize(("seeds", "words"), [(1, "One seed is"), (2, "Two seeds are")])
    def test_one_or_two_seeds_are_shown_and_not_judged(self, seeds, words, tmp_path) -> None:
        results = make_results(tmp_path, FOUR, seeds=seeds)
        _, falling, only = statements.derive_statements(results.models, UNIGRAM)
        assert only.startswith(f"{words} too few to judge differences")
        assert falling.startswith("Validation perplexity still fell")
        row = next(line for line in report.format_table(results).splitlines() if "`m4m`" in line)
        ends = [
            f"{each.perplexity:,.1f}" for each in results.outcomes if each.run.variant.name == "m4m"
        ]
        assert row.split(" | ")[4:6] == [
            f"{results.models[3].perplexity.mean:.2f}",
            ", ".join(ends),
        ]

    def test_ranks_above_half_the_unigram_perplexity_mean_nothing_yet(self, tmp_path) -> None:
        """By hand: from 160 to 140 in 60 updates, so to 100 in 151 more."""
        curve = [(40, 190.0), (100, 170.0), (140, 160.0), (200, 140.0)]
        models = make_results(tmp_path, {"rope": curve}, seeds=1).models
        ranks, *_ = statements.derive_statements(models, UNIGRAM)
        assert ranks.startswith("**Ranks mean nothing yet**: after 200 updates the lowest")
        assert "is 140.1 (`rope`). They mean something below 100.0, half" in ranks
        pace = math.log(160 / 140) / 60
        needed = 50 * math.ceil((200 + math.log(140.14 / 100) / pace) / 50)
        assert f"takes about {needed:,} updates: add `--updates {needed}`" in ranks
        flat = make_results(tmp_path, {"rope": [(100, 150.0), (200, 150.0)]}).models
        assert "It did not fall" in statements.derive_statements(flat, UNIGRAM)[0]

    def test_seeds_that_never_arrive_are_counted(self, tmp_path: Path) -> None:
        model = make_results(tmp_path, {"m4m": [(100, 70.0), (200, 40.0)]}).models[0]
        assert statements._format_arrival(model, 40.05) == "after 200 updates (1 of 3 seeds)"
        assert statements._format_arrival(model, 70.1) == "after 100 to 200 updates"
        assert statements._format_arrival(model, 1.0) == "not in this run"

    def test_without_learned_the_first_is_the_baseline(self, tmp_path: Path) -> None:
        results = make_results(tmp_path, {"decbert_diff": FOUR["learned"], "m4m": FOUR["m4m"]})
        assert "`decbert_diff` ends at" in " ".join(
            statements.derive_statements(results.models, UNIGRAM)
        )


class TestLearningRates:
    def test_a_model_is_judged_at_its_best_rate_over_all_seeds(self) -> None:
        """One lucky seed does not make a rate the best; a rate that diverged never is."""
        (variant,) = parse_variants("m4m")
        ends = {"0.001": (50.0, 52.0), "0.003": (40.0, 90.0), "0.1": (math.nan, 1.0)}
        outcomes = [
            Outcome(Run(variant, seed, lr), {"perplexity": end}, make_curve([(1, end)], 1.0))
            for lr, values in ends.items()
            for seed, end in enumerate(values)
        ]
        (model,) = aggregate(outcomes)
        assert (model.lr, [each.perplexity for each in model.outcomes]) == ("0.001", [50.0, 52.0])

    def test_each_training_has_a_folder_and_its_rate(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, "m4m", seeds=(1, 2), lrs=("0.001", "0.01"))
        runs = settings.runs
        assert len({settings.folder(run) for run in runs}) == len(runs) == 4
        for run in runs:
            words = settings.train_command(run)
            assert words[len(words) - words[::-1].index("--lr")] == run.condition
            assert words[words.index("--seed") + 1] == str(run.seed)


class TestReport:
    def test_table_picture_and_commands(self, tmp_path: Path) -> None:
        out = tmp_path / "my demo"
        out.mkdir()
        text = report.write_report(make_results(out, FOUR)).read_text()
        row = r"\| `learned` \| 8,192 \| 0.003 \| 3 \| 79.84 \([\d.]+ to [\d.]+\) \| 79.9, 79.8,"
        assert re.search(row, text)
        assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert "(curves.png)" in text
        assert f"--out '{out}'" in text
        assert "--attention-directions lr,rl" in text
        assert "300,000 words" in text
        assert "- `decbert_diff`: DecBERT; its first layers attend lr,rl" in text
        assert "- `m4m`: As `m4`, but the three dot products are multiplied." in text
        best = out / "models/m4m/lr-0.003-seed-1/checkpoint_best.pt"
        assert f"fairseq-posenc inspect --checkpoint '{best}' --text" in text

    def test_only_models_that_learned_are_worth_a_closer_look(self, tmp_path: Path) -> None:
        results = make_results(tmp_path, FOUR)
        for worth, names in (("decbert_diff", ["m4m"]), (None, FOUR)):
            outcomes = [
                Outcome(each.run, {}, each.curve, diverged_at=240)
                if each.run.variant.name in names
                else each
                for each in results.outcomes
            ]
            text = report.write_report(replace(results, outcomes=outcomes)).read_text()
            looked_at = re.findall(r"inspect --checkpoint .*/models/(\w+)/", text)
            assert looked_at == ([worth] if worth else [])

    def test_the_screen_shows_the_best_first_in_five_columns(self, tmp_path: Path) -> None:
        table, conclusions = report.format_screen(make_results(tmp_path, FOUR)).split("\n\n")
        header, *rows = (re.split("  +", line) for line in table.splitlines())
        assert header[:3] == ["encoding", "validation perplexity", "each seed"]
        assert max(map(len, table.splitlines())) <= 100
        assert [row[0] for row in rows] == ["m4m", "decbert_diff", "learned", "none"]
        assert conclusions.startswith("- Ranks mean something here: m4m has 39.9")

    def test_the_record_has_a_row_for_each_model(self, tmp_path: Path) -> None:
        broken = {**FOUR, "m4m": [(100, math.nan)]}
        build_record(make_results(tmp_path, broken)).write(tmp_path / RECORD)
        found = record.read(tmp_path / RECORD)
        assert (found.kind, found.data["words"]) == ("compare", 300_000)
        assert [row["seed"] for row in found.figures["trainings"]] == [1, 2, 3] * 4
        pair = next(row for row in found.figures["differences"] if row["model"] == "learned")
        assert (pair["other"], pair["seeds"]) == ("none", 3)
        assert pair["log_perplexity_difference"] == pytest.approx(math.log(79.84 / 100.2), abs=1e-4)
        assert pair["p"] <= pair["p_holm"] < 0.01
        assert [row["model"] for row in found.rows] == list(broken)
        ends = {row["model"]: row["perplexity"] for row in found.rows}
        assert (ends["learned"], ends["m4m"]) == (pytest.approx(79.84, abs=1e-4), None)

    @pytest.mark.parametrize("name", ["none", "learned", "m4m"])
    def test_a_training_without_a_number_is_no_traceback(self, name: str, tmp_path: Path) -> None:
        broken = {**FOUR, name: [(100, math.nan), (200, math.nan)]}
        text = report.write_report(make_results(tmp_path, broken)).read_text()
        assert (tmp_path / "curves.png").is_file()
        assert f"| `{name}` | " in text

    def test_shown_lines_are_understood(self, tmp_path: Path) -> None:
        text = report.write_report(make_results(tmp_path, FOUR)).read_text()
        (line,) = re.findall(r"^fairseq-posenc compare (.*)", text, re.MULTILINE)
        added = re.findall(r"`(--(?:updates|seeds|lrs) \S+)`", text)
        assert len(added) == 3
        for words in ("", *added, "-- --encoder-layers 6"):
            assert command._build_experiment(parse_args(*shlex.split(f"{line} {words}")))

    def test_without_matplotlib(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        text = report.write_report(make_results(tmp_path, FOUR)).read_text()
        assert "curves.png" not in text
        assert "pip install matplotlib" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("changes", "lost"),
        [
            ({"seeds": (1,)}, "none with seed 2"),
            ({"encodings": "none,learned"}, "decbert_diff with seed 1"),
            ({"updates": 400}, "800 updates"),
            ({"vocab_size": 256}, "vocab size 512"),
            ({"train_args": ("--dropout", "0.1")}, "options ''"),
        ],
    )
    def test_a_report_is_not_replaced_by_one_that_lacks_something(self, changes, lost, tmp_path):
        results = make_results(tmp_path, FOUR)
        build_record(results).write(tmp_path / RECORD)
        refuse_to_lose_report(make_settings(tmp_path, seeds=(1, 2, 3, 4), updates=1600))
        with pytest.raises(UserError, match=f"{lost}.*--overwrite"):
            refuse_to_lose_report(make_settings(tmp_path, **{"seeds": (1, 2, 3), **changes}))

    def test_the_same_text_by_another_path_is_the_same(self, tmp_path: Path) -> None:
        first, copy = tmp_path / "first.txt", tmp_path / "copy.txt"
        first.write_text("a text")
        copy.write_text("a text")
        results = make_results(tmp_path, FOUR)
        results = replace(results, experiment=replace(results.experiment, text=first))
        build_record(results).write(tmp_path / RECORD)
        refuse_to_lose_report(replace(results.experiment, text=copy))
        copy.write_text("another")
        with pytest.raises(UserError, match=r"holds a report on text '.*first\.txt'"):
            refuse_to_lose_report(replace(results.experiment, text=copy))

    def test_a_text_that_was_edited_is_another_one(self, tmp_path: Path) -> None:
        text = tmp_path / "my.txt"
        text.write_text("a text")
        results = make_results(tmp_path, FOUR)
        results = replace(results, experiment=replace(results.experiment, text=text))
        build_record(results).write(tmp_path / RECORD)
        refuse_to_lose_report(results.experiment)
        text.write_text("another")
        with pytest.raises(UserError, match=r"holds a report on an earlier content of .*my\.txt"):
            refuse_to_lose_report(results.experiment)

    def test_while_the_run_goes_on_the_page_says_what_is_missing(self, tmp_path, monkeypatch):
        """Of m4m one training has begun and none is finished; learned lacks its last seed."""
        whole = make_results(tmp_path, FOUR)
        *begun, _, _ = (each for each in whole.outcomes if each.run.variant.name == "m4m")
        done = [each for each in whole.outcomes if each.run.variant.name != "m4m"]
        done = [each for each in done if (each.run.variant.name, each.run.seed) != ("learned", 3)]
        curves = {each.run: each.curve for each in begun}
        now = replace(whole, outcomes=done, begun=curves)
        opened: list[str] = []
        monkeypatch.setattr(live, "open_in_browser", opened.append)
        monkeypatch.setattr(live, "_REPORT_SECONDS", 0.0)
        follow = live.Live(opens_browser=True)
        for _ in range(2):
            follow(lambda: now)
        assert opened == [(tmp_path / report.PAGE).as_uri()]
        text = (tmp_path / report.REPORT).read_text()
        assert "Missing: seed 1 of `m4m`; seed 2 of `m4m`; seed 3 of `learned`, `m4m`." in text
        assert "| `learned` | 8,192 | 0.003 | 2 of 3 | 79.88 | 79.9, 79.8 |" in text
        assert "| `m4m` | - | 0.003 | 0 | 39.96 at update 200 |" in text
        assert "judged when all trainings are finished" in text
        page = (tmp_path / report.PAGE).read_text()
        report.write_report(whole)
        page = (tmp_path / report.PAGE).read_text()
        assert re.search(r'<img alt="[^"]+" src="data:image/png;base64,iVBOR', page)
        assert not re.search(r'(src|href)="(?!data:)', page)
        assert "<td><code>m4m</code></td>" in page
        assert page.index("fairseq-posenc compare") > page.index("<h2>Commands</h2>")

    def test_the_time_left_follows_from_the_trainings_that_are_finished(self, tmp_path):
        whole = make_results(tmp_path, FOUR)
        assert live.estimate_seconds_left(whole) is None
        now = replace(whole, outcomes=whole.outcomes[:6])
        assert live.estimate_seconds_left(now) == 6 * (61.0 + live._START_SECONDS) / 2
        there = replace(now, experiment=replace(now.experiment, cluster=Slurm({}, None, False)))
        assert live.estimate_seconds_left(there) is None, "jobs also wait"

    def test_the_time_before_any_training_counts_all_of_it_on_this_machine(
        self, tmp_path, monkeypatch, capsys
    ):
        """Of 10 s for a pass: text, and 4 trainings at a time on two cores for each seed."""
        settings = make_settings(tmp_path, updates=100, jobs=4)
        monkeypatch.setattr(live, "cores", lambda: 2)
        monkeypatch.setattr(live, "_measure_pass", lambda threads: 5.0 * threads)
        live.announce(settings)
        update = 5 * 2 * live._PASSES_OF_UPDATE
        each = update * (100 + 10 * live._UPDATES_OF_VALIDATION + live._UPDATES_OF_START)
        first, both = (live._UPDATES_OF_TEXT * update + seeds * 4 * each / 2 for seeds in (1, 2))
        times = f"{format_time(first)} for the first seed, {format_time(both)} for all"
        assert capsys.readouterr().err.endswith(
            f"4 at a time: on cores with no other work about {times}\n"
        )
        first_seed = [settings.folder(run) for run in settings.runs if run.seed == 1]
        monkeypatch.setattr(live, "updates_done", lambda folder: 100 * (folder in first_seed))
        live.announce(settings)
        second = format_time(first)  # one seed is left
        assert capsys.readouterr().err == (
            "8 trainings of 100 updates, 4 of them done, 4 at a time: on cores with no other work "
            f"about {second}\n"
        )

    def test_a_pass_is_measured(self) -> None:
        assert 0 < live._measure_pass(2) < 60


def test_the_report_of_causal_models_speaks_of_no_masks(tmp_path: Path) -> None:
    results = make_results(tmp_path, FOUR | {"rope": FOUR["m4m"]})
    variants = parse_variants("none,learned,m4m,rope")
    outcomes = [each for each in results.outcomes if each.run.variant in variants]
    settings = make_settings(tmp_path, "none,learned,m4m,rope", family="causal-lm")
    text = report.write_report(TextResults(settings, outcomes, results.data_figures)).read_text()
    assert text.startswith("# Position encodings compared\n\nCausal language models on")
    assert "mask" not in text.replace("masked_lm", "")
    assert "fairseq-posenc compare --family causal-lm --encodings none,learned,m4m,rope" in text
    assert "--decoder-layers 6" in text


class TestTraining:
    def test_models_differ_only_in_their_positions(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, seeds=(1,))
        rest = set()
        for run in settings.runs:
            words = shlex.join(settings.train_command(run))
            own = shlex.join(run.variant.options)
            assert own in words
            folder = shlex.quote(str(settings.folder(run)))
            rest.add(words.replace(own, "").replace(folder, ""))
        assert len(rest) == 1


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--updates", "0"], "--updates: must be a whole number of at least 1, not '0'"),
            (["--seeds", "1,x"], "--seeds: must be whole numbers, as in 1,2,3, not '1,x'"),
            (["--seeds=-1"], "--seeds: must be whole numbers"),
            (["--lrs", "0.1,fast"], "--lrs 0.1,fast: write numbers"),
            (["--jobs", "0"], "--jobs: must be a whole number of at least 1, not '0'"),
            (["--", "--lr", "5"], "--lr cannot be set here; use --lrs"),
            (["--vocab-size", "3"], "--vocab-size 3: must be at least"),
            (["--", "--max-update", "5"], "--max-update cannot be set here; use --updates"),
            (["--", "--save-dir=x"], "--save-dir cannot be set here; use --out"),
            (["demo"], "unrecognized arguments: demo"),
            (["--", "demo"], "'demo' is not an option"),
            (["--encodings", "quantum"], "quantum"),
        ],
    )
    def test_bad_options_are_found_before_any_work(
        self, tmp_path: Path, words: list[str], message: str
    ) -> None:
        with pytest.raises(UserError, match=re.escape(message)):
            command.run(parse_args("--out", str(tmp_path / "out"), *words))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("content", "message"),
        [(None, "No such file"), ("three short words", "too short, 3 words")],
    )
    def test_a_wrong_text_is_found_before_anything_is_promised_or_made(
        self, content, message, tmp_path, capsys
    ) -> None:
        text, out = tmp_path / "text.txt", tmp_path / "out"
        if content:
            text.write_text(content)
        with pytest.raises(UserError, match=message):
            command.run(parse_args("--out", str(out), "--text", str(text)))
        assert not out.exists()
        assert not capsys.readouterr().err

    def test_train_args_win(self, tmp_path: Path) -> None:
        settings = make_settings(tmp_path, train_args=("--max-tokens", "99", "--encoder-layers=6"))
        assert settings.count("--max-tokens") == 99
        assert settings.count("--encoder-layers") == 6
        assert settings.count("--encoder-embed-dim") == 128


def small_text(path: Path) -> Path:
    """Write sentences of a toy grammar, in which the order of the words matters."""
    chance = random.Random(7)
    nouns, verbs = ["cat", "dog", "bird", "fox", "tree", "stone"], ["sees", "hears", "likes"]
    lines = [
        f"the {chance.choice(nouns)} {chance.choice(verbs)} the {chance.choice(nouns)} "
        f"number {chance.randrange(1000)} ."
        for _ in range(1500)
    ]
    path.write_text("\n".join(lines))
    return path


def compare_call(out: Path, encodings: str, *options: str) -> list[str]:
    return [
        *(
            sys.executable,
            "-c",
            "import fairseq_posenc.workbench.cli as cli; raise SystemExit(cli.main())",
        ),
        "compare",
        *("--text", str(small_text(out.parent / "text.txt")), "--out", str(out)),
        *("--encodings", encodings, "--updates", "40", "--vocab-size", "60", *options),
        *("--", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"),
        *("--max-tokens", "1024"),
    ]


@pytest.mark.slow
def test_compare_is_interrupted_and_continued(tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = compare_call(out, "none,decbert_diff", "--seeds", "1")
    environment, halted = halting(out)
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    first = subprocess.Popen(call, env=environment, **both, encoding="utf-8")
    assert first.stdout is not None
    folders = {name: out / "models" / name / "lr-0.003-seed-1" for name in ("none", "decbert_diff")}
    wait_until(halted.exists, first)
    first.send_signal(signal.SIGINT)
    rest = first.stdout.read()
    assert first.wait() == STOPPED, rest
    assert "continues" in rest

    began = time.time()
    second = subprocess.run(call, capture_output=True, encoding="utf-8", check=True)
    assert (out / "data/stamp.json").stat().st_mtime < began, "a finished step was repeated"
    assert "to continue at update" in second.stderr
    text = (out / "report.md").read_text()
    assert re.search(r"\| `none` \| 0 \| 0.003 \| 1 \| [\d.]+ \|", text)
    assert re.search(r"\| `decbert_diff` \| 1,024 \| 0.003 \| 1 \| [\d.]+ \|", text)
    for folder in folders.values():
        curve = curves.read_curve_file(folder / TRAIN_LOG)
        assert [updates for updates, _ in curve.points] == list(range(4, 41, 4))

    third = subprocess.run(call, capture_output=True, encoding="utf-8", check=True)
    assert "fairseq-train" not in third.stderr
    assert third.stdout.startswith("encoding ")


@pytest.mark.slow
def test_seeds_added_later_and_jobs_change_nothing(tmp_path: Path) -> None:
    """One seed and then another, one by one; both at once, side by side: the same bits."""
    found = []
    for name, rounds in (("alone", ["--jobs=1"] * 2), ("beside", ["--jobs=2"])):
        for number, jobs in enumerate(rounds, start=3 - len(rounds)):
            out = tmp_path / name / "out"
            out.parent.mkdir(exist_ok=True)
            call = compare_call(out, "decbert_diff", "--seeds", ",".join("12"[:number]), jobs)
            call[call.index("40")] = "8"
            told = subprocess.run(call, capture_output=True, encoding="utf-8", check=True).stderr
            assert told.count("starting fairseq-train") == (1 if name == "alone" else 2)
        found_record = record.read(out / RECORD)
        perplexities = [row["perplexity"] for row in found_record.figures["trainings"]]
        weights = {
            path.relative_to(out): torch.load(path, weights_only=False)["model"]
            for path in out.glob("models/*/*/checkpoint_last.pt")
        }
        assert len(weights) == 2
        found.append((perplexities, weights))
    (one, ours), (other, theirs) = found
    assert one == other
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_a_training_that_diverges_is_a_result_and_ends_no_other(tmp_path: Path) -> None:
    words = ["--seeds", "1", "--lrs", "1e30,0.003", "--jobs", "1"]
    call = compare_call(tmp_path / "out", "none", *words)
    call[call.index("40")] = "4"
    for starts in (2, 0):  # what diverged would again
        told = subprocess.run(call, capture_output=True, encoding="utf-8", check=True)
        assert told.stderr.count("starting fairseq-train") == starts
    broken, whole = record.read(tmp_path / "out" / RECORD).figures["trainings"]
    assert broken["lr"] == "1e30"
    assert 1 < broken["diverged"] <= 4
    assert broken["perplexity"] is None
    assert whole["diverged"] is None
    assert "| `none` | 0 | 0.003 | 1 |" in (tmp_path / "out" / "report.md").read_text()
