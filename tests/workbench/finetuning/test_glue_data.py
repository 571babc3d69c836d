"""GLUE's data: a text or label of its files that fairseq's sentence prediction does not read."""

import gzip
import itertools
import json
from pathlib import Path

import pytest
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from sentencepiece import SentencePieceProcessor

from fairseq_posenc.checkpoints.dictionary import MANIFEST
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.data import find_training_data, open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS, parse_tasks
from fairseq_posenc.workbench.finetuning.glue.report import complete_submission
from glue import find_file, read_examples, truncate_lengths
from tests.helpers.glue_files import header, row, train_pieces, write_task
from tests.helpers.preprocess import DATA, start

SIZES = {"train": 9, "valid": 5, "test": 4, "valid1": 3, "test1": 6, "test2": 7}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    return train_pieces(tmp_path_factory.mktemp("pieces"))


def read(folder: Path, name: str, split: str = "train"):
    task = TASKS[name]
    return read_examples(find_file(folder, task, split), task, split)


def test_quotes_separators_of_other_kinds_and_compression_change_nothing(tmp_path):
    text = 'a "quoted\u2028 word\x85 and "one more'
    columns = header("MRPC", True)
    lines = ["\t".join(columns), row(TASKS["MRPC"], columns, 0, text, "1"), ""]
    (tmp_path / "MRPC").mkdir()
    content = gzip.compress("\r\n".join(lines).encode("utf-8-sig"))
    (tmp_path / "MRPC" / "train.tsv.gz").write_bytes(content)
    found = read(tmp_path, "MRPC")
    assert (found.sentences, found.labels) == ((["the tree"], [text]), ["1"])


@pytest.mark.parametrize(
    ("task", "split", "what", "message"),
    [
        ("QNLI", "train", "short", "line 11: 1 columns instead of 4; mend the file"),
        ("QQP", "test", "short", "line 6: 1 columns instead of 3; mend the file"),
        ("QQP", "train", "short", None),
        ("RTE", "valid", "maybe", "line 7: the label 'maybe' is not one of entailment, not_entail"),
        ("STS-B", "valid", "5.1", "line 7: the score '5.1' is not between 0 and 5; mend the file"),
        ("STS-B", "valid", "-1", "line 7: the score '-1' is not between 0 and 5; mend the file"),
        ("STS-B", "valid", "nan", "line 7: the score 'nan' is not between 0 and 5; mend the file"),
        ("SST-2", "train", "renamed", "line 1: no column is called 'label' (sentence, labels)"),
    ],
)
def test_a_wrong_row_is_shown_with_its_place(tmp_path, task, split, what, message):
    """Short rows of QQP's labelled files, which have some, are counted."""
    write_task(tmp_path, task, SIZES)
    path = find_file(tmp_path, TASKS[task], split)
    text = path.read_text()
    line = row(TASKS[task], header(task, True), 5, "a bird", what) if what != "short" else "this"
    path.write_text(text.replace("label", "labels", 1) if what == "renamed" else f"{text}{line}\n")
    if message:
        with pytest.raises(UserError) as error:
            read(tmp_path, task, split)
        assert str(error.value).startswith(f"{path}, {message}")
    else:
        found = read(tmp_path, task, split)
        assert (len(found.ids), found.broken) == (9, 1)


def test_the_longer_sentence_is_cut_first():
    for room, *pair in itertools.product(range(14), range(12), range(12)):
        first, second = pair
        while first + second > room:
            first, second = (first - 1, second) if first > second else (first, second - 1)
        assert truncate_lengths(pair, room) == [first, second]
    assert (truncate_lengths([3], 5), truncate_lengths([9], 5)) == ([3], [5])


