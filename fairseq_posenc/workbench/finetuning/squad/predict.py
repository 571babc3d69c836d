"""Answers questions with a fine-tuned model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from fairseq.data import Dictionary, data_utils

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.finetuning.squad.data import Question
from fairseq_posenc.workbench.finetuning.squad.databin import Encoder
from fairseq_posenc.workbench.finetuning.squad.spans import (
    Prediction,
    Scored,
    best_spans,
    combine_windows,
)
from fairseq_posenc.workbench.finetuning.squad.windows import Window
from fairseq_posenc.workbench.loading.checkpoints import State, load_state
from fairseq_posenc.workbench.loading.open_model import open_model
from fairseq_posenc.workbench.running.devices import PLAIN, Computing
from fairseq_posenc.workbench.running.progress import bar
from fairseq_posenc.workbench.tokens.tokenizer import load_tokenizer


class Input(NamedTuple):
    """A window with the number of its question."""

    question: int
    window: Window


class Predictor:
    """Answers questions.

    Args:
        model: fine-tuned model in evaluation mode, on its device.
        encoder: makes windows.
        dictionary: fairseq dictionary.
        version: version of SQuAD that the model was fine-tuned on.
    """

    def __init__(self, model: Any, encoder: Encoder, dictionary: Dictionary, version: str) -> None:
        self.model, self.encoder, self.dictionary = model, encoder, dictionary
        self.version = version

    @classmethod
    def load(cls, path: Path, data: Optional[Path] = None, how: Computing = PLAIN) -> Predictor:
        """Load a model that ``fairseq-posenc squad train`` made.

        Args:
            path: checkpoint of the model.
            data: folder that it was trained on; None for the one that the checkpoint names.
            how: device and precision; the scores of the head are always float32.

        Raises:
            UserError: another model, or the folder is missing.
        """
        state = load_state(path, "--checkpoint")
        if state["cfg"].task._name != "squad" or not _has_head(state):
            raise UserError(
                f"--checkpoint {path}: was not fine-tuned on SQuAD; use fairseq-posenc squad train"
            )
        opened = open_model(path, data, state=state)
        dictionary, data_bin = opened.task.dictionary, opened.task.data_bin
        encoder = Encoder(load_tokenizer(opened.data, dictionary), dictionary, data_bin.limits)
        return cls(how.place(opened.model), encoder, dictionary, data_bin.version)

    def predict(self, questions: Sequence[Question], max_tokens: int = 8192) -> list[Prediction]:
        """Answer questions.

        Args:
            questions: questions, those about one paragraph best one after the other.
            max_tokens: maximum tokens of a batch, with padding.

        Returns:
            The predictions in the order of the questions.
        """
        inputs = [
            Input(number, window)
            for number, question in enumerate(questions)
            for window in self.encoder.windows(question)
        ]
        scored: list[list[Scored]] = [[] for _ in questions]
        with bar("squad predict", len(inputs), " windows") as shown:
            for batch in _batches(inputs, max_tokens):
                for item, found in zip(batch, self._score([item.window for item in batch])):
                    scored[item.question].append(found)
                shown.update(len(batch))
        return [
            combine_windows(each.id, each.context, self.encoder.context(each.context), found)
            for each, found in zip(questions, scored)
        ]

    @torch.inference_mode()
    def _score(self, windows: Sequence[Window]) -> list[Scored]:
        """Score a batch of windows; return the best spans of each."""
        tokens = data_utils.collate_tokens(
            [torch.from_numpy(window.tokens) for window in windows], self.dictionary.pad()
        )
        device = next(self.model.parameters()).device
        scores = self.model(tokens.to(device), span_scores=True)
        starts, ends = (each.cpu().numpy() for each in scores)
        return [best_spans(*each) for each in zip(windows, starts, ends)]


def _has_head(state: State) -> bool:
    return any(name.startswith("span_head.") for name in state["model"])


def _batches(inputs: Sequence[Input], max_tokens: int) -> Iterator[list[Input]]:
    """Batch windows of similar length, the longest first: if memory runs out, it does so early."""
    batch: list[Input] = []
    for item in sorted(inputs, key=lambda item: -len(item.window.tokens)):
        if batch and (len(batch) + 1) * len(batch[0].window.tokens) > max_tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
