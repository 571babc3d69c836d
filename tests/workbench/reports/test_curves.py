"""Learning curves: a line of a log misread, stages beside where they are, a divergence unsaid."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import average_lines, interval
from fairseq_posenc.workbench.results.loss_stages import find_stages, fit_segments, smooth_losses
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.logs import Curve, Entry, read_curve_file
from fairseq_posenc.workbench.running.options import split_paths
from tests.helpers.commands import refused

PLAIN, HYDRA = "2026 | INFO | {} | {}", "[2026-11-21 19:00:00,000][{}][INFO] - {}"
JSON = (
    '{"epoch": 1, "loss": "9.1", "wps": "1234", "num_updates": "50"}',
    '{"epoch": 1, "valid_loss": "6", "valid_nll_loss": "5", "valid_ppl": "32", '
    '"valid_accuracy": "41.5", "valid_num_updates": "100"}',
)
SIMPLE = (
    "epoch 001:     50 / 133 loss=9.1, ppl=548.7, wps=1234, wpb=24576, num_updates=50, lr=0.1",
    "epoch 001 | valid on 'valid' subset | loss 6 | nll_loss 5 | ppl 32 | accuracy 41.5 | wps 0 "
    "| num_updates 100 | best_loss 6",
)
OTHER = "epoch 001 | valid on 'valid' subset:   0%|  | 0/5"  # has no figures
NAN, INF = math.nan, math.inf
Points = Sequence[tuple[int, float]]


def write(path: Path, *validations: float, training: Points = ((50, 6.3),)) -> Path:
    """Write a log: validations' losses in bits, each 100 updates; training's in nats by update."""
    found = [("train_inner", loss / math.log(2), update) for update, loss in training]
    found += [("valid", loss, 100 * n) for n, loss in enumerate(validations, start=1)]
    line = '| {} | {{"loss": "{:.5f}", "wps": "1234", "num_updates": "{}"}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line.format(*each) for each in found))
    return path


def curves(out: Path, *words: object) -> str:
    """Run the command; return its page."""
    assert main(["learning-curves", *map(str, words), "--out", str(out)]) == 0
    page = (out / "curves.md").read_text()
    for name in ("curves.png", "training.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in page
    return page


def test_every_format_says_the_same(tmp_path):
    for line, figures in product((PLAIN, HYDRA), (JSON, SIMPLE)):
        kinds = zip(("train_inner", "valid", "valid"), (*figures, OTHER))
        (tmp_path / "train.log").write_text("\n".join(line.format(*both) for both in kinds))
        curve = read_curve_file(tmp_path / "train.log")
        (entry,), (training,) = curve.validations, curve.training
        assert entry[1:5] == (100, 6.0, 32.0, 41.5)  # updates, loss, perplexity, accuracy
        assert (*training[1:3], curve.speed) == (50, 9.1, 1234)
    (tmp_path / "train.log").write_text(PLAIN.format("valid", JSON[1].replace('"6"', '"nan"')))
    assert read_curve_file(tmp_path / "train.log").best.accuracy is None


def test_bad_input_is_one_line(tmp_path, capsys):
    full, empty = write(tmp_path / "a", 5), write(tmp_path / "b")
    for words, says in (
        (["nothing"], "write NAME=LOG"),
        ([f"a={full},"], "a: a path before or after a comma is empty"),
        ([f".fairseq-posenc={full}"], "needs its own name, which no file of the results has"),
        (["a=missing.log"], "there is no log file missing.log"),
        ([f"a={empty}"], "prints one per epoch, not with --log-format none"),
        ([f"a={full}"] * 2, "'a': each value needs its own name"),
        ([f"a={full}", "--updates", "16k"], "ascending, as in 0:16000, not '16k'"),
        ([f"a={full}", "--updates", "100:50"], "ascending, as in 0:16000, not '100:50'"),
    ):
        assert says in refused(capsys, "learning-curves", *words)


# As the paper's Figure 2 has them: updates and loss in nats, straight in between.
BERT = [(0, 10.8), (1000, 6.9), (8000, 6.1), (10000, 3.2), (16000, 2.6), (40000, 2.2)]
DECBERT = [(0, 10.8), (1000, 6.9), (4000, 6.5), (6000, 3.1), (16000, 2.5), (40000, 2.1)]
BAG_OF_WORDS = [(0, 10.8), (1000, 6.9), (10000, 5.9), (40000, 5.8)]
SINUSOIDAL = [(update, 2.3 + 8.5 * math.exp(-update / 1500)) for update in range(0, 40001, 100)]
SLOW = [(0, 8.0), (400, 5.6), (40000, 5.2)]
EVERY = 100


def losses(corners: Points, noise: float = 0.005, every: int = EVERY) -> Points:
    """Return a training's updates and losses in nats, with noise."""
    rng = random.Random(0)
    updates = range(every, corners[-1][0] + 1, every)
    straight = np.interp(updates, *np.array(corners).T)
    return [(x, y + rng.gauss(0, noise)) for x, y in zip(updates, straight)]


