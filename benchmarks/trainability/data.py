"""Prepares the data: Python's documentation for language models, parallel text for translation."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

from fairseq import options
from fairseq_cli import preprocess

from fairseq_posenc.workbench.experiments.corpus import (
    train_pieces,
    unigram_perplexity,
    write_pieces,
)
from fairseq_posenc.workbench.experiments.text_experiment import TextExperiment
from fairseq_posenc.workbench.running.jobs import RunContext, Step

VOCABULARY = {"text": 512, "translation": 2000}


def prepare(out: Path, files: dict[str, Path], lock: int) -> tuple[dict[str, Path], dict[str, Any]]:
    """Make the data unless it exists; return the folder of each family, and figures."""
    experiment = TextExperiment(
        out=out, variants=(), seeds=(), updates=1, vocab_size=VOCABULARY["text"]
    )
    facts = {"text": experiment.prepare(RunContext(lock))}
    facts["text"] |= _compute_unigram(out / "data", "train.pieces", "valid.pieces")
    folders = dict.fromkeys(("masked LM", "causal LM"), out / "data" / "binary")
    if files:
        inputs = {
            "vocabulary": VOCABULARY["translation"],
            **{name: str(path) for name, path in files.items()},
        }
        folder = out / "parallel"
        facts["translation"] = Step(folder, inputs, lambda _: make_translation(folder, files)).do()
        folders["translation"] = folder / "binary"
    return folders, facts


def make_translation(folder: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Write parallel text as data for translation; ``files`` are by names as ``train.source``."""
    texts = {name: _read_lines(path) for name, path in files.items()}
    both = folder / "both.txt"
    both.write_text("\n".join(texts["train.source"] + texts["train.target"]) + "\n", "utf-8")
    train_pieces(both, folder / "pieces", VOCABULARY["translation"])
    for name, lines in texts.items():
        part, side = name.split(".")
        raw = folder / name
        raw.write_text("\n".join(lines) + "\n", "utf-8")
        write_pieces(folder / "pieces.model", raw, folder / f"{part}.pieces.{side}")
    words = ["-s", "source", "-t", "target", "--joined-dictionary", "--workers", "1"]
    words += [f"--{part}pref={folder / part}.pieces" for part in ("train", "valid")]
    words += ["--destdir", str(folder / "binary")]
    preprocess.main(options.get_preprocessing_parser().parse_args(words))
    facts = {f"{name} lines": len(lines) for name, lines in texts.items()}
    return {**facts, **_compute_unigram(folder, "train.pieces.target", "valid.pieces.target")}


def _read_lines(path: Path) -> list[str]:
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return [" ".join(line.split()) for line in text.rstrip("\n").split("\n")]


def _compute_unigram(folder: Path, train_file: str, valid_file: str) -> dict[str, float]:
    """Compute the loss, in bits, of a model that knows only the frequencies of pieces."""
    return {"unigram": math.log2(unigram_perplexity(folder / train_file, folder / valid_file))}
