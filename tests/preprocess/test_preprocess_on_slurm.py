"""Shards of a corpus on a real cluster of two nodes: together they are what one process makes."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.helpers.slurm import needs_slurm
from tests.preprocess.test_preprocess_shards import content, make_text, run

pytestmark = [pytest.mark.slow, needs_slurm]
ON = ["--on", "slurm", "time=10"]
OPTIONS = ["--empty-lines", "drop", "--min-count", 3, "--longest-line", 7]


@pytest.mark.usefixtures("cluster")
def test_eight_shards_are_one_process_byte_for_byte(tmp_path, capsys):
    texts = [make_text(tmp_path / f"text{seed}", 900, seed) for seed in range(3)]
    given = ["--train", *texts, "--valid", texts[0], *OPTIONS]
    run(*given, "--out", tmp_path / "one")
    out = tmp_path / "eight"
    sharded = [*given, "--out", out, "--num-shards", 8, *ON]
    run(*sharded)
    assert "8 shards in" in capsys.readouterr().err
    folders = sorted(out.glob("shard*"))
    assert [path.name for path in folders] == [f"shard{number}-of-8" for number in range(8)]
    one = content(tmp_path / "one")
    assert (out / "dict.txt").read_bytes() == one["dict.txt"]
    assert {(path / "dict.txt").read_bytes() for path in folders} == {one["dict.txt"]}
    assert b"".join((path / "train.bin").read_bytes() for path in folders) == one["train.bin"]
    assert (folders[0] / "valid.bin").read_bytes() == one["valid.bin"]

    # One that is lost is made again alone, and is what it was, and what one machine makes.
    before = content(folders[3])
    shutil.rmtree(folders[3])
    jobs = json.loads((out / "slurm" / "jobs.json").read_text())
    run(*sharded)
    after = json.loads((out / "slurm" / "jobs.json").read_text())
    assert {name for name in jobs if jobs[name] != after[name]} == {"shard3-of-8"}
    assert content(folders[3]) == before
    here = [*given, "--out", tmp_path / "here", "--dict", out / "dict.txt"]
    run(*here, "--shard", 3, "--num-shards", 8)
    assert content(tmp_path / "here" / "shard3-of-8") == before
