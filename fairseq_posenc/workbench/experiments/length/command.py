"""``fairseq-posenc lm-length``: perplexity of causal language models against context length.

Models are checkpoints of fairseq, which read ``--data``, or folders of transformers, which read
``--text``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.length import report
from fairseq_posenc.workbench.experiments.length.model import LoadedModel, NamedModel, parse_models
from fairseq_posenc.workbench.experiments.length.scoring import Scoring, Size
from fairseq_posenc.workbench.experiments.length.stream import Stream
from fairseq_posenc.workbench.results.intervals import LEAST_SEEDS
from fairseq_posenc.workbench.results.pictures import can_draw
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.running import options
from fairseq_posenc.workbench.running.devices import CPU, ComputeOptions, check_device, choose_dtype
from fairseq_posenc.workbench.running.exit_codes import signals_as_keyboard_interrupt
from fairseq_posenc.workbench.running.files import checksum
from fairseq_posenc.workbench.running.folders import lock_output_folder
from fairseq_posenc.workbench.running.jobs import Inputs
from fairseq_posenc.workbench.running.local_machine import LocalMachine
from fairseq_posenc.workbench.running.progress import say

REPORT, FIGURES, PICTURE = "lm-length.md", "lm-length.json", "lm-length.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="NAME=MODEL[@SPEC]",
        help="a name for the report, and a checkpoint of fairseq or a folder of Hugging Face's "
        "transformers; with @SPEC a checkpoint gets other options of its position encoding, as in "
        "'yarn=model.pt@rope(scaling=yarn:4)', and a folder any positions, as in "
        "'yarn=folder@own(scaling=yarn:4)'",
    )
    options.add_data(parser, "of checkpoints: data that fairseq-preprocess --only-source made")
    options.add_split(parser, "valid")
    add("--text", type=Path, metavar="FILE", help="of folders: the text, in UTF-8")
    options.add_lengths(parser, "context lengths", "64,128,256,512,1024")
    add(
        "--mode",
        choices=(*report.MODES, "both"),
        default="both",
        help="windows: each token once, or overlapping by all but --stride tokens (default: both)",
    )
    options.add_count(parser, "--stride", "tokens that the sliding window moves", 64)
    options.add_count(
        parser,
        "--windows",
        "score only so many sliding windows, spread over the text; those of every length predict "
        "the same tokens (default: all of the text)",
    )
    options.add_count(parser, "--max-tokens", "tokens to read at a time", 4096)
    options.add_out(parser, "lm-length")
    options.add_computing(parser)
    options.add_cluster(parser, one_by_one=True)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Score all models, write the table, the figures and the picture; return the exit code.

    Raises:
        UserError: wrong input.
    """
    sizes = _choose_sizes(args)
    cluster = options.parse_cluster(args)
    check_device(args.device, args.fp16, is_local=not cluster)
    models = parse_models(args.models)
    _refuse_wrong_data(models, args)
    facts, stream = _open_all(models, args)
    text_name = str(args.text) if args.text else f"the split {args.split} of {args.data}"
    _check_length(stream.size, text_name, args)
    with (
        signals_as_keyboard_interrupt(),
        lock_output_folder(args.out, (REPORT, FIGURES, PICTURE)),
    ):
        scored = "all scored once for each figure"
        if args.windows:
            scored = f"{args.windows} windows of which are scored for each figure"
        say(f"{stream.size:,} tokens of {text_name}, {scored}")
        if args.windows and args.windows < LEAST_SEEDS:
            say(f"intervals need at least {LEAST_SEEDS} windows: differences may be chance")
        # Chosen when the jobs call it, because they may run elsewhere.
        computing = partial(ComputeOptions.choose, args.device, args.fp16, args.bf16)
        source, longest = args.text or args.data, args.lengths[-1]  # lengths are sorted
        scorings = [
            Scoring(
                folder=args.out / named.name,
                inputs=_collect_inputs(named, args),
                open_model=partial(_open_once, named, source, args.split, longest, computing),
                sizes=sizes,
                max_tokens=args.max_tokens,
                spread=args.windows,
            )
            for named in models
        ]
        jobs = [scoring.build_job() for scoring in scorings]
        (cluster or LocalMachine()).run(jobs, args.out)
        scores = [scoring.read(job) for scoring, job in zip(scorings, jobs)]
        record = report.build_record(facts, scores, text_name, stream.size)
        record.write(args.out / FIGURES)
        drawn = can_draw() and report.draw(record, args.out / PICTURE)
        report.write_markdown(record, args.out / REPORT, PICTURE if drawn else "")
    print(record.text() if args.json else report.format_results(record))
    say(f"report: {args.out / REPORT}" + ("" if drawn else " (no picture)"))
    return 0


