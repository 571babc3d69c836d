"""Reports samples that fairseq leaves out because they are too long for the model."""

import logging
from typing import Any

import numpy as np
from fairseq import utils

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.frames import find_call

_TASK = "fairseq/tasks/fairseq_task.py"
_DEFAULT_TOKENS = 36_000  # tokens in a batch of fairseq-eval-lm


def count_left_out(record: logging.LogRecord) -> None:
    """Add to fairseq's warning how many samples and tokens are left out, and of how many.

    Raises:
        UserError: all samples are left out, so nothing would be trained or measured.
    """
    call = find_call(_TASK, "filter_indices_by_size")
    if call is None:
        return
    local = call.f_locals
    ignored, rest, dataset = local["ignored"], local["indices"], local["dataset"]
    samples, longest = len(ignored) + len(rest), local["max_positions"]
    if not len(rest):
        # For translation, limits of both languages.
        numbers = longest if isinstance(longest, (tuple, list)) else [longest]
        raise UserError(
            f"all {samples:,} samples are longer than {' or '.join(f'{n:,}' for n in numbers)} "
            "tokens: give a smaller --tokens-per-sample, or a larger --max-tokens, or a model with "
            "more positions (--max-positions, --max-source-positions)"
        )
    share = f"{len(ignored):,} of {samples:,} samples"
    if (tokens := _count_tokens(dataset, ignored)) is not None:
        share += f" and {tokens:,} of {tokens + (_count_tokens(dataset, rest) or 0):,} tokens"
    record.msg = f"{record.getMessage()}; left out are {share}: losses and scores are of the rest"
    record.args = None


def check_window(settings: Any) -> None:
    """Check ``--context-window`` of fairseq-eval-lm, and keep its batches as small as without it.

    fairseq counts only the new tokens of a block, so with a window of nearly the whole block a
    batch would have thousands of blocks.

    Raises:
        UserError: the window leaves no new token in a block.
    """
    block, window = settings.task.tokens_per_sample, settings.eval_lm.context_window
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
    local, settings = call.f_locals, call.f_locals["cfg"]
    new, window = settings.task.tokens_per_sample, settings.eval_lm.context_window
    longest = utils.resolve_max_positions(*[model.max_positions() for model in local["models"]])
    sizes = np.asarray(local["dataset"].sizes)
    cut = settings.task.sample_break_mode != "eos"  # else a block is a sentence of any length
    ignored, tokens = sizes[sizes > longest].sum(), sizes.sum()
    read = f"longer than the {longest:,} tokens that the model reads"
    advice = (
        f"give --tokens-per-sample {longest}, or measure longer blocks with fairseq-posenc "
        "lm-length"
    )
    if ignored and (ignored == tokens or (cut and new > longest)):
        raise UserError(
            f"--tokens-per-sample {new + window}: blocks are {read}, and {ignored:,} of "
            f"{tokens:,} tokens would be left out; {advice}"
        )
    if window and new + window > longest:
        raise UserError(
            f"--tokens-per-sample {new + window}: with --context-window {window} blocks are "
            f"{read}; {advice}"
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
