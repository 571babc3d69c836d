"""Every row of the papers has its command, and the report finds its run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from docs.generate import papers
from fairseq_posenc.analysis.catalogue import count_at_base_size
from fairseq_posenc.workbench.cli import COMMANDS, main
from fairseq_posenc.workbench.results.record import Record
from fairseq_posenc.workbench.training import recipes
from tests.workbench.reports.test_report import (
    TRANSLATION,
    bleu,
    checkpoint,
    glue,
    log,
    ours,
    report,
    squad,
)
from tests.workbench.training.test_train_scripts_pretraining import RUNS

ROOT = Path(__file__).parents[3]
DATA = recipes.load()
ROWS = [
    pytest.param(name, row, id=f"{name}-{row['name']}")
    for name, table in DATA["reported"].items()
    for row in table["rows"]
]
PAGE = papers.format_page()
PICTURES = [shlex.split(each["command"]) for each in DATA["pictures"]]
CORNERS = [(0, 10.8), (10, 6.9), (80, 6.1), (100, 3.2), (160, 2.6)]
# A training loss with a plateau and a dive.
LOSSES = [
    a[1] + (b[1] - a[1]) * (n - a[0]) / (b[0] - a[0])
    for a, b in zip(CORNERS, CORNERS[1:])
    for n in range(a[0] + 1, b[0] + 1)
]


def section(title: str) -> str:
    """Return the part of the page under a heading."""
    (found,) = [part for part in PAGE.split("\n## ")[1:] if part.startswith(title)]
    return found


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_every_row_has_a_line(table, row):
    lines = [line.split(" | ") for line in section(f"{table}: ").splitlines()]
    (line,) = [line for line in lines if line[0] == f"| {row['name']}"]
    assert row["position_encoding"] in line[-1]


@pytest.mark.parametrize(
    ("table", "row"), [row for row in ROWS if row.values[0] not in ("A1", "C")]
)
def test_the_training_of_every_row_is_tested(table, row):
    recipe = row.get("recipe", DATA["reported"][table]["recipe"])
    model = (row["position_encoding"], row.get("attention_directions", "both"))
    ablated = [
        (run["position_encoding"], run.get("attention_directions", "both"))
        for ablation in DATA["ablations"].values()
        if ablation["recipe"] == recipe
        for run in ablation["runs"]
    ]
    assert row.get("released") or (recipe, *model) in RUNS or model in ablated


def test_nothing_that_the_recipes_have_is_left_out():
    commands = " ".join(re.findall(r"`([^`]+)`", PAGE))
    for name, encoding, directions in RUNS:
        quoted = f"'{encoding}'" if "(" in encoding else encoding
        command = f"train_scripts/{name}.sh {quoted} DATA-BIN"
        if name in ("b_small", "b_large"):
            command += f" --model {recipes.find_model(directions)}"
        assert command in commands
    for name in DATA["ablations"]:
        assert f"train_scripts/ablation.sh {name} DATA-BIN" in commands
    measuring = section("Measuring")
    for name in DATA["finetuning"]["glue"]:
        assert f"--protocol {name} --tasks all" in measuring
    for version in DATA["finetuning"]["squad"]["m4m"]["versions"]:
        assert f"| SQuAD {version}, " in measuring
    for encoding in DATA["finetuning"]["translation"]["iwslt17"]["position_encodings"]:
        assert f"train_scripts/translation_iwslt17.sh {encoding} " in section("C: ")


@pytest.mark.parametrize(("table", "name"), [("A3", "scale_factor"), ("A4", "heads")])
def test_an_ablation_that_is_a_table_is_named_there(table, name):
    assert f"train_scripts/ablation.sh {name} " in section(f"{table}: ")


@pytest.mark.parametrize("name", ["layers", "sinusoidal"])
def test_an_ablation_that_is_no_table_has_its_rows(name):
    lines = section(f"Ablation `{name}`")
    assert all(f"\n| {run['name']} | " in lines for run in DATA["ablations"][name]["runs"])


def test_the_commands_are_there():
    scripts = re.findall(r"train_scripts/(\w+\.sh)", PAGE)
    assert all((ROOT / "train_scripts" / name).is_file() for name in scripts)
    words = re.findall(r"fairseq-posenc ([\w-]+)", PAGE)
    assert len(scripts) > 50
    assert set(words) <= set(COMMANDS)


@pytest.mark.parametrize("words", [each for each in PICTURES if each[1] == "plot"], ids=" ".join)
def test_a_picture_of_a_spec_is_drawn_and_one_of_a_checkpoint_asks_for_it(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    if "--encoding" in words:
        assert main(words[1:]) == 0
        assert (tmp_path / words[-1]).stat().st_size > 1000
    else:
        assert main(words[1:]) == 2
        assert "--checkpoint CHECKPOINT: no such file" in capsys.readouterr().err


def test_the_pictures_of_losses_are_of_the_updates_that_the_paper_draws():
    parts = {
        each["where"]: words[-1]
        for each, words in zip(DATA["pictures"], PICTURES)
        if "--updates" in words
    }
    assert parts == {"figure 2": "0:16000", "figure 3": "80000:200000", "figure 5": "0:40000"}
    assert DATA["pretraining"]["b_small"]["settings"]["max_update"] - 80000 == 120000


def test_the_counts_stand_beside_the_papers_with_the_reason():
    part = section("A1: ")
    for name in ("DeBERTa", "TUPE"):
        (line,) = [each for each in part.splitlines() if each.startswith(f"| {name} | `m")]
        spec = line.split(" | ")[-1].strip("`| ")
        assert f"| {count_at_base_size(spec):,} |" in line
        tied = f"{spec.partition('+')[0]}(tie_projections=true)" + "+reset" * ("+" in spec)
        assert f"{count_at_base_size(tied):,}" in part


def test_the_storage_of_table_1_stands_beside_what_was_measured():
    """In blocks that of table rows grows with the length, written out with its square."""
    lines = [line.strip("| ").split(" | ") for line in section("A1: ").splitlines()]
    found = {line[0].strip("`"): line[1:] for line in lines if line[1:] and line[1][:2] == "`O"}
    rows = {row["position_encoding"]: row["texts"] for row in DATA["reported"]["A1"]["rows"]}
    assert {name: cells[0].strip("`") for name, cells in found.items()} == {
        name: texts["complexity"] for name, texts in rows.items()
    }
    for name in ("shaw", "m4", "m4m", "deberta"):
        _, half, whole, _, half_blocked, whole_blocked = map(float, found[name][1:])
        assert whole / half == pytest.approx(4, rel=0.05)
        assert whole_blocked / half_blocked == pytest.approx(2, rel=0.05)


def run_of(row, entry, folder):
    """Write all that the training and the evaluations of a row leave behind."""
    recipe = row.get("recipe", entry["recipe"])
    directions = row.get("attention_directions", "").replace("both", "")
    spec = row["position_encoding"]
    settings = {"position_encoding": spec, "attention_directions": directions}
    if recipe == "b_lm":
        settings |= {"task": "language_modeling", "data": "/data/wikitext-103"}
    if recipe.startswith("translation"):
        settings |= {**TRANSLATION, "position_encoding": spec}
    updates = 0 if row.get("released") else 500000
    origin = checkpoint(folder / "run", updates=updates, **settings)
    log(folder / "run", LOSSES, [4.0, 3.4])
    tasks = {column["task"] for column in entry["columns"].values()}
    if "SST-2" in tasks and any(each["split"] == "dev" for each in entry["columns"].values()):
        protocol = "decbert" if entry["source"] == "decbert" else "m4m"
        glue(folder / "glue.json", spec, protocol, directions, origin)
    elif "SST-2" in tasks:
        path = folder / "site.json"
        scores = [{"task": "SST-2", "accuracy": 94.0}]
        Record("glue-test", {"scores": scores}, {"checkpoint": str(origin)}).write(path)
    for task in tasks & {"SQuAD1.1", "SQuAD2.0"}:
        squad(folder / f"{task}.json", spec, origin, version=task.removeprefix("SQuAD"))
    if recipe.startswith("translation"):
        bleu(folder / "bleu.json", ("name", str(origin), 1, 33.0, 50.0, 0.3))
        return folder
    return f"{recipe}={folder}"


@pytest.mark.parametrize(("table", "row"), ROWS)
def test_the_run_of_a_row_is_found_there(table, row, tmp_path, capsys):
    entry = DATA["reported"][table]
    data = report(capsys, run_of(row, entry, tmp_path), "--tables", table)
    if table == "A1":  # which needs none
        computed = {each["name"]: each["computed"] for each in data["tables"][0]["rows"]}
        assert computed[row["name"]]["parameters (K)"] > 0
        return
    ((values),) = ours(data)[table, row["name"]]
    known = set(row["values"]) - {"average"}
    if table in ("A5", "B3", "B4", "A2", "A3", "A4"):
        known &= {"SST-2", "SQuAD1.1 F1"}  # of GLUE, what the files above have
    assert known - {"Chinese Wikipedia"} <= set(values)
