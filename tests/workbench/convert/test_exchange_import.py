"""Models of transformers as start checkpoints: the way back, and what is refused."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from safetensors.torch import load_file, save_file

from fairseq_posenc.encodings.base import ENCODINGS, Dims
from fairseq_posenc.errors import UserError
from fairseq_posenc.version import __version__
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.convert.exchange import config_json, exporting
from fairseq_posenc.workbench.convert.exchange.encoding_maps import list_hf_classes, parse_positions
from fairseq_posenc.workbench.loading.pretrained import load_state
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint
from tests.helpers.products import product_of, some_of
from tests.workbench.convert.test_exchange import (
    HARD,
    ROTATIONS,
    export,
    exported_copy,
    padded,
    scores,
)
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

IS_4 = transformers.__version__.startswith("4.")
NATIVE: list[tuple[str, str, str, dict[str, Any]]] = [
    ("masked_lm", "learned", "hf", {}),
    *(("masked_lm", spec, "hf4", {}) for spec in ["shaw(max_distance=7)", "m4"] if IS_4),
    ("masked_lm", "rope", "hf", {}),
    ("masked_lm", "t5", "hf", {}),
    ("causal_lm", "rope(layout=half,fraction=0.5)", "hf", {}),
    *(("causal_lm", spec, "hf", {}) for spec in ROTATIONS),
]
LENGTH = "original_max_position_embeddings"
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 6,
    "pos_att_type": ["c2p", "p2c"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pad_token_id": 1,
}
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 34,
    "layer_norm_eps": 1e-5,
}


@pytest.mark.parametrize("name", ["learned", "shaw", "m4", "deberta_v2", "rope"])
def test_a_configuration_has_the_positions_that_it_was_written_for(name):
    for hf_class in list_hf_classes(ENCODINGS[name](Dims(32, 4, 24, causal=True))):
        if hf_class.model != "RoFormerForMaskedLM":  # nothing imports it by its configuration
            item, size = parse_positions(hf_class.model, dict(hf_class.config))
            assert (hf_class.model, item.name, size) == (hf_class.model, name, 24)


def import_(folder: Path, code=0) -> Path:
    out = new_directory() / "start.pt"
    assert main(["import", "--from", str(folder), "--out", str(out)]) == code
    assert out.exists() == (code == 0)
    return out


def refused(folder: Path, capsys) -> str:
    """Return the one line in which an import is refused."""
    import_(folder, code=2)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fairseq-posenc: error: ")
    return line


@pytest.mark.parametrize(
    ("family", "spec", "to", "more"),
    some_of(
        # Every class of transformers, some scalings, and our code.
        [*NATIVE[:6], *NATIVE[6::5], *((f, s, "hf", m) for f, s, m in HARD[::4])],
        [*NATIVE, *((f, s, "hf", m) for f, s, m in HARD)],
    ),
)
def test_there_and_back_is_bit_for_bit(family, spec, to, more):
    trained = checkpoint(family, spec, **more)
    out = new_directory() / "out"
    words = ["--checkpoint", trained.path, "--to", to, "--out", out, "--tokens", "words"]
    assert main(["export", *map(str, words)]) == 0
    native = (family, spec, to, more) in NATIVE
    assert (out / "modeling_fairseq_posenc.py").exists() == (not native)
    start = import_(out)
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(start)])
    model.eval()
    tokens, real = padded("right")
    ours, theirs = (
        scores(each, family, tokens)[real] for each in (trained, trained._replace(model=model))
    )
    torch.testing.assert_close(theirs, ours)


def test_a_model_for_transformers_4_needs_transformers_4(monkeypatch, capsys):
    # That of the command, even if a test has imported the package a second time.
    monkeypatch.setattr(exporting.transformers, "__version__", "5.0.0")
    out = new_directory() / "out"
    trained = checkpoint("masked_lm", "m4")
    words = ["--checkpoint", trained.path, "--to", "hf4", "--out", out, "--tokens", "words"]
    assert main(["export", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "transformers 5.0.0" in line
    assert "pip install 'transformers<5'" in line
    assert not out.exists()


LISTS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 1.5, 2.0, 4.0]}
SCALINGS = [  # of transformers, and how its model comes back, which has 24 positions
    ({"rope_type": "linear", "factor": 4.0}, "linear:4"),
    ({"type": "linear", "factor": 4.0}, "linear:4"),  # as configurations said before 2024
    ({"rope_type": "dynamic", "factor": 2.0}, "dynamic:2"),
    (
        {"rope_type": "yarn", "factor": 4.0, LENGTH: 12, "beta_fast": 8.0, "truncate": False},
        "yarn:4:beta_fast=8:truncate=false:length=12",
    ),
    (
        {"rope_type": "llama3", "factor": 8.0, LENGTH: 12}
        | {"low_freq_factor": 1.0, "high_freq_factor": 3.0},
        "llama3:8:high=3:length=12",
    ),
    (
        {"rope_type": "longrope", "factor": 2.0, LENGTH: 12, **LISTS},
        "longrope:2:short=1/1.1/1.2/1.3:long=1/1.5/2/4:length=12",
    ),
]


@pytest.mark.parametrize(("scaling", "spec"), SCALINGS)
def test_a_scaling_that_was_set_in_transformers_comes_back(scaling, spec, capsys):
    trained = checkpoint("causal_lm", "rope(base=500)")
    folder = export(trained)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]["rope_type"]
    config["rope_parameters"] |= scaling
    config["rope_scaling"] = scaling
    if scaling.get("rope_type") == "longrope":  # where transformers 4 looks
        config[LENGTH] = scaling[LENGTH]
    path.write_text(json.dumps(config))
    versions = ("4.57.6", "5.24.0")
    for version in some_of([versions[len(spec) % 2]], versions):
        path.write_text(json.dumps({**config, "transformers_version": version}))
        state = load_state(start := import_(folder), "it")
        text = capsys.readouterr().out
        assert ("by the longest row of a batch" in text) == ("dyn" in spec or "longrope" in spec)
        found = state["cfg"].model.position_encoding
        assert found == f"rope(base=500,layout=half,scaling={spec})"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        (ours,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(start)])
        tokens, real = padded("left", longest=24)
        with torch.no_grad():
            expected_scores = model(input_ids=tokens, attention_mask=real.long()).logits
            scores_here = ours.eval()(tokens)[0]
        torch.testing.assert_close(scores_here[real], expected_scores[real], atol=1e-5, rtol=1e-5)


def test_transformers_proportional_rotations_come_back():
    folder = export(checkpoint("causal_lm", "rope(layout=half)"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    path.write_text(json.dumps({**config, "transformers_version": "5.24.0"}))
    model = load_state(import_(folder), "it")["cfg"].model
    assert model.position_encoding == "rope(layout=half,scaling=proportional:1:part=0.5)"


def test_a_rotation_that_is_not_known_is_refused(capsys):
    folder = export(checkpoint("causal_lm", "rope"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "rope_scaling"):
        config[key] = {**(config[key] or {}), "rope_type": "another"}
    path.write_text(json.dumps(config))
    assert "the scaling of its rotary positions is not supported" in refused(folder, capsys)


def theirs(kind="Roberta", **more):
    """Return a random model of transformers and the folder that it is in."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "pad_token_id": 1, **more})
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    folder = new_directory() / "theirs"
    model.save_pretrained(folder)
    (folder / "dict.txt").write_text("".join(f"x{number} 1\n" for number in range(55)))
    return model, folder


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Roberta", {"type_vocab_size": 1}),
        ("Roberta", {"type_vocab_size": 2}),
        ("XLMRoberta", {"type_vocab_size": 1}),
        ("DebertaV2", DEBERTA),
        *(  # which RoBERTa has no more in transformers 5
            ("Roberta", {"position_embedding_type": positions, "type_vocab_size": 1})
            for positions in ["relative_key", "relative_key_query"]
            if IS_4
        ),
    ],
)
def test_a_roberta_computes_the_same_here(kind, more):
    model, folder = theirs(kind, **more)
    if "position_embedding_type" in more:  # a model that is trained has none beside
        weights = load_file(folder / "model.safetensors")
        weights["roberta.embeddings.token_type_embeddings.weight"].zero_()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        model = type(model).from_pretrained(folder).eval()
    (ours,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(import_(folder))])
    for side in ("left", "right"):
        tokens, real = padded(side, longest=32, symbols=50)
        with torch.no_grad():
            expected = model(input_ids=tokens, attention_mask=real.long()).logits
            found = ours.eval()(tokens)[0]
        torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


