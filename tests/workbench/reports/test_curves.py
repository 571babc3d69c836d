"""Learning curves: each line that fairseq-train prints is read, and stages are where they are."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.results import pictures
from fairseq_posenc.workbench.results.intervals import average_lines, interval
from fairseq_posenc.workbench.results.loss_stages import find_stages, fit_segments, smooth_losses
from fairseq_posenc.workbench.results.record import read
from fairseq_posenc.workbench.running.logs import Curve, Entry, parse_line, read_curve_file

JSON = [
    '2026 | INFO | train_inner | {"epoch": 1, "loss": "9.1", "wps": "1234", "num_updates": "50"}',
    '2026 | INFO | valid | {"epoch": 1, "valid_loss": "6", "valid_nll_loss": "5", '
    '"valid_ppl": "32", "valid_accuracy": "41.5", "valid_num_updates": "100"}',
]
SIMPLE = [
    "2026 | INFO | train_inner | epoch 001:     50 / 133 loss=9.1, ppl=548.7, wps=1234, "
    "wpb=24576, num_updates=50, lr=0.1",
    "2026 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 6 | nll_loss 5 | ppl 32 | "
    "accuracy 41.5 | wps 0 | num_updates 100 | best_loss 6",
]


def write(path: Path, *losses: float) -> Path:
    lines = [JSON[0]] + [
        f'2026 | INFO | valid | {{"valid_loss": "{loss}", "valid_num_updates": "{100 * (n + 1)}"}}'
        for n, loss in enumerate(losses)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


LOGS = [JSON, SIMPLE]


def under_hydra(line: str) -> str:
    for kind in ("train_inner", "valid"):
        line = line.replace(f"2026 | INFO | {kind} |", f"[2026-11-21 19:00:00,000][{kind}][INFO] -")
    return line


@pytest.mark.parametrize("log", [*LOGS, *([*map(under_hydra, log)] for log in LOGS)])
def test_every_format_says_the_same(log, tmp_path):
    (tmp_path / "train.log").write_text("\n".join(log))
    curve = read_curve_file(tmp_path / "train.log")
    assert curve.speed == 1234
    (entry,) = curve.entries
    assert (entry.updates, entry.loss, entry.perplexity, entry.accuracy) == (100, 6.0, 32.0, 41.5)
    (training,) = curve.training
    assert (training.updates, training.loss) == (50, 9.1)


def test_other_lines_have_no_figures():
    assert parse_line("2026 | INFO | fairseq.trainer | begin training epoch 1") is None
    assert parse_line("| valid | epoch 001 | valid on 'valid' subset:   0%|  | 0/5") is None


def test_the_command_writes_table_and_picture(tmp_path, capsys):
    first, second = write(tmp_path / "a.log", 7, 5, 6), write(tmp_path / "b.log", 8, 4)
    out = tmp_path / "out"
    logs = [f"m4(max_distance=64)={first}", f"rope={second}"]
    assert main(["learning-curves", *logs, "--out", str(out)]) == 0
    text = (out / "curves.md").read_text()
    assert "| `m4(max_distance=64)` | 300 | 200 | 5.000 | 3.466 | 32.00 | 1,234 | 6.308 |" in text
    assert "| loss (bits) | loss (nats) |" in text  # the papers' are in nats
    assert "| `rope` | 200 | 200 | 4.000 | 2.773 | 16.00 | 1,234 | 6.308 |" in text
    assert "accuracy" not in text
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "rope" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "write NAME=LOG"),
        (["a=missing.log"], "missing.log does not exist"),
        (["a=empty.log"], "has no validation"),
        (["a=full.log", "a=full.log"], "'a': each value needs its own name"),
        (["a=full.log", "--updates", "16k"], "write FIRST:LAST, as in 0:16000, not '16k'"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").write_text("")
    write(tmp_path / "full.log", 5)
    assert main(["learning-curves", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


# As the paper's Figure 2 has them: updates and loss in nats, straight in between.
BERT = [(0, 10.8), (1000, 6.9), (8000, 6.1), (10000, 3.2), (16000, 2.6), (40000, 2.2)]
DECBERT = [(0, 10.8), (1000, 6.9), (4000, 6.5), (6000, 3.1), (16000, 2.5), (40000, 2.1)]
BAG_OF_WORDS = [(0, 10.8), (1000, 6.9), (10000, 5.9), (40000, 5.8)]
SINUSOIDAL = [(update, 2.3 + 8.5 * math.exp(-update / 1500)) for update in range(0, 40001, 100)]
EVERY = 100


def losses(corners, noise=0.005, every=EVERY):
    """Return a training's updates and losses in nats, with noise."""
    rng = random.Random(0)
    for update in range(every, corners[-1][0] + 1, every):
        pairs = zip(corners, corners[1:])
        (x, y), (x1, y1) = next((a, b) for a, b in pairs if a[0] < update <= b[0])
        yield update, y + (y1 - y) * (update - x) / (x1 - x) + rng.gauss(0, noise)


