"""Refuses options that this machine does not support, or that would waste a run."""

import os
from importlib.util import find_spec
from typing import Any

import torch

from fairseq_posenc.errors import UserError

# In this order, because memory_efficient_fp16 also sets fp16.
_HALF_PRECISIONS = ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16", "amp")
_BETTER_LOW = {"loss", "nll_loss", "ppl"}
_BETTER_HIGH = {"accuracy", "bleu", "f1", "acc_and_f1", "mcc", "pearson", "spearman"}


def check_precision(common: Any) -> None:
    """Refuse half precision without a GPU, and two precisions, in fairseq's section ``common``."""
    if find_spec("torch_xla"):  # it brings devices that torch does not list
        return
    forget_tpu(common)
    chosen = [name for name in _HALF_PRECISIONS if getattr(common, name, False)]
    precisions = {name.removeprefix("memory_efficient_") for name in chosen}
    if len(precisions) > 1:
        flags = " and ".join(f"--{name}" for name in sorted(precisions))
        raise UserError(f"{flags} set two precisions: give one of them")
    if chosen and (common.cpu or not torch.cuda.is_available()):
        name = chosen[0]
        reason = "--cpu is given" if common.cpu else "torch sees none here"
        raise UserError(
            f"--{name.replace('_', '-')} is for GPUs, and {reason}: leave it out, and train with "
            f"--cpu (hydra: common.{name}=false common.cpu=true)"
        )


def forget_tpu(options: Any) -> None:
    """Undo the choice of a TPU for ``--bf16`` by fairseq's command line, without torch_xla.

    Otherwise a training in bf16 would fail, on a GPU as well.
    """
    if getattr(options, "tpu", False) and options.bf16 and not find_spec("torch_xla"):
        options.tpu = False


def refuse_wrong_checkpoints(checkpoint: Any) -> None:
    """Refuse to keep the worst checkpoint as the best, or none to resume from."""
    if checkpoint.write_checkpoints_asynchronously:
        raise UserError(
            "--write-checkpoints-asynchronously writes no checkpoint_last.pt to resume from"
        )
    metric = checkpoint.best_checkpoint_metric
    maximizes = checkpoint.maximize_best_checkpoint_metric
    if metric in (_BETTER_LOW if maximizes else _BETTER_HIGH):
        kept, change = ("highest", "leave out") if maximizes else ("lowest", "add")
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the checkpoint with the {kept} {metric} "
            f"as the best: {change} --maximize-best-checkpoint-metric"
        )


def check_blocks(settings: Any, max_positions: int) -> None:
    """Refuse blocks that fairseq-eval-lm would leave out, as they are longer than the model reads.

    Sentences may be longer: it counts those it leaves out. Batches are kept as small with a window
    as without: fairseq counts only the tokens beyond the window, so with a window of nearly the
    whole block a batch would have thousands of blocks.
    """
    window = settings.eval_lm.context_window
    # fairseq-eval-lm has subtracted the window from --tokens-per-sample.
    new_tokens = settings.task.tokens_per_sample
    block = new_tokens + max(window, 0)
    if not 0 <= window < block:
        raise UserError(
            f"--context-window {window} is part of the {block} tokens of --tokens-per-sample: give "
            f"a number from 0 to {block - 1}"
        )
    if block > max_positions and settings.task.sample_break_mode != "eos":
        raise UserError(
            f"--tokens-per-sample {block}: blocks are longer than the {max_positions:,} tokens "
            f"that the model reads, and would be left out; give --tokens-per-sample "
            f"{max_positions}, or export the model and measure longer blocks with fairseq-posenc "
            "lm-length"
        )
    if window:
        tokens = settings.dataset.max_tokens or 36_000  # fairseq-eval-lm's default
        settings.dataset.max_tokens = max(new_tokens, tokens * new_tokens // block)


def refuse_training_alone(world_size: int) -> None:
    """Refuse to train alone, and write the same checkpoints, in each process of torchrun."""
    started = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and started.isdigit() and int(started) > 1 and world_size == 1:
        raise UserError(
            f"{started} processes of one training: with --distributed-world-size 1 each would "
            f"train alone, as rank 0; give --distributed-world-size {started}"
        )