def test_tensors_must_be_those_of_the_model(capsys):
    _, folder = theirs(type_vocab_size=1)
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "roberta.encoder.layer.1.output.dense.weight"
    for changed, told in (
        ({k: v for k, v in weights.items() if k != name}, "1 tensors of the model are not there"),
        ({**weights, "more": torch.ones(2)}, "1 tensors have no place in the model, such as more"),
        ({**weights, name: torch.ones(2, 2)}, "1 tensors have other shapes than the settings say"),
        ({**weights, name: weights[name] / 0}, "NaN or infinite"),
        ({**weights, "lm_head.decoder.bias": torch.ones(60)}, "a RoBERTa of fairseq ties them"),
        ({f"t{n}": torch.ones(1) for n in range(100_000)}, "holds 100,000 tensors"),
    ):
        save_file(changed, path, {"format": "pt"})
        assert told in refused(folder, capsys)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"hidden_size": 40}, "have other shapes than the settings say"),
        ({"num_hidden_layers": 3}, "tensors of the model are not there"),
        ({"num_hidden_layers": 1}, "tensors have no place in the model"),
        ({"intermediate_size": 10**9}, "weights do not fit the model of its settings"),
        ({"num_hidden_layers": 10**12}, "weights do not fit the model of its settings"),
        ({"max_position_embeddings": 10**12}, "weights do not fit the model of its settings"),
        ({"max_position_embeddings": 33}, "have other shapes than the settings say"),
        ({"hidden_size": "many"}, "sizes that are not numbers of 1 or more"),
        ({"num_attention_heads": 5}, "cannot be divided among 5 attention heads"),
        ({"vocab_size": -3}, "sizes that are not numbers of 1 or more"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, and fairseq's layer norms"),
        ({"hidden_act": "relu"}, "has gelu in its head and relu in its layers"),
        (
            {"architectures": ["BertForMaskedLM"]},
            "a BertForMaskedLM cannot be imported; fairseq-posenc imports",
        ),
        (
            {"position_embedding_type": "new"},
            "the positions of its RobertaForMaskedLM are not supported",
        ),
    ],
)
def test_a_configuration_that_lies(config, told, capsys):
    _, folder = theirs(type_vocab_size=1)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    assert told in refused(folder, capsys)


