"""Settings of a checkpoint that fairseq would run as code, or open: refused by every command."""

from __future__ import annotations

import argparse
import ast
import sys
from argparse import Namespace
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, utils

from fairseq_posenc.checkpoints import safe_loading
from fairseq_posenc.checkpoints.safe_loading import allow_safe_classes
from fairseq_posenc.checkpoints.trusted_settings import (
    EVALUATED,
    OPENED,
    check_settings,
    is_literal,
    refuse_files,
)
from fairseq_posenc.errors import UserError
from fairseq_posenc.host.audit_hook import refuse_unsafe_checkpoint
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.translation.checkpoint import average_checkpoints
from tests.checkpoints import test_hostile_checkpoints as hostile
from tests.helpers import fault_jobs as disturbed
from tests.helpers.commands import run, sentences, trained
from tests.helpers.fairseq_doors import (
    COVERED,
    EVALUATES,
    evaluated_settings,
    find_doors,
    installed,
    name_of,
)
from tests.helpers.products import product_of
from tests.workbench.finetuning import test_glue_commands as glue
from tests.workbench.finetuning import test_squad_commands as squad
from tests.workbench.translation import test_translation_commands as pieces

TRACE = hostile.TRACE
PAYLOAD = f"__import__('os').mkdir('{TRACE}') or [5]"
SECRET = "correct horse battery staple"
# What each case changes in the settings of the model; each command treats names of files by itself.
FILES = {name: {name: "SECRET"} for name in ("encoder_embed_path", "decoder_embed_path")}
SETTINGS: dict[str, dict[str, Any]] = {
    **FILES,
    "adaptive_softmax_cutoff": {"adaptive_softmax_cutoff": PAYLOAD},
    "adaptive_input_cutoff": {"adaptive_input": True, "adaptive_input_cutoff": PAYLOAD},
    "character_filters": {"character_embeddings": True, "character_filters": PAYLOAD},
    "xformers_att_config": {"xformers_att_config": PAYLOAD},
    "encoder_layers_to_keep": {"encoder_layers_to_keep": "first"},
    "decoder_layers_to_keep": {"decoder_layers_to_keep": 7.5},
    "position_encoding": {"position_encoding": "${oc.env:PAYLOAD}"},
}
KINDS = {
    **dict.fromkeys(("restore", "fine-tune", "eval-lm"), "causal_lm"),
    **dict.fromkeys(("generate", "interactive"), "translation"),
    **dict.fromkeys(("translate", "bleu"), "pieces"),
    **dict.fromkeys(("validate",), "masked_lm"),
    **{"glue": "glue", "squad train": "squad", "squad predict": "answers"},
}
SEVERAL = ("swap", "export", "inspect", "plot")
OURS = {"translate", "bleu", *SEVERAL, "squad predict"}
# Why a place of fairseq's that evaluates, imports or opens does nothing for a checkpoint.
KEPT_OUT = {
    "literal": "only literals pass (host/audit_hook.py)",
    "checkpoint": "a checkpoint: read by load_checkpoint_to_cpu, which is checked; or written",
    "command line": "the user's own command line names it",
    "own": "fairseq's own modules, by a listing of their folder, or a program that fairseq names",
    "data": "a file of the data's folder, or one that the user's program names; read as data",
    "write": "a file of results, of preprocessing or of a cache",
    "program": "a Python program that calls fairseq names it",
    "ranks": "from the other ranks of the same job",
    "callers": "its callers are in the list themselves",
    "speech": "models and tasks of speech: nothing is promised of the files that they open",
}
CASES = [(command, kind) for command, kind in KINDS.items()]
CASES += product_of(SEVERAL, ["masked_lm", "causal_lm", "pieces"])


COMMANDS = {
    **hostile.COMMANDS,
    "translate": hostile.ours("translate", "--checkpoint", "CHECKPOINT", "w1"),
    "bleu": hostile.ours("bleu", "a=CHECKPOINT", "--out", "out", "--beam", 1),
}


