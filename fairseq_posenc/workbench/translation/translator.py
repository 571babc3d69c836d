"""Translates raw text with trained models: sentencepieces, fairseq's beam search, plain text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data.data_utils import post_process
from fairseq.dataclass.configs import GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.modules import LearnedPositionalEmbedding
from omegaconf import OmegaConf, open_dict
from torch import Tensor

from fairseq_posenc.errors import UserError
from fairseq_posenc.tokens.subwords import Pieces
from fairseq_posenc.tokens.tokenizer import PIECES
from fairseq_posenc.workbench.loading.checkpoints import State, load_state
from fairseq_posenc.workbench.loading.open_model import find_pieces, open_model, translates
from fairseq_posenc.workbench.running.devices import place
from fairseq_posenc.workbench.running.progress import say

_QUOTED_CHARACTERS = 40  # of a sentence, in an error message
_MAX_TOKENS = 12000  # source tokens at a time, with padding, as in fairseq-generate


def require_pieces(data: Path, language: str) -> Path:
    """Find the sentencepiece model of a language in a data-bin; refuse a folder without one."""
    if path := find_pieces(data, language):
        return path
    names = f"neither sentencepiece.{language}.model nor {PIECES}"
    raise UserError(f"--data {data}: holds {names}; copy the tokenizer of the training text there")


def load_translation(path: Path, option: str = "--checkpoint") -> State:
    """Load the checkpoint of a translation model; messages begin with the ``option`` that named it.

    Raises:
        UserError: the path is not a file, the file is damaged, or its model does not translate.
    """
    state = load_state(path, option)
    if not translates(task := state["cfg"].task):
        what = f"a model for the task {task.get('_name')!r}"
        raise UserError(f"{option} {path}: is {what}, not for translation")
    return state


class Hypothesis(NamedTuple):
    """A translation: ``text``, and ``score``, the log probability that the search maximizes."""

    text: str  # plain text
    # natural logarithm of the probability, divided by the length (in tokens, including the end) to
    # the power of the length penalty; `fairseq-generate` prints the logarithm to base 2
    score: float


class Translator:
    """Translates: ``Translator.load("checkpoint_best.pt").translate(["Un homme dort."])[0][0]``.

    Args:
        interface: fairseq's interface to the model, which batches, searches and decodes.
        pieces: sentencepiece model of the source language.
    """

    LARGEST_PENALTY = 10.0  # powers of lengths would overflow

    def __init__(self, interface: GeneratorHubInterface, pieces: Pieces) -> None:
        self.interface = interface
        self._pieces = pieces

    @classmethod
    def load(
        cls,
        checkpoint: str | Path,
        data: str | Path | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> "Translator":
        """Load a model.

        Args:
            checkpoint: a file written by ``fairseq-train``.
            data: folder with the dictionaries and the sentencepiece model; by default, the one that
                the model was trained on.
            dtype: precision; the device is a GPU if there is one.

        Raises:
            UserError: a file is missing or damaged, or does not fit the others.
        """
        path, folder = Path(checkpoint), Path(data) if data else None
        opened = open_model(path, folder, state=load_translation(path))
        settings = opened.settings
        with open_dict(settings):
            settings.generation = OmegaConf.structured(GenerationConfig)
            settings.dataset.batch_size = None  # batches are limited only by their tokens
            settings.update(bpe=None, tokenizer=None)  # `encode` splits text by the folder's pieces
        interface = GeneratorHubInterface(settings, opened.task, [opened.model])
        # fairseq would limit positions for all encodings; `translate` and ours check their limits.
        interface.max_positions = None
        pieces = Pieces(require_pieces(opened.data, opened.task.cfg.source_lang))
        return cls(place(interface, dtype), pieces)

    def translate(
        self, sentences: Sequence[str], beam: int = 5, nbest: int = 1, length_penalty: float = 1.0
    ) -> list[list[Hypothesis]]:
        """Translate sentences.

        A source may be as long as the model's encodings allow; relative ones have no limit. As in
        fairseq, a translation ends at 200 tokens, or at the model's ``--max-target-positions``.

        Args:
            sentences: raw text.
            beam: number of hypotheses that the search follows; 1 is greedy.
            nbest: number of hypotheses to return, at most ``beam``.
            length_penalty: from -10 to 10; below 1 favors short translations, above 1 long ones.

        Returns:
            The ``nbest`` hypotheses of each sentence, best first, in the order of the sentences. An
            empty sentence has a single, empty hypothesis.

        Raises:
            UserError: a number is out of range, or a sentence is too long for the encodings.
        """
        if not (1 <= nbest <= beam and abs(length_penalty) <= self.LARGEST_PENALTY):  # or NaN
            given = f"nbest={nbest}, beam={beam}, length_penalty={length_penalty}"
            raise UserError(f"{given}: give nbest from 1 to beam, and a penalty from -10 to 10")
        encoded = [self.encode(sentence) for sentence in sentences]
        lengths = [len(tokens) for tokens in encoded]
        nonempty = [tokens for tokens in encoded if len(tokens) > 1]  # not only an end
        empty = Hypothesis("", 0.0)  # its translation, without the model
        if not nonempty:
            return [[empty] for _ in sentences]
        self.interface.cfg.dataset.max_tokens = max(_MAX_TOKENS, *lengths)  # the longest fits
        table = self.interface.models[0].encoder.embed_positions  # fairseq's own check nothing
        try:
            if isinstance(table, LearnedPositionalEmbedding) and max(lengths) > table.max_positions:
                limit = f"the {table.max_positions} positions of 'learned'"
                raise UserError(f"a sequence of {max(lengths)} tokens is longer than {limit}")
            found = self.interface.generate(nonempty, beam, lenpen=length_penalty)
        except UserError as error:
            # The only mistake of a user that shows here: a source beyond the positions' limit.
            longest = sentences[lengths.index(max(lengths))]
            raise UserError(f"'{longest[:_QUOTED_CHARACTERS]}...': {error}") from None
        translated = iter([[self._decode(x) for x in hypotheses[:nbest]] for hypotheses in found])
        return [next(translated) if length > 1 else [empty] for length in lengths]

    def _decode(self, hypothesis: dict[str, Any]) -> Hypothesis:
        text = post_process(self.interface.string(hypothesis["tokens"]), "sentencepiece")
        return Hypothesis(text, float(hypothesis["score"]))

    def encode(self, sentence: str) -> Tensor:
        """Convert a sentence to dictionary indices, including the end: ``(S,)``."""
        (pieces,) = self._pieces([" ".join(sentence.split())])
        return self.interface.binarize(" ".join(pieces))


def warn_of_long(sentences: Sequence[str], translator: Translator) -> None:
    """Warn of sentences that are longer than a translation may be: theirs may be cut off."""
    end = GenerationConfig.max_len_b  # 200 tokens, whatever the length of the source
    if cut := sum(len(translator.encode(sentence)) > end for sentence in sentences):
        say(f"sentences longer than a translation may be ({end} tokens): {cut:,}; split them")