def test_files_that_are_none(tmp_path, capsys):
    assert "no such folder" in refused(tmp_path / "nowhere", capsys)
    assert "config.json: no such file" in refused(tmp_path, capsys)
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert "config.json: cannot be read" in refused(tmp_path, capsys)
    (tmp_path / "config.json").write_text("{}")
    assert "safe_serialization=True" in refused(tmp_path, capsys)
    path = tmp_path / "model.safetensors"
    for content, told in (
        (b"", "no whole file of safetensors"),
        (struct.pack("<Q", 100_000_000) + b"{" * 1000, "its header says that it has 100,000,000"),
        (struct.pack("<Q", 2**63), "its header says that it has"),
        (struct.pack("<Q", 8) + b"nothing!", "no whole file of safetensors"),
    ):
        path.write_bytes(content)
        assert told in refused(tmp_path, capsys)


def test_a_translation_model_trained_without_named_languages_is_exported(tmp_path, capsys):
    """As the tutorial trains one: fairseq reads the pair off the names of the data."""
    trained, out = checkpoint("translation", "rope"), tmp_path / "out"
    state = torch.load(trained.path)
    state["cfg"]["task"] |= {"source_lang": None, "target_lang": None}
    torch.save(state, trained.path)
    words = ["export", "--to", "hf", "--checkpoint", str(trained.path), "--tokens", "words"]
    assert main([*words, "--out", str(out)]) == 2
    assert "has no files of a language pair" in capsys.readouterr().err
    (trained.data / "train.de-en.de.idx").touch()
    assert main([*words, "--out", str(out)]) == 0
    assert {path.name for path in out.rglob("dict.*")} == {"dict.de.txt", "dict.en.txt"}


