"""Shards of a corpus on a real cluster of two nodes: together they are what one process makes."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.helpers.products import WHOLE
from tests.helpers.slurm import needs_slurm
from tests.preprocess.test_preprocess_shards import content, make_text, run

pytestmark = [pytest.mark.slow, needs_slurm]
ON = ["--on", "slurm", "time=10"]
SHARDS = 8 if WHOLE else 4  # on two nodes, so that some wait for others
OPTIONS = ["--empty-lines", "drop", "--min-count", 3, "--longest-line", 7]


@pytest.mark.usefixtures("cluster")
def test_shards_are_one_process_byte_for_byte(tmp_path, capsys):
    texts = [make_text(tmp_path / f"text{seed}", 900, seed) for seed in range(3)]
    given = ["--train", *texts, "--valid", texts[0], *OPTIONS]
    run(*given, "--out", tmp_path / "one")
    out = tmp_path / "several"
    sharded = [*given, "--out", out, "--num-shards", SHARDS, *ON]
    run(*sharded)
    assert f"{SHARDS} shards in" in capsys.readouterr().err
    folders = sorted(out.glob("shard*"))
    assert [path.name for path in folders] == [
        f"shard{number}-of-{SHARDS}" for number in range(SHARDS)
    ]
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
    assert {name for name in jobs if jobs[name] != after[name]} == {f"shard3-of-{SHARDS}"}
    assert content(folders[3]) == before
    here = [*given, "--out", tmp_path / "here", "--dict", out / "dict.txt"]
    run(*here, "--shard", 3, "--num-shards", SHARDS)
    assert content(tmp_path / "here" / f"shard3-of-{SHARDS}") == before
