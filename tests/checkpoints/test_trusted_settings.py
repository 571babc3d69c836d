"""Settings of a checkpoint that fairseq would run as code are refused."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, utils

from fairseq_posenc.checkpoints.safe_loading import (
    allow_safe_classes,
    check_settings,
    forget_files,
    is_literal,
)
from fairseq_posenc.errors import UserError
from tests.helpers.commands import trained

TRACE = "somebody-was-here"
PAYLOAD = f"__import__('os').mkdir('{TRACE}') or [5]"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["adaptive_softmax_cutoff", "character_filters"])
def test_a_setting_runs_no_code_where_fairseq_loads_the_checkpoint(setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = torch.load(trained("causal_lm").save_dir / "checkpoint_last.pt", weights_only=True)
    changes = {setting: PAYLOAD, "character_embeddings": setting == "character_filters"}
    model = state["cfg"]["model"]
    (vars(model) if isinstance(model, Namespace) else model).update(changes)
    torch.save(state, tmp_path / "file.pt")
    with pytest.raises(UserError, match="would be run as code"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "file.pt")])
    assert not (tmp_path / TRACE).exists()


def test_fairseq_evaluates_literals_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert utils.eval_str_list("500, 1000", int) == [500, 1000]
    with pytest.raises(UserError, match=r"is not a literal .*mkdir"):
        utils.eval_str_list(PAYLOAD, int)
    assert not (tmp_path / TRACE).exists()


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
        *("[" + "1," * 4_000 + "] * 9_999", "[1] * 9_999 + " * 9 + "[1]"),
        "[1] * -99_999 + [1] * 99_999",
    ],
)
def test_what_is_no_literal_is_refused(text):
    assert not is_literal(text)


def test_another_checkpoint_beside_the_one_named_is_checked(tmp_path):
    """fairseq reads NAME-shard0.pt, if it is there, in place of NAME.pt."""
    torch.save({"model": {}}, tmp_path / "a.pt")
    torch.save({"model": {}, "cfg": {"model": {"_target_": "os.mkdir"}}}, tmp_path / "a-shard0.pt")
    with pytest.raises(UserError, match=r"a-shard0.pt: .*model._target_"):
        checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "a.pt")])


def test_settings_that_name_files_are_set_to_none():
    settings = {"cfg": {"model": Namespace(encoder_embed_path="/etc/passwd", dropout=0.1)}}
    forget_files(settings)
    assert settings["cfg"]["model"] == Namespace(encoder_embed_path=None, dropout=0.1)


def test_settings_that_contain_each_other_are_refused():
    """Also without a cycle: these mappings would be visited, and copied, 2^31 times."""
    cyclic: dict[str, Any] = {"_name": "x"}
    cyclic["again"] = cyclic
    shared: dict[str, Any] = {}
    for _ in range(31):
        shared = {"a": shared, "b": shared}
    with pytest.raises(UserError, match=r"settings cfg\.again.* are nested deeper than 32"):
        check_settings({"cfg": cyclic})
    with pytest.raises(UserError, match="more than 10,000 settings"):
        check_settings({"cfg": shared})


def test_no_class_that_torch_may_load_has_behavior():
    """Settings are a Namespace, which only keeps what it is given; the others are numpy's."""
    allow_safe_classes()
    for name in ("__setstate__", "__reduce__", "__new__", "__getattr__", "__del__"):
        assert name not in vars(argparse.Namespace)
    for allowed in torch.serialization.get_safe_globals():
        named = isinstance(allowed, tuple)
        name = allowed[1] if named else f"{allowed.__module__}.{allowed.__name__}"
        is_number = re.fullmatch(r"numpy(\.\w+)*\.(scalar|dtype|\w+DType)", name)
        assert name.startswith("torch.") or name == "argparse.Namespace" or is_number, name