def test_nothing_of_an_export_is_left_where_it_is_refused(tmp_path, capsys):
    trained = checkpoint("masked_lm", "learned")

    def told(*words, out=tmp_path / "out"):
        assert main(["export", "--to", "hf", "--out", str(out), *map(str, words)]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    mine = ["--checkpoint", trained.path, "--tokens", "words"]
    assert "exists and is not empty" in told(*mine, out=full)
    assert "no such file" in told("--checkpoint", tmp_path / "none.pt")
    assert "say with --tokens" in told("--checkpoint", trained.path)
    assert f"--data {tmp_path}: holds no dict.txt; name the" in told(*mine, "--data", tmp_path)
    (trained.data / "dict.txt").unlink()
    assert "holds no dict.txt" in told(*mine)
    stock = checkpoint("masked_lm", "none")
    state = torch.load(stock.path)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "roberta"  # fairseq's own
    state["cfg"]["model"].no_token_positional_embeddings = True
    state["model"] = {k: v for k, v in state["model"].items() if "_extra_state" not in k}
    torch.save(state, stock.path)
    told_of_stock = told("--checkpoint", stock.path, "--tokens", "words")
    assert "a RobertaModel, not a model of fairseq_posenc" in told_of_stock
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_a_damaged_dictionary_of_labels_is_a_line(tmp_path):
    (tmp_path / "label").mkdir()
    (tmp_path / "label" / "dict.txt").write_text("no 1\n\nyes 1\n")
    with pytest.raises(UserError, match=r"dict\.txt: not a fairseq dictionary \(line 2"):
        config_json._name_classes(SimpleNamespace(data=tmp_path), 2)


def test_an_import_needs_no_tokenizers():
    module = "fairseq_posenc.workbench.convert.exchange.importing"
    code = f"import sys; sys.modules['tokenizers'] = None; import {module}"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(name, capsys):
    folder = exported_copy("causal_lm", "none")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name}: " in refused(folder, capsys)


def test_an_import_compares_the_code_of_a_folder_and_does_not_run_it(capsys):
    folder = export(checkpoint("causal_lm", "alibi"))
    path = folder / "modeling_fairseq_posenc.py"
    code = path.read_text()
    path.write_text(code.replace(f"fairseq-posenc {__version__}", "fairseq-posenc 0.0.1", 1))
    import_(folder)
    for other in ("raise SystemExit('run')", code.replace("self", "this", 1), code + "\n# more"):
        assert other != code
        path.write_text(other)
        assert "is not the code that this version" in refused(folder, capsys)
    path.write_text(code)
    config = json.loads((folder / "config.json").read_text())
    for wrong in ({"auto_map": 5}, {"auto_map": {}, "decoder_stack": {"positions": {"new": {}}}}):
        (folder / "config.json").write_text(json.dumps({**config, **wrong}))
        assert "config.json" in refused(folder, capsys)
    (folder / "config.json").write_text(json.dumps(config))
    path.unlink()
    import_(folder)


PAYLOAD = "__import__('os').mkdir('it-ran') or [5]"


CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    *((f, "model", {"adaptive_softmax_cutoff": PAYLOAD}) for f in ("causal_lm", "translation")),
    ("causal_lm", "model", {"adaptive_input": True, "adaptive_input_cutoff": PAYLOAD}),
    ("causal_lm", "model", {"character_embeddings": True, "character_filters": PAYLOAD}),
    *((f, "model", {"xformers_att_config": PAYLOAD}) for f in ("masked_lm", "causal_lm")),
    ("translation", "model", {"encoder_embed_path": "there-is-none.txt"}),
    ("translation", "model", {"decoder_embed_path": "pipe"}),
    ("translation", "model", {"encoder_layers_to_keep": 3}),
    ("translation", "model", {"decoder_layers_to_keep": "a,b"}),
    ("masked_lm", "model", {"encoder_layers_to_keep": ["0"]}),
    ("translation", "model", {"_target_": "os.mkdir"}),
    ("translation", "task", {"source_lang": "${oc.env:HOME}"}),
]


