"""Tiny checkpoints with random weights, carried out of fairseq and back by the commands."""

from argparse import Namespace
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import write_start_checkpoint
from tests.helpers.commands import new_directory, refused
from tests.helpers.tiny_models import ARCHITECTURES

WORDS = [f"w{number}" for number in range(40)]
LENGTHS = {"max_source_positions": 24, "max_target_positions": 24}
OPTIONS: dict[str, dict[str, Any]] = {  # of fairseq, by family
    "masked_lm": {"task": "masked_lm", "max_positions": 24},
    "causal_lm": {"task": "language_modeling", "max_target_positions": 24},
    "translation": {"task": "translation", "source_lang": "de", "target_lang": "en", **LENGTHS},
}


class Checkpoint(NamedTuple):
    path: Path
    data: Path
    model: Any
    task: Any


def data_bin(family: str, symbols: list[str] = WORDS) -> Path:
    """Return a folder with dictionaries, of which ``dict.fr.txt`` is longer, and no data."""
    folder, names = new_directory(), {"dict.txt": symbols}
    if family == "translation":
        names = {"dict.de.txt": symbols, "dict.en.txt": symbols, "dict.fr.txt": [*symbols, "more"]}
    for name, listed in names.items():
        (folder / name).write_text("".join(f"{symbol} 1\n" for symbol in listed), encoding="utf-8")
    return folder


@cache
def _default_settings(arch: str, task: str) -> Any:
    """Build fairseq's configuration, for which hydra takes longer than all else in a checkpoint."""
    words = ["", "--arch", arch, "--task", task]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    return OmegaConf.to_container(convert_namespace_to_omegaconf(args), enum_to_str=True)


def checkpoint(family: str, spec: str | None, data: Path | None = None, **more: Any) -> Checkpoint:
    """Write a checkpoint of a tiny model, every weight drawn so that it matters.

    ``data`` has its dictionaries, by default of :data:`WORDS`; ``more``: fairseq's options. A
    ``spec`` is for architectures of this package.
    """
    data = data or data_bin(family)
    chosen = {"arch": ARCHITECTURES[family], **OPTIONS[family]}
    if spec:
        chosen["position_encoding"] = spec
    if family != "translation" and "task" not in more:
        chosen["tokens_per_sample"] = 24
    if "documents" in str(spec) and family == "masked_lm":
        chosen["include_target_tokens"] = True
    words = [str(data)]
    for name, value in {**chosen, **more}.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    args = vars(options.parse_args_and_arch(options.get_training_parser(), words))
    settings = deepcopy(_default_settings(args["arch"], args["task"]))
    for section in settings.values():
        if isinstance(section, Namespace):  # of a model without a dataclass: all options
            vars(section).update(args)
        elif section:
            section.update({name: args[name] for name in section.keys() & args.keys()})
    config: Any = OmegaConf.create(settings, flags={"allow_objects": True})
    set_up = tasks.setup_task(config.task)
    torch.manual_seed(0)
    model = set_up.build_model(config.model).eval()
    for name, weight in model.named_parameters():
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(weight, centre, 0.1)
    path = new_directory() / "checkpoint.pt"
    stored: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    write_start_checkpoint(stored, model.state_dict(), path)
    return Checkpoint(path, data, model, set_up)


def write_release(args: Namespace, weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint as older fairseqs did, with which RoBERTa was released."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    state = {
        "args": args,
        "model": weights,
        "optimizer_history": [{**history, "num_updates": 500000}],
        "extra_state": {"train_iterator": {"epoch": 30}, "val_loss": 1.4},
        "last_optimizer_state": None,
    }
    path = new_directory() / "model.pt"
    torch.save(state, path)
    return path


def ctranslate2() -> Any:
    """Import CTranslate2, which an extra brings; skip the test without it."""
    return pytest.importorskip("ctranslate2", reason="pip install 'fairseq-posenc[ctranslate2]'")


def _export(trained: Checkpoint, out: Path, more: Iterable[object]) -> list[str]:
    if "ctranslate2" in more:
        ctranslate2()
    words = ["--checkpoint", trained.path, "--out", out, "--tokens", "words", *more]
    return ["export", *map(str, words)]


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
