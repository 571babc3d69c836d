"""Folders of others, given to each command that takes a folder: refused in a line, or safe."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.hf.folders import load_model, load_tokenizer
from tests.helpers.hf_models import MODELS, SYMBOLS, edit_config, edit_weights, save_tokenizer

WEIGHTS, CONFIG = "model.safetensors", "config.json"
COMMANDS = {
    "swap": "swap --checkpoint FOLDER --position-encoding alibi --out OUT",
    "inspect": "inspect --checkpoint FOLDER --text 'w1 w2 w3' --out OUT.html",
    "lm-length": "lm-length --text TEXT --lengths 8 --stride 8 --out OUT own=FOLDER",
}


def config(**settings: Any) -> Callable[[Path], Any]:
    return lambda folder: edit_config(folder, **settings)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    return lambda folder: edit_weights(folder, change)


def content(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def generate_by_code(folder: Path) -> None:
    (folder / "custom_generate").mkdir()
    code = f"open({str(folder / 'ran')!r}, 'w')"
    code += f"\ndef generate(*a, **k): {code}"
    (folder / "custom_generate" / "generate.py").write_text(code)


def name_class(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    edit_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.C"})


def delete_tokenizer(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()


def name_tokenizer(folder: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    auto_map = {"AutoTokenizer": ["evil.T", "evil.T"]}
    edit_config(folder, "tokenizer_config.json", tokenizer_class="T", auto_map=auto_map)


def link(name: str) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        target = folder.parent / "private"
        if (folder / name).exists():
            shutil.move(folder / name, target)
        else:
            target.write_text("secret", encoding="utf-8")
        (folder / name).symlink_to(target)

    return write


def shard_outside(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / WEIGHTS)
    names = dict.fromkeys(load_file(folder.parent / WEIGHTS), f"../{WEIGHTS}")
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def weights_outside(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / WEIGHTS)
    edit_config(folder, transformers_weights=f"../{WEIGHTS}")


def pickle_code(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {folder / 'ran'}",)

    (folder / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")


LAYER = "model.layers.1.mlp.up_proj.weight"
# A change of a folder, and a part of the line that refuses it.
ROWS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code that generates": (generate_by_code, "custom_generate"),
    "a kernel": (config(attn_implementation="user/kernel:f"), "names code"),
    "a kernel of old": (config(_attn_implementation="user/kernel:f"), "names code"),
    "a kernel in a part": (config(text_config={"_attn_implementation": "a/b"}), "names code"),
    "experts by code": (config(experts_implementation="a/b:c"), "names code"),
    "a class of the folder": (name_class, "custom code"),
    "a pickle that runs code": (pickle_code, "cannot be read|checkpoint"),
    "positions in a stock configuration": (config(position_encoding="alibi"), "position_encoding"),
    "a missing layer": (weights(lambda tensors: tensors.pop(LAYER)), f"the weights lack {LAYER}"),
    "a weight too many": (
        weights(lambda tensors: tensors.update({"model.layers.9.x": torch.ones(2)})),
        "also have model.layers.9.x",
    ),
    "another shape": (
        weights(lambda tensors: tensors.update({LAYER: torch.ones(2)})),
        f"other shapes of .*{LAYER}",
    ),
    "a NaN": (weights(lambda x: x[LAYER].fill_(float("nan"))), f"not finite: {LAYER}"),
    "linked weights": (link(WEIGHTS), "is a link that leaves"),
    "a linked configuration": (link(CONFIG), "is a link that leaves"),
    "a linked secret": (link("vocab.txt"), "is a link that leaves"),
    "a billion words": (config(vocab_size=10**9), "numbers in"),
    "a pipe": (lambda folder: os.mkfifo(folder / "pipe.safetensors"), "is not a file"),
    "a shard elsewhere": (shard_outside, "names a file elsewhere"),
    "weights elsewhere": (weights_outside, "another file of weights"),
    "an adapter": (content("adapter_config.json", b"{}"), "has an adapter"),
    "truncated weights": (cut, "cannot be read"),
    "empty weights": (content(WEIGHTS, b""), "cannot be read"),
    "a web page": (content(WEIGHTS, b"<!doctype html>"), "cannot be read"),
    "noise": (content(WEIGHTS, b"\xff" * 99), "cannot be read"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read.*no file named"),
    "a list": (content(CONFIG, b"[]"), "is a list"),
    "no JSON": (content(CONFIG, b"{"), "cannot be read"),
    "nested JSON": (content(CONFIG, b"[" * 100_000), "cannot be read"),
    "bytes": (content(CONFIG, b"\xff\xfe"), "cannot be read"),
    "an activation": (config(hidden_act="evil"), "cannot be read.*evil"),
    "a text for a number": (config(hidden_size="big"), "cannot be read"),
}
# These are about the tokenizer, which `swap` only copies.
TEXT_ROWS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an empty tokenizer": (content("tokenizer.json", b""), "tokenizer.* cannot be read"),
    "a tokenizer of bytes": (content("tokenizer.json", b"\xff"), "tokenizer.* cannot be read"),
    "a tokenizer of the folder": (name_tokenizer, "tokenizer.* cannot be read.*custom code"),
    "no tokenizer": (delete_tokenizer, "has no tokenizer, which"),
    "another model's tokenizer": (
        lambda folder: save_tokenizer(folder, [f"a{i}" for i in range(500)] + ["w1", "w2"]),
        "its tokenizer has the id",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "folder"
    MODELS["llama"].build().save_pretrained(path)
    save_tokenizer(path, [f"w{index}" for index in range(SYMBOLS - 2)])
    (tmp_path / "text").write_text("w1 w2 w3 w4 " * 9, encoding="utf-8")
    yield path
    assert not (path / "ran").exists()


def run(command: str, folder: Path) -> int:
    places = {"FOLDER": folder, "OUT": folder.parent / "out", "TEXT": folder.parent / "text"}
    words = []
    for word in shlex.split(COMMANDS[command]):
        for place, path in places.items():
            word = word.replace(place, str(path))
        words.append(word)
    return main(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_good_folder_is_read(command: str, folder: Path) -> None:
    assert run(command, folder) == 0


def test_links_inside_a_cache_of_the_hub_are_followed(folder: Path) -> None:
    blobs, snapshot = folder.parent / "blobs", folder.parent / "snapshots" / "main"
    folder.rename(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert run("swap", snapshot) == 0


REFUSED = [(x, row) for x in COMMANDS for row in ROWS | (TEXT_ROWS if x != "swap" else {})]


@pytest.mark.parametrize(("command", "row"), REFUSED)
def test_a_folder_is_refused_in_a_line(
    command: str, row: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = (ROWS | TEXT_ROWS)[row]
    change(folder)
    assert run(command, folder) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert str(folder) in error
    assert re.search(message, error)
    assert not [*(folder.parent / "out").rglob("[!.]*")]  # but the lock
    if "linked" in row:
        with pytest.raises(UserError, match=message):
            load_tokenizer(folder)


@pytest.mark.parametrize(("missing", "message"), [(0, "have other shapes"), (1, "numbers in")])
def test_a_byte_has_at_most_eight_numbers(missing: int, message: str, folder: Path) -> None:
    edit_config(folder, vocab_size=2**17)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    size = (model.num_parameters() - 2**20) // 8
    written = sum(path.stat().st_size for path in folder.iterdir())
    (folder / "filler").write_bytes(bytes(size - written - missing))
    with pytest.raises(UserError, match=message):
        load_model(folder)


def test_tables_are_of_checkpoints_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "out.png"
    assert main(["plot", "table", "--checkpoint", str(folder), "--out", str(out)]) == 2
    message = "a folder of transformers, and this command reads a checkpoint"
    assert message in capsys.readouterr().err
    assert not out.exists()
