"""Defines the task ``glue``: fairseq's sentence prediction, configured by the data-bin.

No ``from __future__ import annotations`` here: fairseq makes options from the fields' types.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, List  # noqa: UP035

from fairseq.data import BaseWrapperDataset
from fairseq.tasks import FairseqDataclass, register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from omegaconf import II, MISSING

from fairseq_posenc.checkpoints.dictionary import DICTIONARY, load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.tasks.glue.criterion import HEAD
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import Task


@dataclass
class GlueTaskConfig(FairseqDataclass):
    """Options of the task; the data-bin determines everything else.

    ``fairseq-train`` ignores ``learning_rates``, ``seeds`` and ``warmup_ratio``, from which
    ``fairseq-posenc glue`` plans several training runs.
    """

    data: str = field(default=MISSING, metadata={"help": "data-bin of one task"})
    max_positions: int = field(default=512, metadata={"help": "positions of the model"})
    seed: int = II("common.seed")
    max_update: int = II("optimization.max_update")  # not read; earlier checkpoints have it
    # fairseq makes an option only of `List`, not of `list`.
    learning_rates: List[float] = field(  # noqa: UP006
        default_factory=list, metadata={"help": "for glue: peak learning rates (default: --lr)"}
    )
    seeds: List[int] = field(  # noqa: UP006
        default_factory=list, metadata={"help": "for glue: random seeds (default: --seed)"}
    )
    warmup_ratio: float = field(
        default=0.0, metadata={"help": "for glue: warm-up as a share of all updates"}
    )


class _ScoreDataset(BaseWrapperDataset):
    """Keeps the scores exact, and adds the size of the data set to each batch.

    With --fp16, fairseq rounds all float32 tensors of a batch, but not float64. The criterion needs
    the size to gather the scores of all processes in one vector.
    """

    def collater(self, samples: Any) -> Any:
        batch = self.dataset.collater(samples)
        if "target" in batch:  # a test set has no targets
            batch["target"] = batch["target"].double()
            batch["dataset_size"] = len(self.dataset)
        return batch


@register_task("glue", dataclass=GlueTaskConfig)
class GlueTask(SentencePredictionTask):
    """Sentence prediction whose classes and their order come from the data-bin."""

    glue: Task  # definition of the GLUE task

    @classmethod
    def setup_task(cls, cfg: GlueTaskConfig, **kwargs: Any) -> "GlueTask":
        """Load the data-bin's dictionaries, check the options, and build the task.

        Raises:
            UserError: the folder is not a data-bin of GLUE, or has an example that is too long.
        """
        data = open_glue_data(Path(cfg.data))
        data.check_lengths(cfg.max_positions, "the model")
        glue = data.task
        dictionary = load_dictionary(data.dictionary)
        labels = dictionary  # fairseq's task needs one, but a regression does not use it
        if not glue.regression:
            # Without <mask>, which would become one more class.
            labels = load_dictionary(data.path / "label" / DICTIONARY, mask=False)
            classes = labels.symbols[labels.nspecial :]
            if classes != list(glue.classes):
                raise UserError(
                    f"{cfg.data}/label/dict.txt has {' '.join(classes)}, not {glue.name}'s labels "
                    f"in their order, {' '.join(glue.classes)}; make the data-bin again"
                )
        settings = SentencePredictionConfig(
            data=cfg.data,
            num_classes=1 if glue.regression else len(glue.classes),
            init_token=dictionary.bos(),
            separator_token=dictionary.eos(),
            max_positions=cfg.max_positions,
            regression_target=glue.regression,
            classification_head_name=HEAD,
            seed=cfg.seed,
        )
        task = cls(settings, dictionary, labels)
        task.glue = glue
        return task

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> Any:
        """Load a split."""
        dataset = super().load_dataset(split, combine=combine, **kwargs)
        self.datasets[split] = _ScoreDataset(dataset) if self.glue.regression else dataset
        return self.datasets[split]
