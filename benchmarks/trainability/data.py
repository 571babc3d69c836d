"""The data: Python's documentation for language models, parallel text for translation."""

from __future__ import annotations

import gzip
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fairseq import options
from fairseq_cli import preprocess

from fairseq_posenc.workbench.experiments.corpus import write_corpus
from fairseq_posenc.workbench.experiments.pieces import encode, train_pieces
from fairseq_posenc.workbench.running.stages import Stage

VOCABULARY = {"text": 512, "translation": 2000}


def prepare(out: Path, files: dict[str, Path]) -> tuple[dict[str, Path], dict[str, Any]]:
    """Make the data, or find it made; return the folder of each family, and figures."""
    step = Stage(out / "text", {"vocabulary": VOCABULARY["text"], "python": sys.version})
    facts = {"text": step.do(lambda: make_text(step.folder))}
    folders = dict.fromkeys(("masked LM", "causal LM"), step.folder / "binary")
    if files:
        inputs = {"vocabulary": VOCABULARY["translation"], **{k: str(v) for k, v in files.items()}}
        parallel = Stage(out / "parallel", inputs)
        facts["translation"] = parallel.do(lambda: make_translation(parallel.folder, files))
        folders["translation"] = parallel.folder / "binary"
    return folders, facts


def make_text(folder: Path) -> dict[str, Any]:
    """Write the documentation inside Python as data for the language models."""
    facts = write_corpus(None, "Python's documentation", folder)
    train_pieces(folder / "train.txt", folder / "pieces", VOCABULARY["text"])
    for part in ("train", "valid"):
        encode(folder / "pieces.model", folder / f"{part}.txt", folder / f"{part}.pieces")
    _preprocess(folder, "--only-source")
    return {**facts, **_levels(folder, "train.pieces", "valid.pieces")}


def make_translation(folder: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Write parallel text as data for translation.

    Args:
        folder: where to write.
        files: by ``train.source``, ``train.target``, ``valid.source``, ``valid.target``.
    """
    texts = {name: _read_lines(path) for name, path in files.items()}
    both = folder / "both.txt"
    both.write_text("\n".join(texts["train.source"] + texts["train.target"]) + "\n", "utf-8")
    train_pieces(both, folder / "pieces", VOCABULARY["translation"])
    for name, lines in texts.items():
        part, side = name.split(".")
        raw = folder / name
        raw.write_text("\n".join(lines) + "\n", "utf-8")
        encode(folder / "pieces.model", raw, folder / f"{part}.pieces.{side}")
    _preprocess(folder, "-s", "source", "-t", "target", "--joined-dictionary")
    facts = {f"{name} lines": len(lines) for name, lines in texts.items()}
    return {**facts, **_levels(folder, "train.pieces.target", "valid.pieces.target")}


def _preprocess(folder: Path, *arguments: str) -> None:
    parser = options.get_preprocessing_parser()
    common = ["--destdir", str(folder / "binary"), "--workers", "1"]
    parts = [f"--{part}pref={folder / part}.pieces" for part in ("train", "valid")]
    preprocess.main(parser.parse_args([*common, *parts, *arguments]))


def _read_lines(path: Path) -> list[str]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return [" ".join(line.split()) for line in text.rstrip("\n").split("\n")]


def _levels(folder: Path, train_file: str, valid_file: str) -> dict[str, float]:
    """Return the loss of a model that knows only how frequent each piece is."""
    counts, valid = (
        Counter(
            word
            for line in (folder / name).read_text("utf-8").splitlines()
            for word in (*line.split(), "</s>")
        )
        for name in (train_file, valid_file)
    )
    total, kinds = sum(counts.values()), len(counts) + 1
    bits = sum(n * -math.log2((counts[word] + 1) / (total + kinds)) for word, n in valid.items())
    return {"unigram": bits / sum(valid.values())}
