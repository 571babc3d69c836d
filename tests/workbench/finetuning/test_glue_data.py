"""preprocess/glue.py: fairseq's sentence prediction reads each text and label of GLUE's files."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

from fairseq_posenc.checkpoints.dictionary import MANIFEST
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.data import find_training_data, open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS, WNLI, parse_tasks
from fairseq_posenc.workbench.finetuning.glue.report import complete_submission
from glue import find_file, read_examples, truncate_lengths
from tests.helpers.glue_files import COLOURS, DATA, header, labels_of, row, train_pieces, write_task
from tests.helpers.preprocess import start

SIZES = {"train": 9, "valid": 5, "test": 4}
ALL_SIZES = {**SIZES, "valid1": 3, "test1": 6, "test2": 7}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    return train_pieces(tmp_path_factory.mktemp("pieces"))


def sizes_of(name: str) -> dict[str, int]:
    return {split: ALL_SIZES[split] for split in TASKS[name].files}


def read(folder: Path, name: str, split: str = "train"):
    task = TASKS[name]
    return read_examples(find_file(folder, task, split), task, split)


def test_quotes_separators_of_other_kinds_and_compression_change_nothing(tmp_path):
    text = 'a "quoted\u2028 word\x85 and "one more'
    columns = header("MRPC", True)
    lines = ["\t".join(columns), row(TASKS["MRPC"], columns, 0, "1", text)]
    (tmp_path / "MRPC").mkdir()
    with gzip.open(tmp_path / "MRPC" / "train.tsv.gz", "wt", encoding="utf-8-sig") as file:
        file.write("\r\n".join(lines) + "\r\n")
    found = read(tmp_path, "MRPC")
    assert found.sentences == (["the tree"], [text])
    assert found.labels == ["1"]


def change(path: Path, task: str, what: str) -> None:
    """Add a row to a file of a task: a short one, or one with a label; or rename a column."""
    text = path.read_text()
    if what == "renamed":
        path.write_text(text.replace("label", "labels", 1))
    else:
        line = row(TASKS[task], header(task, True), 5, what, "a bird")
        path.write_text(f"{text}{line if what != 'short' else 'only this'}\n")


@pytest.mark.parametrize(
    ("task", "split", "what", "message"),
    [
        ("QNLI", "train", "short", "line 11: 1 columns instead of 4; mend the file"),
        ("QQP", "test", "short", "line 6: 1 columns instead of 3; mend the file"),
        ("RTE", "valid", "maybe", "line 7: the label 'maybe' is not one of entailment, not_entail"),
        ("STS-B", "valid", "5.1", "line 7: the score '5.1' is not between 0 and 5; mend the file"),
        ("STS-B", "valid", "nan", "line 7: the score 'nan' is not between 0 and 5; mend the file"),
        ("SST-2", "train", "renamed", "line 1: no column is called 'label' (sentence, labels)"),
    ],
)
def test_a_wrong_row_is_told_with_its_place(tmp_path, task, split, what, message):
    write_task(tmp_path, task, SIZES)
    path = find_file(tmp_path, TASKS[task], split)
    change(path, task, what)
    with pytest.raises(UserError) as error:
        read(tmp_path, task, split)
    assert str(error.value).startswith(f"{path}, {message}")


def test_broken_rows_of_qqp_are_counted_and_a_missing_file_is_told(tmp_path):
    write_task(tmp_path, "QQP", SIZES)
    path = tmp_path / "QQP" / "train.tsv"
    change(path, "QQP", "short")
    found = read(tmp_path, "QQP")
    assert (len(found.ids), found.broken) == (9, 1)
    path.unlink()
    with pytest.raises(UserError, match=r"QQP/train.tsv does not exist, nor with .gz"):
        read(tmp_path, "QQP")


def cut_slowly(first: int, second: int, room: int) -> tuple[int, int]:
    while first + second > room:
        first, second = (first - 1, second) if first > second else (first, second - 1)
    return first, second


def test_the_longer_sentence_is_cut_first():
    for room, *pair in itertools.product(range(14), range(12), range(12)):
        assert truncate_lengths(pair, room) == list(cut_slowly(*pair, room))
    assert (truncate_lengths([3], 5), truncate_lengths([9], 5)) == ([3], [5])


def texts_of(tokens: torch.Tensor, dictionary: Dictionary) -> list[str]:
    """Return the sentences of <s> first </s> or <s> first </s> </s> second </s>."""
    ids = tokens.tolist()
    assert ids[0] == dictionary.bos()
    parts = [list(part) for is_end, part in itertools.groupby(ids[1:], dictionary.eos().__eq__)]
    assert parts[1::2] == [[2, 2], [2]][-len(parts) // 2 :]
    return [dictionary.string(torch.tensor(part), "sentencepiece") for part in parts[::2]]


@pytest.mark.parametrize("name", TASKS)
def test_fairseqs_own_task_reads_the_texts_and_labels_of_every_file(tmp_path, name, pieces, capsys):
    task = TASKS[name]
    write_task(tmp_path / "raw", name, sizes_of(name))
    common = [tmp_path / "raw", "--out", tmp_path / "bin", "--sentencepiece-model", pieces]
    start("glue", *common, "--tasks", name)
    capsys.readouterr()
    start("glue", *common, "--tasks", name)
    assert capsys.readouterr().err.startswith(f"{tmp_path}/bin/{name} exists already")
    settings = SentencePredictionConfig(
        data=str(tmp_path / "bin" / name),
        num_classes=len(task.classes) or 1,
        init_token=0,
        separator_token=2,
        no_shuffle=True,
        regression_target=task.regression,
        classification_head_name="head",
        seed=1,
    )
    theirs = SentencePredictionTask.setup_task(settings)
    data = find_training_data(tmp_path / "bin", task)
    said = dict(zip(COLOURS, labels_of(task)))
    for split, size in sizes_of(name).items():
        raw = read(tmp_path / "raw", name, split)
        dataset = theirs.load_dataset(split)
        assert len(dataset) == size == data.splits[split]["examples"]
        assert max(dataset.sizes[0]) == data.splits[split]["longest"]
        for number in range(size):
            texts = texts_of(dataset[number]["net_input.src_tokens"], theirs.dictionary)
            assert texts == [side[number] for side in raw.sentences]
            assert texts[:-1] == ["the tree"] * (len(task.sentences) - 1)
            if split in task.valid_splits or split == "train":
                label = said[next(word for word in texts[-1].split() if word in said)]
                target = dataset[number]["target"]
                assert raw.labels[number] == label
                if task.classes:
                    assert task.classes[int(target)] == label
                else:
                    assert list(target) == pytest.approx([float(label) / 5])
        if split in task.test_splits:
            assert raw.labels == []
            assert open_glue_data(data.path).test_ids(split) == [str(n) for n in range(size)]


def test_what_glues_site_wants_beside_the_eight(tmp_path, pieces, capsys):
    """The diagnostic set for MNLI's model, which may be missing, and WNLI's majority class."""
    raw, out = tmp_path / "raw", tmp_path / "bin"
    for name in TASKS:
        write_task(raw, name, {split: 3 for split in TASKS[name].files if split != "test2"})
    common = [raw, "--out", out, "--sentencepiece-model", pieces]
    start("glue", *common)
    assert "test2" not in open_glue_data(out / "MNLI").splits
    assert not (out / "WNLI.tsv").exists()
    write_task(raw, "MNLI", sizes_of("MNLI"))
    write_task(raw, "WNLI", SIZES)
    assert parse_tasks("all") == parse_tasks("MNLI, QQP, QNLI, SST-2, CoLA, STS-B, MRPC, RTE")
    start("glue", raw, "--out", tmp_path / "all", "--sentencepiece-model", pieces)
    assert open_glue_data(tmp_path / "all" / "MNLI").splits["test2"]["examples"] == 7
    labels = read_examples(raw / "WNLI" / "train.tsv", WNLI, "train").labels
    majority = max(labels, key=labels.count)
    expected = "".join(f"{number}\t{majority}\n" for number in range(4))
    assert (tmp_path / "all" / "WNLI.tsv").read_text() == "index\tprediction\n" + expected
    submission = tmp_path / "submission"
    missing = complete_submission(submission, tmp_path / "all")
    assert missing == ["AX", "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2",
                       "STS-B"]  # fmt: skip
    assert [path.name for path in submission.iterdir()] == ["WNLI.tsv"]
    assert complete_submission(submission, out) == missing


def test_long_pairs_are_cut_and_counted(tmp_path, pieces):
    write_task(tmp_path / "raw", "RTE", {"train": 40, "valid": 5, "test": 4})
    common = [tmp_path / "raw", "--sentencepiece-model", pieces, "--tasks", "RTE"]
    start("glue", *common, "--out", tmp_path / "whole")
    whole = open_glue_data(tmp_path / "whole" / "RTE")
    limit = whole.splits["train"]["longest"] - 3
    start("glue", *common, "--out", tmp_path / "cut", "--max-tokens", limit)
    shorter = open_glue_data(tmp_path / "cut" / "RTE")
    assert shorter.splits["train"]["longest"] == limit
    assert 0 < shorter.splits["train"]["cut"] < 40
    assert whole.splits["train"]["cut"] == 0
    manifest = json.loads((shorter.path / "manifest.json").read_text())
    assert manifest["plan"]["options"] == {"max_tokens": limit}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [("WNLI", "unknown task 'WNLI': choose from MNLI"), ("RTE,RTE", "a task is named")],
)
def test_wrong_tasks_are_told(tasks, message):
    with pytest.raises(UserError) as error:
        parse_tasks(tasks)
    assert str(error.value).startswith(f"--tasks {tasks}: {message}")


def test_a_vocabulary_needs_its_dictionary(tmp_path):
    with pytest.raises(UserError, match="give --dict: the dict"):
        start("glue", tmp_path, "--out", tmp_path, "--encoder-json", "e", "--vocab-bpe", "v")


def test_data_that_cannot_be_trained_on_is_told(tmp_path, pieces):
    write_task(tmp_path / "raw", "QNLI", SIZES)
    common = [tmp_path / "raw", "--out", tmp_path / "bin", "--sentencepiece-model", pieces]
    start("glue", *common, "--tasks", "QNLI")
    manifest = tmp_path / "bin" / "QNLI" / MANIFEST
    described = json.loads(manifest.read_text())
    del described["splits"]["train"]
    manifest.write_text(json.dumps(described))
    with pytest.raises(
        UserError, match=r"QNLI has no train set: make it with fairseq-posenc preprocess glue"
    ):
        find_training_data(tmp_path / "bin", TASKS["QNLI"])
    with pytest.raises(
        UserError, match=r"RTE does not exist: make it with fairseq-posenc preprocess glue --tas"
    ):
        find_training_data(tmp_path / "bin", TASKS["RTE"])
    (tmp_path / "bin" / "RTE").mkdir()
    with pytest.raises(UserError, match="RTE is not a data-bin of a GLUE task: it has no"):
        find_training_data(tmp_path / "bin", TASKS["RTE"])
    for splits in ({}, {"train": {"examples": 9}}, {"train": 9}):
        manifest.write_text(json.dumps({"glue_task": "RTE", "splits": splits}))
        with pytest.raises(UserError, match="describes no GLUE task"):
            open_glue_data(manifest.parent)


PUBLISHED = {
    "CoLA": (8551, 1043, 1063),
    "SST-2": (67349, 872, 1821),
    "RTE": (2490, 277, 3000),
    "MRPC": (3668, 408, 1725),
    "STS-B": (5749, 1500, 1379),
    "QNLI": (None, 5463, 5463),
}


@pytest.mark.skipif(not (DATA / "glue_data").is_dir(), reason="GLUE's files are not here")
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_counts(name):
    for split, expected in zip(("train", "valid", "test"), PUBLISHED[name]):
        if expected:
            found = read(DATA / "glue_data", name, split)
            assert (len(found.ids), found.broken) == (expected, 0)
