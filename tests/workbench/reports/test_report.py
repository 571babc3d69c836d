"""Results in the papers' layouts: which row and cell each goes to, and what is said of it."""

from __future__ import annotations

import base64
import json
import math
import re
import statistics
from argparse import Namespace
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
import torch

from fairseq_posenc import specs
from fairseq_posenc.errors import CONTROL
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.finetuning.glue.report import build_record as glue_record
from fairseq_posenc.workbench.finetuning.squad.command import build_record as squad_record
from fairseq_posenc.workbench.finetuning.squad.data import Squad
from fairseq_posenc.workbench.results.html_page import convert_to_html
from fairseq_posenc.workbench.results.record import Record, read
from fairseq_posenc.workbench.training import recipes
from tests.helpers.commands import new_directory, train, trained

SITE = """
{
  "kind": "glue-test",
  "version": 1,
  "spec": "learned",
  "data": {"name": "mine", "attention_directions": "lr,rl"},
  "figures": {"scores": [{"task": "SST-2", "accuracy": 94.0}, {"task": "MNLI-m", "accuracy": 86.0}]}
}
"""

# A training as the paper's small scale has it, but for what a test changes.
LIKE_A_SMALL = {
    **recipes.build_recipe("a_small").all_settings,
    "arch": "roberta_m4m",
    "position_encoding": "m4m",
    "attention_directions": "",
    "data": "/data/books-wiki",
    "batch_size": 12,
    "update_freq": [1],
    "distributed_world_size": 8,
}


