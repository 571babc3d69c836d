"""The comparison says what its trainings show, and a stopped one goes on to the same bits.

A rank, a test or a figure that is wrong, and an update that a stop loses, are found here alone.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.folders import LOCK
from fairseq_posenc.user_dir import USER_DIR
from fairseq_posenc.workbench.experiments.compare import command, report
from fairseq_posenc.workbench.experiments.compare.outcomes import Run, conclude, rank_models
from fairseq_posenc.workbench.experiments.compare.report import ComparePlan
from fairseq_posenc.workbench.experiments.data_bin import DataFacts
from fairseq_posenc.workbench.experiments.trainings import TrainingEnd
from fairseq_posenc.workbench.experiments.variants import parse_variants
from fairseq_posenc.workbench.results import record
from fairseq_posenc.workbench.running.exit_codes import STOPPED
from fairseq_posenc.workbench.running.logs import Curve, Entry, read_curve_file
from fairseq_posenc.workbench.running.options import Parser, positive_numbers
from tests.helpers import commands
from tests.helpers.products import some_of
from tests.helpers.waiting import is_locked, wait_until
from tests.workbench.experiments.test_corpus import small_text

UNIGRAM = 200.0
FACTS = DataFacts(700, 300_000, 285_000, 15_000, 9_000, 900, UNIGRAM)
# Perplexity by model, after each 100 updates.
FOUR = {"none": (150, 100), "learned": (140, 80), "decbert_diff": (90, 50), "m4m": (70, 40)}
FLAT = {name: (1.01 * last, last) for name, (_, last) in FOUR.items()}


def make_end(values: Sequence[float], **more: Any) -> TrainingEnd:
    entries = [Entry("valid", 100 * n, math.log2(x), x, None, 0.0) for n, x in enumerate(values, 1)]
    return TrainingEnd(Curve(entries, 1000.0), 61.0, **more)


def make_ends(
    curves: Mapping[str, Sequence[float]], seeds: str = "1,2,3"
) -> tuple[ComparePlan, dict[Run, TrainingEnd]]:
    """Return ends in which the seeds differ by a thousandth, every other model's downwards."""
    parser = Parser()
    command.add_arguments(parser)
    words = ["--encodings", ",".join(curves), "--seeds", seeds, "--updates", "200"]
    plan = command.build_plan(parser.parse_args(words))
    ends = {}
    for run in plan.runs:
        number = plan.variants.index(run.variant)
        values = [x * (1 + (-1) ** number * run.seed / 1000) for x in curves[run.variant.name]]
        ends[run] = make_end(values, position_parameters=8192 * number)
    return plan, ends


@pytest.mark.parametrize(
    ("text", "specs", "folder"),
    [
        ("none, rope(base=9, axes=2)", ["none", "rope(base=9,axes=2)"], "rope-base=9-axes=2"),
        ("none; 3*rope+t5,none", ["none", "3*rope+t5,none"], "3xrope+t5--none"),
        ("decbert_same_nope,decbert_diff", ["none", "learned"], "decbert_diff"),
    ],
)
def test_lists_are_split_outside_brackets_and_folders_need_no_quoting(text, specs, folder):
    models = parse_variants(text)
    assert [model.position_encoding for model in models] == specs
    assert models[-1].folder == shlex.quote(folder) == folder
    assert [x.directions for x in models] == (["lr,lr", "lr,rl"] if "decbert" in text else ["", ""])


JUDGED = (
    "After Holm's correction for 6 comparisons: m4m is better than decbert_diff, learned, none; "
    "decbert_diff is better than learned, none; learned is better than none."
)
NAMES = "m4m, decbert_diff, learned, none"
FALLING = f"Perplexity still falls ({NAMES}): more --updates may change the order."
EQUAL = "After Holm's correction for 3 comparisons, no difference is significant."
FEW = "Too few seeds to judge differences: a test needs 3, as in --seeds 1,2,3."
NOTHING = (
    "Ranks mean nothing yet: the lowest perplexity is 100.8 (m4m), and must be below 100.0, half "
    "the perplexity of a model that only counts pieces. To continue the runs, give more --updates."
)


