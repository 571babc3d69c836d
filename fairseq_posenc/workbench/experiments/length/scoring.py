"""Loss and perplexity of a model on a text, in windows of each mode and context length.

The text is a stream: all tokens of a split in a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from torch import Tensor

from fairseq_posenc.encodings.base import Encoding
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.experiments.length.checkpoint import LoadedModel
from fairseq_posenc.workbench.running.progress import bar, format_time, say
from fairseq_posenc.workbench.running.stages import Inputs, Outputs, Stage


class Stream(NamedTuple):
    """What a model reads and what it predicts."""

    # `(N,)`, the token before each target. Before the first one it is the end of sentence, as
    # fairseq has it in training, so the first token is predicted like others
    inputs: Tensor
    targets: Tensor  # `(N,)`, every token of the split, ends of sentences included

    @classmethod
    def from_tokens(cls, tokens: Tensor, eos: int) -> Stream:
        """Build the stream of ``tokens``, ``(N,)``."""
        return cls(torch.cat([tokens.new_tensor([eos]), tokens[:-1]]), tokens)

    def __len__(self) -> int:
        """Count the tokens, N."""
        return len(self.targets)


def read_dictionary(data: Path) -> Dictionary:
    """Read the dictionary of a folder that ``fairseq-preprocess --only-source`` made.

    Raises:
        UserError: the data do not exist.
    """
    path = data / "dict.txt"
    if not path.is_file():
        raise UserError(
            f"--data {data}: {path} does not exist; name a folder that fairseq-preprocess "
            "--only-source made"
        )
    return Dictionary.load(str(path))


def read_stream(data: Path, split: str, dictionary: Dictionary) -> Stream:
    """Read all tokens of a split.

    Raises:
        UserError: the folder has no such split, it is empty or damaged, or of another dictionary.
    """
    dataset = load_indexed_dataset(str(data / split), dictionary)
    if dataset is None or not sum(dataset.sizes):
        splits = ", ".join(sorted(path.stem for path in data.glob("*.idx"))) or "none"
        raise UserError(f"--split {split}: {data} has no tokens of it; its splits: {splits}")
    tokens = torch.cat([dataset[index] for index in range(len(dataset))]).long()
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < len(dictionary):
            raise UserError(
                f"{data / split}.bin: has a token {token:,}, and dict.txt has {len(dictionary):,} "
                "symbols; name the dictionary that the text was preprocessed with"
            )
    return Stream.from_tokens(tokens, dictionary.eos())


class Window(NamedTuple):
    """A piece of the stream: read from ``start``, predicted from ``scored``, up to ``end``."""

    start: int
    scored: int
    end: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many tokens are read, and how many of them are predicted."""
        return self.end - self.start, self.end - self.scored


def cut_windows(total: int, length: int, stride: int) -> Iterator[Window]:
    """Cut a stream so that every token is predicted exactly once.

    A window reads at most ``length`` tokens and predicts the last ``stride`` of them, so each has
    at least ``length - stride`` tokens of context, as far as the stream has them. With a stride of
    ``length`` that is the non-overlapping evaluation.

    Source:
        Press et al. (2022), "ALiBi", arXiv:2108.12409, appendix B; the windows are those of
        ``fairseq-eval-lm --context-window (length - stride)``.
    """
    for scored in range(0, total, stride):
        yield Window(max(0, scored - length + stride), scored, min(scored + stride, total))


