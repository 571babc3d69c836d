"""Checks what a command of fairseq has built: the metric of its validation, samples left out.

fairseq has no hook at the point where a command has its options, model and data, but it logs a
message there. The log filter of :mod:`~fairseq_posenc.host.log_guard` then calls these functions
with the variables of the fairseq function that logs.
"""

import logging
import sys
from collections import ChainMap
from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.logging import metrics

from fairseq_posenc.checkpoints.faults import locate
from fairseq_posenc.errors import UserError


def find_variables(file: str, function: str) -> Mapping[str, Any] | None:
    """Find the local and global variables of a running function; None if it does not run.

    Args:
        file: file of the function with its folder, such as ``fairseq_cli/train.py``. The module's
            name would not do: it is ``__main__`` under ``python -m``.
        function: name of the function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and locate(frame) != (file, function):
        frame = frame.f_back
    return None if frame is None else ChainMap(frame.f_locals, frame.f_globals)


def refuse_missing_metric(training: Mapping[str, Any]) -> None:
    """Refuse a metric that validation does not compute, by validating one batch with the model.

    Called when fairseq is about to read a validation subset for the first time. With the metric
    ``loss``, which always exists, nothing is computed.
    """
    settings = training["cfg"]
    wanted = settings.checkpoint.best_checkpoint_metric
    if wanted == "loss" or (wanted == "bleu" and getattr(settings.task, "eval_bleu", False)):
        return  # BLEU may be undefined for one batch: a new model may translate it to nothing
    trainer, subset = training["trainer"], training["subset"]
    batches = trainer.get_valid_iterator(subset).next_epoch_itr(
        shuffle=False, set_dataset_epoch=False
    )
    with metrics.aggregate(new_root=True) as measured:
        trainer.valid_step(next(iter(batches)))
    names = sorted(name for name in measured.get_smoothed_values() if not name.startswith("_"))
    if wanted not in names:
        raise UserError(
            f"--best-checkpoint-metric {wanted}: validation on {subset!r} has no such figure; it "
            f"has {', '.join(names)}"
        )


def report_left_out(record: logging.LogRecord, selection: Mapping[str, Any]) -> None:
    """Add to fairseq's warning how many samples and tokens are left out, and of how many.

    Raises:
        UserError: all samples are left out, so nothing would be trained or measured.
    """
    ignored, used = selection["ignored"], selection["indices"]
    dataset = selection["dataset"]
    samples = len(ignored) + len(used)
    if not len(used):
        limits = selection["max_positions"]
        if not isinstance(limits, (tuple, list)):  # for translation, of both languages
            limits = [limits]
        # The limits of several pairs of languages are a dictionary.
        shown = " or ".join(f"{n:,}" if isinstance(n, int) else str(n) for n in limits)
        raise UserError(
            f"all {samples:,} samples are longer than {shown} tokens: give a smaller "
            "--tokens-per-sample, or a larger --max-tokens, or a model with more positions "
            "(--max-positions, --max-source-positions)"
        )
    counts = f"{len(ignored):,} of {samples:,} samples"
    if (tokens := _count_tokens(dataset, ignored)) is not None:
        counts += f" and {tokens:,} of {tokens + (_count_tokens(dataset, used) or 0):,} tokens"
    record.msg = f"{record.getMessage()}; left out are {counts}: losses and scores are of the rest"
    record.args = None


def refuse_long_blocks(evaluation: Mapping[str, Any]) -> None:
    """Refuse to measure the perplexity of blocks that are too long for the model.

    Called when fairseq-eval-lm has loaded model and data.

    Raises:
        UserError: says how many tokens would be left out.
    """
    settings = evaluation["cfg"]
    window = settings.eval_lm.context_window
    # fairseq-eval-lm has subtracted the window from --tokens-per-sample by now.
    new_tokens = settings.task.tokens_per_sample
    block = new_tokens + window
    limits = [model.max_positions() for model in evaluation["models"]]
    longest = utils.resolve_max_positions(*limits)
    sizes = np.asarray(evaluation["dataset"].sizes)
    blocks_are_sentences = settings.task.sample_break_mode == "eos"
    ignored = sizes[sizes > longest].sum()
    tokens = sizes.sum()
    excess = f"longer than the {longest:,} tokens that the model reads"
    advice = (
        f"give --tokens-per-sample {longest}, or export the model and measure longer "
        "blocks with fairseq-posenc lm-length"
    )
    # Some sentences that are too long are left out with a warning (`report_left_out`).
    blocks_are_too_long = not blocks_are_sentences and new_tokens > longest
    if ignored and (blocks_are_too_long or ignored == tokens):
        raise UserError(
            f"--tokens-per-sample {block}: blocks are {excess}, and {ignored:,} of "
            f"{tokens:,} tokens would be left out; {advice}"
        )
    if window and block > longest:
        raise UserError(
            f"--tokens-per-sample {block}: with --context-window {window} blocks are "
            f"{excess}; {advice}"
        )


def _count_tokens(dataset: Any, indices: Any) -> int | None:
    """Count the tokens of some samples, in both languages for translation; None if unknown."""
    sizes = getattr(dataset, "sizes", None)
    if sizes is None:
        return None
    if isinstance(sizes, (list, tuple)) and len(sizes) == 1:  # a list of the sizes of each input
        sizes = sizes[0]
    table = np.asarray(sizes)
    return int(table[indices].sum()) if len(table) == len(dataset) else None