def curve_of(nats: Points) -> Curve:
    """Return the curve of a training with these updates and losses in nats."""
    lines = [Entry("train_inner", x, y / math.log(2), 0.0, None, 1.0) for x, y in nats]
    return Curve([], 1.0, lines)


@pytest.mark.parametrize(("noise", "lines"), [(0.0, 1), (0.02, 1), (0.05, 2)])
def test_bounds_of_stages_are_found_to_a_line_or_two(noise, lines):
    """Forty made-up losses; noise as of a batch's masks, in nats."""
    for seed in range(40):
        rng = random.Random(seed)
        ranges = ((600, 1500), (2500, 8000), (800, 2000))
        ends = [*accumulate(rng.randrange(*limits, EVERY) for limits in ranges)]
        top = 6.9 - rng.uniform(0.1, 0.4)
        low = top - rng.uniform(2, 3)
        corners = [(0, 10.8), *zip(ends, (6.9, top, low)), (40000, low - 0.8)]
        found = find_stages(curve_of(losses(corners, noise)))
        assert found == pytest.approx(ends, abs=lines * EVERY), seed


def test_without_a_dive_or_a_plateau_or_lines_there_are_no_stages():
    """Nor is the way back from a jump, as where a stretch of the text is hard, a dive."""
    for corners, noise, every in (
        *((x, noise, EVERY) for x in (BAG_OF_WORDS, SINUSOIDAL) for noise in (0.0, 0.005, 0.02)),
        *((SLOW, 0.05, every) for every in (20, 100)),  # ten times the fall from line to line
        *(([(0, 2.0), (lines, 2.0)], 0.0, 1) for lines in range(3)),
    ):
        assert find_stages(curve_of(losses(corners, noise, every))) is None, (corners, noise)
    found = losses([(0, 8.0), (60, 6.0), (2000, 5.8)], noise=0.03, every=20)
    jumped = [(at, loss + (0.4 - (at - 620) / 100) * (620 <= at <= 660)) for at, loss in found]
    assert max(piece.rate for piece in fit_segments(jumped)[1:]) > 0.005
    assert find_stages(curve_of(jumped)) is None


def test_a_line_is_smoothed_with_as_many_on_either_side():
    at, nats = zip(*smooth_losses(curve_of([(0, 9), (1, 6), (9, NAN), (2, 3), (3, 6), (4, 6)])))
    assert at == (0, 1, 2, 3, 4, 9)
    assert nats == pytest.approx((9, 6, 6, 5, 6, NAN), nan_ok=True)


def test_the_command_tells_figures_and_stages_and_draws_the_training(tmp_path, capsys):
    """With a name in which matplotlib would look for TeX."""
    trainings = {"bert": BERT, "diff": DECBERT, r"$\nope$": BAG_OF_WORDS}
    logs = [write(tmp_path / x, 7, 5, 6, training=losses(y)) for x, y in trainings.items()]
    text = curves(tmp_path / "out", *[f"{log.name}={log}" for log in logs], "--updates", "0:16000")
    assert "| loss (bits) | loss (nats) |" in text  # the papers' are in nats
    assert "| `bert` | 300 | 200 | 5.000 | 3.466 | 32.00 | 1,234 | 2.195 |" in text
    assert "accuracy" not in text
    assert "| `bert` | 900 | 8,000 | 10,000 | 7,100 |" in text
    assert text.count(r"`$\nope$` |") == 1  # it has no stages
    assert "The dive is the steepest line segment" in text
    stages = [[*row.values()] for row in read(tmp_path / "out/curves.json").figures["stages"]]
    assert stages == [["bert", 900, 8000, 10000, 7100], ["diff", 900, 4000, 5900, 3100]]
    assert text.startswith(capsys.readouterr().out)
    later = ["--updates", "90000:", "--out", str(tmp_path / "out")]  # none of its updates is there
    assert main(["learning-curves", f"bert={logs[0]}", *later]) == 0
    assert not [*tmp_path.glob("out/*.png")]  # of the first call