@cache
def source(kind: str) -> Path:
    """Return a checkpoint that a command would read."""
    if kind == "glue":
        return glue.pretrained()
    if kind == "squad":
        return squad.files().pretrained
    if kind == "pieces":
        return pieces.checkpoint()
    if kind == "answers":
        return squad.trained()[0] / "checkpoint_last.pt"
    return trained(kind).save_dir / "checkpoint_last.pt"


def changed(path: Path, kind: str, changes: dict[str, Any]) -> Path:
    """Write a checkpoint with other settings of the model, and none of its optimizer's state."""
    state = torch.load(source(kind), weights_only=True)
    state = deepcopy({**state, "last_optimizer_state": None})
    model = state["cfg"]["model"] if state.get("cfg") else state["args"]
    (vars(model) if isinstance(model, Namespace) else model).update(changes)
    torch.save(state, path)
    return path


WATCHED: list[str] = []  # a path whose opening is noted, and then what was opened


def _note(event: str, given: tuple[Any, ...]) -> None:
    if event == "open" and WATCHED and str(given[0]) == WATCHED[0]:
        WATCHED.append(event)


sys.addaudithook(_note)


@pytest.fixture
def secret(tmp_path, monkeypatch):
    """Work in an empty folder; give a file that nothing may open, and check that nothing did."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "secret.txt"
    path.write_text(f"{SECRET}\n" * 3, encoding="utf-8")
    WATCHED[:] = [str(path)]
    yield path
    opened, WATCHED[:] = WATCHED[1:], []
    assert not (tmp_path / TRACE).exists(), "RUNS"
    assert not opened, "OPENS"


def start(command: str, path: Path, *fixtures: Any) -> str | None:
    """Run a command on a checkpoint; return the line it ends with, None if it does its work."""
    told: str | None = COMMANDS[command](path, *fixtures)
    return told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("command", "kind", "setting"),
    [
        *product_of(CASES, FILES),
        *product_of(CASES, [name for name in SETTINGS if name not in FILES]),
    ],
)
def test_a_setting_runs_nothing_and_opens_nothing(
    command, kind, setting, secret, tmp_path, monkeypatch, capsys
):
    changes = {
        name: str(secret) if value == "SECRET" else value
        for name, value in SETTINGS[setting].items()
    }
    path = changed(tmp_path / "file.pt", kind, changes)
    told = start(command, path, capsys, monkeypatch)
    if setting.endswith("embed_path") and command in OURS:
        assert not told or setting not in told  # its numbers are in the checkpoint: not needed
        return
    assert told, "no error"
    assert "\n" not in told
    assert str(path) in told
    assert setting in told
    assert SECRET not in told


ALONE: dict[str, dict[str, Any]] = {
    "no mapping": {"task": 5},
    "no model": {"model": "roberta"},
    "settings that are none": {"": [1, 2]},
    "a target": {"model": {"_target_": "os.mkdir", "path": TRACE}},
    "a reference": {"common": {"seed": "${oc.env:HOME}"}},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("command", "setting"),
    product_of(
        ["inspect", "export", "plot"],
        ["activation_dropout", "encoder_layerdrop", "tokens_per_sample"],
    ),
)
def test_settings_of_another_type_are_one_line(
    command, setting, secret, tmp_path, monkeypatch, capsys
):
    state = torch.load(source("masked_lm"), weights_only=True)
    section = state["cfg"]["task" if setting == "tokens_per_sample" else "model"]
    (vars(section) if isinstance(section, Namespace) else section)[setting] = "many"
    torch.save(state, tmp_path / "file.pt")
    message = start(command, tmp_path / "file.pt", capsys, monkeypatch)
    assert message
    assert f"{tmp_path / 'file.pt'}: no model can be built of its settings" in message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("command", "kind", "fault"), product_of(CASES, ALONE))
def test_settings_of_another_form_are_one_line(
    command, kind, fault, secret, tmp_path, monkeypatch, capsys
):
    state = torch.load(source(kind), weights_only=True)
    changes = ALONE[fault]
    cfg = changes.get("") or {**(state.get("cfg") or {}), **changes}
    torch.save({**state, "args": None, "cfg": cfg}, tmp_path / "file.pt")
    told = start(command, tmp_path / "file.pt", capsys, monkeypatch)
    assert told, "no error"
    assert "\n" not in told
    assert "its " in told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setting", ["decoder_layers", "decoder_attention"])
@pytest.mark.parametrize("old", [True, False])
def test_a_model_of_fairseqs_own_runs_nothing(setting, old, secret, tmp_path, monkeypatch, capsys):
    model = {"arch": "fconv_lm", "_name": "fconv_lm", "criterion": "cross_entropy"}
    model |= {"tokens_per_sample": 16, "decoder_layers": "[(8, 2)] * 2", setting: PAYLOAD}
    args = Namespace(**model, task="language_modeling", data=str(sentences()))
    state = torch.load(source("causal_lm"), weights_only=True)
    cfg = {**state["cfg"], "model": Namespace(**model)}
    settings = {"args": args, "cfg": None} if old else {"args": None, "cfg": cfg}
    path = tmp_path / "file.pt"
    torch.save({**state, **settings}, path)
    told = start("eval-lm", path, capsys, monkeypatch)
    assert told is not None
    assert str(path) in told
    assert setting in told


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["adaptive_softmax_cutoff", "encoder_embed_path"])
def test_hydra_and_averages_and_reports_run_nothing(setting, secret, tmp_path, capsys):
    changes = {
        name: value.replace("SECRET", str(secret)) for name, value in SETTINGS[setting].items()
    }
    path = changed(tmp_path / "checkpoint_last.pt", "pieces", changes)
    command = [*disturbed.hydra(tmp_path / "run"), f"checkpoint.finetune_from_model={path}"]
    done = run(*command, cwd=tmp_path, fails=True)
    assert done.status
    assert f"{path}: its setting model.{setting}" in done.log
    assert "Traceback" not in done.log
    if setting == "encoder_embed_path":
        return  # the commands below take it away
    with pytest.raises(UserError, match=f"its setting model.{setting}"):
        average_checkpoints([path, path], tmp_path / "average.pt")
    assert main(["report", str(tmp_path)]) == 2
    assert f"its setting model.{setting}" in capsys.readouterr().err


def test_what_fairseq_evaluates_has_to_be_a_literal(secret):
    """Whatever asks for it, if its name is in no list."""
    assert utils.eval_str_list("500, 1000", int) == [500, 1000]
    assert utils.eval_str_dict("{'name': 'linear'}") == {"name": "linear"}
    with pytest.raises(UserError, match=r"is not a literal .*mkdir"):
        utils.eval_str_list(PAYLOAD, int)


class Text(str):
    """Is another text for whoever asks it."""

    def __str__(self) -> str:
        return "1"


class Bytes(bytes):
    """Is another text for whoever asks it."""

    def decode(self, *how: Any) -> str:
        return "1"


RUN = {
    "text": PAYLOAD,
    "bytes": PAYLOAD.encode(),
    "a buffer": bytearray(PAYLOAD.encode()),
    "a view": memoryview(PAYLOAD.encode()),
    "UTF-7": f"#coding:utf-7\n[1#+AAo-,{PAYLOAD}]".encode(),
    "UTF-7 on the second line": f"\n# vim: fileencoding=utf-7\n[1#+AAo-,{PAYLOAD}]".encode(),
    "a mark of UTF-8": b"\xef\xbb\xbf" + PAYLOAD.encode(),
    "a kind of text": Text(PAYLOAD),
    "a kind of bytes": Bytes(PAYLOAD.encode()),
    "code": compile(PAYLOAD, "setting", "eval"),
    "code without names": compile("(lambda: 1)()", "setting", "eval"),
    "a tree": ast.parse(PAYLOAD, mode="eval"),
}
EVALUATE = """
def evaluate(x): return eval(x)
def execute(x): return exec(x)
def compile_and_run(x): return eval(compile(x, "setting", "eval"))
"""


@pytest.mark.parametrize("form", RUN)
@pytest.mark.parametrize("how", ["evaluate", "execute", "compile_and_run"])
def test_nothing_but_literals_is_evaluated_in_any_form(how, form, secret):
    fairseqs: dict[str, Any] = {"__name__": "fairseq.tasks.new"}
    exec(EVALUATE, fairseqs)
    is_code, is_tree = (form.startswith(kind) for kind in ("code", "a tree"))
    other = (is_code and how == "compile_and_run") or (is_tree and how != "compile_and_run")
    with pytest.raises(TypeError if other else UserError):
        fairseqs[how](RUN[form])


@pytest.mark.parametrize(
    "text",
    [
        *("", "None", "True", "0.25", "(0.9, 0.98)", "500,1000", "[(512, 3)] * 20", " [1] "),
        *("[(850, 6)] * 3 + [(850, 1)] * 1 + [(512, 4)]", "{'name': 'linear'}", "[-1, 1e-8]"),
    ],
)
def test_literals_are_taken(text):
    assert is_literal(text)


@pytest.mark.parametrize(
    "text",
    [
        *(PAYLOAD, "f()", "x", "[x for x in (1, 2)]", "1 if 2 else 3", "(1).real", "lambda: 1"),
        *("f'{1}'", "[1] * 10 ** 9", "[1] * 99999999", "[[1] * 9999] * 9999", "[1] @ [2]", "[1"),
        *("(y := 1)", "[*range(3)]", "-x", "1" * 200_000, "(" * 9_000 + ")" * 9_000, "\0"),
        *("#coding:utf-7\n1", "[" + "1," * 4_000 + "] * 9_999", "[1] * 9_999 + " * 9 + "[1]"),
        "[1] * -99_999 + [1] * 99_999",
    ],
)
def test_what_is_no_literal_is_refused(text):
    assert not is_literal(text)


def test_another_checkpoint_beside_the_one_named_is_checked(tmp_path):
    """fairseq reads NAME-shard0.pt, if it is there, where NAME.pt was asked for."""
    torch.save({"model": {}}, tmp_path / "a.pt")
    settings = {"model": {"adaptive_softmax_cutoff": PAYLOAD}}
    torch.save({"model": {}, "cfg": settings}, tmp_path / "a-shard0.pt")
    with pytest.raises(UserError, match=r"a-shard0.pt: .*model.adaptive_softmax_cutoff"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a.pt")])


def test_a_setting_that_the_command_line_names_is_the_users(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    torch.save({"args": Namespace(encoder_embed_path="vectors.txt"), "model": {}}, path)
    monkeypatch.setattr(sys, "argv", ["fairseq-generate", "DATA"])
    with pytest.raises(UserError, match=r"args.encoder_embed_path names a file, 'vectors.txt'"):
        refuse_unsafe_checkpoint(path)
    for word in (path.with_name("encoder_embed_path.pt"), "--encoder-embed", "{'x': 'y'}"):
        monkeypatch.setattr(sys, "argv", ["fairseq-generate", "DATA", str(word)])
        with pytest.raises(UserError, match=r"names a file"):
            refuse_unsafe_checkpoint(path)
    for word in (
        *("--encoder-embed-path", "--encoder-embed-path=vectors.txt", "--encoder_embed_path"),
        *("{'encoder_embed_path': None}", "--model-overrides={'encoder_embed_path':None}"),
        *("model.encoder_embed_path=vectors.txt", "+model.encoder_embed_path=null"),
    ):
        monkeypatch.setattr(sys, "argv", ["fairseq-generate", "DATA", word])
        refuse_unsafe_checkpoint(path)


def test_a_checkpoint_names_no_file_to_write(tmp_path):
    """A criterion of fairseq's opens a file for writing, in fairseq-validate too."""
    criterion = {"_name": "sentence_ranking", "save_predictions": "/etc/passwd"}
    with pytest.raises(UserError, match=r"criterion.save_predictions names a file"):
        refuse_files({"cfg": {"criterion": criterion}})


