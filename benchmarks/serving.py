"""Measures the speed and BLEU of a trained translation model in the engines that it exports to.

fairseq's own search, transformers and CTranslate2 in each type take turns at the same batches of
raw text, with sentences of similar length together and beam 5. Their translations of the whole test
set are compared token by token with fairseq's, with beam 5 and greedily.

    python benchmarks/serving.py --checkpoint rope/checkpoint_best.pt --threads 1
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional, Protocol

import ctranslate2
import sacrebleu
import torch
import transformers
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from fairseq_posenc.workbench.convert.exchange.config_json import build_generation_config
from fairseq_posenc.workbench.convert.exchange.ctranslate2.exporting import export_to_ctranslate2
from fairseq_posenc.workbench.convert.exchange.exporting import export
from fairseq_posenc.workbench.convert.exchange.hf_folder_writer import Labels
from fairseq_posenc.workbench.loading.open_model import OpenModel, open_model
from fairseq_posenc.workbench.translation import Translator
from fairseq_posenc.workbench.translation.checkpoint import ParallelDataBin
from measuring import page, timing
from measuring.commands import add_turns, new_parser, run_script

BEAMS = (5, 1)  # translations are compared at both, and timed at the first


class Translation(NamedTuple):
    """An engine's translation of a sentence."""

    tokens: tuple[str, ...]  # sentencepieces, without the end
    score: Optional[float]  # mean log probability of tokens and end; None if it is not computed


class Engine(Protocol):
    """A translation program with its model."""

    def __call__(
        self, sentences: Sequence[str], beam: int, scored: bool = False
    ) -> list[Translation]:
        """Translate; without ``scored``, an engine leaves out scores that take extra time."""


def parse_args(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="a translation model")
    add("--data", type=Path, metavar="FOLDER", help="with its dictionaries (default: as trained)")
    add("--batches", type=int, nargs="+", default=[1, 32], metavar="N", help="(default: 1 32)")
    add("--sentences", type=int, default=96, metavar="N", help="number to time (default: 96)")
    add_turns(parser)
    parser.set_defaults(device=torch.device("cpu"), dtype="float32", threads=1, rounds=3)
    return parser.parse_args(words)


def fairseq_engine(args: argparse.Namespace) -> Engine:
    """Load the model with fairseq, for the search of ``fairseq-generate``."""
    translator = Translator.load(args.checkpoint, data=args.data, device="cpu")

    def translate(sentences: Sequence[str], beam: int, scored: bool = False) -> list[Translation]:
        hypotheses = translator.translate(sentences, beam=beam, max_tokens=10**6)  # one batch
        return [Translation(hypothesis[0].tokens, hypothesis[0].score) for hypothesis in hypotheses]

    return translate