def checkpoint(folder, updates=500000, best=2.0, name="checkpoint_last.pt", **changes):
    """Write what a report reads of a checkpoint, as fairseq-train does."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**LIKE_A_SMALL, **changes}
    state = {
        "args": None,
        "cfg": {"task": {"_name": settings["task"]}, "model": Namespace(**settings)},
        "model": {},
        "optimizer_history": [{"num_updates": updates}],
        "extra_state": {} if best is None else {"best": best},
    }
    torch.save(state, folder / name)
    return folder / name


def glue(path, spec="m4m", protocol="m4m", directions="", origin=None, tasks=None, **more):
    """Write the record of ``fairseq-posenc glue``."""
    tasks = tasks or {"SST-2": [(2e-5, 1, {"accuracy": 90.0}), (3e-5, 1, {"accuracy": 91.5})]}
    results = {
        task: (
            next(iter(runs[0][2])),
            [
                {
                    **{"learning_rate": lr, "seed": seed, "update": 10, "metrics": metrics},
                    "collapsed": f"{lr}-{seed}" in more.get("collapsed", ()),
                    "folder": f"{lr}-{seed}",
                }
                for lr, seed, metrics in runs
            ],
        )
        for task, runs in tasks.items()
    }
    data = {"name": path.stem, "checkpoint": str(origin) if origin else None}
    data |= {"attention_directions": directions, "protocol": protocol}
    data |= {"unfinished": "; ".join(more.get("unfinished", ()))}
    glue_record(results, spec, data).write(path)
    return path


def squad(path, spec="m4m", origin=None, version="1.1", exact=80.25, f1=88.5):
    """Write the record of ``fairseq-posenc squad``."""
    questions = Squad(Path("dev.json"), version, [])
    squad_record(questions, {"exact": exact, "f1": f1}, path.stem, origin, spec).write(path)
    return path


def report(capsys, *arguments):
    """Return the report as data."""
    assert main(["report", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def ours(data):
    """Return our figures: (table, row) to the values of each model."""
    return {
        (table["id"], row["name"]): [model["values"] for model in row["ours"]]
        for table in data["tables"]
        for row in table["rows"]
        if row["ours"]
    }


def differences(data):
    (models,) = (row["ours"] for t in data["tables"] for row in t["rows"] if row["ours"])
    return models[0]["differences"]


def test_all_tables_are_there_with_the_papers_figures(tmp_path, capsys):
    every = ["A1", "A-loss", "A2", "A-raffel", *("A3", "A4", "A5", "A6", "A7")]
    every += ["B1", "B2", "B3", "B4", "B-figure2", "B-figure4", "C"]
    data = report(capsys, glue(tmp_path / "g.json"), "--tables", "all")
    assert [table["id"] for table in data["tables"]] == every
    assert list(recipes.load()["reported"]) == every  # nothing is left out
    by_id = {table["id"]: table for table in data["tables"]}
    (shaw,) = (row for row in by_id["A2"]["rows"] if row["name"] == "Shaw")
    assert shaw["paper"] == {"MNLI-m": 82.88, "SST-2": 91.28, "SQuAD1.1 F1": 88.62}
    assert by_id["B2"]["rows"][0]["paper"] == {"perplexity": 353.97}


def test_without_tables_only_those_with_a_figure_of_ours(tmp_path, capsys):
    data = report(capsys, glue(tmp_path / "g.json", "m4"))
    expected = [{"SST-2": 91.5}]  # the best of the learning rates
    assert ours(data) == {("A2", "M4"): expected, ("A3", "1"): expected, ("A4", "shared"): expected}
    assert data["others"] == []


SPECS = [
    ("learned", {("A2", "Absolute")}),
    ("m4+reset", {("A2", "M4+Reset")}),
    ("m4(reset=true)", {("A2", "M4+Reset")}),
    ("m4m+learned", {("A2", "ABS+M4M")}),
    ("m4(scale_factor=1.0)", {("A2", "M4"), ("A3", "1"), ("A4", "shared")}),
    ("m4(scale_factor=9)", {("A3", "9")}),
    ("m4(per_head=true)", {("A4", "not shared")}),
    ("m4(per_head=false,reset=false)", {("A2", "M4"), ("A3", "1"), ("A4", "shared")}),
    ("m4(max_distance=128)", set()),
    ("rope", set()),
]


@pytest.mark.parametrize(("spec", "rows"), SPECS)
def test_rows_are_found_by_encoding_and_options(spec, rows, tmp_path, capsys):
    data = report(capsys, glue(tmp_path / "g.json", spec))
    assert set(ours(data)) == rows
    assert bool(data["others"]) == (not rows)


def test_what_fits_no_row_is_listed_with_its_figures(tmp_path, capsys):
    assert main(["report", str(squad(tmp_path / "mine.json", "rope"))]) == 0
    text = capsys.readouterr().out
    assert "Not in the papers' tables" in text
    assert "`mine` (squad, a_small, rope, directions not known): SQuAD1.1 exact dev 80.25" in text
    assert re.search(r"Why: A1, .*A4: no row has rope with its directions\.$", text, re.MULTILINE)


def test_a_figure_that_no_table_has_is_why(tmp_path, capsys):
    tasks = {"CoLA": [(3e-5, 1, {"matthews": 0.5})]}
    (other,) = report(capsys, glue(tmp_path / "g.json", "m4", tasks=tasks))["others"]
    assert other["why"] == "A1, A2, A3, A4: no column for CoLA matthews dev"


def test_glue_and_squad_of_one_model_share_a_line(tmp_path, capsys):
    base = checkpoint(tmp_path / "m4m")
    mnli = [(3e-5, 1, {"accuracy_m": 83.5, "accuracy_mm": 84.5})]
    glue(tmp_path / "g.json", origin=base, tasks={"MNLI": mnli})
    tuned = {"task": "squad", "finetune_from_model": str(base)}
    squad(tmp_path / "s.json", origin=checkpoint(tmp_path / "tuned", **tuned))
    assert main(["report", str(tmp_path), "--tables", "A2"]) == 0
    text = capsys.readouterr().out
    assert "| M4M | `g`, `s` | 83.50 / 83.58 | - / 91.62 | 88.50 / 89.45 |" in text
    assert "| Shaw | - | - / 82.88 | - / 91.28 | - / 88.62 |" in text


def test_models_of_one_row_have_a_line_each(tmp_path, capsys):
    paths = [glue(tmp_path / f"{name}.json", origin=None) for name in ("one", "two")]
    data = report(capsys, *paths)
    assert ours(data) == {("A2", "M4M"): [{"SST-2": 91.5}, {"SST-2": 91.5}]}


def decbert_tasks(value):
    one = {"accuracy": value, "f1": value, "pearson": value, "spearman": value}
    names = ("SST-2", "QNLI", "QQP", "RTE", "MRPC", "STS-B")
    tasks = {
        name: [(1e-5, s, {k: v + s for k, v in one.items()}) for s in (1, 2)] for name in names
    }
    return {**tasks, "MNLI": [(1e-5, 1, {"accuracy_m": value, "accuracy_mm": value + 1})]}


def test_decberts_figures_are_means_of_seeds_and_their_average(tmp_path, capsys):
    arguments = ("learned", "decbert", "lr,rl")
    data = report(capsys, glue(tmp_path / "g.json", *arguments, tasks=decbert_tasks(80.0)))
    ((found,),) = ours(data).values()
    assert set(ours(data)) == {("B3", "DecBERT-Diff")}
    assert found["SST-2"] == found["STS-B"] == 81.5
    assert (found["MNLI-m"], found["MNLI-mm"]) == (80.0, 81.0)
    assert found["average"] == pytest.approx(statistics.fmean([81.5] * 6 + [80.0, 81.0]))


def test_an_average_of_some_tasks_is_none(tmp_path, capsys):
    tasks = decbert_tasks(80.0)
    del tasks["RTE"]
    data = report(capsys, glue(tmp_path / "g.json", "none", "decbert", "lr,lr", tasks=tasks))
    ((found,),) = ours(data).values()
    assert "average" not in found


def test_the_mean_is_that_of_the_learning_rate_where_it_is_best(tmp_path, capsys):
    seeds = [
        (lr, s, {"accuracy": a}) for lr, s, a in [(1, 1, 99), (1, 2, 1), (2, 1, 60), (2, 2, 70)]
    ]
    data = report(capsys, glue(tmp_path / "g.json", "learned", "decbert", tasks={"MRPC": seeds}))
    assert ours(data) == {("B3", "BERT-reImp"): [{"MRPC": 65.0}]}


@pytest.mark.parametrize(
    ("directions", "row"),
    [("", "BERT-reImp"), ("both,both", "BERT-reImp"), ("lr,lr", "DecBERT-Same"), ("rl", None)],
)
def test_rows_of_decbert_are_found_by_direction_too(directions, row, tmp_path, capsys):
    checkpoint(tmp_path / "run", position_encoding="learned", attention_directions=directions)
    data = report(capsys, tmp_path / "run")
    assert ours(data) == ({("B2", row): [{"perplexity": 4.0}]} if row else {})  # 2 bits


def test_scores_from_glues_site(tmp_path, capsys):
    path = tmp_path / "site.json"
    path.write_text(SITE)
    expected = [{"SST-2": 94.0, "MNLI-m": 86.0}]
    assert ours(report(capsys, path)) == {("B4", "DecBERT-Diff"): expected}


def test_the_setup_follows_from_start_and_size_or_is_the_users(tmp_path, capsys):
    start = {"finetune_from_model": "start.pt"}
    base = squad(tmp_path / "b.json", origin=checkpoint(tmp_path / "base", **start))
    size = {"encoder_layers": 24, "encoder_embed_dim": 1024}
    large = squad(tmp_path / "l.json", origin=checkpoint(tmp_path / "large", **start, **size))
    assert set(ours(report(capsys, base))) == {("A6", "RoBERTa-M4M")}
    assert set(ours(report(capsys, large))) == {("A7", "RoBERTa-M4M Large")}
    assert set(ours(report(capsys, f"a_c4={base}"))) == {("A6", "RoBERTa-M4M (C4 en)")}
    assert set(ours(report(capsys, f"a_small={base}"))) == {("A2", "M4M")}
    assert "start: start.pt (paper: random)" in differences(report(capsys, f"a_small={base}"))


def test_a_training_resumed_in_its_own_folder_has_no_other_start(tmp_path, capsys):
    resumed = {"restore_file": "runs/mine/checkpoint7.pt", "save_dir": "runs/mine/"}
    record = squad(tmp_path / "r.json", origin=checkpoint(tmp_path / "moved", **resumed))
    lines = differences(report(capsys, f"a_small={record}"))
    assert not [line for line in lines if line.startswith("start: ")]
    checkpoint(tmp_path / "moved", **{**resumed, "save_dir": "runs/other"})
    lines = differences(report(capsys, f"a_small={record}"))
    assert "start: runs/mine/checkpoint7.pt (paper: random)" in lines


def test_a_released_model_and_one_trained_on_are_two_rows(tmp_path, capsys):
    learned = {"arch": "roberta_learned", "position_encoding": "learned"}
    trained_on = checkpoint(tmp_path / "abs", finetune_from_model="start.pt", **learned)
    as_released = checkpoint(tmp_path / "start", updates=0, name="start.pt", **learned)
    one = squad(tmp_path / "one.json", "learned", trained_on, exact=1.0)
    two = squad(tmp_path / "two.json", "learned", as_released, exact=2.0)
    found = ours(report(capsys, one, two))
    exact = {row: [values["SQuAD1.1 EM"] for values in models] for row, models in found.items()}
    assert exact == {("A6", "RoBERTa"): [2.0], ("A6", "RoBERTa-ABS"): [1.0]}


def test_only_what_differs_is_told(tmp_path, capsys):
    changes = {"lr": [0.0005], "batch_size": 4, "seed": 7, "adam_betas": "(0.5, 0.9)"}
    squad(tmp_path / "s.json", origin=checkpoint(tmp_path / "run", updates=200, **changes))
    assert differences(report(capsys, tmp_path / "s.json")) == [
        "data: /data/books-wiki (paper: BooksCorpus and English Wikipedia)",
        "updates: 200 (paper: 500,000)",
        "batch: 32 sequences (paper: 96 sequences)",
        "lr: 0.0005 (paper: 0.0001)",
        "seed: 7 (paper: -)",
    ]


def test_pairs_are_the_same_however_fairseq_writes_them(tmp_path, capsys):
    like = {**recipes.build_recipe("b_small").all_settings, "position_encoding": "learned"}
    checkpoint(tmp_path / "run", updates=200000, **{**like, "adam_betas": [0.9, 0.98]})
    told = differences(report(capsys, tmp_path / "run"))
    assert not any(line.startswith(("adam", "updates", "lr")) for line in told)
    assert "batch: 96 sequences (paper: 256 sequences)" in told


def test_fine_tuning_that_differs_is_told(tmp_path, capsys):
    data = report(capsys, glue(tmp_path / "g.json"))
    told = differences(data)
    assert "SST-2, learning rates: 2e-05, 3e-05 (paper: 2e-05, 3e-05, 4e-05)" in told
    assert "SST-2, seeds: 1 (paper: -)" in told
    assert "the settings of its training are unknown: the checkpoint is missing" in told


def test_collapsed_and_unfinished_runs_are_told(tmp_path, capsys):
    path = glue(tmp_path / "g.json", collapsed=["2e-05-1"], unfinished=["RTE, seed 1"])
    told = differences(report(capsys, path))
    assert "SST-2: 1 of 2 runs collapsed" in told
    assert "not finished: RTE, seed 1" in told


def test_colas_matthews_correlation_stands_beside_the_papers(tmp_path, capsys):
    tasks = {"CoLA": [(2e-5, 1, {"accuracy": 69.13, "matthews": 51.5})]}
    path = glue(tmp_path / "g.json", tasks=tasks)
    data = report(capsys, f"a_base={path}")
    assert ours(data) == {("A5", "RoBERTa-M4M"): [{"CoLA": 51.5}]}


def test_a_training_without_validation_has_no_figure(tmp_path, capsys):
    checkpoint(tmp_path / "run", best=None, position_encoding="learned")
    data = report(capsys, tmp_path / "run")
    assert data["tables"] == []
    assert "its checkpoint has no validation loss" in data["others"][0]["notes"]


def test_a_best_metric_that_is_no_loss_is_not_taken_for_one(tmp_path, capsys):
    checkpoint(tmp_path / "run", best_checkpoint_metric="bleu", position_encoding="learned")
    assert report(capsys, tmp_path / "run")["tables"] == []


# ------------------------------------------------------------------- from the log, and translation


def log(folder, nats, perplexities=(), script=None):
    """Write the log of a training, as the training scripts do, and whose script it is."""
    text = [
        f"2026 | INFO | train_inner | epoch 001: {n} / 9 loss={x / math.log(2)}, num_updates={n}00"
        for n, x in enumerate(nats, start=1)
    ]
    text += [
        f"2026 | INFO | valid | epoch {n:03d} | valid on 'valid' subset | loss {math.log2(x)} | "
        f"accuracy 56.5 | num_updates {20000 * n}"
        for n, x in enumerate(perplexities, start=1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.log").write_text("\n".join(text), encoding="utf-8")
    if script:
        stamp = {"inputs": {"recipe": script, "encoding": "none"}}
        (folder / "stamp.json").write_text(json.dumps(stamp), encoding="utf-8")


@pytest.mark.parametrize(
    ("spec", "script", "row"),
    [
        ("none", "a_none", "no positions"),
        ("sentence_learned", "a_none", "positions in the sentence"),
        ("learned", "a_small", "RoBERTa-base"),
    ],
)
def test_the_training_loss_at_the_end_is_the_logs_in_nats(spec, script, row, tmp_path, capsys):
    checkpoint(tmp_path / "run", position_encoding=spec)
    log(tmp_path / "run", [9.0, 6.0, 5.75], script=script)
    ((table, name), ((values),)) = next(iter(ours(report(capsys, tmp_path / "run")).items()))
    assert (table, name) == ("A-loss", row)
    assert values["train loss"] == pytest.approx(5.75)


def test_the_stages_are_those_of_the_log(tmp_path, capsys):
    corners = [(0, 10.8), (10, 6.9), (80, 6.1), (100, 3.2), (160, 2.6)]
    falls = [
        a[1] + (b[1] - a[1]) * (n - a[0]) / (b[0] - a[0])
        for a, b in zip(corners, corners[1:])
        for n in range(a[0] + 1, b[0] + 1)
    ]
    checkpoint(tmp_path / "run", position_encoding="learned", attention_directions="lr,rl")
    log(tmp_path / "run", falls, script="b_small")
    (found,) = ours(report(capsys, tmp_path / "run"))["B-figure2", "DecBERT-Diff"]
    expected = {"start": 1000, "plateau": 8000, "dive": 10000, "length of the plateau": 7000}
    assert found == pytest.approx(expected, abs=100)  # a line of the log


def test_when_the_perplexity_of_figure_4_is_reached(tmp_path, capsys):
    checkpoint(tmp_path / "run", position_encoding="learned", attention_directions="lr,rl")
    log(tmp_path / "run", [3.0], [4.0, 3.5, 3.484, 3.3], script="b_large")
    found = ours(report(capsys, tmp_path / "run"))
    ((values),) = found["B-figure4", "DecBERT-Diff"]
    assert values == {"epoch": 3, "update": 60000, "perplexity": pytest.approx(3.484)}
    text = as_markdown(capsys, tmp_path / "run")
    assert "| DecBERT-Diff | `run` | 3 / 13 | 60,000 / 265,000 | 3.48 / 3.48 |" in text


def as_markdown(capsys, *arguments):
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_table_1_needs_no_run_and_has_the_complexity(capsys):
    text = as_markdown(capsys, "--tables", "A1")
    assert "| Shaw | `shaw`, counted | 786 / 785 | m (2n - 1) d/h | O(m n^2 d/h) |" in text
    assert "| TUPE | `tupe+reset`, counted | 504 / 454 |" in text
    assert "| Raffel | `raffel`, counted | 12 / 12 | m (2n - 1) | O(m n^2) |" in text
    data = report(capsys, "--tables", "A1")
    computed = {row["name"]: row["computed"] for row in data["tables"][0]["rows"]}
    assert computed["M4M"] == {"parameters (K)": 785.664}


TRANSLATION = {
    **{"task": "translation", "arch": "transformer_rope", "position_encoding": "rope"},
    **{"data": "/data/iwslt17.fr-en", "dropout": 0.3, "encoder_layers": 6},
}


def bleu(path, *rows):
    """Write figures in the form of ``fairseq-posenc bleu``: system, checkpoint, beam, scores."""
    names = ("system", "path", "beam", "BLEU", "chrF2", "BLEU-4 on pieces, 0 to 1")
    path.parent.mkdir(exist_ok=True)
    Record("bleu", {"scores": [dict(zip(names, row)) for row in rows]}, {}).write(path)
    return path


def test_a_translation_model_and_its_bleu_share_a_line(tmp_path, capsys):
    path = checkpoint(tmp_path / "rope", **TRANSLATION)
    log(tmp_path / "rope", [4.0, 2.0], [12.0, 10.0, 11.0])
    rows = [("rope", str(path), 1, 33.5, 50.0, 0.35), ("rope", str(path), 5, 35.5, 51.0, 0.36)]
    bleu(tmp_path / "bleu" / "bleu.json", *rows)
    data = report(capsys, tmp_path)
    (values,) = ours(data)["C", "RoPE"]
    assert values == {
        "train loss": pytest.approx(2.0),
        "valid loss": pytest.approx(math.log(10)),
        "valid accuracy": pytest.approx(0.565),
        "BLEU": 0.35,  # of greedy search
    }
    told = differences(data)
    assert "sacreBLEU 33.50" in told
    assert "dropout: 0.3 (paper: 0.1)" in told
    assert not any(line.startswith(("encoder_layers", "runs", "warmup")) for line in told)
    assert data["others"] == []
    text = as_markdown(capsys, tmp_path)
    cells = "2.000 / 1.857 | 2.303 / 2.304 | 0.5650 / 0.5764 | 0.3500 / 0.5594"
    assert f"| RoPE | `rope` | {cells} |" in text
    assert "- `rope`, greedy: What you fear is never as severe as you can imagine" in text
    assert "  - beam search, 4.8646: What you're never care about." in text


SEEDS = {1: (10.0, 0.35), 2: (9.0, 0.34), 3: (11.0, 0.36)}  # validation perplexity, BLEU


@pytest.mark.parametrize(
    ("with_logs", "column", "best", "lowest"),
    [(True, "valid loss", 2, 0.34), (False, "BLEU", 3, 0.34), (False, "BLEU", 3, 0.0)],
)
def test_the_best_of_trainings_that_differ_by_seed_stands_beside_them(
    with_logs, column, best, lowest, tmp_path, capsys
):
    rows = []
    for seed, (perplexity, score) in {**SEEDS, 2: (9.0, lowest)}.items():
        folder = tmp_path / f"rope-{seed}"
        path = checkpoint(folder, **TRANSLATION, seed=seed, save_dir=str(folder))
        rows.append((f"rope-{seed}", str(path), 1, 33.0 + seed, 50.0, score))
        if with_logs:
            log(folder, [4.0, 2.0], [12.0, perplexity])
    other = checkpoint(tmp_path / "wide", **{**TRANSLATION, "dropout": 0.5}, seed=1)
    rows.append(("wide", str(other), 1, 40.0, 60.0, 0.9))  # not one of the three
    bleu(tmp_path / "bleu" / "bleu.json", *rows)
    text = as_markdown(capsys, tmp_path)
    lines = [line for line in text.splitlines() if line.startswith("| RoPE | ")]
    named = [line.split(" | ")[1] for line in lines]
    assert named == ["`rope-1`", "`rope-2`", "`rope-3`", "`wide`", named[-1]]
    assert named[-1] == f"best of 3 runs, by {column}: `rope-{best}`"
    assert lines[-1].split(" | ")[2:] == lines[best - 1].split(" | ")[2:]
    (table,) = report(capsys, tmp_path)["tables"]
    models = next(row["ours"] for row in table["rows"] if row["name"] == "RoPE")
    assert [model.get("best_of") for model in models] == [
        3 if number == best else None for number in (1, 2, 3, 4)
    ]


HOSTILE = {
    "html": "<script>alert(1)</script>",
    "picture": '<img src=x onerror="alert(1)">',
    "link": "[here](javascript:alert(1))",
    "picture of a link": "![here](javascript:alert(1))",
    "reference": "[here]: javascript:alert(1)",
    "automatic link": "<javascript:alert(1)>",
    "end of code": "a`<b onclick=alert(1)>`b",
    "two ends of code": "``<b onclick=alert(1)>``",
    "escaped bracket": "\\[here](javascript:alert(1))",
    "many backslashes": "\\\\\\[here](javascript:alert(1))",
    "cell": "a | <script>alert(1)</script> | b",
    "colour": "a\x1b[31mred\x1b[0m",
    "title of the terminal": "\x1b]0;owned\x07",
    "one-byte command": "\x9b31mred",
    "line": "a\n# <script>alert(1)</script>\n",
    "overwritten": "failed\rpassed",
    "right to left": "\u202egnp.exe",
}


def hostile_record(folder: Path, text: str) -> Path:
    rows = [{"system": text, text: 1.0, "words": text}]
    data = {"text": text, text: 2}
    record = Record(f"kind {text}", {"rows": rows}, data, spec=text, command=f"run {text}")
    record.write(folder / "hostile.json")
    return folder / "hostile.json"


class Active(HTMLParser):
    """Collects what a browser would run or load of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "img", "b", "a"):
            self.found.append(f"{tag} {attrs}")


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_nothing_of_a_record_is_active(text, tmp_path, capsys):
    told = as_markdown(capsys, hostile_record(tmp_path, text))
    assert not CONTROL.search(told.replace("\n", ""))
    for extensions in (["tables", "fenced_code"], []):
        reader = Active()
        reader.feed(markdown.markdown(told, extensions=extensions))
        assert reader.found == []
    page = convert_to_html(told, tmp_path)
    reader = Active()
    reader.feed(page)
    assert reader.found == []


