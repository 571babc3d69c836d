"""Checkpoints with random weights that fairseq reads, each with the data folder that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fairseq import options, tasks
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import write_start_checkpoint
from tests.helpers.commands import new_directory
from tests.helpers.tiny_models import ARGS

WORDS = [f"w{number}" for number in range(40)]
SIZES = {
    "masked_lm": ARGS["masked_lm"] | {"tokens_per_sample": 24},
    "causal_lm": {
        "decoder_layers": 3,
        "decoder_embed_dim": 32,
        "decoder_ffn_embed_dim": 48,
        "decoder_attention_heads": 4,
        "tokens_per_sample": 24,
        "max_target_positions": 24,
    },
    "translation": {"max_source_positions": 24, "max_target_positions": 24},
}
ARCH = {"masked_lm": "roberta_", "causal_lm": "transformer_lm_", "translation": "transformer_"}
TASK = {"masked_lm": "masked_lm", "causal_lm": "language_modeling", "translation": "translation"}


class Checkpoint(NamedTuple):
    path: Path
    data: Path
    model: Any
    task: Any


def data_bin(family: str, symbols: list[str] = WORDS) -> Path:
    """Return a folder with dictionaries and no data."""
    folder = new_directory()
    names = ["dict.de.txt", "dict.en.txt"] if family == "translation" else ["dict.txt"]
    for name in names:
        text = "".join(f"{symbol} 1\n" for symbol in symbols)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def checkpoint(
    family: str, spec: str, data: Path | None = None, task: str | None = None, **more: Any
) -> Checkpoint:
    """Write a checkpoint of a tiny model, every weight drawn so that it matters.

    ``data`` has its dictionaries, by default of :data:`WORDS`; ``task``, ``more``: fairseq's.
    """
    data = data or data_bin(family)
    arch = more.pop("arch", f"{ARCH[family]}none_tiny")
    chosen = {**SIZES[family], "position_encoding": spec, **more}
    if "documents" in spec and family == "masked_lm":
        chosen["include_target_tokens"] = True
    if task:
        del chosen["tokens_per_sample"]
    words = ["--task", task or TASK[family], "--arch", arch]
    if family == "translation":
        words += ["--source-lang", "de", "--target-lang", "en"]
    for name, value in chosen.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    args = options.parse_args_and_arch(options.get_training_parser(), [str(data), *words])
    config = convert_namespace_to_omegaconf(args)
    set_up = tasks.setup_task(config.task)
    torch.manual_seed(0)
    model = set_up.build_model(config.model).eval()
    for name, weight in model.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(weight, centre, 0.1)
    if family == "translation":
        _let_sentences_end(model.decoder)
    path = new_directory() / "checkpoint.pt"
    settings: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    write_start_checkpoint(settings, model.state_dict(), path)
    return Checkpoint(path, data, model, set_up)


def _let_sentences_end(decoder: Any) -> None:
    """Give ``</s>`` a score that the last layer norm's bias makes high, in every sentence."""
    bias = decoder.layers[-1].final_layer_norm.bias.data
    decoder.output_projection.weight.data[2] += 3.0 * bias / bias.square().sum()


def export_to(trained: Checkpoint, *more: object, tokens: str = "words") -> Path:
    """Export a checkpoint by the command; return the folder."""
    out = new_directory() / "out"
    words = ["--checkpoint", trained.path, "--out", out, "--tokens", tokens, *more]
    assert main(["export", *map(str, words)]) == 0
    return out


def import_from(folder: Path) -> Path:
    """Import a folder by the command; return the checkpoint."""
    out = new_directory() / "start.pt"
    assert main(["import", "--from", str(folder), "--out", str(out)]) == 0
    return out


def padded(side: str, rows: int = 4, longest: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sentences of several lengths; return them and where they are real."""
    sentences = [
        torch.cat([torch.randint(4, 4 + len(WORDS), (length,)), torch.tensor([2])])
        for length in torch.linspace(1, longest - 1, rows).long().tolist()
    ]
    tokens = collate_tokens(sentences, 1, left_pad=side == "left")
    return tokens, tokens.ne(1)


def refuse_export(capsys: pytest.CaptureFixture[str], trained: Checkpoint, *more: object) -> str:
    """Return the line in which an export is refused, which leaves nothing behind."""
    out = new_directory() / "out"
    words = ["--checkpoint", trained.path, "--out", out, "--tokens", "words", *more]
    assert main(["export", *map(str, words)]) == 2
    assert list(out.parent.iterdir()) == []
    return capsys.readouterr().err.splitlines()[-1]
