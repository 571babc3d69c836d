"""Tiny checkpoints with random weights, carried out of fairseq and back by the commands."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from sentencepiece import SentencePieceProcessor

from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import write_start_checkpoint
from tests.helpers.commands import new_directory, refused
from tests.helpers.preprocess import write_pieces

TEXT = ["Un homme dort.", "Une femme court vite.", "Deux chats blancs jouent ici, et 7 font"]
TEXT += ["quelque bruit.", "Zoé lit Kafka; Max, Yves et Wanda jugent le garçon Hubert: 18 pages!"]
# Options of models that can be carried, and places that no export may name.
_PLACES = "--save-dir /private/runs --restore-file /private/x.pt "
_MASKED = "--arch roberta_none_tiny --max-positions "
FAMILIES = {
    "masked_lm": f"--task masked_lm {_MASKED} 24 --tokens-per-sample 24 --include-target-tokens",
    "glue": f"--task glue {_MASKED} 64 --max-update 2 --pooler-activation-fn tanh",
    "squad": f"--task squad {_MASKED} 48",
    "causal_lm": "--task language_modeling --arch transformer_lm_none_tiny "
    "--max-target-positions 64 --tokens-per-sample 64",
    "translation": "--task translation --arch transformer_none_tiny --max-source-positions 24 "
    "--max-target-positions 24 --source-lang de --target-lang en",
}


class Checkpoint(NamedTuple):
    path: Path
    data: Path
    model: Any
    task: Any


def data_bin(symbols: list[str]) -> Path:
    """Return a folder with dictionaries, of which ``dict.fr.txt`` is longer, and no data."""
    folder, longer = new_directory(), [*symbols, "more"]
    for name, listed in {"": symbols, "de.": symbols, "en.": symbols, "fr.": longer}.items():
        text = "".join(f"{symbol} 1\n" for symbol in listed)
        (folder / f"dict.{name}txt").write_text(text, encoding="utf-8")
    return folder


@cache
def pieces() -> tuple[Path, SentencePieceProcessor]:
    """Return a folder with a sentencepiece model and its dictionaries, and that model."""
    path = write_pieces(new_directory(), 50, TEXT * 9)
    model = SentencePieceProcessor(model_file=str(path))
    data = data_bin([model.id_to_piece(number) for number in range(3, len(model))])
    return path.rename(data / "sentencepiece.model").parent, model


def checkpoint(family: str, words: str, data: Path | None = None) -> Checkpoint:
    """Write a checkpoint of a tiny model, every weight drawn so that it matters.

    ``words`` are a spec, unless they begin with an option, and options of fairseq.
    """
    data = data or pieces()[0]
    given = [str(data), *f"{_PLACES}{FAMILIES[family]}".split()]
    given += [*([] if words.startswith("--") else ["--position-encoding"]), *words.split()]
    args = options.parse_args_and_arch(options.get_training_parser(), given)
    config = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(config.task)
    torch.manual_seed(0)
    model = task.build_model(config.model).eval()
    for name, weight in model.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(weight, centre, 0.1)
    path = new_directory() / "checkpoint.pt"
    settings: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    write_start_checkpoint(settings, model.state_dict(), path)
    return Checkpoint(path, data, model, task)


def ctranslate2() -> Any:
    """Import CTranslate2, which an extra brings; skip the test without it."""
    return pytest.importorskip("ctranslate2", reason="pip install 'fairseq-posenc[ctranslate2]'")


def _export(trained: Checkpoint, out: Path, more: tuple[object, ...]) -> list[str]:
    if "ctranslate2" in more:
        ctranslate2()
    return ["export", *map(str, ["--checkpoint", trained.path, "--out", out, *more])]


def export_to(trained: Checkpoint, *more: object) -> Path:
    """Export a checkpoint by the command, with ``more`` options; return the folder."""
    out = new_directory() / "out"
    assert main(_export(trained, out, more)) == 0
    return out


def import_from(folder: Path) -> Path:
    """Import a folder by the command; return the checkpoint."""
    out = new_directory() / "start.pt"
    assert main(["import", "--from", str(folder), "--out", str(out)]) == 0
    return out


def refuse_export(capsys: pytest.CaptureFixture[str], trained: Checkpoint, *more: object) -> str:
    """Return the line in which an export is refused, which leaves nothing behind."""
    out = new_directory() / "out"
    message = refused(capsys, *_export(trained, out, more))
    assert list(out.parent.iterdir()) == []
    return message
