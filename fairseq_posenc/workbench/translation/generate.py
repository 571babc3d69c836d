"""Translates a test set with ``fairseq-generate``, in parts, so that it can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fairseq_posenc.errors import UserError
from fairseq_posenc.files import write_whole
from fairseq_posenc.folders import Request, checksum, is_made, whole_folder
from fairseq_posenc.tokens.files import read_lines
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.running.devices import choose_device
from fairseq_posenc.workbench.running.host import USER_DIR
from fairseq_posenc.workbench.running.programs import run_logged
from fairseq_posenc.workbench.running.progress import say
from fairseq_posenc.workbench.translation.checkpoint import ParallelDataBin

_MAX_BATCH_SENTENCES = 128


class Search(NamedTuple):
    """Settings of beam search."""

    beam: int  # beam size; 1 is greedy
    length_penalty: float  # below 1 favours short translations, above 1 long ones

    @property
    def name(self) -> str:
        """Name in tables."""
        return "greedy" if self.beam == 1 else f"beam {self.beam}"

    @property
    def file_name(self) -> str:
        """Name in paths."""
        return self.name.replace(" ", "-")


class GenerationOptions(NamedTuple):
    """Options that all translations of an evaluation share."""

    split: str  # name of the part of the data to translate
    num_shards: int  # number of parts, after each of which an interrupted evaluation can resume
    max_tokens: int  # source tokens in a batch
    device: Optional[str]  # device to compute on; None for a GPU if there is one
    fp16: bool  # whether to compute in half precision


class Generation:
    """The translations of a test set by a model, or by several as an ensemble.

    Messages begin with ``label``. Translations are written below ``folder``. The constructor reads
    all files of the checkpoints and of the data, for their checksums.
    """

    def __init__(
        self,
        label: str,
        checkpoints: Sequence[Path],
        data: ParallelDataBin,
        options: GenerationOptions,
        folder: Path,
    ) -> None:
        self.label = label
        self.folder = folder
        self._checkpoints = list(checkpoints)
        self._data, self._options = data, options
        self._sentences = data.count_sentences(options.split)
        files = sorted(data.folder.glob(f"{options.split}.*-*.*"))
        files += [data.folder / f"dict.{name}.txt" for name in (data.source, data.target)]
        # No part may be empty: fairseq-generate divides by the number of its sentences.
        self._shards = min(options.num_shards, self._sentences)
        self._inputs: Request = {
            "checkpoints": [checksum(path) for path in self._checkpoints],
            "data": [checksum(path) for path in files],
            "languages": [data.source, data.target],
            "options": [options.split, options.max_tokens, options.fp16],
            "version": __version__,
        }

    def join(self, search: Search) -> tuple[str, list[str]]:
        """Join the parts into a file of plain text, in the order of the test set.

        Returns:
            The path of the file, and its lines.

        Raises:
            UserError: ``fairseq-generate`` left out a sentence.
        """
        hypotheses: dict[int, str] = {}
        for shard in range(self._shards):
            part = self._find_part(search, shard)
            hypotheses |= read_hypotheses(part / f"generate-{self._options.split}.txt")
        for number in range(self._sentences):
            if number not in hypotheses:
                raise UserError(f"{self.folder}: fairseq-generate left out sentence {number + 1}")
        lines = [hypotheses[number] for number in range(self._sentences)]
        path = self.folder / f"{search.file_name}.txt"
        write_whole(path, "".join(f"{line}\n" for line in lines))
        return str(path), lines

    def translate(self, search: Search, lock: int) -> None:
        """Translate the parts that are missing; ``lock`` is that of the command's folder.

        Raises:
            UserError: a part was translated with other models, data or options.
            RunError: ``fairseq-generate`` failed.
        """
        for shard in range(self._shards):
            part = self._find_part(search, shard)
            request = {**self._inputs, "search": list(search), "shard": [shard, self._shards]}
            if not is_made(part, request):
                say(f"{self.label}, {search.name}: part {shard + 1} of {self._shards}")
                part.parent.mkdir(parents=True, exist_ok=True)
                with whole_folder(part, request) as partial:
                    command = self._build_command(search, shard, partial)
                    run_logged(command, partial / "generate.log", lock)

    def _find_part(self, search: Search, shard: int) -> Path:
        return self.folder / search.file_name / f"part-{shard + 1}"

    def _build_command(self, search: Search, shard: int, folder: Path) -> list[str]:
        """Build the command that translates one part."""
        options = self._options
        # fairseq deals out whole batches. There are at least as many of this size as parts.
        batch_size = min(self._sentences // self._shards, _MAX_BATCH_SENTENCES)
        command = ["fairseq-generate", str(self._data.folder), "--user-dir", str(USER_DIR)]
        command += ["--source-lang", self._data.source, "--target-lang", self._data.target]
        command += ["--path", ":".join(map(str, self._checkpoints))]
        command += ["--gen-subset", options.split, "--remove-bpe", "sentencepiece"]
        command += ["--beam", str(search.beam), "--lenpen", str(search.length_penalty)]
        # Files of pre-trained embeddings are needed only for training.
        no_embedding_files = "{'encoder_embed_path': None, 'decoder_embed_path': None}"
        command += ["--model-overrides", no_embedding_files, "--results-path", str(folder)]
        command += ["--max-tokens", str(options.max_tokens), "--batch-size", str(batch_size)]
        command += ["--required-batch-size-multiple", "1"]  # by default, multiples of 8
        command += ["--num-workers", "0"]  # parts are small: no worker process
        # These two only select the part: fairseq-generate starts no group of processes, and
        # ignores --num-shards and --shard-id.
        command += ["--distributed-world-size", str(self._shards), "--distributed-rank", str(shard)]
        if choose_device(options.device, options.fp16) == "cpu":
            command.append("--cpu")
        if options.fp16:
            command.append("--fp16")
        return [*command, "--no-progress-bar"]


def read_hypotheses(path: Path) -> dict[int, str]:
    """Read the best hypotheses of ``fairseq-generate``: plain text by sentence number."""
    hypotheses: dict[int, str] = {}
    for line in read_lines(path, "the output of fairseq-generate"):
        if line.startswith("D-"):
            # "D-NUMBER<tab>score<tab>text"; an empty text has no tab, as `read_lines` strips lines.
            name, _, score_and_text = line.partition("\t")
            _, _, text = score_and_text.partition("\t")
            # The best hypothesis of a sentence comes first.
            hypotheses.setdefault(int(name.removeprefix("D-")), text)
    return hypotheses
