"""What the benchmarks make of a comparison's models: fine-tuned, or with other positions."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_posenc.checkpoints.safe_loading import open_mapped
from fairseq_posenc.workbench.experiments.variants import parse_variants
from fairseq_posenc.workbench.results.record import Record, read
from tests.helpers.commands import run
from tests.helpers.glue_files import WORDS, start, write_task

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from swaps import Swaps  # noqa: E402

TINY = ["--encoder-layers", "1", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"]
TINY += ["--encoder-attention-heads", "2", "--max-tokens", "1024", "--tokens-per-sample", "32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a comparison, `models`, and GLUE's data in its pieces, `glue`."""
    folder, rng = tmp_path_factory.mktemp("compared"), random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=8)) for _ in range(1500)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    run(
        *("fairseq-posenc", "compare", "--text", folder / "text.txt", "--out", folder / "models"),
        *("--encodings", "rope", "--updates", 4, "--vocab-size", 30, "--seeds", "1,2"),
        *("--jobs", 1, "--", *TINY),
    )
    for task in ("SST-2", "STS-B"):
        write_task(folder / "raw", task, {"train": 24, "valid": 9})
    binary = folder / "models" / "data" / "binary"
    pieces = ["--sentencepiece-model", binary / "sentencepiece.model"]
    pieces += ["--dict", binary / "dict.txt", "--max-tokens", 32]
    chosen = ["--tasks", "SST-2,STS-B", "--splits", "train,valid"]
    start("glue", [folder / "raw", "--out", folder / "glue", *pieces, *chosen])
    return folder


def call(place: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in the folder of the comparison."""
    command = [sys.executable, str(BENCHMARKS / name), "models", *options]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


def test_models_are_fine_tuned_each_with_its_seed_and_a_second_call_repeats_none(place):
    given = ["--encodings", "rope", "--seeds", "1,2", "--out", "tuned.json", "--"]
    given += ["--protocol", "m4m", "--data", "glue", "--tasks", "SST-2,STS-B", "--jobs", "1"]
    given += ["--learning-rates", "1e-3", "--device", "cpu", "--set", "optimization.max_epoch=1"]
    done = call(place, "finetuning.py", *given)
    assert done.returncode == 0, done.stderr
    record = read(place / "tuned.json")
    assert record.kind == "finetuning"
    assert [(row["task"], row["seeds"]) for row in record.rows] == [
        ("SST-2", 2),
        ("STS-B", 2),
        ("mean", 2),
    ]
    scores = {(row["task"], row["seed"]): row["score"] for row in record.figures["runs"]}
    for seed in (1, 2):
        own = read(place / "tuned" / "rope" / f"lr-0.003-seed-{seed}" / "results.json")
        words, similar = sorted(own.figures["runs"], key=lambda row: row["task"])
        assert words["seed"] == similar["seed"] == seed
        assert f"models/rope/lr-0.003-seed-{seed}/" in own.data["checkpoint"]
        both = words["accuracy"], similar["spearman"]
        assert (scores["SST-2", seed], scores["STS-B", seed]) == both
        assert scores["mean", seed] == pytest.approx(sum(both) / 2)
    for row in record.rows:
        assert row["model"] == "rope"
        assert row["score"] == pytest.approx((scores[row["task"], 1] + scores[row["task"], 2]) / 2)

    kept = times(place, "tuned")
    assert call(place, "finetuning.py", *given).returncode == 0
    assert times(place, "tuned") == kept
    assert read(place / "tuned.json") == record


def test_a_fine_tuning_that_fails_is_told_in_a_line(place):
    given = ["--encodings", "alibi", "--out", "none.json", "--", "--protocol", "m4m"]
    done = call(place, "finetuning.py", *given, "--data", "glue", "--learning-rates", "1e-3")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert line.startswith("error: fairseq-posenc: ")
    assert "checkpoint_last.pt" in line
    assert line.endswith("(its log: none/alibi/lr-0.003-seed-1/glue.log)")
    assert not (place / "none.json").exists()


def test_trainings_start_from_the_models_weights_with_other_positions(place):
    given = ["--source", "rope", "--encodings", "rope,m4m", "--updates", "2", "--seeds", "1,2"]
    given += ["--out", "start.json", "--lr", "0.000000001", "--", "--warmup-updates", "1"]
    done = call(place, "swaps.py", *given)
    assert done.returncode == 0, done.stderr
    record, source = read(place / "start.json"), read(place / "models" / "compare.json")
    assert (record.data["source"], record.data["source_updates"]) == ("rope", 4)
    assert [(row["model"], row["updates"], row["seeds"]) for row in record.rows] == [
        ("rope", 2, 2),
        ("m4m", 2, 2),
    ]
    # At a rate of nearly nothing a model stays as it was trained, and so as good.
    started, trained = perplexities(record, "rope"), perplexities(source, "rope")
    assert started == pytest.approx(trained, rel=1e-4)
    assert started[1] != started[2]
    old, new = (
        open_mapped(place / folder / "checkpoint_last.pt")["model"]
        for folder in ("models/models/rope/lr-0.003-seed-2", "start/m4m/lr-0.000000001-seed-2")
    )
    shared = {name for name in old.keys() & new.keys() if not name.endswith("_extra_state")}
    assert any("q_proj" in name for name in shared)
    assert any("m4m" in name for name in new.keys() - old.keys())
    for name in shared:
        assert (old[name] - new[name]).abs().max() < 1e-6, name

    kept = times(place, "start")
    assert call(place, "swaps.py", *given).returncode == 0
    assert times(place, "start") == kept


def test_another_source_is_another_start(tmp_path):
    (rope,) = parse_variants("rope")
    experiment = Swaps(
        out=tmp_path,
        source=rope,
        source_lr="0.003",
        trainings=tmp_path / "start",
        variants=(rope,),
        seeds=(1,),
        updates=2,
        vocab_size=100,
    )
    (run,) = experiment.runs
    source = tmp_path / "models" / "rope" / "lr-0.003-seed-1" / "checkpoint_last.pt"
    source.parent.mkdir(parents=True)
    options = []
    for content in (b"trained", b"trained further"):
        source.write_bytes(content)
        options.append(experiment.options(run))
    assert options[0] != options[1]


def perplexities(record: Record, model: str) -> dict[int, float]:
    """Read a model's perplexity for each seed."""
    rows = record.figures["trainings"]
    return {row["seed"]: row["perplexity"] for row in rows if row["model"] == model}


def times(place: Path, folder: str) -> dict[Path, int]:
    """Read when each checkpoint below a folder was written."""
    found = {path: path.stat().st_mtime_ns for path in (place / folder).rglob("*.pt")}
    assert found
    return found
