"""The programs of preprocess/ as users call them, and fairseq's commands on what they write."""

from __future__ import annotations

import ast
import gzip
import json
import os
import random

import pytest
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset

from tests.helpers import commands
from tests.helpers.preprocess import PROGRAMS, start
from tests.helpers.products import some_of


def sentences(number: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    words = [f"w{i}" for i in range(20)]
    return [" ".join(generator.choices(words, k=6)).capitalize() + "." for _ in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("family", some_of(["masked_lm"], ["masked_lm", "causal_lm"]))
def test_fairseq_trains_on_shards_one_after_the_other(tmp_path, family, monkeypatch):
    document = [" ".join(sentences(9, seed)) for seed in range(8)]
    lines = [json.dumps({"text": text}) for text in document]
    for number, part in enumerate((lines[:4], lines[4:])):
        with gzip.open(tmp_path / f"c4.{number}.json.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(part))
    common = ["--sentences", "--words", "--workers", 1, "--longest-line", 15]
    common += ["--valid", tmp_path / "c4.0.json.gz"]
    shards = [tmp_path / "c4" / str(number) for number in (0, 1)]
    for number, shard in enumerate(shards):
        files = ["--train", tmp_path / f"c4.{number}.json.gz", "--out", shard]
        given = ["--dict", shards[0] / "dict.txt"] if number else []
        start("json_lines", *files, *common, *given)
    arch = {"masked_lm": "roberta_sentence_learned_tiny", "causal_lm": "transformer_lm_rope_tiny"}
    done = commands.run(
        *("fairseq-train", os.pathsep.join(map(str, shards)), "--user-dir", commands.USER_DIR),
        *commands.FAMILIES[family].task,
        *("--arch", arch[family], "--max-epoch", 2, "--no-save", *commands.TRAINING),
    )
    for shard in shards:
        assert f"loaded 39 examples from: {shard}/train" in done.log  # 36 sentences, 3 ends
    assert len(done.valid()) == 2


CORPORA = {
    "plain_text": ("A b. C\n\nD", [], ["A b.", "C", "", "D"]),
    "json_lines": ('{"body": "A b. C"}\n{"body": "D"}', ["--field", "body"], None),
    "wikipedia": ("<doc id=1>\nA b. C\n</doc>\n<doc id=2>\nD\n</doc>\n", [], None),
    "wikitext": (" = A = \n A b. C \n = D = \n D\n", ["--articles", "--no-headings"], None),
    "chinese": ("甲 乙。丙\n\n丁", [], ["甲 乙 。", "丙", "", "丁"]),
}


@pytest.mark.parametrize("name", CORPORA)
def test_every_program_does_what_it_says(tmp_path, name, monkeypatch):
    text, more, expected = CORPORA[name]
    (tmp_path / "text").write_text(text, encoding="utf-8")
    tokens = [] if name == "chinese" else ["--words"]
    files = ["--train", tmp_path / "text", "--out", tmp_path / "bin"]
    start(name, *files, *tokens, *more, "--sentences", "--workers", "1")
    dictionary = Dictionary.load(str(tmp_path / "bin" / "dict.txt"))
    items = MMapIndexedDataset(str(tmp_path / "bin" / "train"))
    expected = expected or CORPORA["plain_text"][2]
    assert [dictionary.string(item) for item in items] == expected


@pytest.mark.parametrize("name", CORPORA)
def test_every_program_explains_itself(name, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        start(name, *["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"fairseq-posenc preprocess {name} --train" in text
    assert "--longest-line" in text


def test_only_the_settings_are_built_from_parsed_options():
    """No module behind the door sees an ``argparse.Namespace``."""
    takers = {
        function.name
        for path in PROGRAMS.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        and any("Namespace" in ast.unparse(arg) for arg in function.args.args)
    }
    assert takers == {"from_args", "run"}
