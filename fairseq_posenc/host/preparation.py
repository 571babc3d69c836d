"""Prepares fairseq's commands for our models: checks, the lock of a folder, resumption.

fairseq-train builds a criterion before it loads data or a checkpoint, and is prepared then. A
resumed run continues the count of ``--patience``, and has the batches of an uninterrupted one.
"""

import logging
import os
import shutil
import sys
import weakref
from argparse import Namespace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.data.iterators import CountingIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import DictConfig

from fairseq_posenc import locks
from fairseq_posenc.checkpoints.recovery import LAST, check_resumption, find_start, restore_if_torn
from fairseq_posenc.checkpoints.state_dict_adapter import PositionCheckpoints
from fairseq_posenc.errors import UserError, counted
from fairseq_posenc.host import checks
from fairseq_posenc.host.explanations import FITTING_TASKS, save_dirs
from fairseq_posenc.transformer.options import read_task_options, refuse_unknown_settings

_CROSS_ENTROPIES = ("cross_entropy", "label_smoothed_cross_entropy")
_UNFIT_LOSSES = {LanguageModelingTask: ("masked_lm",), MaskedLMTask: _CROSS_ENTROPIES}
_PATIENCE_KEY = "patience"  # of the count in a checkpoint's extra state
logger = logging.getLogger(__name__)
_held: dict[Path, int] = {}  # folder -> descriptor of its lock, open until the process ends
# Models -> tasks; an attribute of the task would keep its model alive, and be copied with it.
_built: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class CheckedModel(PositionCheckpoints):
    """Mixin for models: adapts their checkpoints, and checks the options of evaluations."""

    def prepare_for_inference_(self, cfg: DictConfig) -> None:
        """Check options of fairseq-generate, -interactive or -eval-lm, which call this method."""
        super().prepare_for_inference_(cfg)  # type: ignore[misc]
        if not cfg.common_eval.path:  # `from_pretrained` gives the configuration of the training
            return
        checks.check_precision(cfg.common)
        reads_targets = cfg.generation.score_reference or cfg.generation.prefix_size
        if reads_targets and getattr(cfg.task, "left_pad_target", False):
            raise UserError("--left-pad-target: padding would be read as targets; leave it out")
        if window := cfg.eval_lm.context_window:
            block = cfg.task.tokens_per_sample + max(window, 0)  # fairseq has subtracted it
            if not 0 < window < block:
                part = f"{window} is part of the {block} tokens of --tokens-per-sample"
                raise UserError(f"--context-window {part}: give a number from 0 to {block - 1}")


def prepare_model(model: CheckedModel, task: Any, **stacks: Any) -> None:
    """Check a model's data, log its ``stacks``, wrap what begins its training or evaluation."""
    checks.check_data_bins(task)
    for name, stack in stacks.items():
        logger.info("%s position encoding: %s", name, stack.describe())
        checks.check_document_ends(stack.spec, task)
    if type(task) in _UNFIT_LOSSES and isinstance(model, FairseqEncoderDecoderModel):
        raise UserError(f"evaluate translation models by fairseq-generate: {FITTING_TASKS}")
    if hasattr(task, "eval_lm_dataloader"):
        task.eval_lm_dataloader = partial(load_blocks, task)
    if hasattr(task, "build_criterion"):
        task.build_criterion = partial(build_criterion, task)
        _built[model] = weakref.ref(task)


