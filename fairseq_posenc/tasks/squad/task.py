"""Defines the task ``squad``: finding the start and end of an answer in each window of a text.

No ``from __future__ import annotations`` here: fairseq makes options from the fields' types.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import data as fairseq_data
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.squad.databin import SquadDataBin, open_data_bin


@dataclass
class SquadConfig(FairseqDataclass):
    """The options of the task."""

    data: str = field(
        default=MISSING, metadata={"help": "folder made by fairseq-posenc preprocess squad"}
    )
    seed: int = II("common.seed")


@register_task("squad", dataclass=SquadConfig)
class SquadTask(FairseqTask):
    """Finds the answer to a question in a paragraph."""

    def __init__(self, cfg: SquadConfig, data_bin: SquadDataBin, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        self.data_bin = data_bin
        self.dictionary = dictionary

    @classmethod
    def setup_task(cls, cfg: SquadConfig, **kwargs: Any) -> "SquadTask":
        """Open the folder and build the task.

        Raises:
            UserError: the folder was not made by ``fairseq-posenc preprocess squad``.
        """
        data_bin = open_data_bin(Path(cfg.data))
        return cls(cfg, data_bin, load_dictionary(data_bin.dictionary))

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        """Build a model of the RoBERTa family with a head for spans.

        Raises:
            UserError: the model is of another family, or has fewer positions than a window has
                tokens.
        """
        model = super().build_model(cfg, from_checkpoint)
        if not hasattr(model, "register_span_head"):  # a method of our RoBERTa alone
            raise UserError(
                f"the task squad needs a model of fairseq_posenc's RoBERTa family, not {cfg._name}"
            )
        self.data_bin.check_lengths(model.max_positions(), "the model")
        model.register_span_head()
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> FairseqDataset:
        """Load a split in a random order, so that batches mix questions.

        Raises:
            FileNotFoundError: the data have no such split.
        """
        prefix = str(self.data_bin.path / split)
        tokens = data_utils.load_indexed_dataset(prefix, self.dictionary)
        if tokens is None:
            raise FileNotFoundError(f"{self.data_bin.path}: has no split {split!r}")
        spans = np.load(f"{prefix}.spans.npy").astype(np.int64)  # [N, 2]: first, last token
        dataset = fairseq_data.NestedDictionaryDataset(
            {
                "id": fairseq_data.IdDataset(),
                "net_input": {
                    "src_tokens": fairseq_data.RightPadDataset(tokens, self.dictionary.pad()),
                    "src_lengths": fairseq_data.NumelDataset(tokens),
                },
                "starts": fairseq_data.RawLabelDataset(spans[:, 0].tolist()),
                "ends": fairseq_data.RawLabelDataset(spans[:, 1].tolist()),
                "nsentences": fairseq_data.NumSamplesDataset(),
                "ntokens": fairseq_data.NumelDataset(tokens, reduce=True),
            },
            sizes=[tokens.sizes],
        )
        with data_utils.numpy_seed(self.cfg.seed):
            order = np.random.permutation(len(tokens))
        self.datasets[split] = fairseq_data.SortDataset(dataset, sort_order=[order])
        return self.datasets[split]

    def max_positions(self) -> int:
        """Look up the maximum size of a window."""
        return self.data_bin.limits.max_length

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of the windows."""
        return self.dictionary

    target_dictionary = source_dictionary  # which fairseq's criterions read
