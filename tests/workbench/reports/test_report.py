"""``report``: a wrong row, mean or unit in a user's tables; a wrong copy of the papers' figures."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics

import pytest
import torch

from docs.generate.papers import FIGURES, format_page
from fairseq_posenc import specs
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.finetuning.glue.report import build_record
from fairseq_posenc.workbench.results.record import Record
from tests.helpers.commands import EPOCHS, USER_DIR, call, refused, trained
from tests.workbench.finetuning.test_glue import FACTS, MNLI, RTE
from tests.workbench.training.test_configurations import SETTINGS

TABLES = FIGURES["reported"]


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_folder_with_results_of_all_kinds_and_links(tmp_path, tmp_path_factory, capsys):
    build_record([*RTE, *MNLI], "m4m", {**FACTS, "protocol": "m4m"}).write(tmp_path / "glue.json")
    scores, facts = {"exact": 0.0, "f1": 92.0}, {"name": "q", "squad": "1.1"}
    Record("squad", {"scores": [scores]}, facts).write(tmp_path / "squad.json")
    (tmp_path / "link").symlink_to(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    for name in ("back", "again"):  # each leads to all links, again and again
        (elsewhere / name).symlink_to(tmp_path)
    found = [(1, 30.0), (1, 32.0), (5, 34.0)]
    rows = [{"system": "rope", "beam": beam, "BLEU": x, "chrF2": 50.0} for beam, x in found]
    facts = {"sentences": 1000, "subset": "test"}
    Record("bleu", {"scores": rows}, facts).write(elsewhere / "deep.json")
    (tmp_path / "other.json").write_text("no record")
    text, progress = call(capsys, "report", tmp_path, "--user-dir", USER_DIR)
    assert "not finished: QQP, seed 2" in progress
    assert "MNLI-m | MNLI-mm | RTE | average | collapsed runs" in text
    assert row(text, "`mine`")[2:-1] == ["40.00", "50.00", "70.00", "53.33", "1"]
    assert row(text, "`q`")[2:4] == ["0.00", "92.00"]
    assert row(text, "`rope, beam 1`")[2:5] == ["31.00", "32.00", "50.00"]  # mean, best of 2
    assert row(text, "`rope, beam 5`")[2] == "34.00"
    assert len(json.loads(call(capsys, "report", "--json", tmp_path)[0])) == 4


@pytest.mark.slow
def test_trainings_have_perplexity_or_losses_in_nats_and_means_over_seeds(tmp_path, capsys):
    state = trained("masked_lm").checkpoint()
    for seed, loss, spec in ((1, 2.0, "m4m"), (2, 3.0, "m4m"), (4, 5000.0, "m4m"), (3, 5.0, None)):
        # By another metric, the best figure is not a loss.
        state["cfg"]["checkpoint"]["best_checkpoint_metric"] = "loss" if spec else "accuracy"
        state["cfg"]["common"]["seed"] = seed
        state["cfg"]["model"].lr = [0.2 if seed == 4 else 0.1]  # so that 4 is not in the mean
        state["cfg"]["model"].position_encoding = spec
        state["extra_state"]["best"] = loss  # in bits
        (tmp_path / str(seed)).mkdir()
        torch.save(state, tmp_path / str(seed) / "checkpoint_last.pt")
    (tmp_path / "latest").symlink_to("2")  # the same run
    translation = trained("translation")
    shutil.copytree(translation.save_dir, tmp_path / "a")
    (tmp_path / "a" / "train.log").write_text(
        '| train_inner | {"loss": "2", "num_updates": "3"}\n'
        '| valid | {"valid_loss": "3", "valid_accuracy": "25", "valid_num_updates": "3"}\n'
    )
    text, _ = call(capsys, "report", tmp_path)
    state["extra_state"]["best"] = math.nan
    state["cfg"]["checkpoint"]["best_checkpoint_metric"] = "loss"
    state["cfg"]["task"]["_name"] = "language_modeling"  # perplexities of causal LMs are others
    torch.save(state, tmp_path / "3" / "checkpoint_last.pt")
    found, _ = call(capsys, "report", tmp_path / "3", "--json")
    (causal,) = json.loads(found, parse_constant=pytest.fail)
    assert causal["table"].replace("of causal LMs", "of masked LMs") in text
    assert causal["figures"]["perplexity"] is None
    assert row(text, "`1`")[1:-1] == ["`m4m`", "1", str(EPOCHS), "4.00"]
    assert row(text, "`2`")[-2] == "8.00"
    assert row(text, "`3`")[1:-1] == ["`fairseq's`", "3", str(EPOCHS), "-"]
    assert row(text, "mean of 2 seeds")[-2] == "6.00"
    state = translation.checkpoint()
    best = state["extra_state"]["best"] * math.log(2)
    assert row(text, "`a`")[4:-1] == ["1.386", "0.2500", f"{best:.3f}"]
    state["cfg"]["checkpoint"]["best_checkpoint_metric"] = "bleu"  # whose best may be another
    torch.save(state, tmp_path / "a" / "checkpoint_last.pt")
    assert row(call(capsys, "report", tmp_path / "a")[0], "`a`")[4:-1] == ["1.386", "-"]


def test_nothing_to_report_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("x")
    os.mkfifo(tmp_path / "empty" / "pipe.json")  # nobody writes into it
    row = {"system": "a", "beam": 5, "BLEU": None, "chrF2": 50.0}
    for kind, table, facts, field in (
        ("glue", {"tasks": []}, {"name": "of another version"}, "protocol"),
        ("glue", {"tasks": []}, {"protocol": "mine"}, "protocol"),
        ("glue", {"tasks": [row]}, {"protocol": "m4m"}, "task"),
        ("glue", [row], {"protocol": "m4m"}, "tasks"),
        ("squad", {"scores": []}, {"name": "q", "squad": "1.1"}, "exact"),
        ("squad", {"scores": [1]}, {"name": "q", "squad": "1.1"}, "exact"),
        ("bleu", {"scores": [row]}, {"sentences": 9, "subset": "test"}, "BLEU"),
        ("bleu", {"scores": [row]}, ["sentences"], "sentences"),
        ("bleu", {"scores": [{**row, "BLEU": 1.0}]}, {"sentences": "nine"}, "sentences"),
    ):
        Record(kind, table, facts).write(tmp_path / "old.json")
        said = call(capsys, "report", tmp_path, code=2)[1]
        assert f"old.json: left out: {field} is missing or wrong; run {kind} again" in said
    for name, words in (("x", "no such"), ("empty", "no results of"), ("x.json", "cannot be")):
        assert words in refused(capsys, "report", tmp_path / name)


def test_a_fault_of_ours_is_no_damaged_record(tmp_path, monkeypatch):
    scores = {"scores": [{"system": "a", "beam": 5, "BLEU": 1.0, "chrF2": 5.0}]}
    Record("bleu", scores, {"sentences": 9, "subset": "t"}).write(tmp_path / "x.json")
    monkeypatch.setattr(statistics, "fmean", [].pop)
    with pytest.raises(TypeError):
        main(["report", str(tmp_path)])


def test_the_papers_figures_agree_and_their_models_can_be_trained():
    """The page has all rows; averages are those of columns; figures of several tables agree."""
    for (name, table), part in zip(TABLES.items(), format_page().split("\n## ")[1:]):
        assert part.startswith(f"{name}: ")
        assert table["configuration"] in SETTINGS
        for entry in table["rows"]:
            specs.parse(entry["position_encoding"])
            assert f"`{entry['position_encoding']}`" in " ".join(row(part, entry["name"]))
    for name, digits in (("B3", 0.0051), ("B4", 0.051)):
        for entry in TABLES[name]["rows"]:
            *values, average = entry["values"].values()
            assert statistics.fmean(values) == pytest.approx(average, abs=digits)
    entries = [entry for name in ("A2", "A3", "A4") for entry in TABLES[name]["rows"]]
    first, *others = (x["values"] for x in entries if x["position_encoding"] == "m4")
    assert others == [first, first]
