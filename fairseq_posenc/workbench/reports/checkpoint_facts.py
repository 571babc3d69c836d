"""Reads facts about a training from its checkpoint: task, settings, positions, best perplexity.

A checkpoint of fairseq holds all options of its training, so no log or command line is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Optional

from fairseq_posenc.checkpoints.recovery import BEST, LAST
from fairseq_posenc.checkpoints.safe_loading import open_checkpoint
from fairseq_posenc.workbench.loading.checkpoints import read_updates

PRETRAINING_TASKS = ("masked_lm", "language_modeling")
# Sections of fairseq's configuration; if two have an option of the same name, the later one counts.
_SECTIONS = ["common", "distributed_training", "dataset", "optimization", "optimizer"]
_SECTIONS += ["lr_scheduler", "checkpoint", "model", "task"]


class CheckpointFacts(NamedTuple):
    """Facts about the training that made a checkpoint."""

    path: Path  # absolute
    task: str  # fairseq's name of the task
    settings: dict[str, Any]  # fairseq's options by name
    updates: int
    perplexity: Optional[float]  # lowest validation perplexity; None if it was not measured

    @property
    def encoding(self) -> str:
        """Spec of the first stack's positions; for fairseq's own models, the equivalent spec."""
        side = "decoder" if self.task == "language_modeling" else "encoder"
        if "position_encoding" in self.settings:
            decoder = self.settings.get("position_encoding_decoder") if side == "decoder" else None
            return str(decoder or self.settings["position_encoding"])
        if self.settings.get("no_token_positional_embeddings"):
            return "none"
        # By default, fairseq's RoBERTa trains its positions, and its causal LMs compute sinusoids.
        learned = self.settings.get(f"{side}_learned_pos", side == "encoder")
        return "learned" if learned else "sinusoidal(layout=fairseq)"

    @property
    def directions(self) -> str:
        """Attention directions of the layers, as in ``lr,rl``; ``lr`` for causal models."""
        if self.task == "language_modeling":
            return "lr"
        return str(self.settings.get("attention_directions") or "")

    @property
    def data_name(self) -> str:
        """Name of the training's data folder, in lower case."""
        folder = Path(str(self.settings.get("data", "")).split(":")[0])
        is_shard = folder.name.startswith("shard")  # a folder in that of the data
        return (folder.parent if is_shard else folder).name.lower()

    @property
    def is_released(self) -> bool:
        """Whether the model was converted (0 updates), or is of fairseq's own architectures."""
        return self.updates == 0 or "position_encoding" not in self.settings

    @property
    def start(self) -> Optional[Path]:
        """The checkpoint that the training started from; None if its weights were random."""
        if pretrained := self.settings.get("finetune_from_model"):
            return Path(pretrained)
        restored = Path(self.settings.get("restore_file") or LAST)
        folders = (self.path.parent, Path(self.settings.get("save_dir", self.path.parent)))
        is_same_run = restored == Path(LAST) or restored.parent in folders
        return None if is_same_run else restored


def read_checkpoint(path: Path) -> CheckpointFacts:
    """Read a checkpoint without loading its tensors.

    Raises:
        UserError: the file is not a checkpoint of fairseq.
    """
    with open_checkpoint(path) as state:
        settings, updates = _flatten_settings(state), read_updates(state)
        metric = settings.get("best_checkpoint_metric", "loss")
        best = state["extra_state"].get("best") if metric in ("loss", "ppl") else None
    if best is not None:
        best = float(2.0**best if metric == "loss" else best)  # fairseq's losses are in bits
    return CheckpointFacts(path.resolve(), str(settings.get("task")), settings, updates, best)


def read_folder(folder: Path) -> Optional[CheckpointFacts]:
    """Read the training in a ``--save-dir``; None if the folder has no checkpoint.

    Raises:
        UserError: a file with the name of a checkpoint is none.
    """
    for name in (LAST, BEST):  # the last one has the most updates
        if (folder / name).is_file():
            return read_checkpoint(folder / name)
    return None


def _flatten_settings(state: dict[str, Any]) -> dict[str, Any]:
    if state.get("args") is not None:
        return vars(state["args"])
    flat: dict[str, Any] = {}
    for name in _SECTIONS:
        section = state["cfg"].get(name) or {}
        flat.update(section if isinstance(section, dict) else vars(section))
    flat["task"] = state["cfg"]["task"]["_name"]
    return flat
