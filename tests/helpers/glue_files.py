"""GLUE's raw files in small: their own headers and quirks, and texts that say their label."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from fairseq_posenc.tasks.glue.definitions import TASKS, WNLI
from tests.helpers.preprocess import write_pieces

COLORS = ("red", "blue", "green")
WORDS = [*COLORS, "a", "bird", "sees", "the", "old", "tree", "and", "sings", "of", "it"]
# Columns of the files with labels and without, as they are published; CoLA's first have no header.
HEADERS = {
    "WNLI": ("index,sentence1,sentence2,label", "index,sentence1,sentence2"),
    "MNLI": (
        "index,promptID,pairID,genre,sentence1,sentence2,label1,gold_label",
        "index,promptID,pairID,genre,sentence1,sentence2",
    ),
    "QQP": ("id,qid1,qid2,question1,question2,is_duplicate", "id,question1,question2"),
    "QNLI": ("index,question,sentence,label", "index,question,sentence"),
    "SST-2": ("sentence,label", "index,sentence"),
    "CoLA": ("source,label,mark,sentence", "index,sentence"),
    "STS-B": ("index,genre,sentence1,sentence2,score", "index,genre,sentence1,sentence2"),
    "MRPC": ("Quality,#1 ID,#2 ID,#1 String,#2 String", "index,#1 ID,#2 ID,#1 String,#2 String"),
    "RTE": ("index,sentence1,sentence2,label", "index,sentence1,sentence2"),
}


def write_task(
    folder: Path, name: str, sizes: dict[str, int], wrong: str = ""
) -> dict[str, list[tuple[str, str]]]:
    """Write the files of a task, as many examples of each split; the labels of one may be wrong.

    Returns the examples of each split: the text, which is the second one of a pair, and the label.
    MRPC's files with labels begin with a mark, as published; they are Windows' and compressed.
    QQP's end with a row that lacks columns, as some of the published do.
    """
    task, rng = {**TASKS, "WNLI": WNLI}[name], random.Random(0)
    labels = task.classes or ("0.000", "2.571", "5.000")
    written: dict[str, list[tuple[str, str]]] = {}
    for split in (split for split in task.files if split in sizes):
        labeled = split not in task.test_splits
        columns = HEADERS["WNLI" if split == "test2" else name][not labeled].split(",")
        lines = [] if labeled and task.headless else ["\t".join(columns)]
        written[split] = examples = []
        for number in range(sizes[split]):
            which = rng.randrange(len(labels))
            words = [*rng.choices(WORDS[3:], k=rng.randint(2, 6)), *[COLORS[which]] * 3]
            words += ['"old\u2028', "of\x85"] if name == "MRPC" else []
            rng.shuffle(words)
            text, label = " ".join(words).strip(), labels[which - (split == wrong)]
            examples.append((text, label))
            cells = {**dict.fromkeys(task.sentences, "the tree"), task.sentences[-1]: text}
            cells |= {"index": str(number), "id": str(number), task.label: label}
            lines.append("\t".join(cells.get(column, "x") for column in columns))
        lines += ["short"] if name == "QQP" and labeled else []
        path = folder / name / f"{task.files[split]}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "\n".join([*lines, ""])
        if name == "MRPC" and labeled:
            encoded = content.replace("\n", "\r\n").encode("utf-8-sig")
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(encoded))
        else:
            path.write_text(content, encoding="utf-8")
    return written


def train_pieces(folder: Path) -> Path:
    """Write a text of the words; return a sentencepiece model of it."""
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=8)) for _ in range(200)]
    (folder / "pieces.txt").write_text("\n".join(lines))
    path = write_pieces(folder, 32, lines, control_symbols=["<pad>", "<mask>"])
    return path.rename(folder / "pieces.model")