@pytest.mark.parametrize(
    ("link", "stays"),
    [
        ("javascript:alert(1)", False),
        ("JaVaScRiPt:alert(1)", False),
        ("&#106;avascript:alert(1)", False),
        ("data:text/html,x", False),
        ("vbscript:x", False),
        ("https://example.org/a:b", True),
        ("report.md#a", True),
        ("#part", True),
    ],
)
def test_a_page_has_no_links_that_run(link, stays, tmp_path):
    page = convert_to_html(f"# Title\n\n[here]({link}) ![there]({link})\n", tmp_path)
    assert (f'href="{link}"' in page) == stays
    assert (f'src="{link}"' in page) == stays
    assert ">here</a>" in page


def test_a_page_takes_pictures_from_its_folder_alone(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "own.png").write_bytes(b"own")
    text = "# Title\n\n![a](own.png) ![b](../secret.png) ![c](/etc/hostname)\n"
    page = convert_to_html(text, tmp_path / "out")
    assert page.count("data:image/png;base64,") == 1
    assert base64.b64encode(b"own").decode() in page


def test_a_translation_of_another_text_is_in_no_row(tmp_path, capsys):
    path = checkpoint(tmp_path / "rope", **{**TRANSLATION, "data": "/data/multi30k"})
    log(tmp_path / "rope", [2.0], [10.0])
    bleu(
        tmp_path / "bleu.json",
        ("rope", str(path), 1, 33.5, 50.0, None),
        ("text", "x", None, 1, 2, 3),
    )
    data = report(capsys, tmp_path)
    assert data["tables"] == []
    figures = {each["name"] + each["kind"]: each["figures"] for each in data["others"]}
    assert figures["ropebleu"] == {"multi30k sacreBLEU test": 33.5, "multi30k chrF2 test": 50.0}
    assert figures["ropetraining"]["multi30k accuracy valid"] == pytest.approx(0.565)
    assert "textbleu" in figures