def load_blocks(task: Any, dataset: Any, max_tokens: Any = 36_000, *args: Any, **named: Any) -> Any:
    """Load fairseq-eval-lm's blocks, with its defaults; refuse those it would skip, and none."""
    options, window = read_task_options(task), named.get("context_window", 0)
    new_tokens, limit = options.tokens_per_sample, named.get("max_positions")
    if limit is not None:
        checks.refuse_long_blocks(options, new_tokens + window, limit)
    if window and max_tokens:  # fairseq counts only new tokens, so batches would be too large
        max_tokens = max(new_tokens, max_tokens * new_tokens // (new_tokens + window))
    batches = type(task).eval_lm_dataloader(task, dataset, max_tokens, *args, **named)
    if named.get("num_shards", 1) < 2:
        return batches
    first: Any = next(batches, {})
    if "net_input" not in first:  # {} fills up a shard, and would have a perplexity of 1
        raise UserError("a shard has no batch: lower --num-shards or --distributed-world-size")
    return CountingIterator(chain([first], batches), total=len(batches))


def build_criterion(task: Any, cfg: Any, *args: Any, **named: Any) -> Any:
    """Build the criterion of a task, but first prepare the training of its model, if it is new.

    fairseq-validate builds one for a model that it has loaded, which has a number of updates.
    """
    if new := [x for x in _built if _built[x]() is task and x.training and x.num_updates is None]:
        settings, is_copy = _find_settings(cfg, read_task_options(task))
        if settings is not None:
            _prepare_training(new[-1], task, settings, is_copy)  # the latest, if it built several
        else:
            logger.warning("no configuration of fairseq: options are unchecked, no folder locked")
    return type(task).build_criterion(task, cfg, *args, **named)


def _find_settings(*sections: Any) -> tuple[DictConfig | None, bool]:
    """Return fairseq's configuration of these sections, and whether it is a copy of options."""
    # omegaconf 2.0 has no public root. A section without a dataclass is a namespace of all options.
    roots: list[Any] = [x._get_root() for x in sections if isinstance(x, DictConfig)]
    if found := [root for root in roots if "checkpoint" in root]:
        return found[0], False
    options = [x for x in sections if isinstance(x, Namespace) and hasattr(x, "save_dir")]
    return (convert_namespace_to_omegaconf(options[0]), True) if options else (None, False)


def _prepare_training(model: Any, task: Any, settings: DictConfig, is_copy: bool) -> None:
    """Check the options of a training run, lock its folder, and prepare to resume it."""
    _check_options(model, task, settings)
    for function in filter(None, (checkpoint_utils.save_checkpoint, _find_counter())):
        for name in ("best", "num_runs"):  # attributes that an earlier run of a hydra sweep left
            vars(function).pop(name, None)
    lock_save_dir(settings)
    # By default only rank 0 reads a checkpoint, and sends it to the others as pickled classes of
    # fairseq, which torch loads only if files may run code. So several ranks could not resume.
    settings.checkpoint.load_checkpoint_on_all_dp_ranks |= not is_copy  # fairseq reads no copy
    save_dirs[model] = settings.checkpoint.save_dir  # for the line on a divergence
    keep_batches(task, settings.dataset.curriculum)
    _prepare_saving(task, settings.checkpoint)
    if not settings.distributed_training.use_sharded_state:  # files of each rank are not checked
        _prepare_resumption(model, settings, is_copy)


def _check_options(model: Any, task: Any, settings: DictConfig) -> None:
    """Refuse options with which a training run would fail late, or be wasted."""
    is_ours = type(model).__module__.startswith("fairseq_posenc.")  # others may add settings
    if is_ours and isinstance(settings.model, DictConfig):  # hydra's, in which `+` adds any name
        refuse_unknown_settings(settings.model)
    checks.check_precision(settings.common, getattr(settings.model, "quant_noise_pq", 0))
    started = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    is_alone = settings.distributed_training.distributed_world_size == 1
    if is_alone and started.isdigit() and int(started) > 1:
        # Each rank would train by itself, as rank 0, and write the same checkpoints.
        raise UserError(f"torchrun starts {started} ranks: give --distributed-world-size {started}")
    checks.refuse_wrong_checkpoints(settings.checkpoint, settings.task, settings.criterion)
    loss = getattr(settings.criterion, "_name", settings.criterion)  # or a name alone
    if loss in _CROSS_ENTROPIES and getattr(settings.model, "adaptive_softmax_cutoff", None):
        raise UserError("--adaptive-softmax-cutoff is for --criterion adaptive_loss: give both")
    if type(task) in _UNFIT_LOSSES:  # not a user's own, which may build other batches
        # fairseq would fail in the first batch, or count unmasked tokens.
        if loss in _UNFIT_LOSSES[type(task)]:
            raise UserError(f"the model, the task or the criterion does not fit: {FITTING_TASKS}")
        block, batch = settings.task.tokens_per_sample, settings.dataset.max_tokens
        if settings.task.sample_break_mode != "eos" and batch and block > batch:
            raise UserError(f"--max-tokens {batch}: give at least --tokens-per-sample, {block}")
        checks.refuse_long_blocks(settings.task, block, model.max_positions())
    checks.check_shards(getattr(settings.task, "data", None) or "", settings.dataset.train_subset)


def lock_save_dir(settings: DictConfig) -> None:
    """Lock a ``--save-dir``, if fairseq has made it, until this process ends; in rank 0 for all."""
    folder = Path(settings.checkpoint.save_dir).resolve()
    is_first = settings.distributed_training.distributed_rank == 0
    if is_first and not settings.checkpoint.no_save and folder.is_dir() and folder not in _held:
        _held[folder] = locks.acquire(folder / ".fairseq-train", f"--save-dir {folder}")


def _prepare_saving(task: Any, checkpoint: DictConfig) -> None:
    """Check the room on the disk before each checkpoint, and write the count of ``--patience``.

    fairseq keeps the count only in memory (fairseq #3531). Before it writes a checkpoint, it calls
    the hook ``get_checkpoint_dict`` if a task has it.
    """
    get_state: Any = getattr(task, "get_checkpoint_dict", dict)  # by default {}

    def get_checkpoint_dict() -> dict[str, object]:
        refuse_full_disk(checkpoint.save_dir)
        counter = _find_counter()
        if checkpoint.patience <= 0 or not hasattr(counter, "best"):
            return get_state()
        metric = checkpoint.best_checkpoint_metric
        progress = {"metric": metric, "best": float(counter.best), "runs": counter.num_runs}
        return {**get_state(), _PATIENCE_KEY: progress}

    task.get_checkpoint_dict = get_checkpoint_dict


def refuse_full_disk(folder: str) -> None:
    """Refuse to write a checkpoint for which the disk has no room.

    fairseq copies a new file onto ``checkpoint_last.pt`` in place, which a full disk cuts short.
    """
    sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".pt")]
    needed = int(1.1 * max(sizes, default=0))  # 10% more than the largest so far
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UserError(
            f"no room for a checkpoint in {folder}: it needs about {needed / 1e6:,.0f} MB and "
            f"{free / 1e6:,.0f} are free; all earlier ones are complete: make room, then resume"
        )