def training_log(path: Path, corners, **how) -> Path:
    """Write a log of a training with that loss, and a validation every 10,000 updates."""
    text = []
    for update, nats in losses(corners, **how):
        bits = nats / math.log(2)
        text.append(
            f"2026 | INFO | train_inner | epoch {update // 10001 + 1:03d}:  {update} / 40000 "
            f"loss={bits:.5f}, wps=1234, num_updates={update}"
        )
        if update % 10000 == 0:
            text.append(
                f"2026 | INFO | valid | epoch {update // 10000:03d} | valid on 'valid' subset | "
                f"loss {bits:.5f} | num_updates {update}"
            )
    path.write_text("\n".join(text), encoding="utf-8")
    return path


def curve_of(losses):
    """Return the curve of a training with these updates and losses in nats."""
    bits = [(update, nats / math.log(2)) for update, nats in losses]
    return Curve([], 1.0, [Entry("train_inner", at, loss, 0.0, None, 1.0) for at, loss in bits])


def stages_of(corners, **how):
    return find_stages(curve_of(losses(corners, **how)))


def made_stages(seed):
    """Return the corners of a made-up loss with stages, and the updates of their ends."""
    rng = random.Random(seed)
    start = rng.randrange(600, 1500, EVERY)
    plateau = start + rng.randrange(2500, 8000, EVERY)
    dive = plateau + rng.randrange(800, 2000, EVERY)
    top = 6.9 - rng.uniform(0.1, 0.4)
    low = top - rng.uniform(2, 3)
    corners = [(0, 10.8), (start, 6.9), (plateau, top), (dive, low), (40000, low - 0.8)]
    return corners, (start, plateau, dive)


@pytest.mark.parametrize(("noise", "lines"), [(0.0, 1), (0.02, 1), (0.05, 2)])
def test_how_exact_the_bounds_are(noise, lines):
    """Forty made-up losses; noise as of a batch's masks, in nats."""
    for seed in range(40):
        corners, bounds = made_stages(seed)
        assert stages_of(corners, noise=noise) == pytest.approx(bounds, abs=lines * EVERY), seed


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("corners", [BAG_OF_WORDS, SINUSOIDAL])
def test_without_a_dive_or_without_a_plateau_there_are_no_stages(corners, noise):
    assert stages_of(corners, noise=noise) is None


@pytest.mark.parametrize("losses", [[], [(1, 2.0)], [(1, 2.0), (2, 2.0)]])
def test_a_log_of_a_line_or_none_has_no_stages(losses):
    assert find_stages(curve_of(losses)) is None


def test_noise_as_of_a_small_batch_makes_no_stages():
    """A fall that goes on, seen through noise ten times the fall from line to line."""
    slow = [(0, 8.0), (400, 5.6), (40000, 5.2)]
    for every in (20, 100):
        assert stages_of(slow, noise=0.05, every=every) is None


def test_the_way_back_from_a_jump_is_no_dive():
    """As where a stretch of the text is hard."""
    found = list(losses([(0, 8.0), (60, 6.0), (2000, 5.8)], noise=0.03, every=20))
    jumped = [(at, loss + (0.4 - (at - 620) / 100) * (620 <= at <= 660)) for at, loss in found]
    assert max(piece.rate for piece in fit_segments(tuple(jumped))[1:]) > 0.005
    assert find_stages(curve_of(jumped)) is None


def test_a_line_is_smoothed_with_as_many_on_either_side():
    losses = [(0, 9.0), (1, 6.0), (9, math.nan), (2, 3.0), (3, 6.0)]
    updates, nats = zip(*smooth_losses(curve_of(losses)))
    assert updates == (0, 1, 2, 3, 9)
    assert nats == pytest.approx((9, 6, 5, 6, math.nan), nan_ok=True)


def test_the_command_tells_stages_and_epochs_and_draws_the_training(tmp_path, capsys):
    logs = [
        f"{name}={training_log(tmp_path / name, corners)}"
        for name, corners in (("bert", BERT), ("diff", DECBERT), ("none", BAG_OF_WORDS))
    ]
    out = tmp_path / "out"
    assert main(["learning-curves", *logs, "--out", str(out), "--updates", "0:16000"]) == 0
    text = (out / "curves.md").read_text()
    assert "| `bert` | 900 | 8,000 | 10,000 | 7,100 |" in text
    assert "| `diff` | 900 | 4,000 | 5,900 | 3,100 |" in text
    assert text.count("`none` |") == 1 + text.count("| `none` |\n")  # it has no stages
    assert "The dive is the steepest line segment" in text
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "![Training loss in nats](training.png)" in text
    assert "are left out" not in text
    record = read(out / "curves.json")
    assert [row["training"] for row in record.figures["stages"]] == ["bert", "diff"]
    assert dict(record.figures["stages"][0]) == {
        **{"training": "bert", "start_ends": 900, "plateau_ends": 8000, "dive_ends": 10000},
        "plateau": 7100,
    }
    assert record.data["bert"] == str(tmp_path / "bert")
    assert text in capsys.readouterr().out + text


