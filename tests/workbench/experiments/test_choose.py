"""``choose``: its table has the figures of the page, and it says one thing.

An answer that the measurements do not give is found nowhere else.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairseq_posenc.workbench.experiments import choose
from fairseq_posenc.workbench.experiments.variants import FAMILIES
from tests.helpers.commands import call, refused

PAGE = Path(__file__).parents[3] / "docs" / "choose.md"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_the_figures_of_the_page_and_names_no_encoding_beside_a_better_one(family):
    lines = PAGE.read_text("utf-8").splitlines()
    for row in json.loads(choose.TABLE.read_text("utf-8"))["new"][family]:
        means = [float(text.split()[0]) for text in (row["best"] | row["others"]).values()]
        assert means == sorted(means, reverse=row["figure"] == "BLEU")
        assert not row["best"].keys() & (row["others"].keys() | row["fast"].keys())
        if row["up_to"] in (1, 8):  # the page has tables of these lengths
            for name, figure in (row["best"] | row["others"] | row["fast"]).items():
                if row["up_to"] == 8:  # where the page has no interval
                    figure = figure.partition(" ")[0]
                assert any(x.startswith(f"| `{name}` |") and f" {figure} |" in x for x in lines)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            "--family masked-lm --length 64",
            ["Use deberta_v2", "The next is significantly worse", "If speed matters, use rope"],
        ),
        (
            "--family causal-lm --length 1000 --trained 128",
            ["Use sandwich 31.38 (29.53 to 33.35)", "Not significantly worse: transformer_xl"],
        ),
        ("--family causal-lm --length 4096 --trained 64", ["Longer inputs were not measured."]),
        ("--family causal-lm --length 9 --from-trained", ["Keep own 15.16", "Keep rope 65.09"]),
        ("--family causal-lm --length 9 --trained 2 --from-trained", ["Change own"]),
        ("--family translation --length 64", ["Use rope 40.96 (40.15 to 41.77): the best"]),
    ],
)
def test_an_answer_says_what_to_take(words, lines, capsys):
    printed = call(capsys, "choose", *words.split())[0].splitlines()
    assert all(any(text.startswith(line) for text in printed) for line in lines)
    assert not {"Keep", "Change"} <= {text.partition(" ")[0] for text in printed}


@pytest.mark.parametrize("words", ["--length 64 --trained 128", ""])
def test_a_wrong_length_is_one_line(words, capsys):
    message = refused(capsys, "choose", "--family", "masked-lm", *words.split())
    assert message.startswith("--length: give the longest text to read")