@pytest.mark.parametrize(
    ("curves", "seeds", "conclusions"),
    [
        (FLAT, "1,2,3", [JUDGED]),
        (FOUR, "1,2,3", [JUDGED, FALLING]),
        (FLAT, "1", [FEW]),
        (FLAT, "1,2", [FEW]),
        ({"none": [190], "m4m": [101]}, "1,2,3", [NOTHING]),
        # Of p = 1, 0.04 and 0.04, none is below 0.05 after the correction.
        ({"none": [40], "m4m": [39.936], "t5": [40]}, "1,2,3", [EQUAL]),
    ],
)
def test_only_what_the_trainings_show_is_said(curves, seeds, conclusions):
    _, ends = make_ends(curves, seeds)
    assert conclude(rank_models(ends), UNIGRAM) == conclusions


def test_a_model_is_judged_at_its_best_rate_over_all_seeds():
    """One lucky seed does not make a rate the best; a rate that diverged never is."""
    assert positive_numbers("0.003, 3e-3,0.001") == (0.003, 0.001)
    (variant,) = parse_variants("m4m")
    ends = {
        Run(variant, seed, lr): make_end([end or 9], diverged_at=0 if end else 1)
        for lr, values in {"0.001": (50, 52), "0.003": (40, 90), "0.1": (0, 1)}.items()
        for seed, end in enumerate(values)
    }
    (model,) = rank_models(ends)
    assert (model.lr, model.perplexities) == ("0.001", {0: 50, 1: 52})


def test_seeds_that_were_validated_at_other_updates_are_no_falling_curve():
    entries = {seed: [Entry("valid", seed, 0.0, 90.0, None, 0.0)] for seed in (1, 2)}
    (variant,) = parse_variants("m4m")
    ends = {Run(variant, x, "1"): TrainingEnd(Curve(y, 1.0), 1.0) for x, y in entries.items()}
    assert conclude(rank_models(ends), UNIGRAM) == [FEW]


@pytest.mark.parametrize("validated", [[150, 90], []])  # it may diverge before the first time
def test_a_seed_that_diverged_is_shown_and_the_others_are_compared(validated):
    plan, ends = make_ends(FOUR)
    run = next(run for run in ends if run.variant.name == "learned")
    ends[run] = make_end(validated, diverged_at=140)
    models = rank_models(ends)
    assert [model.variant.name for model in models] == ["m4m", "decbert_diff", "none", "learned"]
    diverged, test, falling = conclude(models, UNIGRAM)
    assert diverged == "learned diverged at update 140 (seed 1)."
    assert falling == FALLING.replace("learned, ", "")
    assert "for 3 comparisons: m4m is better than decbert_diff, none;" in test
    line = r"^learned  +diverged at update 140 \(seed 1\)  +79\.8, 79\.8  +8,192  +01:01$"
    assert re.search(line, report.format_screen(models, UNIGRAM), re.M)
    rows = report.build_record(plan, FACTS, ends, {}).figures["trainings"]
    (row,) = (row for row in rows if row["diverged"])
    assert (row["model"], row["perplexity"], row["diverged"]) == ("learned", None, 140)


