"""Learning curves: a line of a log misread, stages beside where they are, a divergence unsaid."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import average_lines, interval
from fairseq_posenc.workbench.results.loss_stages import find_stages, fit_segments, smooth_losses
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.logs import Curve, Entry, read_curve_file
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
Points = Iterable[tuple[int, float]]


def write(path: Path, *validations: float, training: Points = ((50, 6.3),)) -> Path:
    """Write a log: validations' losses in bits, each 100 updates; training's in nats by update."""
    line = '| {} | {{"loss": "{:.5f}", "wps": "1234", "num_updates": "{}"}}'
    lines = [line.format("train_inner", loss / math.log(2), update) for update, loss in training]
    lines += [line.format("valid", x, 100 * n) for n, x in enumerate(validations, start=1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def curves(out: Path, *words: object) -> str:
    """Run the command; return its page."""
    assert main(["learning-curves", *map(str, words), "--out", str(out)]) == 0
    page = (out / "curves.md").read_text()
    for name in ("curves.png", "training.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in page
    return page


@pytest.mark.parametrize("line", [PLAIN, HYDRA])
@pytest.mark.parametrize("figures", [JSON, SIMPLE])
def test_every_format_says_the_same(line, figures, tmp_path):
    kinds = zip(("train_inner", "valid", "valid"), (*figures, OTHER))
    (tmp_path / "train.log").write_text("\n".join(line.format(*both) for both in kinds))
    curve = read_curve_file(tmp_path / "train.log")
    assert curve.speed == 1234
    (entry,), (training,) = curve.entries, curve.training
    assert (entry.updates, entry.loss, entry.perplexity, entry.accuracy) == (100, 6.0, 32.0, 41.5)
    assert (training.updates, training.loss) == (50, 9.1)


def test_bad_input_is_one_line(tmp_path, capsys):
    full, empty = write(tmp_path / "a", 5), write(tmp_path / "b")
    for words, says in (
        (["nothing"], "write NAME=LOG"),
        (["a=missing.log"], "missing.log does not exist"),
        ([f"a={empty}"], "has no validation"),
        ([f"a={full}"] * 2, "'a': each value needs its own name"),
        ([f"a={full}", "--updates", "16k"], "write FIRST:LAST, as in 0:16000, not '16k'"),
    ):
        assert says in refused(capsys, "learning-curves", *words)


# As the paper's Figure 2 has them: updates and loss in nats, straight in between.
BERT = [(0, 10.8), (1000, 6.9), (8000, 6.1), (10000, 3.2), (16000, 2.6), (40000, 2.2)]
DECBERT = [(0, 10.8), (1000, 6.9), (4000, 6.5), (6000, 3.1), (16000, 2.5), (40000, 2.1)]
BAG_OF_WORDS = [(0, 10.8), (1000, 6.9), (10000, 5.9), (40000, 5.8)]
SINUSOIDAL = [(update, 2.3 + 8.5 * math.exp(-update / 1500)) for update in range(0, 40001, 100)]
SLOW = [(0, 8.0), (400, 5.6), (40000, 5.2)]
EVERY = 100


def losses(corners: Sequence[tuple[int, float]], noise=0.005, every=EVERY) -> Points:
    """Return a training's updates and losses in nats, with noise."""
    rng = random.Random(0)
    for update in range(every, corners[-1][0] + 1, every):
        pairs = zip(corners, corners[1:])
        (x, y), (x1, y1) = next((a, b) for a, b in pairs if a[0] < update <= b[0])
        yield update, y + (y1 - y) * (update - x) / (x1 - x) + rng.gauss(0, noise)


def curve_of(nats: Points) -> Curve:
    """Return the curve of a training with these updates and losses in nats."""
    bits = [(update, loss / math.log(2)) for update, loss in nats]
    entries = [Entry("train_inner", update, loss, 0.0, None, 1.0) for update, loss in bits]
    return Curve([], 1.0, entries)


@pytest.mark.parametrize(("noise", "lines"), [(0.0, 1), (0.02, 1), (0.05, 2)])
def test_how_exact_the_bounds_are(noise, lines):
    """Forty made-up losses; noise as of a batch's masks, in nats."""
    for seed in range(40):
        rng = random.Random(seed)
        start = rng.randrange(600, 1500, EVERY)
        plateau = start + rng.randrange(2500, 8000, EVERY)
        dive = plateau + rng.randrange(800, 2000, EVERY)
        top = 6.9 - rng.uniform(0.1, 0.4)
        low = top - rng.uniform(2, 3)
        corners = [(0, 10.8), (start, 6.9), (plateau, top), (dive, low), (40000, low - 0.8)]
        found = find_stages(curve_of(losses(corners, noise)))
        assert found == pytest.approx((start, plateau, dive), abs=lines * EVERY), seed


@pytest.mark.parametrize(
    ("corners", "noise", "every"),
    [
        *((x, noise, EVERY) for x in (BAG_OF_WORDS, SINUSOIDAL) for noise in (0.0, 0.005, 0.02)),
        *((SLOW, 0.05, every) for every in (20, 100)),  # ten times the fall from line to line
        *(([(0, 2.0), (lines, 2.0)], 0.0, 1) for lines in range(3)),
    ],
)
def test_without_a_dive_or_a_plateau_or_lines_there_are_no_stages(corners, noise, every):
    assert find_stages(curve_of(losses(corners, noise, every))) is None


