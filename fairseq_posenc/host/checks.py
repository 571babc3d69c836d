"""Refuses options and data with which a run would fail late, or be wasted."""

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset, infer_dataset_impl
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask

from fairseq_posenc.errors import UserError
from fairseq_posenc.specs import Spec
from fairseq_posenc.transformer.options import read_task_options

# In this order, so that the first is what the user gave: memory_efficient_fp16 also sets fp16.
_HALF_PRECISIONS = ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16", "amp")
_BETTER_LOW = {"loss", "nll_loss", "ppl"}  # metrics of validation
_BETTER_HIGH = {"accuracy", "bleu", "f1", "acc_and_f1", "mcc", "pearson", "spearman"}
_OPTIONS = {"accuracy": "report-accuracy", "bleu": "eval-bleu"}  # by the metrics that they add


def check_precision(common: Any, noise: float = 0) -> None:
    """Refuse half precision without a GPU, two precisions, and noise that stays in the weights.

    fairseq writes the noise of ``--quant-noise-pq`` into the weights in place; only updates of
    float32 copies, which ``fp16`` and ``bf16`` have, restore them. ``common`` is fairseq's section.
    """
    use_gpu_for_bf16(common)  # for architectures of a user; ours have done it
    chosen = [name for name in _HALF_PRECISIONS if getattr(common, name, False)]
    flags = sorted({f"--{name.removeprefix('memory_efficient_')}" for name in chosen})
    if len(flags) > 1:
        raise UserError(f"{' and '.join(flags)} set two precisions: give one of them")
    if noise and (not chosen or chosen[0] not in ("fp16", "bf16")):
        remedy = "train on a GPU with --fp16 or --bf16 (not memory-efficient), or leave it out"
        raise UserError(f"--quant-noise-pq would leave its noise in the weights: {remedy}")
    lists_all = not find_spec("torch_xla")  # which brings devices that torch does not list
    if chosen and lists_all and (common.cpu or not torch.cuda.is_available()):
        name, reason = chosen[0], "--cpu is given" if common.cpu else "torch sees none here"
        remedy = f"leave it out (hydra: common.{name}=false common.cpu=true)"
        raise UserError(f"--{name.replace('_', '-')} is for GPUs, and {reason}: {remedy}")


def use_gpu_for_bf16(options: Any) -> None:
    """Without torch_xla, undo fairseq's choice of a TPU for ``--bf16``: it fails, also on a GPU."""
    if getattr(options, "tpu", False) and options.bf16 and not find_spec("torch_xla"):
        options.tpu = False


def refuse_wrong_checkpoints(checkpoint: Any, *sections: Any) -> None:
    """Refuse to keep the worst checkpoint or no last one, and metrics that no section computes."""
    if checkpoint.write_checkpoints_asynchronously:
        raise UserError("--write-checkpoints-asynchronously: no checkpoint_last.pt to resume from")
    metric = checkpoint.best_checkpoint_metric
    maximizes = checkpoint.maximize_best_checkpoint_metric
    if metric in (_BETTER_LOW if maximizes else _BETTER_HIGH):
        kept, change = ("highest", "leave out") if maximizes else ("lowest", "add")
        raise UserError(
            f"--best-checkpoint-metric {metric} would keep the checkpoint with the {kept} {metric} "
            f"as the best: {change} --maximize-best-checkpoint-metric"
        )
    option = _OPTIONS.get(metric)
    if option and any(getattr(x, option.replace("-", "_"), None) is False for x in sections):
        raise UserError(f"--best-checkpoint-metric {metric} is computed only with --{option}")


def refuse_long_blocks(options: Any, block: int, max_positions: int) -> None:
    """Refuse blocks that fairseq would silently leave out: the model reads fewer tokens."""
    if options.sample_break_mode != "eos" and block > max_positions:
        raise UserError(
            f"--tokens-per-sample {block}: blocks are longer than the {max_positions:,} tokens "
            f"that the model reads, and would be left out; give --tokens-per-sample "
            f"{max_positions}, or train with more --max-positions (causal LM: "
            "--max-target-positions); fairseq-posenc lm-length measures longer ones"
        )


