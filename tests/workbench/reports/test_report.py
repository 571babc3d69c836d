"""``report``: a user's results in the layout of the papers' tables; and the papers' own figures."""

from __future__ import annotations

import json
import math
import shutil
import statistics
from pathlib import Path

import pytest

from docs.generate.papers import FIGURES, format_page
from fairseq_posenc import specs
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.results.record import Record
from tests.helpers.commands import EPOCHS, refused, trained

ROOT = Path(__file__).resolve().parents[3]


def glue_record(protocol: str = "m4m", best: float = 80.0) -> Record:
    tasks = [
        {"task": "MNLI", "metric": "accuracy_m", "reported": True, "best": best, "mean": 70.0},
        {"task": "MNLI", "metric": "accuracy_mm", "reported": False, "best": 81.0, "mean": 71.0},
        {"task": "CoLA", "metric": "matthews", "reported": True, "best": 0.0, "mean": 40.0},
        {"task": "CoLA", "metric": "accuracy", "reported": False, "best": 99.0, "mean": 99.0},
    ]
    runs = [{"task": "CoLA", "collapsed": True}, {"task": "MNLI", "collapsed": False}]
    data = {"name": "a", "protocol": protocol, "unfinished": "RTE, seed 1"}
    return Record("glue", {"tasks": tasks, "runs": runs}, data, "m4m")


def squad_record(version: str) -> Record:
    scores = [{"exact": 85.0, "f1": 92.0}]
    return Record("squad", {"scores": scores}, {"name": "q", "squad": version})


def bleu_record() -> Record:
    rows = [
        {"system": "rope", "beam": beam, "BLEU": bleu, "chrF2": 50.0}
        for beam, bleu in ((1, 30.0), (1, 32.0), (5, 34.0))
    ]
    return Record("bleu", {"scores": rows}, {"sentences": 1000, "subset": "test"})


def report(capsys: pytest.CaptureFixture[str], *paths: Path) -> str:
    capsys.readouterr()
    assert main(["report", *map(str, paths)]) == 0
    said = capsys.readouterr()
    assert ("not finished: RTE, seed 1" in said.err) == ("## GLUE" in said.out)
    return said.out


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("protocol", "figures"),
    [
        ("m4m", ["80.00", "81.00", "0.00", "53.67"]),
        ("decbert", ["70.00", "71.00", "40.00", "60.33"]),
    ],
)
def test_glue_shows_what_the_paper_of_its_protocol_reports(protocol, figures, tmp_path, capsys):
    glue_record(protocol).write(tmp_path / "results.json")
    text = report(capsys, tmp_path)
    assert "MNLI-m | MNLI-mm | CoLA | average | collapsed runs" in text
    assert row(text, "`a`")[2:-1] == [*figures, "1.00"]


def test_a_folder_with_results_of_all_kinds_and_links(tmp_path, tmp_path_factory, capsys):
    glue_record().write(tmp_path / "glue.json")
    squad_record("1.1").write(tmp_path / "squad.json")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / "link").symlink_to(elsewhere)
    bleu_record().write(elsewhere / "deep.json")
    text = report(capsys, tmp_path)
    assert row(text, "`q`")[2:4] == ["85.00", "92.00"]
    assert row(text, "`rope, beam 1`")[2:5] == ["31.00", "32.00", "50.00"]  # mean, best of 2
    assert row(text, "`rope, beam 5`")[2] == "34.00"
    assert main(["report", "--json", str(tmp_path)]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4


@pytest.mark.slow
def test_trainings_have_their_perplexity_and_means_over_seeds(tmp_path, capsys):
    import torch

    state = torch.load(trained("masked_lm").save_dir / "checkpoint_last.pt", weights_only=False)
    for seed, loss, spec in ((1, 2.0, "m4m"), (2, 3.0, "m4m"), (3, 5.0, None)):
        state["cfg"]["common"]["seed"] = seed
        state["cfg"]["model"].position_encoding = spec
        state["extra_state"]["best"] = loss  # in bits
        (tmp_path / str(seed)).mkdir()
        torch.save(state, tmp_path / str(seed) / "checkpoint_last.pt")
    text = report(capsys, tmp_path)
    assert row(text, "`1`")[1:-1] == ["`m4m`", "1", str(EPOCHS), "4.00"]
    assert row(text, "`2`")[-2] == "8.00"
    assert row(text, "`3`")[1] == "`fairseq's`"
    assert row(text, "mean of 2 seeds")[-2] == "6.00"


@pytest.mark.slow
def test_a_translation_has_its_losses_in_nats_and_its_accuracy(tmp_path, capsys):
    model, folder = trained("translation"), tmp_path / "a"
    folder.mkdir()
    shutil.copy(model.save_dir / "checkpoint_last.pt", folder)
    (folder / "train.log").write_text(
        '| train_inner | {"loss": "2", "num_updates": "3"}\n'
        '| valid | {"valid_loss": "3", "valid_accuracy": "25", "valid_num_updates": "3"}\n'
    )
    best = model.checkpoint()["extra_state"]["best"] * math.log(2)
    assert row(report(capsys, tmp_path), "`a`")[4:-1] == ["1.386", "0.2500", f"{best:.3f}"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file or folder"),
        (lambda path: path.mkdir(), "no results yet: repeat its glue, squad predict or bleu"),
        (lambda path: path.write_text("x"), "no results yet"),
    ],
)
def test_nothing_to_report_is_one_line(make, message, tmp_path, capsys):
    make(tmp_path / "x")
    assert message in refused(capsys, "report", tmp_path / "x")


def test_the_page_has_every_row_of_the_papers():
    page = format_page()
    for name, table in FIGURES["reported"].items():
        (section,) = [part for part in page.split("\n## ") if part.startswith(f"{name}: ")]
        for entry in table["rows"]:
            specs.parse(entry["position_encoding"])
            (line,) = [
                line for line in section.splitlines() if line.startswith(f"| {entry['name']} |")
            ]
            assert f"`{entry['position_encoding']}`" in line or name == "A1"
            assert (ROOT / f"train_scripts/configs/{table['configuration']}.yaml").exists()


@pytest.mark.parametrize(("name", "digits"), [("B3", 0.0051), ("B4", 0.051)])
def test_the_averages_are_those_of_the_columns(name, digits):
    for entry in FIGURES["reported"][name]["rows"]:
        values = dict(entry["values"])
        average = values.pop("average")
        assert statistics.fmean(values.values()) == pytest.approx(average, abs=digits)


def test_figures_that_several_tables_have_are_the_same():
    rows = {
        name: {row["position_encoding"]: row["values"] for row in FIGURES["reported"][name]["rows"]}
        for name in ("A2", "A3", "A4")
    }
    assert rows["A2"]["m4"] == rows["A3"]["m4"] == rows["A4"]["m4"]
