"""Translates raw text with trained models: sentencepieces, fairseq's beam search, plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from fairseq_posenc.workbench.running import host  # noqa: F401  (before fairseq, see there)

# isort: split
from fairseq import utils
from fairseq.data.data_utils import post_process
from fairseq.dataclass.configs import GenerationConfig
from torch import Tensor, nn

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.pieces import Pieces
from fairseq_posenc.workbench.running.devices import ComputeOptions
from fairseq_posenc.workbench.translation.checkpoint import ParallelDataBin, open_ensemble

_QUOTED_CHARACTERS = 40  # of a sentence, in an error message


class Hypothesis(NamedTuple):
    """A translation."""

    text: str  # plain text
    # natural logarithm of the probability, divided by the length (in tokens, including the end) to
    # the power of the length penalty; `fairseq-generate` prints the logarithm to base 2
    score: float
    tokens: tuple[str, ...]  # sentencepiece tokens


_EMPTY = Hypothesis("", 0.0, ())  # translation of an empty line, without a model


class Translator:
    """Translates with one model, or with several whose probabilities are averaged.

    :meth:`load` builds it from checkpoints.

    Args:
        task: fairseq's translation task, with its dictionaries.
        models: models on their device, prepared for inference.
        pieces: sentencepiece model of the source language.
    """

    def __init__(self, task: Any, models: Sequence[nn.Module], pieces: Path) -> None:
        self.task = task
        self.models = list(models)
        self.device = next(models[0].parameters()).device
        self._pieces = Pieces(pieces)

    @classmethod
    def load(
        cls,
        *checkpoints: Union[str, Path],
        data: Union[str, Path, None] = None,
        device: Optional[str] = None,
        fp16: bool = False,
        bf16: bool = False,
    ) -> Translator:
        """Load a model, or several as an ensemble.

        Args:
            *checkpoints: files written by ``fairseq-train``.
            data: folder with the dictionaries and the sentencepiece model; by default, the one that
                the first model was trained on.
            device: ``cpu`` or ``cuda``; by default, a GPU if there is one.
            fp16: whether to compute in half precision, on a GPU.
            bf16: whether to compute in bfloat16.

        Raises:
            UserError: a file is missing or damaged, or does not fit the others.
        """
        compute = ComputeOptions.choose(device, fp16, bf16)
        opened_models = open_ensemble(map(Path, checkpoints), Path(data) if data else None)
        for opened in opened_models:
            compute.place(opened.model).prepare_for_inference_(opened.settings)
        data_bin = ParallelDataBin.from_opened(opened_models[0])
        models = [opened.model for opened in opened_models]
        return cls(opened_models[0].task, models, data_bin.find_pieces(data_bin.source))

    def translate(
        self,
        sentences: Sequence[str],
        beam: int = 5,
        nbest: int = 1,
        length_penalty: float = 1.0,
        max_tokens: int = 12000,
    ) -> list[list[Hypothesis]]:
        """Translate sentences.

        A source may be as long as the model's encodings allow; relative ones have no limit. As in
        fairseq, a translation ends at 200 tokens, or at the model's ``--max-target-positions``.

        Args:
            sentences: raw text.
            beam: number of hypotheses that the search follows; 1 is greedy.
            nbest: number of hypotheses to return.
            length_penalty: below 1 favours short translations, above 1 long ones.
            max_tokens: source tokens translated at a time, including padding.

        Returns:
            The ``nbest`` hypotheses of each sentence, best first, in the order of the sentences. An
            empty sentence has a single, empty hypothesis.

        Raises:
            UserError: ``nbest`` is out of range, or a sentence is too long for the encodings.
        """
        if not 1 <= nbest <= beam:
            raise UserError(f"nbest {nbest}: must be from 1 to the beam of {beam}")
        options = GenerationConfig(beam=beam, lenpen=length_penalty)
        generator = self.task.build_generator(self.models, options)
        encoded = [self._encode(sentence) for sentence in sentences]
        # The only token of an empty sentence is its end.
        nonempty = [number for number, tokens in enumerate(encoded) if tokens.numel() > 1]
        results = [[_EMPTY] for _ in sentences]
        for batch in self._make_batches([encoded[number] for number in nonempty], max_tokens):
            numbers = [nonempty[index] for index in batch["id"].tolist()]
            try:
                translated = self.task.inference_step(generator, self.models, batch)
            except UserError as error:
                # The only mistake of a user that shows here: a source beyond the encodings' limit.
                longest = numbers[int(batch["net_input"]["src_lengths"].argmax())]
                raise UserError(
                    f"'{sentences[longest][:_QUOTED_CHARACTERS]}...': {error}"
                ) from None
            for number, hypotheses in zip(numbers, translated):
                results[number] = [self._decode(hypothesis) for hypothesis in hypotheses[:nbest]]
        return results

    def _decode(self, hypothesis: dict[str, Any]) -> Hypothesis:
        tokens = self.task.target_dictionary.string(hypothesis["tokens"])
        text = post_process(tokens, "sentencepiece")
        return Hypothesis(text, float(hypothesis["score"]), tuple(tokens.split()))

    def _encode(self, sentence: str) -> Tensor:
        """Convert a sentence to dictionary indices, including the end: ``(S,)``."""
        (pieces,) = self._pieces([" ".join(sentence.split())])
        symbols: Tensor = self.task.source_dictionary.encode_line(
            " ".join(pieces), add_if_not_exist=False
        )
        return symbols.long()

    def _make_batches(self, encoded: list[Tensor], max_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield fairseq's batches of sentences of similar length."""
        if not encoded:
            return
        lengths = [tokens.numel() for tokens in encoded]
        dataset = self.task.build_dataset_for_inference(encoded, lengths)
        # fairseq's iterators would limit positions for all encodings; these check their own limits.
        for numbers in dataset.batch_by_size(
            dataset.ordered_indices(), max_tokens=max(max_tokens, *lengths)
        ):
            batch = dataset.collater([dataset[number] for number in numbers])
            yield utils.apply_to_sample(lambda tensor: tensor.to(self.device), batch)