def check_shards(data: str, split: str) -> None:
    """Refuse shards of ``data`` (``first:second``) without the split or the first's dictionary.

    fairseq opens a shard only when its epoch begins, perhaps days after the start.
    """
    first, *shards = map(Path, utils.split_paths(data))
    for folder in shards:
        if not folder.is_dir():
            raise UserError(f"{folder}, one of {len(shards) + 1} shards, does not exist")
        splits = {path.name.partition(".")[0] for path in folder.glob("*.idx")}
        if split not in splits:
            found = ", ".join(sorted(splits)) or "none at all"
            raise UserError(f"{folder} has no split {split!r} (--train-subset), but {found}")
        for path in sorted(folder.glob("dict*.txt")):
            other = first / path.name
            if not other.exists() or path.read_bytes() != other.read_bytes():
                fault = f"{path} is not the dictionary of {first}, which is read for all shards"
                raise UserError(f"{fault}: preprocess them with one dictionary")


def check_data_bins(task: Any) -> None:
    """Refuse a task whose data-bins are damaged; a task may be set up without any."""
    for folder in utils.split_paths(getattr(read_task_options(task), "data", None) or ""):
        for index in Path(folder).rglob("*.idx") if folder else ():
            check_data_bin(index)


def check_data_bin(index: Path) -> None:
    """Refuse a split whose files do not have the lengths that its index says.

    fairseq maps them into memory and trusts the index: a file that was not written to its end
    causes a crash, or wrong tokens. Only indices of fairseq's default format are checked.
    """
    data = index.with_suffix(".bin")
    for path in (index, data):
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: is not a file; make the data-bin again")
    if infer_dataset_impl(str(index.with_suffix(""))) != "mmap":
        return  # also without one of the files: fairseq reports a missing split
    try:
        sentences = MMapIndexedDataset.Index(str(index))
    except (ValueError, KeyError, AssertionError, struct.error):
        raise _damaged(index, "fairseq cannot read it") from None
    count, index_size = len(sentences), index.stat().st_size
    expected = 26 + 12 * count  # 26: the header; 12: a length (4) and an offset (8) by sentence
    if index_size != expected:
        raise _damaged(index, f"{index_size:,} bytes, not the {expected:,} of {count:,} sentences")
    if not count:
        raise UserError(f"{data} is empty: the split has no sentences; prepare it from longer text")
    begin, length = map(int, sentences[count - 1])
    size, end = data.stat().st_size, begin + length * sentences.dtype().itemsize
    if size != end:
        raise _damaged(index, f"{data.name} has {size:,} bytes, and its sentences have {end:,}")


def _damaged(index: Path, reason: str) -> UserError:
    return UserError(f"{index} is damaged: {reason}; make the data-bin again")


def check_document_ends(spec: Spec, task: Any) -> None:
    """Refuse to train with ``documents`` on text in which the ends of documents are not marked.

    Each ``</s>`` ends one, or with ``end=empty`` each empty line. Only language models are checked.
    """
    ends = [dict(item.options).get("end") for item in spec.items if item.name == "documents"]
    if not ends or not isinstance(task, (LanguageModelingTask, MaskedLMTask)):
        return
    settings = read_task_options(task)
    if isinstance(task, MaskedLMTask) and not settings.include_target_tokens:
        raise UserError("documents: a masked </s> would end none; add --include-target-tokens")
    train = Path(utils.split_paths(settings.data or "")[0]) / "train"
    # By default fairseq maps the text into memory, and does not read it.
    lines = data_utils.load_indexed_dataset(str(train), task.source_dictionary)
    if not lines:
        return  # no training text, so the command only evaluates other splits
    # fairseq-preprocess ends either all lines with </s> or none, so the first line is enough.
    if not len(lines[0]) or lines[0][-1] != task.source_dictionary.eos():
        raise UserError(f"documents: the lines of {train} do not end with </s>")
    if "empty" in ends and not (lines.sizes == 1).any():  # only </s>
        raise UserError(
            f"documents(end=empty): no line of {train} is empty, so no document ends; put an "
            "empty line after each document, or use documents, which ends one at each line"
        )