def _prepare_resumption(model: Any, settings: DictConfig, is_copy: bool) -> None:
    """Check the checkpoint that a run starts from; end a run with nothing left to train."""
    checkpoint, wanted = settings.checkpoint, settings.optimization.max_update
    if (path := find_start(checkpoint)) is None:
        return
    last = Path(checkpoint.save_dir, LAST)
    is_elsewhere = path.parent.resolve() != last.parent.resolve()
    if is_elsewhere and last.exists() and not checkpoint.no_save:
        raise UserError(
            f"--restore-file {path} would start again, and replace {last}: leave it out, and "
            "--reset-..., to continue from that; or give another --save-dir"
        )
    ranks = settings.distributed_training.distributed_world_size
    if ranks > 1 and not checkpoint.load_checkpoint_on_all_dp_ranks:
        raise UserError(f"{ranks} ranks read {path}: add --load-checkpoint-on-all-dp-ranks")
    restore_if_torn(path, checkpoint)  # a file that ends too early, by the newest complete one
    finetunes = path == Path(checkpoint.finetune_from_model or "")
    resumed = check_resumption(path, settings, finetunes)  # what fairseq will load
    if finetunes:
        return
    reason = ""  # why nothing is left to train
    if resumed.loads_optimizer:
        logger.info("starts from %s, at update %s", path, f"{resumed.updates:,}")
        model.optimizer_source = path  # loading weights then refuses tables of other sizes
        if 0 < wanted <= resumed.updates:  # fairseq would make another one
            reason = f"{path} has made {resumed.updates:,} updates; --max-update is {wanted:,}"
            if is_elsewhere:
                raise UserError(
                    f"{reason}: nothing is left to train; --reset-optimizer --reset-lr-scheduler "
                    "--reset-meters --reset-dataloader start counting from 0"
                )
    runs = restore_patience(resumed.extra_state.get(_PATIENCE_KEY), checkpoint)
    if not reason and checkpoint.restore_file == LAST and 0 < checkpoint.patience <= runs:
        count = f"{counted(runs, 'validations')} without improvement"
        reason = f"{checkpoint.save_dir}: {count} reach --patience {checkpoint.patience}"
    if reason:
        logger.warning(f"{reason}: the training is finished, and nothing was changed")
        settings.optimization.max_epoch = -1  # fairseq trains none; an exit would end hydra's sweep
        if is_copy and _find_counter():  # in fairseq-train, which does not read our copy
            sys.exit()


def restore_patience(progress: Any, checkpoint: DictConfig) -> int:
    """Restore the count that :func:`_prepare_saving` wrote, and return it; 0 without one."""
    counter = _find_counter()
    is_reset = checkpoint.reset_meters or checkpoint.reset_dataloader  # counts from 0 again
    has_metric = progress and progress["metric"] == checkpoint.best_checkpoint_metric
    if checkpoint.patience <= 0 or is_reset or counter is None or not has_metric:
        return 0
    counter.best, counter.num_runs = progress["best"], progress["runs"]
    return int(counter.num_runs)


def _find_counter() -> Any:
    """Find fairseq's function that keeps the count in its attributes; None outside of its command.

    ``best`` is the best value of the metric, ``num_runs`` the number of validations since then.
    """
    modules = map(sys.modules.get, ("__main__", "fairseq_cli.train"))  # the first by `python -m`
    return next(filter(None, (getattr(x, "should_stop_early", None) for x in modules)), None)


def keep_batches(task: Any, curriculum: int) -> None:
    """Let a resumed run have the batches of an uninterrupted one.

    fairseq forms them once, seeded by the epoch at the start: here always 1. Loading then sets it.
    """
    build = task.get_batch_iterator

    def get_batch_iterator(dataset: Any, *args: Any, epoch: int = 1, **options: Any) -> Any:
        wants_new = options.get("disable_iterator_cache") or options.get("update_epoch_batch_itr")
        is_cached = dataset in task.dataset_to_epoch_iter  # by fairseq, after the first call
        keeps_epoch = wants_new or is_cached or not task.can_reuse_epoch_itr(dataset)
        iterator = build(dataset, *args, epoch=epoch if keeps_epoch else 1, **options)
        dataset.set_epoch(epoch)  # `build` may have set it to 1
        if curriculum:  # epochs without shuffling; a loader that is reused never begins to shuffle
            iterator.reuse_dataloader = False
        return iterator

    task.get_batch_iterator = get_batch_iterator
