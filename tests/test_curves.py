"""Learning curves, read from all that fairseq-train prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairseq_posenc.cli import main
from fairseq_posenc.running.logs import parse_line, read_curve

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


def under_hydra(line: str) -> str:
    for kind in ("train_inner", "valid"):
        line = line.replace(f"2026 | INFO | {kind} |", f"[2026-11-21 19:00:00,000][{kind}][INFO] -")
    return line


@pytest.mark.parametrize(
    "log", [JSON, SIMPLE, [*map(under_hydra, JSON)], [*map(under_hydra, SIMPLE)]]
)
def test_every_format_says_the_same(log):
    curve = read_curve(log)
    assert curve.speed == 1234
    (entry,) = curve.entries
    assert (entry.updates, entry.loss, entry.perplexity, entry.accuracy) == (100, 6.0, 32.0, 41.5)


def test_other_lines_have_no_figures():
    assert parse_line("2026 | INFO | fairseq.trainer | begin training epoch 1") is None
    assert parse_line("| valid | epoch 001 | valid on 'valid' subset:   0%|  | 0/5") is None


def test_the_command_writes_table_and_picture(tmp_path, capsys):
    first, second = write(tmp_path / "a.log", 7, 5, 6), write(tmp_path / "b.log", 8, 4)
    out = tmp_path / "out"
    assert (
        main(["curves", f"m4(max_distance=64)={first}", f"rope={second}", "--out", str(out)]) == 0
    )
    text = (out / "curves.md").read_text()
    assert "| `m4(max_distance=64)` | 300 | 200 | 5.000 | 3.466 | 32.00 | 1,234 |" in text
    assert "| loss (bits) | loss (nats) |" in text  # the papers' are in nats
    assert "| `rope` | 200 | 200 | 4.000 | 2.773 | 16.00 | 1,234 |" in text
    assert "accuracy" not in text
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "rope" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "write NAME=LOG"),
        (["a=missing.log"], "missing.log does not exist"),
        (["a=empty.log"], "has no validation"),
        (["a=full.log", "a=full.log"], "two trainings are called 'a'"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.log").write_text("")
    write(tmp_path / "full.log", 5)
    assert main(["curves", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
