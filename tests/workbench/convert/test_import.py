"""Models of transformers as checkpoints of fairseq: the way back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from safetensors.torch import load_file, save_file

import fairseq_posenc.hf
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint, export_to, import_from, padded
from tests.helpers.products import product_of, some_of
from tests.workbench.convert.test_export import LAYOUTS, MORE, load
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

THERE_AND_BACK = [
    *((name, spec, {}) for name in LAYOUTS for spec in ("learned", "rope+m4m", "sentence_learned")),
    *MORE,
]


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
    ("name", "spec", "more"), some_of(THERE_AND_BACK[::3] + MORE, THERE_AND_BACK)
)
def test_there_and_back_is_bit_for_bit(name, spec, more):
    family, options = LAYOUTS[name]
    trained = checkpoint(family, spec, **{**options, **more})
    start = import_from(export_to(trained))
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    if "max_target_positions" in more:  # transformers has one number of positions
        before, after = (
            {name: x for name, x in state.items() if not name.endswith("_extra_state")}
            for state in (before, after)
        )
    assert before.keys() == after.keys()
    for weight in before:
        assert torch.equal(before[weight], after[weight]), weight
    assert open_checkpoint(start).max_positions() is not None


@pytest.mark.parametrize(
    ("family", "spec"), [("masked_lm", "learned+m4"), ("causal_lm", "learned")]
)
def test_tables_become_longer_between_export_and_import(family, spec):
    trained = checkpoint(family, spec)
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


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec"), product_of(["glue", "squad"], ["learned", "m4m+rope"]))
def test_fine_tuned_heads_come_back_bit_for_bit(task, spec, capsys):
    options = {"pooler_activation_fn": "tanh", "max_positions": 48}
    if task == "glue":
        data, pieces = glue_data() / "glue" / "STS-B", glue_data() / "pieces.model"
        trained = checkpoint("masked_lm", spec, data, "glue", **options, max_update=2)
    else:
        data = pieces = squad_files().data
        trained = checkpoint("masked_lm", spec, data, "squad", **options)
    start = import_from(export_to(trained, tokens=str(pieces)))
    assert "zeros in the checkpoint" in capsys.readouterr().out
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    assert before.keys() == after.keys()
    for name in before:
        left_out = "lm_head" in name and name != "encoder.lm_head.weight"
        expected = torch.zeros_like(before[name]) if left_out else before[name]
        assert torch.equal(after[name], expected), name


def train_once(model) -> None:
    tokens, real = padded("right", longest=12)
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    model.train()(**inputs, labels=tokens.masked_fill(~real, -100)).loss.backward()
    with torch.no_grad():
        for parameter in filter(lambda x: x.grad is not None, model.parameters()):
            parameter -= 0.1 * parameter.grad


@pytest.mark.parametrize(
    ("name", "spec"),
    [("RobertaForMaskedLM", "learned"), *((name, "m4m+rope") for name in LAYOUTS)],
)
def test_a_model_that_was_trained_in_transformers_comes_back(name, spec):
    family, options = LAYOUTS[name]
    trained = checkpoint(family, spec, **options)
    model = load(export_to(trained))
    train_once(model)
    folder = new_directory() / "trained"
    model.save_pretrained(folder)
    start = import_from(folder)
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    assert sum(not torch.equal(before[x], after[x]) for x in before) > len(before) / 2
    # The command has compared the scores; here, once more through the file.
    tokens, real = padded("left")
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    ours = build_again(start, family)
    with torch.no_grad():
        if family == "translation":
            found = ours(tokens, real.sum(1), tokens)[0]
            inputs |= {f"decoder_{key}": value for key, value in inputs.items()}
        else:
            found = ours(tokens)[0]
        expected = model.eval()(**inputs).logits
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)


def build_again(path: Path, family: str):
    """Open a checkpoint whose folder has no dictionaries."""
    data = checkpoint(family, "none").data
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], {"data": str(data), "source_lang": "de", "target_lang": "en"}
    )
    return model.eval()


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


def test_tensors_must_be_those_of_the_model(capsys):
    _, folder = make_roberta(type_vocab_size=1)
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "roberta.encoder.layer.1.output.dense.weight"
    for changed, message in (
        ({k: v for k, v in weights.items() if k != name}, f"the weights lack {name}"),
        ({**weights, "more": torch.ones(2)}, "the weights also have more"),
        ({**weights, name: torch.ones(2, 2)}, "the weights have other shapes of"),
        ({**weights, name: weights[name] / 0}, "the weights are not finite"),
    ):
        save_file(changed, path, {"format": "pt"})
        assert message in refuse(folder, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 40}, "the weights have other shapes"),
        ({"num_hidden_layers": 3}, "the weights lack"),
        ({"num_hidden_layers": 1}, "the weights also have"),
        ({"max_position_embeddings": 33}, "the weights have other shapes"),
        ({"hidden_size": "many"}, ""),
        ({"num_attention_heads": 5}, ""),
        ({"vocab_size": -3}, ""),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, and fairseq's layer norms"),
        ({"hidden_act": "relu"}, "relu in its layers and gelu in its head"),
        ({"architectures": ["BertForMaskedLM"]}, "not a model of text of type 'roberta'"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "the weights lack"),
    ],
)
def test_a_configuration_that_lies(change, message, capsys):
    _, folder = make_roberta(type_vocab_size=1)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert message in refuse(folder, capsys)


def test_other_classes_are_refused_by_name(tmp_path, capsys):
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=8))
    model.save_pretrained(tmp_path)
    assert "a LlamaForCausalLM cannot be imported, but Roberta" in refuse(tmp_path, capsys)


def test_files_that_are_none(tmp_path, capsys):
    assert "no such folder" in refuse(tmp_path / "nowhere", capsys)
    assert str(tmp_path) in refuse(tmp_path, capsys)
    _, folder = make_roberta(type_vocab_size=1)
    (folder / "model.safetensors").write_bytes(b"nothing!")
    assert "its model cannot be read" in refuse(folder, capsys)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")  # a pickle is not read
    assert str(folder) in refuse(folder, capsys)


def test_a_dictionary_of_another_size_is_refused(capsys):
    _, folder = make_roberta(type_vocab_size=1)
    (folder / "dict.txt").write_text("x 1\n")
    assert "dict.txt: has 6 symbols, and the model 60" in refuse(folder, capsys)