CAUSAL = {"task": "language_modeling", "arch": "transformer_lm_none", "position_encoding": "none"}


@pytest.mark.parametrize(
    ("data_folder", "column"),
    [
        ("wikitext-103", "WikiText-103"),
        ("wikitext-103/shard0-of-2:/data/wikitext-103/shard1-of-2", "WikiText-103"),
        ("zh-wiki", "Chinese Wikipedia"),
        ("books", None),
    ],
)
def test_causal_models_go_by_the_name_of_their_data(data_folder, column, tmp_path, capsys):
    checkpoint(tmp_path / "run", data=f"/data/{data_folder}", **CAUSAL)
    expected = {("B1", "without positions"): [{column: 4.0}]} if column else {}
    assert ours(report(capsys, tmp_path / "run")) == expected


def test_all_figures_are_of_the_run_that_is_best(tmp_path, capsys):
    """MNLI's mismatched set does not choose the run."""
    accuracies = [(2e-5, 80.0, 90.0), (3e-5, 81.0, 70.0)]
    runs = [(lr, 1, {"accuracy_m": m, "accuracy_mm": mm}) for lr, m, mm in accuracies]
    path = glue(tmp_path / "g.json", tasks={"MNLI": runs})
    assert ours(report(capsys, f"a_base={path}")) == {
        ("A5", "RoBERTa-M4M"): [{"MNLI-m": 81.0, "MNLI-mm": 70.0}]
    }