def batch_windows(pieces: Iterator[Window], max_tokens: int) -> Iterator[list[Window]]:
    """Put neighbours of equal shape together, up to ``max_tokens`` tokens, or else one by one."""
    for (read, _), alike in groupby(pieces, key=lambda window: window.shape):
        while batch := list(islice(alike, max(1, max_tokens // read))):
            yield batch


_ROWS = 1024  # tokens whose probabilities are computed at once: each has the whole vocabulary's
_MOST_BITS = 1000.0  # 2 to this power is still a number


class Score(NamedTuple):
    """How well a model predicts a stream, or why it cannot."""

    length: int  # most tokens that the model read at a time
    stride: int  # tokens predicted at a time
    tokens: int  # tokens predicted in all
    loss: Optional[float]  # bits per token; None if the model refused
    seconds: float  # wall-clock time
    refusal: str = ""  # why there is no figure

    @property
    def perplexity(self) -> Optional[float]:
        """Perplexity per token."""
        return None if self.loss is None else 2.0**self.loss


class Evaluation(NamedTuple):
    """The scores of a model, each computed once and kept in a folder of its own."""

    folder: Path  # where their folders lie; messages call the model by its name
    inputs: Inputs  # what the scores depend on, without their lengths
    lengths: Sequence[int]  # context lengths
    # the stride of each mode; None for that of the length, so that nothing overlaps
    strides: Mapping[str, int | None]
    max_tokens: int  # tokens to read in a batch

    def stages(self) -> Iterator[tuple[str, int, Stage]]:
        """Yield mode, context length and stage of each score."""
        for mode, stride in self.strides.items():
            for length in self.lengths:
                sizes = length, stride or length, self.max_tokens
                inputs = {**self.inputs, "sizes": sizes}
                yield mode, length, Stage(self.folder / f"{mode}-{length}", inputs)

    def count_left(self) -> int:
        """Count the scores that are not there."""
        return sum(stage.outputs is None for _, _, stage in self.stages())

    def compute(self, loaded: LoadedModel, stream: Stream) -> None:
        """Compute the scores that are not there."""
        for mode, length, stage in self.stages():
            name = f"{self.folder.name}, {mode}, {length:,}"
            stage.do(partial(_measure, name, loaded, stream, stage.inputs["sizes"]))

    def read(self) -> dict[str, dict[int, Score]]:
        """Read the scores of each mode, by length; all are there."""
        scores: dict[str, dict[int, Score]] = {mode: {} for mode in self.strides}
        for mode, length, stage in self.stages():
            scores[mode][length] = Score(**(stage.outputs or {}))
        return scores


def _measure(name: str, loaded: LoadedModel, stream: Stream, sizes: Sequence[int]) -> Outputs:
    with bar(name, len(stream), " tokens") as shown:
        length, stride, max_tokens = sizes
        score = score_stream(loaded, stream, length, stride, max_tokens, shown.update)
    figure = f"no figure: {score.refusal}"
    if score.perplexity is not None:
        figure = f"perplexity {score.perplexity:,.2f} of {score.tokens:,} tokens"
    say(f"{name}: {figure} ({format_time(score.seconds)})")
    return score._asdict()


def score_stream(
    loaded: LoadedModel,
    stream: Stream,
    length: int,
    stride: int,
    max_tokens: int,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Score every token of a stream once; tell ``on_tokens`` of each batch how many.

    At most ``length`` tokens are read at a time and ``stride`` predicted, in batches of
    ``max_tokens``, if that is more than one window.
    """
    began = time.monotonic()
    total, tokens, refusal = 0.0, 0, ""
    try:
        if loaded.limit is not None and length > loaded.limit:
            raise UserError(f"{length} tokens are more than the model's limit of {loaded.limit}")
        for module in loaded.model.modules():
            if isinstance(module, Encoding):
                module.make_room(length)
        for batch in batch_windows(cut_windows(len(stream), length, stride), max_tokens):
            log_probs = compute_log_probabilities(loaded, stream, batch)
            total += float(log_probs.double().sum())
            tokens += log_probs.numel()
            on_tokens(log_probs.numel())
    except UserError as error:  # an encoding that cannot read so much
        refusal = str(error)
    loss = -total / max(1, tokens) / math.log(2)
    if not refusal and not loss < _MOST_BITS:  # so that NaN fails
        refusal = "the model's probabilities are too small for a number"
    seconds = time.monotonic() - began
    return Score(length, stride, tokens, None if refusal else loss, seconds, refusal)


@torch.no_grad()
def compute_log_probabilities(loaded: LoadedModel, stream: Stream, batch: list[Window]) -> Tensor:
    """Compute the natural logarithms of the probabilities of predicted tokens, ``(n,)``.

    All windows of the batch have one shape.
    """
    model = loaded.model
    device = next(model.parameters()).device
    tokens = torch.stack([stream.inputs[w.start : w.end] for w in batch])  # [B, T]
    targets = torch.cat([stream.targets[w.scored : w.end] for w in batch]).to(device)  # [n]
    # fairseq's own decoder has no default for encoder_out.
    features = model.extract_features(tokens.to(device), encoder_out=None)[0]  # [B, T, C]
    features = features[:, tokens.size(1) - batch[0].shape[1] :].flatten(0, 1)  # [n, C]
    log_probs = []
    for rows, wanted in zip(features.split(_ROWS), targets.split(_ROWS)):
        wanted = wanted[None]
        output = (model.output_layer(rows[None]), None)
        logs = model.get_normalized_probs(output, log_probs=True, sample={"target": wanted})
        log_probs.append(logs.gather(2, wanted[..., None]).flatten())
    return torch.cat(log_probs)