@pytest.mark.parametrize(("family", "part", "change"), CHANGES)
def test_the_options_of_a_folder_run_nothing_and_open_nothing(
    family, part, change, tmp_path, monkeypatch, capsys
):
    folder = exported_copy(family, "none")
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # opening it would wait for ever
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["fairseq"][part] |= change
    path.write_text(json.dumps(config))
    told = refused(folder, capsys)
    assert f"{path}: its setting {part}.{[*change][-1]}" in told
    assert not Path("it-ran").exists()


@pytest.mark.parametrize(
    ("family", "task"),
    product_of(
        ["masked_lm", "causal_lm", "translation"],
        ["masked_lm", "language_modeling", "translation", "glue", "squad"],
        times=2,
    ),
)
def test_another_tasks_name_is_one_line(family, task, capsys):
    folder = exported_copy(family, "none")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kept = config["fairseq"]
    own = kept["task"]["_name"] == task
    kept["task"]["_name"] = task
    path.write_text(json.dumps(config))
    fits = own or (family == "masked_lm" and task in ("glue", "squad"))
    import_(folder, code=0 if fits else 2)
    assert fits or "the task of its model" in capsys.readouterr().err


def test_what_an_export_keeps_for_the_way_back_is_checked(capsys):
    folder = export(checkpoint("masked_lm", "m4m"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    kept = config["fairseq"]
    for part, change, told in (
        ("model", {"_name": "transformer"}, "transformer is not an architecture of fairseq_posenc"),
        ("model", {"encoder_embed_dim": 10**9}, "weights do not fit the model of its settings"),
        (
            "model",
            {"position_encoding": "rope+m4m"},
            'encoder_stack has the positions [{"m4m": ',
        ),
        ("model", {"attention_directions": "lr"}, "encoder_stack has the directions"),
        ("model", {"position_encoding": "shaw"}, "tensors of the model are not there"),
        ("task", {"_name": "bart"}, "the task of its model is not one of masked_lm"),
        ("model", {"activation_fn": "relu"}, "gelu in its head, where a model of fairseq"),
        ("meanings", {"encoder": {"heads": 2}}, "trained with 2 heads, the model has 4 heads"),
        ("meanings", {"encoder": 3}, "config.json: cannot be read"),
    ):
        options = {**kept, part: {**kept[part], **change}}
        path.write_text(json.dumps({**config, "fairseq": options}))
        assert told in refused(folder, capsys)


def test_nothing_of_the_machine_is_in_a_folder():
    trained = checkpoint("masked_lm", "m4m", save_dir="/private/runs", restore_file="/private/x.pt")
    folder = export(trained)
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert b"/private" not in content, path
            assert str(trained.data).encode() not in content, path
            assert str(trained.path.parent).encode() not in content, path


@pytest.mark.parametrize(
    ("family", "spec", "pipeline"),
    [("masked_lm", "m4m", "fill-mask"), ("translation", "alibi", "translation")],
)
def test_a_card_says_what_the_model_is_and_its_lines_run(family, spec, pipeline):
    folder = export(checkpoint(family, spec), "--license", "mit")
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    languages = "[de, en]" if family == "translation" else "[]"
    for line in ("license: mit", f"language: {languages}", f"pipeline_tag: {pipeline}"):
        assert line in front.splitlines()
    code = text.partition("```python\n")[2].partition("```")[0].replace("FOLDER", str(folder))
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["tokenizer"]("w1 w2")["input_ids"][-1] == 2
    kinds = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert len(kinds) == 1  # all are for the same readers


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec"), product_of(["glue", "squad"], ["learned", "m4m+rope"]))
def test_fine_tuned_heads_come_back_bit_for_bit(task, spec, capsys):
    tanh = {"pooler_activation_fn": "tanh", "max_positions": 48}
    if task == "glue":
        data, pieces = glue_data() / "glue" / "STS-B", glue_data() / "pieces.model"
        trained = checkpoint("masked_lm", spec, data, "glue", **tanh, max_update=2)
    else:
        data = pieces = squad_files().data
        trained = checkpoint("masked_lm", spec, data, "squad", **tanh)
    folder = export(trained, tokens=str(pieces))
    before, after = (load_state(path, "it")["model"] for path in (trained.path, import_(folder)))
    assert "the folder has no head for masked tokens: the checkpoint has zeros there" in (
        capsys.readouterr().out
    )
    assert before.keys() == after.keys()
    for name in before:
        left_out = "lm_head" in name and name != "encoder.lm_head.weight"
        expected = torch.zeros_like(before[name]) if left_out else before[name]
        assert torch.equal(after[name], expected), name
    path = folder / "config.json"
    config = json.loads(path.read_text())
    masked = "RobertaForMaskedLM" if spec == "learned" else "PosencForMaskedLM"
    for change, told in (
        ({"architectures": ["BertForMaskedLM"]}, "is not an export of fairseq-posenc"),
        ({"architectures": [masked], "head_activation": "gelu"}, "tensors of the model are not"),
        ({"architectures": ["PosencForMaskedLM"], "head_activation": "tanh"}, "tanh in its head"),
    ):
        path.write_text(json.dumps({**config, **change}))
        assert told in refused(folder, capsys)


ODD = [3.5, ["x"], {"x": {"y": [{}]}}, 10**30, "\x1b[31mred"]
ODD_KEYS = ["model_type", "architectures", "hidden_act", "head_activation", "auto_map"]
ODD_KEYS += ["transformers_version", "vocab_size", "max_position_embeddings", "layer_norm_eps"]
ODD_KEYS += ["rope_parameters", "rope_scaling", "pos_att_type", "encoder_stack", "decoder_stack"]
ODD_KEYS += ["fairseq", "fairseq.model", "fairseq.task", "fairseq.head", "fairseq.meanings"]
ODD_KEYS += ["fairseq.trained_lengths", "fairseq.model.encoder_ffn_embed_dim"]
ODD_KEYS += ["fairseq.model.decoder_xformers_att_config", "encoder_stack.positions"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "family", "spec", "has_options"),
    product_of(
        ODD_KEYS,
        [
            ("masked_lm", "m4m", True),  # our code
            ("masked_lm", "learned", False),  # RoBERTa of others
            ("causal_lm", "rope(layout=half,fraction=0.5)", True),  # GPT-NeoX
        ],
    ),
)
def test_values_of_another_kind_are_a_line_or_without_effect(
    family, spec, has_options, key, capsys
):
    path = export(checkpoint(family, spec)) / "config.json"
    config = json.loads(path.read_text())
    if not has_options:
        del config["fairseq"]
    *parents, last = key.split(".")
    first = ODD_KEYS.index(key) % len(ODD)
    for value in some_of([ODD[first], ODD[first - 2]], ODD):
        changed = json.loads(json.dumps(config))
        place = changed
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                return
        place[last] = value
        path.write_text(json.dumps(changed))
        code = main(["import", "--from", str(path.parent), "--out", str(path.parent / "start.pt")])
        told = capsys.readouterr()
        assert code in (0, 2)
        assert "\x1b" not in told.out + told.err
        if code:
            (line,) = (each for each in told.err.splitlines() if not each.startswith("INFO:"))
            assert line.startswith("fairseq-posenc: error: ")
        (path.parent / "start.pt").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("key", "value"),
    product_of(
        ["model_type", "hidden_act", "transformers_version"],
        [value for value in ODD if not isinstance(value, str)],
    ),
)
def test_a_text_that_is_none_is_named(key, value, capsys):
    path = export(checkpoint("masked_lm", "m4m")) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert f"{path}: {key} is {json.dumps(value)}, which is not a text" in refused(
        path.parent, capsys
    )