def _choose_sizes(args: argparse.Namespace) -> list[Size]:
    """Choose the mode, the context length and the stride of each score."""
    modes = report.MODES if args.mode == "both" else (args.mode,)
    if args.windows:
        if args.mode == report.NON_OVERLAPPING:
            raise UserError("--windows is of sliding windows: leave out --mode")
        modes = (report.SLIDING,)
    if report.SLIDING in modes and args.stride > (shortest := args.lengths[0]):
        raise UserError(
            f"--stride {args.stride} is more than the context length {shortest}: tokens in "
            "between would not be scored; choose a smaller stride"
        )
    return [
        Size(mode, length, args.stride if mode == report.SLIDING else length)
        for mode in modes
        for length in args.lengths
    ]


def _check_length(tokens: int, text_name: str, args: argparse.Namespace) -> None:
    """Refuse a text that is too short for the context lengths, or for that many windows."""
    longest = args.lengths[-1]
    if longest > tokens:
        raise UserError(f"--lengths {longest}: {text_name} has only {tokens:,} tokens")
    most = 1 + (tokens - longest) // args.stride
    if args.windows and args.windows > most:
        raise UserError(
            f"--windows {args.windows}: windows would predict the same tokens, because {text_name} "
            f"has only {tokens:,}; use at most {most}, or a smaller --stride"
        )


def _refuse_wrong_data(models: list[NamedModel], args: argparse.Namespace) -> None:
    """Refuse checkpoints without ``--data``, folders without ``--text``, and a mixture of both."""
    folders = [named.name for named in models if named.is_folder]
    if folders and len(folders) < len(models):
        raise UserError(
            f"{folders[0]} is a folder of transformers, and others are checkpoints of fairseq: "
            "they read different data; score them one by one"
        )
    if folders and (args.text is None or args.data is not None):
        raise UserError("folders of transformers read --text FILE: give that, and it alone")
    if not folders and (args.data is None or args.text is not None):
        raise UserError("checkpoints of fairseq read --data DIR: give that, and it alone")


def _open_all(models: list[NamedModel], args: argparse.Namespace) -> tuple[list[Row], Stream]:
    """Open all models before the first is scored, so that a wrong one is an error at once.

    Returns facts about the models, by column of the record, and their text.
    """
    facts: list[Row] = []
    streams: list[Stream] = []
    source = args.text or args.data
    for named in models:
        loaded, stream = _open(named, source, args.split, args.lengths[-1], lambda: CPU)
        streams.append(stream)
        if not torch.equal(stream.targets, streams[0].targets):
            raise UserError(
                f"{models[0].name} and {named.name} cut the text into other tokens, so their "
                "perplexities by token cannot be compared: score them one by one"
            )
        facts.append(
            {
                "model": named.name,
                "checkpoint": str(named.path),
                "override": named.spec_override,
                "position_encoding": loaded.encoding,
                "trained_length": loaded.trained_length,
                "updates": loaded.updates,
            }
        )
        del loaded  # frees the memory for the next one
    return facts, streams[0]


def _open(
    named: NamedModel,
    source: Path,
    split: str,
    longest: int,
    computing: Callable[[], ComputeOptions],
) -> tuple[LoadedModel, Stream]:
    """Open a model, and ``source``, its text or data-bin, on the device that ``computing`` chooses.

    The model gets room for ``longest`` tokens; ``split`` is a part of the data-bin.

    Raises:
        UserError: the model is not a causal language model, has another dictionary than the text,
            or was not trained with the requested positions.
    """
    if named.is_folder:  # either host may be absent
        from fairseq_posenc.workbench.experiments.length import hf_model

        return hf_model.load(named, computing(), longest), hf_model.tokenize_text(
            source, named.path
        )
    from fairseq_posenc.workbench.experiments.length import fairseq_model

    stream = fairseq_model.read_stream(source, split)
    return fairseq_model.load(named, source, computing()), stream


@lru_cache(1)
def _open_once(*arguments: Any) -> tuple[LoadedModel, Stream]:
    """Open a model as :func:`_open` does, once for all its scores, which follow each other."""
    _open_once.cache_clear()  # frees the model before: two large ones may not fit into the memory
    return _open(*arguments)


def _collect_inputs(named: NamedModel, args: argparse.Namespace) -> Inputs:
    """Collect what the scores of a model depend on, without their lengths."""
    if args.text:
        files = sorted(path for path in named.path.iterdir() if path.is_file())
        model_hashes: str | list[str] = [*map(checksum, files)]
        text_hashes = [checksum(args.text)]
    else:
        model_hashes = checksum(named.path)
        names = ("dict.txt", f"{args.split}.idx", f"{args.split}.bin")
        text_hashes = [checksum(args.data / name) for name in names]
    return {
        "checkpoint": model_hashes,
        "override": str(named.spec_override),
        "text": text_hashes,
        "precision": str(choose_dtype(args.fp16, args.bf16)),
        "version": __version__,
    }
