"""Means, intervals and differences over seeds, by hand; records and tables.

Commands print a wrong bound or p-value as calmly as a right one: only formulas by hand find it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.results import intervals, markdown, pictures, record

# Student's t with two degrees of freedom, below which are 97.5 %, for the mean of 1, 2 and 3.
REACH = 4.302652729911275 / math.sqrt(3)


def test_the_interval_of_three_values_is_that_of_students_t():
    found = intervals.interval([1, 2, 3])
    assert found == pytest.approx((2, 2 - REACH, 2 + REACH))
    assert found.show(2) == "2.00 (-0.48 to 4.48)"
    assert intervals.interval([2.0**900, 1.0]).show(2) == "4.226e+270"  # most digits say nothing
    assert found.figures("loss") == dict(zip(("loss", "loss_low", "loss_high"), found))


@pytest.mark.parametrize("values", [[5.0], [4.0, 6.0], [1.0, math.nan, 2.0], [math.inf] * 3])
def test_too_few_or_unknown_values_have_no_bounds(values):
    found = intervals.interval(values)
    assert found[1:] == (-math.inf, math.inf)
    assert found.mean == pytest.approx(sum(values) / len(values), nan_ok=True)
    assert "(" not in found.show(1)


def test_the_mean_of_perplexities_is_that_of_the_losses():
    found = intervals.interval_of_perplexity([math.exp(loss) for loss in (1, 2, 3)])
    assert found == pytest.approx([math.exp(x) for x in (2, 2 - REACH, 2 + REACH)])
    assert intervals.interval_of_perplexity([2.0, 8.0]) == pytest.approx((4, -math.inf, math.inf))
    assert intervals.interval_of_perplexity([math.inf])[0] == math.inf


def test_lines_are_averaged_where_all_have_a_value():
    lines = [[(1, 1.0), (2, 2.0), (3, 3.0)], [(3, 5.0), (2, 4.0)], [(2, 6.0), (9, 1.0)]]
    ((at, found),) = intervals.average_lines(lines, intervals.interval)
    assert (at, found) == (2, intervals.interval([2, 4, 6]))


def test_a_line_has_the_means_and_the_band():
    _, (axes,) = pictures.new_panels(1, 1, (4, 4))
    means = [intervals.interval([1, 2, value]) for value in (3, math.nan, 6)]
    few = [intervals.interval([1, 2])] * 3  # the third name, whose color is that of others' thirds
    lines = {"all": [*enumerate(means)], "none": [], "_few": [*enumerate(few)]}
    pictures.draw_means(axes, lines, lambda _, y: f"{y:,.1f}")
    drawn = [list(line.get_ydata()) for line in axes.lines]
    assert drawn == [pytest.approx([2, math.nan, 3], nan_ok=True), [], [1.5] * 3]
    (band,) = axes.collections  # in two parts, where all three seeds have a value
    assert len(band.get_paths()) == 2
    assert [text.get_text() for text in axes.get_legend().texts] == ["all  3.0", "_few  1.5"]
    (axes,) = pictures.draw_curves(lines, "loss", log=False).axes
    assert (axes.get_title("left"), axes.get_xlabel()) == ("loss", "training updates")


ONE, OTHER = {1: 2.0, 2: 3.0, 3: 4.0, 4: 9.0}, {1: 3.0, 2: 5.0, 3: 7.0, 5: 1.0}


def exponents(values):
    return {seed: math.exp(value) for seed, value in values.items()}


def test_seeds_are_compared_in_pairs():
    found = intervals.compare(exponents(ONE), exponents(OTHER))
    assert found.seeds == 3
    assert found.log_ratio == pytest.approx(intervals.interval([-1, -2, -3]))
    t = 2 * math.sqrt(3)  # of two degrees of freedom, for which p has a closed form
    assert found.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_what_is_not_finite_is_no_pair():
    assert intervals.compare({**ONE, 1: math.nan}, {**OTHER, 2: math.inf}).seeds == 1


@pytest.mark.parametrize(
    ("changes", "p_value"), [([0] * 3, 1), ([7e-4] * 3, 0.056), ([2, 2], math.nan), ([], math.nan)]
)
def test_differences_of_0_001_bits_may_be_rounding_and_few_have_no_p(changes, p_value):
    one, other = dict(enumerate(changes)), dict.fromkeys(range(len(changes)), 0)
    found = intervals.compare(exponents(one), exponents(other))
    assert found.p_value == pytest.approx(p_value, rel=0.01, nan_ok=True)
    assert (found.p_value <= 0.05) != (found.log_ratio.low <= 0 <= found.log_ratio.high)


def test_nearly_equal_differences_warn_of_nothing(recwarn):
    one, other = dict(enumerate([1.0, 1.0 + 1e-15, 1.0, 1.0])), dict.fromkeys(range(4), 0.5)
    assert intervals.compare(exponents(one), exponents(other)).p_value < 1e-9
    assert not recwarn.list


def test_all_pairs_from_the_best_on_with_holms_correction():
    logs = {"good": (2.0, 2.01, 1.99), "same": (2.011, 1.99, 2.0), "bad": (3.0, 3.02, 3.01)}
    found = intervals.compare_all({name: exponents(dict(enumerate(logs[name]))) for name in logs})
    assert list(found) == [("good", "same"), ("good", "bad"), ("same", "bad")]
    by_size = sorted(found.values(), key=lambda each: each.p_value)
    times = [factor * each.p_value for factor, each in zip((3, 2, 1), by_size)]
    expected = np.minimum(1, np.maximum.accumulate(times))
    assert [each.corrected_p_value for each in by_size] == pytest.approx(expected)


def test_marks_of_markdown_in_a_text_stay_text():
    shown = markdown.table(["a", "b", "c"], [["x|y", "2", "3"]])
    assert shown == "| a | b | c |\n| --- | ---: | ---: |\n| x\\|y | 2 | 3 |"
    assert [markdown.code("a"), markdown.code("")] == ["`a`", ""]
    assert markdown.code("a``b`") == "``` a``b` ```"


def test_a_table_for_a_terminal_is_aligned():
    shown = markdown.align_columns([("encoding", "size"), ("m4m", "8,128"), ("a|b", "1")], left=1)
    assert shown.splitlines() == ["encoding   size", "m4m       8,128", "a|b           1"]


def test_a_page_is_filled_between_its_markers():
    assert markdown.fill_page("a <s> old <e> b", "<s>", "new", "<e>") == "a <s>new<e> b"
    for text in ("<e> <s>", "<s>", ""):
        with pytest.raises(UserError, match="page has no line '<s>' with a line '<e>'"):
            markdown.fill_page(text, "<s>", "new", "<e>")


def test_a_record_comes_back(tmp_path):
    figures = {"models": [{"name": "ü|x", "loss": 2.5, "none": None}], "empty": []}
    written = record.Record("compare", figures, {"text": "a.txt"}, "rope", "compare --x 'a b'")
    written.write(tmp_path / "a.json")
    assert record.read(tmp_path / "a.json") == written


def test_a_record_has_null_for_what_is_not_finite(tmp_path):
    row = {"loss": 2.5, "nan": math.nan, "high": math.inf}
    written = record.Record("compare", {"models": [row]}, {"text": "a.txt"})
    written.write(tmp_path / "a.json")
    expected = {**row, "nan": None, "high": None}
    assert record.read(tmp_path / "a.json") == replace(written, figures={"models": [expected]})


def test_a_file_that_is_no_record_is_refused(tmp_path):
    whole = vars(record.Record("compare", {"a": [{"b": 1}]}, {}))
    (tmp_path / "a.json").write_text(json.dumps({**whole, "other": 1}))
    with pytest.raises(UserError, match="not a record"):
        record.read(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{"kind": 1')
    with pytest.raises(UserError, match="cannot be read"):
        record.read(tmp_path / "a.json")