def test_seeds_have_means_with_intervals(tmp_path, capsys):
    """Plateaus of 7,000, 6,000 and 8,000 updates: 7,000, and Student's t of two degrees, 4.303."""
    logs = []
    for number, plateau in enumerate((8000, 7000, 9000)):
        corners = [(x + (plateau - 8000) * (x in (8000, 10000)), y) for x, y in BERT]
        logs.append(str(training_log(tmp_path / f"{number}.log", corners, noise=0.0)))
    none = training_log(tmp_path / "none.log", BAG_OF_WORDS, noise=0.0)
    out = tmp_path / "out"
    words = [f"bert={','.join(logs)}", f"none={none}", f"mixed={logs[0]},{none}"]
    assert main(["learning-curves", *words, "--out", str(out)]) == 0
    text = (out / "curves.md").read_text()
    assert "| `bert 2` | 1,000 | 7,000 | 9,000 | 6,000 |" in text
    (bert, mixed) = read(out / "curves.json").figures["seeds"]
    reach = 4.302653 * 1000 / math.sqrt(3)
    assert bert["plateau"] == pytest.approx(7000, abs=EVERY)
    assert bert["plateau_low"] == pytest.approx(7000 - reach, abs=2 * EVERY)
    assert bert["plateau_high"] == pytest.approx(7000 + reach, abs=2 * EVERY)
    assert "| `bert` | 9.03 (9.03 to 9.03) | 2.200 (2.200 to 2.200) | 7,967 (" in text
    assert "plateau" not in mixed
    # The mean of an epoch's perplexities is that of the losses.
    ends = [next(loss for at, loss in losses(BERT, noise=0.0) if at == 40000), 5.8]
    assert mixed["perplexity"] == pytest.approx(math.exp(sum(ends) / 2), rel=0.001)
    assert "`mixed`" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["none--lr=2e-4", "none,lr=2e-4", "rope,8-changes-0a1b2c3d"])
def test_a_folder_that_train_names_is_read_alone_and_among_seeds(name, tmp_path, capsys):
    logs = [tmp_path / name / f"seed{seed}" / "train.log" for seed in (1, 2)]
    for log in logs:
        log.parent.mkdir(parents=True)
        write(log, 5.0, 4.0)
    words = [f"a={logs[0]},{logs[1]}", f"b={logs[1]}", "--out", str(tmp_path / "out")]
    assert main(["learning-curves", *words]) == 0
    data = read(tmp_path / "out" / "curves.json").data
    assert data == {"a": f"{logs[0]},{logs[1]}", "b": str(logs[1])}


@pytest.mark.parametrize("number", [0, 2])
def test_a_loss_that_is_no_number_is_said_and_left_out(number, tmp_path, capsys):
    found = [5.0, 4.0, 3.0]
    found[number] = math.nan
    log = write(tmp_path / "a.log", *found)
    assert main(["learning-curves", f"a={log}", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    where = 100 * (number + 1)
    assert f"`a` diverged: its validation loss is NaN or infinite at update {where} first" in said
    best = min(loss for loss in found if loss == loss)
    assert f"| {best:.3f} |" in said
    assert (tmp_path / "out" / "curves.png").is_file()


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("losses", "label"),
    [
        ([5, 4, 3], "a  8.0"),
        ([NAN, 4, 3], "a  8.0"),
        ([5, INF, 3], "a  8.0"),
        ([5, 4, NAN, NAN], "a  diverged at 300"),
        ([NAN, NAN, NAN], "a  diverged at 100"),
    ],
)
def test_a_divergence_is_drawn(losses, label, tmp_path):
    """The line breaks there, and its label says it if the training did not recover."""
    logs = {"a": write(tmp_path / "a.log", *losses), "b": write(tmp_path / "b.log", 5, 4, 3)}
    curves = {name: read_curve_file(log).points for name, log in logs.items()}
    lines = {name: average_lines([points], interval) for name, points in curves.items()}
    (axes,) = pictures.draw_curves(lines, "title", log=True).axes
    assert [text.get_text() for text in axes.get_legend().texts] == [label, "b  8.0"]
    shown = [2**loss if math.isfinite(loss) else NAN for loss in losses]
    assert list(axes.lines[0].get_ydata()) == pytest.approx(shown, nan_ok=True)


def test_names_with_dollar_signs_are_drawn_as_they_are(tmp_path, capsys):
    """Between two of them matplotlib looks for TeX, and knows no such symbol."""
    log = write(tmp_path / "log", 3, 2)
    assert main(["learning-curves", rf"$\nope$={log}", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert r"`$\nope$`" in capsys.readouterr().out
