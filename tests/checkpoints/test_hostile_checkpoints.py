"""Every kind of file that is no checkpoint, or means harm: at both loaders and every command."""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq_cli import eval_lm, generate, interactive, train, validate

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.checkpoints.test_checkpoints import BROKEN, saved
from tests.helpers.commands import FAMILIES, TRAINING, USER_DIR, pairs, sentences, trained
from tests.helpers.products import product_of, some_of
from tests.workbench.finetuning import test_glue_commands as glue
from tests.workbench.finetuning import test_squad_commands as squad

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TRACE = "it-ran"  # a folder that a file's code would make where the command runs


class Calls:
    """Is pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Builds(Calls):
    """Is pickled as a call of a class, with a state that is set after."""

    def __reduce__(self) -> Any:
        return Namespace, (), {"arch": Calls(os.mkdir, TRACE)}


def swelling() -> bytes:
    """Return an archive of 64 KB that would become 64 MB."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(BROKEN["no settings"])) as old,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr("archive/data/0", bytes(1 << 26))
    return buffer.getvalue()


def nested() -> bytes:
    """Return a tuple in a tuple, and so on, 100,000 of them."""
    return b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."


def hollow() -> bytes:
    """Return weights of one number that say, by their strides, that they have 10^12."""
    weight = torch.zeros(1).expand(10**6, 10**6)
    return saved({"model": {"decoder.embed_tokens.weight": weight}, "optimizer_history": []})


HOSTILE: dict[str, Callable[[], bytes]] = {
    "runs code": lambda: saved({"model": Calls(os.mkdir, TRACE)}),
    "runs code as its settings": lambda: saved({"model": {}, "cfg": Builds(Namespace)}),
    "runs code, as an old pickle": lambda: pickle.dumps(Calls(os.mkdir, TRACE), 2),
    "evaluates text": lambda: saved(Calls(eval, f"__import__('os').mkdir('{TRACE}')")),
    "imports": lambda: saved({"args": Calls(__import__, "antigravity"), "model": {}}),
    "nested": nested,
    "swelling": swelling,
    "hollow": hollow,
    "a model of another program": lambda: saved({"bert.embeddings.weight": torch.ones(9, 9)}),
    **{name: partial(bytes, content) for name, content in BROKEN.items()},
}


@cache
def content_of(fault: str) -> bytes:
    return HOSTILE[fault]()


def fairseqs(program: Any, *words: Any) -> Callable[[Path, Any, Any], Any]:
    """Build a function that runs a command of fairseq's; CHECKPOINT stands for the file.

    It returns the line that the command ends with, None if the command does its work.
    """

    def run(path: Path, capsys: Any, monkeypatch: Any) -> str | None:
        given = [str(path) if word == "CHECKPOINT" else str(word) for word in words]
        given += ["--user-dir", str(USER_DIR)]
        monkeypatch.setattr(sys, "argv", ["fairseq", *given])
        monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\n"))
        try:
            program.cli_main()
        except Exception as error:
            if (message := find_message(error)) is None:
                raise  # a stack trace, which fails the test
            return message
        return None

    return run


def ours(*words: Any) -> Callable[[Path, Any, Any], Any]:
    """Build a function that runs a command of ours, with the file in the place of CHECKPOINT.

    Words may be made when they are needed. The function returns the line that the command ends
    with, None if the command does its work.
    """

    def run(path: Path, capsys: Any, monkeypatch: Any) -> str | None:
        given = [str(word() if callable(word) else word) for word in words]
        # fairseq logs to the stream of the test that loaded it, which is closed.
        monkeypatch.setattr(logging, "raiseExceptions", False)
        code = main([word.replace("CHECKPOINT", str(path)) for word in given])
        printed = capsys.readouterr().err
        assert "Traceback" not in printed
        lines = [line for line in printed.splitlines() if "error: " in line]
        if code == 0:
            assert not lines
            return None
        assert code == 2, printed
        (told,) = lines
        return told.removeprefix("fairseq-posenc: error: ")

    return run


def training(family: str, *more: Any) -> Callable[[Path, Any, Any], Any]:
    """Build a function that runs a training that begins with the file."""

    def run(path: Path, *fixtures: Any) -> str | None:
        chosen = FAMILIES[family]
        words = [*chosen.task, *chosen.model, *TRAINING, "--max-update", 1, "--save-dir", "run"]
        return fairseqs(train, chosen.data(), *words, *more)(path, *fixtures)

    return run


def on(data: Callable[[], Path], program: Any, *words: Any) -> Callable[[Path, Any, Any], Any]:
    """Build a function that runs a command of fairseq's on data made when they are needed."""
    return lambda *given: fairseqs(program, data(), "--path", "CHECKPOINT", *words)(*given)


COMMANDS = {
    "restore": training("causal_lm", "--restore-file", "CHECKPOINT"),
    "fine-tune": training("causal_lm", "--finetune-from-model", "CHECKPOINT"),
    "eval-lm": on(sentences, eval_lm, "--tokens-per-sample", 16),
    "validate": on(sentences, validate, "--task", "masked_lm", "--batch-size", 4),
    "generate": on(pairs, generate),
    "interactive": on(pairs, interactive),
    "translate": ours("translate", "--checkpoint", "CHECKPOINT", "--data", pairs, "w1"),
    "bleu": ours("bleu", "a=CHECKPOINT", "--data", pairs, "--out", "out"),
    "swap by --arch": ours(
        *("swap", "--checkpoint", "CHECKPOINT", "--arch", "roberta_m4m", "--out", "start.pt")
    ),
    "swap": ours(
        *("swap", "--checkpoint", "CHECKPOINT", "--position-encoding", "alibi"),
        *("--out", "start.pt"),
    ),
    "export": ours("export", "--checkpoint", "CHECKPOINT", "--to", "hf", "--out", "out"),
    "inspect": ours("inspect", "--checkpoint", "CHECKPOINT", "--text", "w1 w2"),
    "plot": ours("plot", "scores", "--checkpoint", "CHECKPOINT", "--out", "a.png"),
    "glue": ours(
        *("glue", "--checkpoint", "CHECKPOINT", "--data", lambda: glue.data() / "glue"),
        *("--protocol", "m4m", "--tasks", "CoLA", "--out", "out"),
    ),
    "squad train": ours(
        *("squad", "train", "--checkpoint", "CHECKPOINT", "--data", lambda: squad.files().data),
        *("--out", "out"),
    ),
    "squad predict": ours(
        *("squad", "predict", "--checkpoint", "CHECKPOINT", "--out", "out"),
        *("--questions", lambda: squad.files().raw),
    ),
}


