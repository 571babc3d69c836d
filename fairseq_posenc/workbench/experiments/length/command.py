"""``fairseq-posenc lm-length``: perplexity of causal language models by context length.

Models are transformers model folders. A finished score is kept in ``OUT/NAME``, in a file with its
request, so the same command does not compute it again.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.folders import checksum, lock_folder, read_result, write_result
from fairseq_posenc.hf.own_positions import read_positions, read_trained_length
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.experiments.corpus import read_text
from fairseq_posenc.workbench.experiments.length import hf_model, report, scoring
from fairseq_posenc.workbench.results.intervals import LEAST_SAMPLE
from fairseq_posenc.workbench.results.markdown import format_number
from fairseq_posenc.workbench.results.record import Row
from fairseq_posenc.workbench.running import devices, options
from fairseq_posenc.workbench.running.progress import bar, say

FIGURES, PICTURE = "lm-length.json", "lm-length.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="NAME=FOLDER[@SPEC]",
        help="a name for the report, and a model folder of Hugging Face's transformers; with @SPEC "
        "it gets other positions, as in 'yarn=folder@own(scaling=yarn:4)'",
    )
    add("--text", type=Path, metavar="FILE", required=True, help="the text, in UTF-8")
    text = "context lengths (default: %(default)s)"
    add("--lengths", type=options.positive_ints, default="64,128,256,512,1024", help=text)
    stride = "tokens of a window that are predicted; if they are all, windows do not overlap"
    options.add_count(parser, "--stride", stride, 64)
    options.add_count(
        parser,
        "--windows",
        "number of windows to score, spread over the text; they predict the same tokens at every "
        "length (default: all of the text)",
    )
    options.add_count(parser, "--max-tokens", "tokens to read at a time", 4096)
    options.add_out(parser, "lm-length")
    options.add_precision(parser)


def run(args: argparse.Namespace) -> None:
    """Score all models, print the table, write figures and a picture.

    Raises:
        UserError: wrong input.
    """
    dtype = devices.choose_dtype(args.fp16, args.bf16)
    models = hf_model.parse_models(args.models, FIGURES, PICTURE)
    raw = read_text(args.text)
    rows: list[Row] = []
    tokenized: list[Tensor] = []  # the text's tokens, for each model
    for named in models:  # all are opened first, so that no mistake shows after hours of scoring
        model = hf_model.load(named, dtype, args.lengths[-1])  # with positions for the longest
        tokenized.append(hf_model.tokenize_text(raw, named.path, model))
        del model  # frees the memory for the next one
        _check_length(len(tokenized[-1]) - 1, args)  # without the beginning-of-text token
        if not torch.equal(tokenized[-1][1:], tokenized[0][1:]):
            both = f"{models[0].name} and {named.name} tokenize the text differently"
            raise UserError(f"{both}: their perplexities cannot be compared: score each alone")
    with lock_folder(args.out):
        if args.windows and args.windows < LEAST_SAMPLE:
            say(f"intervals need at least {LEAST_SAMPLE} windows: differences may be chance")
        for named, text in zip(models, tokenized):
            model = hf_model.load(named, dtype, args.lengths[-1])
            facts = {
                "model": named.name,
                "checkpoint": str(named.path),
                "override": named.spec_override,
                "position_encoding": read_positions(model),
                "trained_length": read_trained_length(model),
            }
            scores = _score_model(named, model, text, args)
            rows += [{**facts, **report.score_figures(score)} for score in scores]
            del model  # frees the memory for the next one
        record = report.build_record(rows, args.text, len(tokenized[0]) - 1)  # same for all models
        record.write(args.out / FIGURES)
        drawn = report.draw(record, args.out / PICTURE)
    print(report.format_results(record))
    say(f"figures: {args.out / FIGURES}" + (f", {args.out / PICTURE}" if drawn else ""))


def _score_model(
    named: hf_model.NamedModel, model: PreTrainedModel, text: Tensor, args: argparse.Namespace
) -> list[scoring.Score]:
    """Compute the scores of a model by length; read those that are finished from their files."""
    scores = []
    total, longest = len(text) - 1, args.lengths[-1]  # lengths are sorted
    shared = {  # what the scores depend on, except length and stride
        "model": {x.name: checksum(x) for x in sorted(named.path.iterdir()) if x.is_file()},
        "positions": named.spec_override,
        "text": checksum(args.text),
        "precision": [args.fp16, args.bf16],
        "max tokens": args.max_tokens,  # other batches round differently
        "windows": [args.windows, longest] if args.windows else None,  # fix where windows end
        "version": __version__,
    }
    (args.out / named.name).mkdir(exist_ok=True)
    for length in args.lengths:
        stride = min(args.stride, length)
        request = {**shared, "stride": stride}
        path = args.out / named.name / f"length-{length}.json"
        if (figures := read_result(path, request)) is None:  # not scored yet
            cut = scoring.cut_windows(total, length, stride)
            if args.windows:
                cut = scoring.spread_windows(total, length, stride, longest, args.windows)
            windows = list(cut)
            label = f"{named.name}, {counted(length, 'tokens')}"
            predicted = sum(w.end - w.scored for w in windows)  # each from `scored` to `end`
            with bar(desc=label, total=predicted, unit=" tokens") as shown:
                score = scoring.score_windows(
                    model, text, windows, length, stride, args.max_tokens, shown.update
                )
            outcome = score.refusal or f"perplexity {format_number(score.perplexity, 2)}"
            say(f"{label}: {outcome} ({score.seconds:.0f} s)")
            # Perplexities by window: windows of a whole text, or before a refusal, are no sample.
            sample = score.windows if args.windows and not score.refusal else []
            figures = {**score._asdict(), "windows": sample}
            write_result(path, request, figures)
        scores.append(scoring.Score(**figures))
    return scores


def _check_length(tokens: int, args: argparse.Namespace) -> None:
    """Refuse a text too short for the context lengths or windows, and too long a stride."""
    shortest, longest = args.lengths[0], args.lengths[-1]  # they are sorted
    if longest > tokens:
        raise UserError(f"--lengths {longest}: {args.text} has only {counted(tokens, 'tokens')}")
    if not args.windows:
        return
    if args.stride > shortest:
        raise UserError(f"--stride {args.stride}: give at most {shortest}, the shortest length")
    most = 1 + (tokens - longest) // args.stride  # the first window ends at token `longest`
    if args.windows > most:
        fault = f"windows would predict the same tokens of {tokens:,}; give at most {most}"
        raise UserError(f"--windows {args.windows}: {fault}, or a smaller --stride")
