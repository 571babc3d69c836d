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
    "masked_lm": {"task": "masked_lm", "max_positions": 48},
    "causal_lm": {"task": "language_modeling", "max_target_positions": 48},
    "translation": {"task": "translation", "source_lang": "de", "target_lang": "en", **LENGTHS},
}


class Checkpoint(NamedTuple):
    path: Path
    data: Path
    model: Any
    task: Any


def data_bin(symbols: Iterable[object] = WORDS) -> Path:
    """Return a folder with dictionaries and no data; ``en`` has another order, ``fr`` more."""
    folder, lines = new_directory(), [f"{symbol} 1\n" for symbol in symbols]
    turned = lines[::-1]
    orders = {"": lines, ".de": lines, ".nl": lines, ".en": turned, ".fr": [*turned, "more 1\n"]}
    for name, order in orders.items():
        (folder / f"dict{name}.txt").write_text("".join(order), encoding="utf-8")
    return folder


def _parse(*words: str) -> Namespace:
    return options.parse_args_and_arch(options.get_training_parser(), [*words])


@cache
def _default_settings(arch: str, task: str) -> Any:
    """Build fairseq's configuration, for which hydra takes longer than all else in a checkpoint."""
    config = convert_namespace_to_omegaconf(_parse("", "--arch", arch, "--task", task))
    return OmegaConf.to_container(config, enum_to_str=True)


def checkpoint(family: str, spec: str | None, data: Path | None = None, **more: Any) -> Checkpoint:
    """Write a checkpoint of a tiny model, every weight drawn so that it matters.

    ``data`` has its dictionaries, by default of :data:`WORDS`; ``more``: fairseq's options. A
    ``spec`` is for architectures of this package.
    """
    data = data or data_bin()
    places = {"save_dir": "/private/runs", "restore_file": "/private/x.pt"}
    chosen = {"arch": ARCHITECTURES[family], **OPTIONS[family], **places, **more}
    if spec:
        chosen["position_encoding"] = spec
    if "documents" in str(spec) and family == "masked_lm":
        chosen["include_target_tokens"] = True
    names = {f"--{name.replace('_', '-')}": value for name, value in chosen.items()}
    words = [name if value is True else f"{name}={value}" for name, value in names.items()]
    args = vars(_parse(str(data), *words))
    settings = deepcopy(_default_settings(args["arch"], args["task"]))
    for section in settings.values():
        if isinstance(section, Namespace):  # of a model without a dataclass: all options
            vars(section).update(args)
        elif section:
            section.update({name: args[name] for name in section.keys() & args.keys()})
    config: Any = OmegaConf.create(settings, flags={"allow_objects": True})
    task = tasks.setup_task(config.task)
    torch.manual_seed(0)
    model = task.build_model(config.model).eval()
    for name, weight in model.named_parameters():
        center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(weight, center, 0.1)
    path = new_directory() / "checkpoint.pt"
    stored: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    write_start_checkpoint(stored, model.state_dict(), path)
    return Checkpoint(path, data, model, task)


def rewrite(trained: Checkpoint, updates: int) -> None:
    """Write a checkpoint's file again, with what its model has by now, after so many updates."""
    state = torch.load(trained.path, weights_only=False)
    state["optimizer_history"][-1]["num_updates"] = updates
    torch.save({**state, "model": trained.model.state_dict()}, trained.path)


def let_sentences_end(trained: Checkpoint, logit: float = 1.5, padding: float = -30.0) -> None:
    """Give logits to ends, to padding, which fairseq's search never writes, and to unknowns."""
    decoder = trained.model.decoder
    norm = decoder.layer_norm or decoder.layers[-1].final_layer_norm
    norm.weight.data[0], norm.bias.data[0] = 0.0, 1.0  # a channel that is 1 wherever it is read
    rows = decoder.output_projection.weight.data
    rows[1:4] = 0.0
    if decoder.layer_norm or not decoder.layers[-1].normalize_before:
        rows[1:4, 0] = torch.tensor([padding, logit, -30.0])


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


def export_words(trained: Checkpoint, *more: object) -> list[object]:
    """Return the words of an export, without a place; skip the test if a library is missing."""
    if "ctranslate2" in more:
        pytest.importorskip("ctranslate2", reason="pip install 'fairseq-posenc[ctranslate2]'")
    return ["export", "--checkpoint", trained.path, *more]


def carry(*words: object) -> Path:
    """Run an export or an import; return what it wrote."""
    out = new_directory() / "an out"
    assert main([*map(str, words), "--out", str(out)]) == 0
    return out


def refuse(capsys: pytest.CaptureFixture[str], command: object, *words: object) -> str:
    """Return the line in which an export or an import is refused, which leaves nothing behind."""
    out = new_directory() / "out"
    message = refused(capsys, command, "--out", out, *words)
    assert list(out.parent.iterdir()) == []
    return message