def test_the_screen_shows_the_best_first_and_the_record_has_differences_and_trainings(tmp_path):
    plan, ends = make_ends(FOUR)
    table, conclusions = report.format_screen(rank_models(ends), UNIGRAM).split("\n\n")
    assert max(map(len, table.splitlines())) <= 100
    names = [line.split()[0] for line in table.splitlines()]
    assert names == ["encoding", "m4m", "decbert_diff", "learned", "none"]
    assert conclusions.startswith("- After Holm's correction for 6")
    report.build_record(plan, FACTS, ends, {"family": "x"}).write(tmp_path / "r.json")
    found = record.read(tmp_path / "r.json")
    assert (found.kind, found.data["words"]) == ("compare", 300_000)
    assert [row["seed"] for row in found.figures["trainings"]] == [1] * 4 + [2] * 4 + [3] * 4
    # A pair whose differences have variance; its p is the second largest of the six.
    pair = found.figures["differences"][-1]
    assert (pair["model"], pair["other"], pair["seeds"]) == ("learned", "none", 3)
    log_difference = pair["log_perplexity_difference"]
    assert log_difference == pytest.approx(math.log(79.84 / 100.2), abs=1e-4)
    reach = 4.302653 * 0.002 / math.sqrt(3)  # the three differences are 0.002 apart
    bounds = (pair[f"log_perplexity_difference_{end}"] for end in ("low", "high"))
    assert [*bounds] == pytest.approx([log_difference - reach, log_difference + reach], abs=1e-5)
    t = log_difference / (0.002 / math.sqrt(3))
    assert pair["p"] == pytest.approx(1 - abs(t) / math.sqrt(2 + t * t), rel=1e-3)
    assert pair["p_holm"] == pytest.approx(2 * pair["p"])


