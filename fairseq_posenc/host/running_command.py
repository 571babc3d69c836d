"""Checks what a command of fairseq has built: the metric of its validation, samples left out.

fairseq has no hook at the point where a command has its options, model and data, but it logs a
message there. The log filter of :mod:`~fairseq_posenc.host.log_guard` then calls these functions,
which read the local variables of fairseq's functions up the stack.
"""

import logging
import sys
from types import FrameType
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.logging import metrics

from fairseq_posenc.checkpoints.faults import locate
from fairseq_posenc.errors import UserError

_BETTER_LOW = {"loss", "nll_loss", "ppl"}
_BETTER_HIGH = {"accuracy", "bleu", "f1", "acc_and_f1", "mcc", "pearson", "spearman"}
_DEFAULT_TOKENS = 36_000  # tokens in a batch of fairseq-eval-lm


def find_call(file: str, function: str) -> FrameType | None:
    """Find the innermost running call of a function; None if it does not run.

    Args:
        file: file of the function with its folder, such as ``fairseq_cli/train.py``. The module's
            name would not do: it is ``__main__`` under ``python -m``.
        function: name of the function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and locate(frame) != (file, function):
        frame = frame.f_back
    return frame


def check_direction(checkpoint: Any) -> None:
    """Check that the best checkpoint is chosen by the highest accuracy or the lowest loss.

    Raises:
        UserError: ``--maximize-best-checkpoint-metric`` is missing, or wrong for the metric.
    """
    metric = checkpoint.best_checkpoint_metric
    flag = "--maximize-best-checkpoint-metric"
    if metric in _BETTER_HIGH and not checkpoint.maximize_best_checkpoint_metric:
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the checkpoint with the lowest {metric} "
            f"as the best: add {flag}"
        )
    if metric in _BETTER_LOW and checkpoint.maximize_best_checkpoint_metric:
        raise UserError(
            f"{flag} would keep the checkpoint with the highest {metric} as the best: leave it out"
        )


def check_metric() -> None:
    """Check that validation computes the metric, by validating one batch with the model.

    Called when fairseq is about to read a validation subset for the first time. With the metric
    ``loss``, which always exists, nothing is computed.
    """
    call = find_call("fairseq_cli/train.py", "main")
    if call is None:
        return
    settings = call.f_locals["cfg"]
    wanted = settings.checkpoint.best_checkpoint_metric
    if wanted == "loss" or (wanted == "bleu" and getattr(settings.task, "eval_bleu", False)):
        return  # BLEU may be undefined for one batch: a new model may translate it to nothing
    trainer = call.f_locals["trainer"]
    subset = call.f_locals["subset"]
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


def count_left_out(record: logging.LogRecord) -> None:
    """Add to fairseq's warning how many samples and tokens are left out, and of how many.

    Raises:
        UserError: all samples are left out, so nothing would be trained or measured.
    """
    call = find_call("tasks/fairseq_task.py", "filter_indices_by_size")
    if call is None:
        return
    local = call.f_locals
    ignored = local["ignored"]
    used = local["indices"]
    dataset = local["dataset"]
    samples = len(ignored) + len(used)
    if not len(used):
        limits = local["max_positions"]
        if not isinstance(limits, (tuple, list)):  # for translation, of both languages
            limits = [limits]
        raise UserError(
            f"all {samples:,} samples are longer than {' or '.join(f'{n:,}' for n in limits)} "
            "tokens: give a smaller --tokens-per-sample, or a larger --max-tokens, or a model with "
            "more positions (--max-positions, --max-source-positions)"
        )
    counts = f"{len(ignored):,} of {samples:,} samples"
    if (tokens := _count_tokens(dataset, ignored)) is not None:
        counts += f" and {tokens:,} of {tokens + (_count_tokens(dataset, used) or 0):,} tokens"
    record.msg = f"{record.getMessage()}; left out are {counts}: losses and scores are of the rest"
    record.args = None


def check_window(settings: Any) -> None:
    """Check ``--context-window`` of fairseq-eval-lm, and keep its batches as small as without it.

    fairseq counts only the new tokens of a block, so with a window of nearly the whole block a
    batch would have thousands of blocks.

    Raises:
        UserError: the window leaves no new token in a block.
    """
    block = settings.task.tokens_per_sample
    window = settings.eval_lm.context_window
    if not 0 <= window < block:
        raise UserError(
            f"--context-window {window} is part of the {block} tokens of --tokens-per-sample: give "
            f"a number from 0 to {block - 1}"
        )
    if window:
        new = block - window
        tokens = settings.dataset.max_tokens or _DEFAULT_TOKENS
        settings.dataset.max_tokens = max(new, tokens * new // block)


def check_blocks() -> None:
    """Refuse to measure the perplexity of blocks that are too long for the model.

    Called when fairseq-eval-lm has loaded model and data.

    Raises:
        UserError: says how many tokens would be left out.
    """
    call = find_call("fairseq_cli/eval_lm.py", "main")
    if call is None:
        return
    local = call.f_locals
    settings = local["cfg"]
    new_tokens = settings.task.tokens_per_sample
    window = settings.eval_lm.context_window
    longest = utils.resolve_max_positions(*[model.max_positions() for model in local["models"]])
    sizes = np.asarray(local["dataset"].sizes)
    has_fixed_length = settings.task.sample_break_mode != "eos"  # else blocks are sentences
    ignored = sizes[sizes > longest].sum()
    tokens = sizes.sum()
    excess = f"longer than the {longest:,} tokens that the model reads"
    advice = (
        f"give --tokens-per-sample {longest}, or measure longer blocks with fairseq-posenc "
        "lm-length"
    )
    if ignored and (ignored == tokens or (has_fixed_length and new_tokens > longest)):
        raise UserError(
            f"--tokens-per-sample {new_tokens + window}: blocks are {excess}, and {ignored:,} of "
            f"{tokens:,} tokens would be left out; {advice}"
        )
    if window and new_tokens + window > longest:
        raise UserError(
            f"--tokens-per-sample {new_tokens + window}: with --context-window {window} blocks are "
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
