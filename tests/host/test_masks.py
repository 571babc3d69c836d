"""The masks of a masked LM: others in each epoch, whoever loads the data, also after a restart."""

from __future__ import annotations

from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from tests.helpers.commands import sentences

Masks = list[dict[int, list[int]]]  # of each epoch: the masked tokens of each sample


def draw_masks(workers: int, first: int, last: int) -> Masks:
    """Load the data of some epochs as a training does, which has built its model."""
    words = [str(sentences()), "--task", "masked_lm", "--arch", "roberta_none_tiny"]
    words += ["--tokens-per-sample", "32", "--sample-break-mode", "none"]
    args = options.parse_args_and_arch(options.get_training_parser("masked_lm"), words)
    settings = convert_namespace_to_omegaconf(args)
    before = str(settings.task)
    task = tasks.setup_task(settings.task)
    task.build_model(settings.model)
    assert str(settings.task) == before  # checkpoints hold these
    task.load_dataset("train")
    batches = task.get_batch_iterator(
        task.dataset("train"), max_sentences=4, seed=1, num_workers=workers, epoch=first
    )
    found: Masks = []
    for _ in range(first, last + 1):
        samples = list(batches.next_epoch_itr())
        pairs = [pair for x in samples for pair in zip(x["id"].tolist(), x["target"].tolist())]
        found.append(dict(pairs))
    return found


def test_each_epoch_has_its_masks():
    masks = draw_masks(1, 1, 2)
    assert masks[0].keys() == masks[1].keys()
    assert masks[0] != masks[1]
    assert masks == draw_masks(0, 1, 2)
    assert masks[1:] == draw_masks(1, 2, 2)
