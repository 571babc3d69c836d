"""Models of transformers as checkpoints of fairseq: the way back, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fairseq import checkpoint_utils

import fairseq_posenc.hf
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint, export_to, import_from, padded
from tests.helpers.products import some_of
from tests.workbench.convert.test_export import LAYOUTS, compute_both, load


def open_checkpoint(path: Path):
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model.eval()


def refuse(folder: Path, capsys) -> str:
    """Return the one line in which an import is refused."""
    out = new_directory() / "start.pt"
    assert main(["import", "--from", str(folder), "--out", str(out)]) == 2
    assert not out.exists()
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fairseq-posenc: error: ")
    return line


@pytest.mark.parametrize(
    ("family", "spec", "more"),
    [
        ("masked_lm", "learned+m4", {"attention_directions": "lr,rl"}),
        ("causal_lm", "learned", {}),
    ],
)
def test_tables_become_longer_between_export_and_import(family, spec, more):
    trained = checkpoint(family, spec, **more)
    folder = export_to(trained)
    model = load(folder)
    fairseq_posenc.hf.set_positions(model, "own", max_positions=48, extend="copy")
    model.save_pretrained(folder)
    longer = open_checkpoint(import_from(folder))
    grown = 0
    for name, weight in longer.named_parameters():
        old = trained.model.get_parameter(name)
        if name.endswith("learned.table.weight") and len(weight) == 2 * len(old):
            assert torch.equal(weight, torch.cat([old, old]))
            grown += 1
    assert grown
    tokens, real = padded("right")
    with torch.no_grad():
        ours, before = longer(tokens)[0], trained.model(tokens)[0]
    torch.testing.assert_close(ours[real], before[real])
    with torch.no_grad():
        longer(padded("right", longest=48)[0])


def train_once(model) -> None:
    tokens, real = padded("right", longest=12)
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    model.train()(**inputs, labels=tokens.masked_fill(~real, -100)).loss.backward()
    with torch.no_grad():
        for parameter in filter(lambda x: x.grad is not None, model.parameters()):
            parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("RobertaForMaskedLM", "learned"),
        *((name, "m4m+rope") for name in some_of([*LAYOUTS][::2], LAYOUTS)),
    ],
)
def test_a_model_that_was_trained_in_transformers_comes_back(name, spec):
    family, options = LAYOUTS[name]
    trained = checkpoint(family, spec, **options)
    model = load(export_to(trained))
    train_once(model)
    folder = new_directory() / "trained"
    model.save_pretrained(folder)
    for dictionary in trained.data.iterdir():
        shutil.copy(dictionary, folder)
    start = import_from(folder)
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    assert sum(not torch.equal(before[x], after[x]) for x in before) > len(before) / 2
    # The command has compared the scores; here, once more through the file.
    tokens, real = padded("left")
    with torch.no_grad():
        found, expected = compute_both(open_checkpoint(start), model.eval(), tokens, real)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 34,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}


def make_roberta(kind: str = "Roberta", **more: Any):
    """Make a random model of transformers, and the folder that it is in."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    folder = new_directory() / "roberta"
    model.save_pretrained(folder)
    (folder / "dict.txt").write_text("".join(f"x{number} 1\n" for number in range(55)))
    return model, folder


@pytest.mark.parametrize(
    ("kind", "types"), [("Roberta", 1), ("Roberta", 2), ("XLMRoberta", 1), ("XLMRoberta", 2)]
)
def test_a_roberta_of_transformers_computes_the_same_in_fairseq(kind, types):
    model, folder = make_roberta(kind, type_vocab_size=types)
    ours = open_checkpoint(import_from(folder))
    for side in ("left", "right"):
        tokens, real = padded(side, longest=32)
        with torch.no_grad():
            expected = model(input_ids=tokens, attention_mask=real.long()).logits
            found = ours(tokens)[0]
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, and fairseq's is 1e-05"),
        ({"hidden_act": "relu"}, "RobertaForMaskedLM differs from fairseq's model by"),
        ({"num_hidden_layers": 3}, "the weights lack"),
    ],
)
def test_a_configuration_that_fairseq_does_not_have_is_refused(change, message, capsys):
    _, folder = make_roberta(type_vocab_size=1)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert message in refuse(folder, capsys)


def test_other_classes_are_refused_by_name(tmp_path, capsys):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=8))
    model.save_pretrained(tmp_path)
    assert "a LlamaForCausalLM cannot be imported, but RoBERTa" in refuse(tmp_path, capsys)


def test_a_folder_that_does_not_exist_is_refused(tmp_path, capsys):
    assert "no such folder" in refuse(tmp_path / "nowhere", capsys)


def test_a_dictionary_of_another_size_is_refused(capsys):
    _, folder = make_roberta(type_vocab_size=1)
    (folder / "dict.txt").write_text("x 1\n")
    assert "dict.txt: has 6 symbols, and the model 60" in refuse(folder, capsys)