@pytest.mark.parametrize("name", TASKS)
def test_fairseqs_own_task_reads_the_texts_and_labels_of_every_file(tmp_path, name, pieces, capsys):
    task = TASKS[name]
    written = write_task(tmp_path / "raw", name, SIZES)
    common = [tmp_path / "raw", "--sentencepiece-model", pieces, "--tasks", name, "--out"]
    start("glue", *common, tmp_path / "bin")
    capsys.readouterr()
    start("glue", *common, tmp_path / "bin")
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

    def cut(text: str) -> list[int]:
        return [theirs.dictionary.index(x) for x in processor.encode(text, out_type=str)]

    processor = SentencePieceProcessor(model_file=str(pieces))
    for split in task.files:
        dataset = theirs.load_dataset(split)
        assert len(dataset) == SIZES[split] == data.splits[split]["examples"]
        assert max(dataset.sizes[0]) == data.splits[split]["longest"]
        for (text, label), example in zip(written[split], dataset):
            tokens = [0, *cut(text), 2]
            if len(task.sentences) > 1:  # <s> first </s> </s> second </s>
                tokens[:1] = [0, *cut("the tree"), 2, 2]
            assert example["net_input.src_tokens"].tolist() == tokens
            if split not in task.test_splits:
                target = task.classes.index(label) if task.classes else float(label) / 5
                assert [*example["target"]] == pytest.approx([target])
        if split in task.test_splits:
            assert read(tmp_path / "raw", name, split).labels == []
            assert open_glue_data(data.path).test_ids(split) == [*map(str, range(SIZES[split]))]
    # Long ones are cut and counted.
    limit = data.splits["train"]["longest"] - 1
    start("glue", *common, tmp_path / "cut", "--max-tokens", limit)
    shorter = open_glue_data(tmp_path / "cut" / name)
    assert shorter.splits["train"]["longest"] == limit
    assert 0 == data.splits["train"]["cut"] < shorter.splits["train"]["cut"] < SIZES["train"]
    manifest = json.loads((shorter.path / MANIFEST).read_text())
    assert manifest["plan"]["options"] == {"max_tokens": limit}


def test_what_glues_site_wants_beside_the_eight(tmp_path, pieces):
    """The diagnostic set for MNLI's model, which may be missing, and WNLI's majority class."""
    raw, submission = tmp_path / "raw", tmp_path / "submission"
    for name in TASKS:
        write_task(raw, name, {split: 3 for split in TASKS[name].files if split != "test2"})
    start("glue", raw, "--out", tmp_path / "eight", "--sentencepiece-model", pieces)
    assert "test2" not in open_glue_data(tmp_path / "eight" / "MNLI").splits
    assert not (tmp_path / "eight" / "WNLI.tsv").exists()
    write_task(raw, "MNLI", SIZES)
    labels = [label for _, label in write_task(raw, "WNLI", SIZES)["train"]]
    start("glue", raw, "--out", tmp_path / "all", "--sentencepiece-model", pieces)
    assert open_glue_data(tmp_path / "all" / "MNLI").splits["test2"]["examples"] == 7
    expected = "".join(f"{number}\t{max(labels, key=labels.count)}\n" for number in range(4))
    assert (tmp_path / "all" / "WNLI.tsv").read_text() == "index\tprediction\n" + expected
    missing = ["AX", "CoLA", "MNLI-m", "MNLI-mm", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B"]
    for folder in ("all", "eight"):  # what one has added stays
        assert complete_submission(submission, tmp_path / folder) == missing
        assert [path.name for path in submission.iterdir()] == ["WNLI.tsv"]


def test_tasks_and_data_that_cannot_be_trained_on_are_shown(tmp_path, pieces):
    assert parse_tasks("all") == parse_tasks("MNLI, QQP, QNLI, SST-2, CoLA, STS-B, MRPC, RTE")
    with pytest.raises(UserError, match=r"--tasks WNLI: unknown task 'WNLI': choose MNLI"):
        parse_tasks("WNLI")
    with pytest.raises(UserError, match=r"--tasks RTE,RTE: a task is named"):
        parse_tasks("RTE,RTE")
    with pytest.raises(UserError, match="give --dict: the dict"):
        start("glue", tmp_path, "--out", tmp_path, "--encoder-json", "e", "--vocab-bpe", "v")
    with pytest.raises(UserError, match=r"QQP/train.tsv does not exist, nor with .gz"):
        read(tmp_path, "QQP")
    with pytest.raises(UserError, match=r"RTE does not exist: make it .* preprocess glue --ta"):
        find_training_data(tmp_path, TASKS["RTE"])
    (tmp_path / "RTE").mkdir()
    with pytest.raises(UserError, match="RTE is not a data-bin of a GLUE task: it has no"):
        find_training_data(tmp_path, TASKS["RTE"])
    counts, wrong = {"examples": 9, "longest": 9}, "describes no GLUE task"
    faulty = [(x, wrong) for x in ({}, {"train": {"examples": 9}}, {"train": 9})]
    for splits, message in [*faulty, ({"valid": counts}, "RTE has no train set: make it")]:
        described = json.dumps({"glue_task": "RTE", "splits": splits})
        (tmp_path / "RTE" / MANIFEST).write_text(described)
        with pytest.raises(UserError, match=message):
            find_training_data(tmp_path, TASKS["RTE"])


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
def test_the_published_files_have_their_published_counts(name):
    for split, expected in zip(("train", "valid", "test"), PUBLISHED[name]):
        if expected:
            found = read(DATA / "glue_data", name, split)
            assert (len(found.ids), found.broken) == (expected, 0)