def test_seeds_have_means_with_intervals(tmp_path):
    """Plateaus of 7,000, 6,000 and 8,000 updates: 7,000, and Student's t of two degrees, 4.303."""
    shifted = [[(x + more * (x in (8000, 10000)), y) for x, y in BERT] for more in (0, -1000, 1000)]
    for n, y in enumerate([*shifted, BAG_OF_WORDS]):
        write(tmp_path / f"{n}", y[-1][1] / math.log(2), training=losses(y, noise=0.0))
    words = [f"bert={tmp_path}/0,{tmp_path}/1,{tmp_path}/2", f"none={tmp_path}/3"]
    text = curves(tmp_path / "out", *words, f"mixed={tmp_path}/0,{tmp_path}/3")
    assert "| `bert 2` | 1,000 | 7,000 | 9,000 | 6,000 |" in text
    (of_bert, mixed) = read(tmp_path / "out" / "curves.json").figures["seeds"]
    reach = 4.302653 * 1000 / math.sqrt(3)
    assert of_bert["plateau"] == pytest.approx(7000, abs=EVERY)
    assert of_bert["plateau_low"] == pytest.approx(7000 - reach, abs=2 * EVERY)
    assert of_bert["plateau_high"] == pytest.approx(7000 + reach, abs=2 * EVERY)
    assert "| `bert` | 9.03 (9.03 to 9.03) | 2.200 (2.200 to 2.200) | 7,967 (" in text
    assert "plateau" not in mixed
    assert mixed["perplexity"] == pytest.approx(math.exp((2.2 + 5.8) / 2), rel=1e-3)  # of losses
    assert "In brackets: Student's t, 95%, over 3 seeds or more." in text  # `mixed` has none


def test_folders_that_train_names_are_read_alone_and_among_seeds(tmp_path):
    for name in ("none--lr=2e-4", "none,lr=2e-4", "rope,8-changes-0a1b2c3d"):
        logs = [str(write(tmp_path / name / f"seed{x}" / "train.log", 5, 4)) for x in (1, 2)]
        assert split_paths(",".join(logs), "a") == logs
        assert split_paths(logs[1], "a") == logs[1:]
        with pytest.raises(UserError, match=r"^a: .* occurs twice; name each path once"):
            split_paths(",".join([*logs, logs[0]]), "a")
    assert len(split_paths(",".join(map("{}.log".format, range(80))), "a")) == 80  # a long text
    data = {"both": ",".join(logs), "one": logs[1]}  # of a name with a comma
    curves(tmp_path / "out", *map("=".join, data.items()))
    assert read(tmp_path / "out" / "curves.json").data == data


# Validation losses -> first update that is not a number, the table's best loss, the legend's end.
DIVERGED = {
    (5, 4, 3): (0, "3.000", "8.0"),
    (NAN, 4, 3): (100, "3.000", "8.0"),
    (5, INF, 3): (200, "3.000", "8.0"),
    (5, 4, NAN, NAN): (300, "4.000", "diverged at 300"),
    (NAN, NAN, NAN): (100, "- | - | -", "diverged at 100"),
}


def test_a_divergence_is_said_and_drawn(tmp_path):
    """The line breaks there, and its label says it if the training did not recover."""
    logs = [write(tmp_path / f"a{n}", *losses) for n, losses in enumerate(DIVERGED)]
    text = curves(tmp_path / "out", *(f"{log.name}={log}" for log in logs))
    lines = {x.name: average_lines([read_curve_file(x).points], interval) for x in logs}
    (axes,) = pictures.draw_curves(lines, "title", log=True).axes
    labels = [label.get_text() for label in axes.get_legend().texts]
    for losses, line, label, name in zip(DIVERGED, axes.lines, labels, lines, strict=True):
        first, best, end = DIVERGED[losses]
        (row,) = [row for row in text.splitlines() if row.startswith(f"| `{name}` |")]
        assert f"| {best} |" in row
        said = f"`{name}` diverged: its validation loss is NaN or infinite, first at update {first}"
        assert (said in text) == (f"`{name}` diverged" in text) == (first > 0)
        assert label == f"{name}  {end}"
        shown = [2**loss if math.isfinite(loss) else NAN for loss in losses]
        assert list(line.get_ydata()) == pytest.approx(shown, nan_ok=True)