def transformers_engine(folder: Path) -> Engine:
    """Load an exported folder with transformers."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)

    def cut_special(ids: Tensor) -> tuple[str, ...]:
        special = {tokenizer.pad_token, tokenizer.eos_token}
        pieces = tokenizer.convert_ids_to_tokens(ids.tolist())
        return tuple(piece for piece in pieces if piece not in special)

    def translate(sentences: Sequence[str], beam: int, scored: bool = False) -> list[Translation]:
        inputs = tokenizer(list(sentences), return_tensors="pt", padding=True)
        with torch.inference_mode():
            generated = model.generate(**inputs, num_beams=beam, early_stopping=beam > 1)
        return [Translation(cut_special(hypothesis), None) for hypothesis in generated]

    return translate


def ctranslate2_engine(folder: Path, pieces: Path, longest: int, threads: int) -> Engine:
    """Load an exported folder with CTranslate2."""
    tokenizer = SentencePieceProcessor(model_file=str(pieces))
    translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=threads)

    def translate(sentences: Sequence[str], beam: int, scored: bool = False) -> list[Translation]:
        inputs = [tokenizer.encode(sentence, out_type=str) for sentence in sentences]
        translated = translator.translate_batch(
            inputs, beam_size=beam, max_decoding_length=longest, return_end_token=True
        )
        best = [translation.hypotheses[0] for translation in translated]
        outputs = [[piece for piece in hypothesis if piece != "</s>"] for hypothesis in best]
        scores: Sequence[Optional[float]] = [None] * len(outputs)
        # The search forbids the end as the first token, so its scores of first tokens are too high.
        if scored:
            scores = [fmean(score.log_probs) for score in translator.score_batch(inputs, outputs)]
        return [Translation(tuple(output), score) for output, score in zip(outputs, scores)]

    return translate


def export_engines(trained: OpenModel, folder: Path, threads: int) -> dict[str, Engine]:
    """Export a model, and load it with each of the other engines."""
    longest = build_generation_config(trained)["max_new_tokens"] - 1  # without the end
    data = ParallelDataBin.from_opened(trained)
    pieces = data.find_pieces(data.source)
    export(trained, "hf", tokens=None, out=folder / "hf", labels=Labels())
    engines = {"transformers": transformers_engine(folder / "hf")}
    for quantization in ("float32", "float16", "int8"):
        exported = folder / quantization
        export_to_ctranslate2(trained, quantization, tokens=None, out=exported, labels=Labels())
        engines[f"CTranslate2, {quantization}"] = ctranslate2_engine(
            exported, pieces, longest, threads
        )
    return engines


def make_batches(sentences: Sequence[str], size: int) -> list[list[str]]:
    """Cut sentences, sorted by length, into batches."""
    ordered = sorted(sentences, key=len)
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def measure_speeds(
    engines: list[Engine], sentences: Sequence[str], size: int, args: argparse.Namespace
) -> list[tuple[float, float]]:
    """Measure the sentences per second of each engine, and the ratio to the first one."""
    batches = make_batches(sentences, size)

    def build_pass(engine: Engine) -> timing.Pass:
        def run() -> None:
            for batch in batches:
                engine(batch, BEAMS[0])

        return run

    passes = [build_pass(engine) for engine in engines]
    times = timing.interleaved(passes, args.device, args.rounds, args.seconds)
    return [
        (len(sentences) / timing.median(times, index), 1 / timing.ratio(times, index, 0))
        for index in range(len(engines))
    ]


def translate_all(engine: Engine, sources: Sequence[str], beam: int) -> list[Translation]:
    """Translate the whole test set; equal sentences are translated once."""
    by_source: dict[str, Translation] = {}
    for batch in make_batches(sorted(set(sources)), 32):
        by_source.update(zip(batch, engine(batch, beam, scored=True)))
    return [by_source[source] for source in sources]


def compare(
    originals: list[Translation], translations: list[Translation], references: list[str]
) -> dict[str, Any]:
    """Compare with fairseq's ``originals``: equal translations, largest score difference, BLEU."""
    same = 0
    differences = []
    for original, translation in zip(originals, translations):
        if original.tokens == translation.tokens:
            same += 1
            if original.score is not None and translation.score is not None:
                differences.append(abs(original.score - translation.score))
    texts = ["".join(line.tokens).replace("▁", " ").strip() for line in translations]
    return {
        "same": same,
        "score_difference": max(differences, default=None),
        "bleu": sacrebleu.corpus_bleu(texts, [references]).score,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a row for each engine."""
    trained = open_model(args.checkpoint, args.data)
    data = ParallelDataBin.from_opened(trained)
    sources, references = (
        (data.folder / f"test.raw.{language}").read_text("utf-8").splitlines()
        for language in (data.source, data.target)
    )
    with TemporaryDirectory() as folder:
        engines = {"fairseq": fairseq_engine(args)} | export_engines(
            trained, Path(folder), args.threads
        )
        rows: list[dict[str, Any]] = [
            {"device": "cpu", "engine": name, "sentences": len(sources)} for name in engines
        ]
        group = list(engines.values())
        step = max(1, len(sources) // args.sentences)
        timed = sources[::step][: args.sentences]  # from all parts of the test set
        for size in args.batches:
            for row, (speed, ratio) in zip(rows, measure_speeds(group, timed, size, args)):
                row |= {f"sentences_per_second_{size}": speed, f"ratio_{size}": ratio}
        for beam in BEAMS:
            translated = [translate_all(engine, sources, beam) for engine in group]
            for row, hypotheses in zip(rows, translated):
                figures = compare(translated[0], hypotheses, references)
                row |= {f"{name}_beam_{beam}": value for name, value in figures.items()}
    return rows


if __name__ == "__main__":
    run_script("serving", parse_args, measure, page.serving_table)