@pytest.mark.slow
def test_the_user_dir_of_a_checkpoint_is_not_imported(secret, tmp_path, monkeypatch, capsys):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text(f"import os; os.mkdir('{TRACE}')")
    state = torch.load(source("causal_lm"), weights_only=True)
    state["cfg"]["common"]["user_dir"] = str(tmp_path / "theirs")
    torch.save(state, tmp_path / "file.pt")
    for command in ("eval-lm", "inspect", "fine-tune"):
        assert start(command, tmp_path / "file.pt", capsys, monkeypatch) is None


def test_cyclic_settings_are_refused():
    section: dict[str, Any] = {"_name": "x"}
    section["again"] = section
    with pytest.raises(UserError, match="nested more than 32 deep"):
        check_settings({"cfg": {"model": section}})


def test_no_class_that_torch_may_load_has_behaviour():
    """No method of theirs that unpickling calls does more than set what it is given."""
    allow_safe_classes()
    allowed = [
        each[0] if isinstance(each, tuple) else each
        for each in torch.serialization.get_safe_globals()
    ]
    ours = {argparse.Namespace, safe_loading._NumberType, safe_loading._read_number}
    assert ours <= set(allowed)
    for name in ("__setstate__", "__reduce__", "__new__", "__getattr__", "__del__"):
        assert name not in vars(argparse.Namespace)
    for each in set(allowed) - ours:
        assert str(getattr(each, "__module__", each)).startswith("torch"), each