def by_fairseq(path: Path, *fixtures: Any) -> str | None:
    """Read a file as fairseq's commands do."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  (what it is depends on the file)
        checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return find_message(caught.value)


def by_ours(path: Path, *fixtures: Any) -> str | None:
    """Read a file as our commands do."""
    with pytest.raises(UserError) as caught:
        load_state(path, "--checkpoint")
    return str(caught.value)


LOADERS = {"fairseq's loader": by_fairseq, "our loader": by_ours}
# Two loaders read what all commands are given.
CASES = [*itertools.product(LOADERS, HOSTILE), *product_of(COMMANDS, HOSTILE)]


@pytest.mark.parametrize(("reader", "fault"), CASES)
def test_it_is_told_in_one_line_and_runs_nothing(reader, fault, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.pt"
    content = content_of(fault)
    path.write_bytes(content)
    told = (LOADERS | COMMANDS)[reader](path, capsys, monkeypatch)
    assert told, "no error"
    assert str(path) in told
    assert "\n" not in told
    assert len(told) < 1000
    assert not (tmp_path / TRACE).exists()
    assert path.read_bytes() == content


def float8(weight: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float8_e4m3fn)


def quantized(weight: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(weight.float(), 0.1, 0, torch.quint8)


# Weights that are none for fairseq, or have no number for each of the model's.
FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float8": float8,
    "complex": lambda weight: weight.to(torch.complex64),
    "meta": lambda weight: weight.to("meta"),
    "sparse": lambda weight: weight.to_sparse(),
    "compressed": lambda weight: weight.to_sparse_csr(),
    "quantized": quantized,
    "one number": lambda weight: weight.flatten()[0].clone(),
    "flat": lambda weight: weight.flatten().clone(),
    "deep": lambda weight: weight[None].clone(),
    "no rows": lambda weight: weight[:0].clone(),
    "whole numbers": lambda weight: weight.long(),
    "flags": lambda weight: weight > 0,
    "a list": lambda weight: weight.tolist(),
    "text": lambda weight: "weights",
    "a mapping": lambda weight: {"weight": weight},
    "nothing": lambda weight: None,
    "huge": lambda weight: torch.full_like(weight, 3e38),
    "huge in double precision": lambda weight: torch.full_like(weight.double(), 1e300),
    "no numbers": lambda weight: torch.full_like(weight, float("nan")),
}
READERS = {
    **dict.fromkeys(("inspect", "swap", "export", "plot", "eval-lm"), "causal_lm"),
    "generate": "translation",
}


def of_readers(*axes: Any) -> list[tuple[Any, ...]]:
    """Return a command of each loader with all values of some axes, and the others with some."""
    both = ["inspect", "eval-lm"]
    others = [command for command in READERS if command not in both]
    chosen = [case for command in both for case in product_of([command], *axes)]
    return chosen + some_of(product_of(others, *axes)[::2], product_of(others, *axes))


@pytest.mark.parametrize(
    ("command", "form", "name"),
    of_readers(FORMS, ["embed_tokens.weight", "layers.0.fc1.weight"]),
)
def test_weights_of_other_forms_are_one_line_that_names_the_parameter(
    command, form, name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.pt"
    state = torch.load(trained(READERS[command]).save_dir / "checkpoint_last.pt")
    state["last_optimizer_state"] = None
    (parameter, *_) = [key for key in state["model"] if key.endswith(name)]
    model = {**state["model"], parameter: FORMS[form](state["model"][parameter])}
    torch.save({**state, "model": model}, path)
    told = COMMANDS[command](path, capsys, monkeypatch)
    assert told
    assert str(path) in told
    assert parameter in told or " symbols" in told  # of the dictionary, and its file
    assert "\n" not in told


BAD_SETTINGS: dict[str, Any] = {
    "_name": "no_such_model",
    "decoder_layers": "many",
    "decoder_embed_dim": [1, 2],
    "decoder_attention_heads": 0,
    "activation_fn": "no-such-function",
    "decoder_ffn_embed_dim": None,
}


@pytest.mark.parametrize(("command", "setting"), of_readers(BAD_SETTINGS))
def test_settings_that_no_model_can_be_built_of_are_one_line(
    command, setting, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    state = torch.load(trained(READERS[command]).save_dir / "checkpoint_last.pt")
    model = state["cfg"]["model"]
    values = vars(model) if isinstance(model, Namespace) else model
    values[setting] = BAD_SETTINGS[setting]
    if setting == "_name":
        values["arch"] = values["_name"]
    torch.save({**state, "last_optimizer_state": None}, tmp_path / "file.pt")
    told = COMMANDS[command](tmp_path / "file.pt", capsys, monkeypatch)
    assert told
    assert str(tmp_path / "file.pt") in told or command == "swap"  # it names the setting
    assert "\n" not in told