def test_the_way_back_from_a_jump_is_no_dive():
    """As where a stretch of the text is hard."""
    found = losses([(0, 8.0), (60, 6.0), (2000, 5.8)], noise=0.03, every=20)
    jumped = [(at, loss + (0.4 - (at - 620) / 100) * (620 <= at <= 660)) for at, loss in found]
    assert max(piece.rate for piece in fit_segments(tuple(jumped))[1:]) > 0.005
    assert find_stages(curve_of(jumped)) is None


def test_a_line_is_smoothed_with_as_many_on_either_side():
    updates, nats = zip(*smooth_losses(curve_of([(0, 9), (1, 6), (9, NAN), (2, 3), (3, 6)])))
    assert updates == (0, 1, 2, 3, 9)
    assert nats == pytest.approx((9, 6, 5, 6, NAN), nan_ok=True)


def test_the_command_tells_figures_and_stages_and_draws_the_training(tmp_path, capsys):
    """With a name in which matplotlib would look for TeX."""
    words = []
    for name, corners in (("bert", BERT), ("diff", DECBERT), (r"$\nope$", BAG_OF_WORDS)):
        log = write(tmp_path / name, 7, 5, 6, training=losses(corners))
        words.append(f"{name}={log}")
    text = curves(tmp_path / "out", *words, "--updates", "0:16000")
    assert "| loss (bits) | loss (nats) |" in text  # the papers' are in nats
    assert "| `bert` | 300 | 200 | 5.000 | 3.466 | 32.00 | 1,234 | 2.195 |" in text
    assert "accuracy" not in text
    assert "| `bert` | 900 | 8,000 | 10,000 | 7,100 |" in text
    assert text.count(r"`$\nope$` |") == 1  # it has no stages
    assert "The dive is the steepest line segment" in text
    stages = [[*row.values()] for row in read(tmp_path / "out/curves.json").figures["stages"]]
    assert stages == [["bert", 900, 8000, 10000, 7100], ["diff", 900, 4000, 5900, 3100]]
    assert text.startswith(capsys.readouterr().out)


def test_seeds_have_means_with_intervals(tmp_path):
    """Plateaus of 7,000, 6,000 and 8,000 updates: 7,000, and Student's t of two degrees, 4.303."""
    shifts = (0, -1000, 1000)
    plateaus = [[(x + more * (x in (8000, 10000)), y) for x, y in BERT] for more in shifts]
    *bert, none = (
        str(write(tmp_path / f"{n}.log", y[-1][1] / math.log(2), training=losses(y, noise=0.0)))
        for n, y in enumerate([*plateaus, BAG_OF_WORDS])
    )
    words = [f"bert={','.join(bert)}", f"none={none}", f"mixed={bert[0]},{none}"]
    text = curves(tmp_path / "out", *words)
    assert "| `bert 2` | 1,000 | 7,000 | 9,000 | 6,000 |" in text
    (of_bert, mixed) = read(tmp_path / "out" / "curves.json").figures["seeds"]
    reach = 4.302653 * 1000 / math.sqrt(3)
    assert of_bert["plateau"] == pytest.approx(7000, abs=EVERY)
    assert of_bert["plateau_low"] == pytest.approx(7000 - reach, abs=2 * EVERY)
    assert of_bert["plateau_high"] == pytest.approx(7000 + reach, abs=2 * EVERY)
    assert "| `bert` | 9.03 (9.03 to 9.03) | 2.200 (2.200 to 2.200) | 7,967 (" in text
    assert "plateau" not in mixed
    # The mean of an epoch's perplexities is that of the losses.
    assert mixed["perplexity"] == pytest.approx(math.exp((2.2 + 5.8) / 2), rel=0.001)


def test_folders_that_train_names_are_read_alone_and_among_seeds(tmp_path):
    data = {}
    for name in ("none--lr=2e-4", "none,lr=2e-4", "rope,8-changes-0a1b2c3d"):
        logs = [write(tmp_path / name / f"seed{seed}" / "train.log", 5, 4) for seed in (1, 2)]
        data |= {f"{len(data)}": f"{logs[0]},{logs[1]}", f"{len(data)}b": str(logs[1])}
    curves(tmp_path / "out", *(f"{name}={logs}" for name, logs in data.items()))
    assert read(tmp_path / "out" / "curves.json").data == data


@pytest.mark.parametrize(
    ("losses", "first", "best", "label"),
    [
        ([5, 4, 3], 0, "3.000", "a  8.0"),
        ([NAN, 4, 3], 100, "3.000", "a  8.0"),
        ([5, INF, 3], 200, "3.000", "a  8.0"),
        ([5, 4, NAN, NAN], 300, "4.000", "a  diverged at 300"),
        ([NAN, NAN, NAN], 100, "- | - | -", "a  diverged at 100"),
    ],
)
def test_a_divergence_is_said_and_drawn(losses, first, best, label, tmp_path):
    """The line breaks there, and its label says it if the training did not recover."""
    logs = {"a": write(tmp_path / "a.log", *losses), "b": write(tmp_path / "b.log", 5, 4, 3)}
    text = curves(tmp_path / "out", *(f"{name}={log}" for name, log in logs.items()))
    assert f"| {best} |" in text
    said = f"`a` diverged: its validation loss is NaN or infinite at update {first} first"
    assert (said in text) == ("diverged" in text) == (first > 0)
    points = {name: read_curve_file(log).points for name, log in logs.items()}
    lines = {name: average_lines([seed], interval) for name, seed in points.items()}
    (axes,) = pictures.draw_curves(lines, "title", log=True).axes
    assert [text.get_text() for text in axes.get_legend().texts] == [label, "b  8.0"]
    shown = [2**loss if math.isfinite(loss) else NAN for loss in losses]
    assert list(axes.lines[0].get_ydata()) == pytest.approx(shown, nan_ok=True)