def test_every_place_of_fairseqs_that_evaluates_imports_or_opens_is_known():
    """If this fails, fairseq has a new place: find out what a checkpoint can make it do."""
    doors = find_doors(installed())
    new = unknown(doors)
    assert not new, f"not reviewed, add them to tests/helpers/fairseq_doors.json: {new}"
    assert set(COVERED.values()) <= {*KEPT_OUT, *(f"setting {name}" for name in OPENED)}
    for place, call in doors.items():
        assert evaluated_settings(call) <= EVALUATED | {"model_overrides"}, place
        if name_of(call.func).rpartition(".")[2] in EVALUATES:
            expected = "command line" if place.startswith("fairseq_cli") else "literal"
            assert COVERED[place] == expected


def unknown(doors: Iterable[str]) -> list[str]:
    """Return the places that nobody has reviewed."""
    return sorted(set(doors) - COVERED.keys())


@pytest.mark.parametrize(
    ("module", "call", "setting"),
    [
        ("models/lstm.py", "eval(args.something_new)", {"something_new"}),
        ("models/lstm.py", "open(args.encoder_embed_path)", set()),
        ("trainer.py", "importlib.import_module(cfg.model.plugin)", set()),
        ("trainer.py", "hydra.utils.instantiate(cfg.model)", set()),
        ("trainer.py", "torch.load(cfg.checkpoint.other)", set()),
    ],
)
def test_a_new_place_is_noticed(module, call, setting, tmp_path):
    package = tmp_path / "fairseq"
    for top in installed():
        if top.name == "fairseq":
            (package / module).parent.mkdir(parents=True)
            text = (top / module).read_text(encoding="utf-8")
            (package / module).write_text(f"{text}\n{call}\n", encoding="utf-8")
    doors = find_doors([package])
    assert unknown(doors) == [f"fairseq/{module}: {call}"]
    assert evaluated_settings(doors[f"fairseq/{module}: {call}"]) - EVALUATED == setting