def test_a_run_that_is_named_twice_counts_once(tmp_path, capsys):
    path = glue(tmp_path / "g.json")
    data = report(capsys, tmp_path, f"a_base={path}")
    assert ours(data) == {("A5", "RoBERTa-M4M"): [{"SST-2": 91.5}]}


def test_fine_tuned_checkpoints_are_no_pre_trainings(tmp_path, capsys):
    tuned = checkpoint(tmp_path / "tuned", task="sentence_prediction")
    glue(tmp_path / "results.json")
    assert len(ours(report(capsys, tmp_path))) == 1
    assert main(["report", str(tuned)]) == 2
    assert "no checkpoint of a pre-training" in capsys.readouterr().err


MISTAKES = [
    (["no-such-folder"], "no-such-folder: no such file or folder"),
    (["."], ".: holds no results of a fairseq-posenc command, and no checkpoint"),
    (["torn.pt"], "torn.pt: not a complete checkpoint of fairseq"),
    (["good.json", "--tables", "A9"], "--tables A9: unknown table 'A9': choose from A1"),
    ([], "name results, or the papers' tables to show with --tables"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_told_in_a_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if arguments != ["."]:
        torch.save({"model": {}}, tmp_path / "torn.pt")
        glue(tmp_path / "good.json")
    assert main(["report", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


RECORD = {"kind": "compare", "version": 1, "figures": {"models": [{"model": "m4m"}]}}
STRAYS = {
    "settings.json": ('{"a": 1}', "not a record of fairseq-posenc"),
    "list.json": ('["kind"]', "not a record of fairseq-posenc"),
    "torn.json": ('{"kind": "compare", "ver', "not a complete JSON file (Unterminated string"),
    "bytes.json": (b'{"kind": "\xff"}', "not a complete JSON file ('utf-8' codec can't decode"),
    "deep.json": ('{"kind": ' + "[" * 10**6, "not a complete JSON file (maximum recursion depth"),
    "old.json": ('{"kind": "glue", "tasks": {}}', "not a record of fairseq-posenc"),
    "newer.json": (
        json.dumps({**RECORD, "version": 2}),
        "a record of version 2; this program reads",
    ),
    "list_of_figures.json": (json.dumps({**RECORD, "figures": []}), "whose 'figures' is"),
    "deep_row.json": (json.dumps({**RECORD, "figures": {"a": [{"b": [1]}]}}), "whose 'figures' is"),
    "seed.json": (json.dumps({**RECORD, "seed": "one"}), "a record whose 'seed' is invalid"),
    "part.json": (
        json.dumps({**RECORD, "kind": "glue"}),
        "not a complete record of glue (KeyError",
    ),
    "score.json": (
        json.dumps({**RECORD, "kind": "glue-test", "figures": {"a": [{"task": "x", "y": "z"}]}}),
        "not a complete record of glue-test (ValueError",
    ),
}
# 6,000 digits are not a number to Python 3.11, and one too large for any figure to Python 3.9.
STRAYS["huge.json"] = (json.dumps({**RECORD, "seed": 7}).replace("7", "7" * 6000), "skipped: ")


@pytest.mark.parametrize("name", STRAYS)
def test_files_that_are_no_record_are_named_and_passed_over(name, tmp_path, capsys):
    content, reason = STRAYS[name]
    stray = tmp_path / name
    stray.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["report", str(stray)]) == 2
    (line, error) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"skipped: {stray}: ")
    assert reason in line
    assert len(line) < 600
    assert error.endswith("all files were skipped: nothing to report")
    glue(tmp_path / "whole.json")
    assert main(["report", "--json", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == line + "\n"
    assert len(json.loads(said.out)["records"]) == 1


def test_strays_of_one_kind_are_a_line(tmp_path, capsys):
    for number in range(30):
        (tmp_path / f"{number:02}.json").write_text("{}")
    for name in ("stamp.json", "result.json"):  # which are for other commands
        (tmp_path / name).write_text("{}")
    glue(tmp_path / "whole.json")
    assert main(["report", str(tmp_path)]) == 0
    said = f"skipped: {tmp_path}/00.json and 29 more: not a record of fairseq-posenc\n"
    assert capsys.readouterr().err == said


def test_records_of_every_kind_have_a_table(tmp_path, capsys):
    rows = [
        {"model": "m4m", "perplexity": 22.5, "updates": 800},
        {"model": "none", "perplexity": None},
    ]
    for seed in (1, 2):
        record = Record(
            "compare", {"models": rows}, {"text": "a|b"}, None, seed, "fairseq-posenc x"
        )
        record.write(tmp_path / f"{seed}.json")
    row = {"seconds_per_update": 12345.678, "gpu": None, "finite": True}
    Record("plan", {"plan": [row]}, {}, spec="rope").write(tmp_path / "plan.json")
    text = as_markdown(capsys, tmp_path)
    folder = tmp_path.name
    assert f"1. `1.json` in `{folder}`, `fairseq-posenc x`: seed: 1; text: a|b\n2. `2.json`" in text
    assert "|  | model | perplexity | updates |\n| ---: | --- | ---: | ---: |\n" in text
    assert "| 1 | m4m | 22.5 | 800 |\n| 1 | none | - | - |\n| 2 | m4m | 22.5 | 800 |" in text
    assert f"1. `plan.json` in `{folder}`: positions: rope" in text
    assert (
        "|  | seconds_per_update | finite |\n| ---: | ---: | ---: |\n| 1 | 12,346 | yes |" in text
    )


def test_a_record_comes_back_as_it_was_written(tmp_path):
    rows = [{"name": "ä|b", "figure": 1.5, "none": None, "count": 3, "yes": True}, {}]
    record = Record("kind", {"a": rows, "b": []}, {"text": "x"}, "m4m", 7, "command --option")
    record.write(tmp_path / "r.json")
    assert read(tmp_path / "r.json") == record
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert '\n   {"name": "ä|b", "figure": 1.5, ' in text  # a line a row, for version control


def test_what_is_no_number_is_null_in_a_record(tmp_path):
    Record("kind", {"a": [{"x": math.nan, "y": -math.inf}]}, {"z": math.inf}).write(
        tmp_path / "r.json"
    )
    found = read(tmp_path / "r.json")
    assert (found.rows, found.data) == ([{"x": None, "y": None}], {"z": None})
    assert "NaN" not in found.text()


def test_every_row_of_the_papers_can_be_read():
    for table in recipes.load()["reported"].values():
        for row in table["rows"]:
            assert specs.parse(row["position_encoding"])


@pytest.mark.slow
def test_a_real_pre_training_and_its_perplexity(capsys):
    folder = new_directory() / "diff"
    done = train("masked_lm", "--arch", "decbert_diff_tiny", "--max-epoch", 2, save_dir=folder)
    other = trained("masked_lm")  # m4m, which is in no table of perplexities
    data = report(capsys, folder, other.save_dir)
    perplexity = min(float(each["valid_ppl"]) for each in done.run.valid())
    ((found,),) = ours(data).values()
    assert set(ours(data)) == {("B2", "DecBERT-Diff")}
    assert found["perplexity"] == pytest.approx(perplexity, abs=0.006)
    told = differences(data)
    assert "updates: 2 (paper: 200,000)" in told
    assert "batch: 16 sequences (paper: 256 sequences)" in told
    assert "encoder_layers: 2 (paper: 12)" in told
    assert [each["encoding"] for each in data["others"]] == ["m4m"]


def test_control_characters_in_names_are_written_out(tmp_path, capsys):
    odd = "a\n# no heading\x1b[31m"
    folder = tmp_path / "a\x1bfolder"
    folder.mkdir()
    row = {"model": odd, "perplexity": 2.0}
    Record("compare", {"models": [row]}, {"text": odd}, command=odd).write(folder / "x.json")
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count(r"a\n# no heading\x1b[31m") == 3
    assert r"in `a\x1bfolder`" in said
    assert "\x1b" not in said
    assert "\n# no heading" not in said