def test_the_page_needs_no_other_file_escapes_names_and_has_what_is_finished(tmp_path):
    plan, ends = make_ends(FOUR)
    report.write_page(plan, FACTS, ends, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert re.search(r'<img alt="[^"]+" src="data:image/png;base64,iVBOR', page)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert re.search(r"<td>79.84 \([\d.]+ to [\d.]+\)</td><td>79.9, 79.8,", page)
    assert "<code>m4m</code>: As m4, but the three dot products are multiplied." in page
    assert "300,000 words" in page
    report.write_page(plan, FACTS, dict(list(ends.items())[:5]), tmp_path / "report.html")
    unfinished = (tmp_path / "report.html").read_text()
    said = "7 of 12 training runs are not finished", "all training runs are finished", "Holm&#39;s"
    assert [text in unfinished for text in said] == [True, True, False]
    assert [text in page for text in said] == [False, False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--encodings", "m4n"], "--encodings: unknown position encoding 'm4n': did you mean m4 "),
        (["--encodings", "decbert_dif"], "--encodings: unknown name 'decbert_dif': did you mean d"),
        (["--encodings", "rope(axes=x)"], "--encodings: rope(axes=x): expected a whole number"),
        (["--encodings", "none,,m4m"], "--encodings 'none,,m4m': an empty name"),
        (["--encodings", "none,3*rope,none"], "'none' would train the same model twice; separate"),
        (["--encodings", "m4m,m4m()"], "'m4m' and 'm4m()' would train the same"),
        (["--lrs", "0.1,fast"], "argument --lrs: must be a number from -1e+300 to"),
        (["--lrs", "0.1,0"], "argument --lrs: 0.1,0: write numbers above 0, as in 0.001,0.003"),
        (["--", "--lr", "5"], "-- --lr: this option cannot be set here; use --lrs"),
        (["--", "--save-dir=x"], "cannot be set here; use --out"),
        (["--", "--no-save"], "cannot be set here; figures are read from the last checkpoint"),
        (["--out", "a,b"], "--out a,b: fairseq splits names at ':' and ','; name another folder"),
        (["demo"], "'demo' is not an option: give --encodings SPECS or --text FILE"),
        (["--", "demo"], "'demo' is not an option"),
        (["--encodings", "none;3*rope,none"], "is a list of 4 layers, but the stack has 2"),
        (["--encodings", "none,cope"], "query; give --family causal-lm"),
        (["--encodings", "rope", "--", "--encoder-embed-dim", "20"], "--encodings: rope"),
        (["--family", "causal-lm", "--encodings", "decbert_same"], "attends from left to right"),
        (["--on", "cloud"], "--on cloud: write local, or slurm"),
        (["--text", "none.txt"], "No such file"),
    ],
)
def test_wrong_options_are_found_before_any_work(words, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert message in commands.refused(capsys, "compare", "--out", out, *words)
    assert not out.exists()


def test_models_differ_only_in_their_positions():
    plan, _ = make_ends(FOUR, "1")
    rest = set()
    for run in plan.runs:
        training = command.build_training(plan, run, Path("out"), USER_DIR)
        words = shlex.join(training.command).replace(str(training.folder), "")
        rest.add(words.replace(shlex.join(run.variant.options), "OPTIONS"))
    assert [words.count("OPTIONS") for words in rest] == [1]


def test_results_of_a_text_do_not_replace_the_demo(tmp_path, monkeypatch, capsys):
    def stop(out):
        raise UserError(str(out))

    monkeypatch.setattr(command, "lock_folder", stop)
    text = ["--text", str(small_text(tmp_path / "my.txt"))]
    for words, folder in (([], "demo"), (text, "compare-my"), (["--out", "there"], "there")):
        assert commands.refused(capsys, "compare", *words) == folder


ENCODINGS = "none,decbert_diff"
MORE = (20, "--seeds", "1,2", "--jobs", "2")  # updates of one epoch


def compare_words(out: Path, encodings: str, updates: int, *words: str) -> list[str]:
    """Return the words of a tiny comparison."""
    text = small_text(out.parent / "text.txt")
    tiny = "--encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --max-tokens 1024"
    return [
        *("compare", "--text", str(text), "--out", str(out), "--encodings", encodings),
        *("--updates", str(updates), "--vocab-size", "60", *words, "--", *tiny.split()),
    ]


def run_compare(*args: Any, fails: bool = False) -> commands.Run:
    return commands.run("fairseq-posenc", *compare_words(*args), fails=fails)


def read_trainings(out: Path) -> dict[tuple[str, int], Any]:
    """Read all that must not depend on interruptions: figures, curves and weights."""
    found, zeros = {}, dict.fromkeys(("seconds", "tokens_per_second"), 0)
    for row in record.read(out / report.RECORD).figures["trainings"]:
        folder = out / f"models/{row['model']}/lr-{row['lr']}-seed-{row['seed']}"
        model = torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"]
        weights = [tensor.flatten()[:100].tolist() for tensor in model.values()]
        points = read_curve_file(folder / "train.log").points
        found[row["model"], row["seed"]] = {**row, **zeros}, points, weights
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    run_compare(out, ENCODINGS, *MORE)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("number", some_of([signal.SIGKILL], [signal.SIGTERM, signal.SIGKILL]))
def test_a_stopped_or_killed_comparison_continues_to_the_same_bits(number, undisturbed, tmp_path):
    out = tmp_path / "out"
    call = [commands.script("fairseq-posenc"), *compare_words(out, "none", *MORE)]
    process = subprocess.Popen(call, stderr=subprocess.PIPE, encoding="utf-8")
    wait_until(lambda: any(out.glob("models/*/*/checkpoint_last.pt")), process)
    process.send_signal(number)
    *_, last = process.communicate()[1].strip().splitlines()
    if number == signal.SIGTERM:
        assert process.returncode == STOPPED
        assert last == "fairseq-posenc: stopped; the same command continues, or starts again"
    wait_until(lambda: not is_locked(out / LOCK))
    assert "continues at update" in run_compare(out, "none", *MORE).err
    expected = read_trainings(undisturbed)
    assert read_trainings(out) == {key: expected[key] for key in expected if key[0] == "none"}


@pytest.mark.slow
def test_a_kill_within_a_save_loses_no_update_and_leaves_no_checkpoint(undisturbed, tmp_path):
    """The last figures are in the log, newer checkpoints are whole, older ones not yet deleted."""
    out = shutil.copytree(undisturbed, tmp_path / "out")
    older, torn = (path.parent for path in sorted(out.glob("models/*/*-2/train.log")))
    shutil.copyfile(older / "checkpoint_1_18.pt", older / "checkpoint_last.pt")
    (torn / "checkpoint_last.pt").write_bytes(b"")
    for folder in out.glob("models/*/*"):
        shutil.copyfile(folder / "checkpoint_1_18.pt", folder / "checkpoint_1_16.pt")
    run = run_compare(out, ENCODINGS, *MORE)
    assert re.findall(r"continues at update (\d+)", run.err) == ["18"]
    assert read_trainings(out) == read_trainings(undisturbed)
    left, expected = ({x.relative_to(top) for x in top.rglob("*.pt")} for top in (out, undisturbed))
    assert left == expected


@pytest.mark.slow
def test_a_training_whose_log_lost_its_end_is_named_and_not_begun_again(undisturbed, tmp_path):
    """As a power cut may leave it; after a kill, the log is whole."""
    out = shutil.copytree(undisturbed, tmp_path / "out")
    log = out / "models/none/lr-0.003-seed-1/train.log"
    log.write_text(cut := log.read_text().rpartition('"valid_num_updates": "20"')[0])
    run = run_compare(out, ENCODINGS, *MORE, fails=True)
    assert run.status == 1
    assert f"{log.parent}: its log has no last validation; delete the folder" in run.err
    assert "continues at update" not in run.err
    assert log.read_text() == cut


@pytest.mark.slow
def test_more_seeds_updates_and_encodings_continue_and_others_are_refused(
    undisturbed, tmp_path, capsys, monkeypatch
):
    """One by one or side by side, at once or later: the same bits."""
    out = tmp_path / "out"
    run_compare(out, "none", 10, "--seeds", "1", "--jobs", "1")
    more = run_compare(out, ENCODINGS, 20, "--seeds", "1,2", "--jobs", "1")
    assert "seed 1: continues at update 10" in more.err
    monkeypatch.setenv("PATH", str(tmp_path))  # has no Slurm
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # a progress bar is shown
    for message, *words in (
        ("was trained for 20 updates; give --updates 20", 10, "--seeds", "1"),
        ("was made with other vocab size: 60, not 50", 20, "--vocab-size", "50"),
        (r"(?s)all runs:  67%\|.*--on slurm: squeue", 20, "--on", "slurm", "time=1"),
    ):
        _, said = commands.call(capsys, *compare_words(out, ENCODINGS, *words), code=2)
        assert re.search(message, said)
    assert "2 of 6 training runs are not finished" in (out / report.PAGE).read_text()
    found, expected = map(read_trainings, (out, undisturbed))
    assert found.keys() == expected.keys()
    for training, (figures, _, weights) in found.items():  # curves have other points
        assert (figures, weights) == expected[training][::2]


@pytest.mark.slow
@pytest.mark.parametrize("updates", [2, 4])  # in update 2, only the validation shows it
def test_a_training_that_diverges_is_a_result_and_ends_no_other(updates, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):  # neither what diverged nor what is finished is trained again
        run_compare(out, "none", updates, "--seeds", "1", "--lrs", "1e30,0.003", "--jobs", "1")
        logs = [path.read_text() for path in out.glob("models/none/*/train.log")]
        assert [log.count("$ fairseq-train") for log in logs] == [1, 1]
    broken, whole = record.read(out / report.RECORD).figures["trainings"]
    assert (broken["lr"], broken["perplexity"]) == ("1e+30", None)
    assert 1 < broken["diverged"] <= 4
    assert whole["diverged"] is None


@pytest.mark.slow
def test_a_failed_training_is_one_line_with_the_reason(tmp_path: Path) -> None:
    words = [*compare_words(tmp_path / "out", "none", 4), "--activation-fn", "x"]
    run = commands.run("fairseq-posenc", *words, fails=True)
    assert run.status == 1
    assert "Traceback" not in run.err.splitlines()[-1]
    assert "train.log" in run.err
