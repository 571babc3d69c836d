"""Models exported to transformers compute there what they compute in fairseq, and come back.

A weight, an option or a tie that a class of transformers names otherwise is found nowhere else.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from huggingface_hub import ModelCard
from transformers.pipelines import SUPPORTED_TASKS

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.workbench.convert import to_transformers
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.helpers.commands import new_directory, refused
from tests.helpers.exchanged import (
    Checkpoint,
    checkpoint,
    export_to,
    import_from,
    padded,
    refuse_export,
)
from tests.helpers.glue_files import DATA
from tests.helpers.preprocess import start
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import COMPANIONS, COMPOSITIONS, NAMES, PATTERNS, needs_causal
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
CLASSES = {  # a class of transformers -> family and options of the models that become it
    "RobertaForMaskedLM": ("masked_lm", {}),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", {"encoder_normalize_before": True}),
    "BioGptForCausalLM": ("causal_lm", {}),
    "MarianMTModel": ("translation", {}),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM),
    "BartForConditionalGeneration": ("translation", {"layernorm_embedding": True}),
    "MBartForConditionalGeneration": ("translation", {**PRE_NORM, "layernorm_embedding": True}),
}
# One of each encoding, alone; each companion with rotations; compositions; layers that differ.
SPECS = [*NAMES, *(f"rope+{name}" for name in COMPANIONS), *COMPOSITIONS, *PATTERNS]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    (name, spec, {})
    for name, spec in product_of(
        CLASSES, some_of(["none", "learned", "rope+m4(reset=true)", "t5", "m3"], SPECS)
    )
    if name == "BioGptForCausalLM" or not needs_causal(spec)
]
# Positions that a class has itself, so that transformers alone loads the folder.
STOCK: list[tuple[str, str, dict[str, Any]]] = [
    ("RobertaForMaskedLM", "learned", {}),
    ("RobertaPreLayerNormForMaskedLM", "learned", {}),
    ("M2M100ForConditionalGeneration", "sinusoidal(layout=fairseq)", {}),
]
OPTIONS = [  # ties and other options of fairseq
    ("RobertaForMaskedLM", "m4m", {"untie_weights_roberta": True, "attention_directions": "lr,rl"}),
    ("BioGptForCausalLM", "t5", {"no_share_decoder_input_output_embed": True}),
    ("BioGptForCausalLM", "rope", {"no_scale_embedding": True, "add_bos_token": True}),
    ("BioGptForCausalLM", "alibi", {"activation_fn": "relu"}),
    ("MarianMTModel", "t5", {"share_all_embeddings": True, "max_target_positions": 60}),
    ("MarianMTModel", "rope", {"position_encoding_decoder": "m4m+alibi", "decoder_layers": 3}),
    ("M2M100ForConditionalGeneration", "rope", {"share_all_embeddings": True}),
    ("BartForConditionalGeneration", "shaw", {"share_decoder_input_output_embed": True}),
    ("BartForConditionalGeneration", "m4m", {"activation_fn": "gelu_fast"}),
]


def make(name: str, spec: str, **more: Any) -> Checkpoint:
    """Write a checkpoint that becomes a class."""
    family, options = CLASSES[name]
    return checkpoint(family, spec, **{**options, **more})


def load(folder: Path) -> Any:
    """Load a folder by the class that its card names."""
    (name,) = re.findall(r"model = (\w+)\.from_pretrained", (folder / "README.md").read_text())
    return getattr(transformers, name).from_pretrained(folder).eval()


def open_checkpoint(path: Path) -> Any:
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model.eval()


@torch.no_grad()
def compare(ours: Any, theirs: Any, longest: int = 20) -> None:
    """Compare scores of sentences padded on either side; the targets are the sources."""
    for side in ("left", "right"):
        tokens, real = padded(side, longest=longest)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": real.long()}
        given: tuple[Any, ...] = (tokens,)
        if theirs.config.is_encoder_decoder:
            inputs |= {f"decoder_{key}": value for key, value in inputs.items()}
            given = (tokens, real.sum(1), tokens)
        found = theirs(**inputs)
        if "start_logits" in found:
            scores = torch.stack([found.start_logits, found.end_logits], -1)[real]
            expected = torch.stack(ours(tokens, span_scores=True), -1)[real]
        else:
            scores, expected = found.logits[real], ours(*given)[0][real]
        bound = 1e-5 * min(1.0, float(expected.abs().max()))
        torch.testing.assert_close(scores, expected, atol=bound, rtol=0)


def find_changes(trained: Checkpoint, folder: Path) -> dict[str, torch.Tensor]:
    """Import an exported folder; return the tensors that do not come back bit for bit."""
    before, after = (load_state(x, "it")["model"] for x in (trained.path, import_from(folder)))
    assert before.keys() == after.keys()
    return {name: after[name] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(("name", "spec", "more"), [*CASES, *STOCK, *OPTIONS])
def test_scores_are_those_of_fairseq_and_all_weights_come_back(name, spec, more):
    trained = make(name, spec, **more)
    folder = export_to(trained)
    model = load(folder)
    assert type(model).__name__ == name
    stock = (name, spec, more) in STOCK
    assert stock == ("fairseq_posenc" not in (folder / "config.json").read_text())
    assert stock == ("import fairseq_posenc" not in (folder / "README.md").read_text())
    assert not stock or read_positions(model) == spec
    compare(trained.model, model)
    # transformers has one number of positions for both sides.
    changes = {"encoder._extra_state"} if "max_target_positions" in more else set()
    assert find_changes(trained, folder).keys() == changes


@pytest.mark.parametrize(
    ("name", "spec", "more"),
    [
        ("RobertaForMaskedLM", "learned", {}),
        ("RobertaForMaskedLM", "learned", {"attention_directions": "lr,rl"}),
        *((name, "learned+m4m", {}) for name in some_of([*CLASSES][2::2], CLASSES)),
    ],
)
def test_a_model_that_was_made_longer_and_trained_in_transformers_comes_back(name, spec, more):
    trained = make(name, spec, **more)
    model = load(export_to(trained))
    set_positions(model, "own", max_positions=48, extend="copy")
    compare(trained.model, model)
    tokens, real = padded("right", longest=12)
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    model.train()(**inputs, labels=tokens.masked_fill(~real, -100)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    folder = new_directory() / "trained"
    model.save_pretrained(folder)
    for dictionary in trained.data.iterdir():
        shutil.copy(dictionary, folder)
    compare(open_checkpoint(import_from(folder)), model.eval(), longest=48)
    assert len(find_changes(trained, folder)) > len(trained.model.state_dict()) / 2


REFUSED = [
    ("causal_lm", "rope", {"adaptive_softmax_cutoff": "10,20"}, "with an adaptive softmax"),
    ("causal_lm", "rope", {"layernorm_embedding": True}, "layernorm_embedding=True"),
    ("translation", "rope(cross_attention=true)", {}, "with rope(cross_attention=true)"),
    ("translation", "rope", {"encoder_normalize_before": True}, "decoder_normalize_before=F"),
    ("translation", "rope", {"decoder_embed_dim": 48}, "decoder_embed_dim=48 beside 64"),
    ("causal_lm", "rope", {"no_decoder_final_norm": True}, "lacks biogpt.layer_norm.weight"),
    ("masked_lm", "rope", {"activation_fn": "relu"}, "activation_fn=relu"),
    ("translation", "learned", {"max_target_positions": 60}, "one number of positions"),
]


@pytest.mark.parametrize(("family", "spec", "more", "message"), REFUSED)
def test_what_no_class_computes_is_refused_by_name(family, spec, more, message, capsys):
    if "adaptive_softmax_cutoff" in more:
        more = {**more, "no_share_decoder_input_output_embed": True}
    assert message in refuse_export(capsys, checkpoint(family, spec, **more))


def test_a_model_that_differs_is_not_written(monkeypatch, capsys):
    def build_another(*args, **options):
        model = right(*args, **options)
        torch.nn.init.zeros_(model.get_input_embeddings().weight[5])
        return model

    right = to_transformers.build_stock_model
    monkeypatch.setattr(to_transformers, "build_stock_model", build_another)
    trained = checkpoint("masked_lm", "m4m")
    assert "RobertaForMaskedLM differs from the model by" in refuse_export(capsys, trained)


def test_an_export_that_cannot_begin_is_a_line(tmp_path, capsys):
    trained = checkpoint("masked_lm", "none")
    (tmp_path / "file").touch()
    assert "exists and is not empty" in refused(
        *(capsys, "export", "--checkpoint", trained.path, "--tokens", "words", "--out", tmp_path)
    )
    assert "is for --to ctranslate2" in refuse_export(capsys, trained, "--quantization", "int8")
    state = torch.load(trained.path)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "roberta"  # fairseq's own
    state["cfg"]["model"].no_token_positional_embeddings = True
    state["model"] = {k: v for k, v in state["model"].items() if "_extra_state" not in k}
    torch.save(state, trained.path)
    message = "a RobertaModel, not a model of fairseq_posenc"
    assert message in refuse_export(capsys, trained)
    data = checkpoint("translation", "rope", **PRE_NORM).data
    with open(data / "dict.en.txt", "a", encoding="utf-8") as file:
        file.write("more 1\n")
    trained = checkpoint("translation", "rope", data, **PRE_NORM)
    assert "one width, one dictionary" in refuse_export(capsys, trained)


@pytest.mark.parametrize(
    ("spec", "more", "beam"), product_of([("m4+rope", {}), ("t5", PRE_NORM)], [1, 5])
)
def test_translations_are_those_of_fairseq(spec, more, beam):
    lengths = {"max_source_positions": 60, "max_target_positions": 60}
    trained = checkpoint("translation", spec, **lengths, **more)
    tokens, real = padded("left", rows=25)
    search = trained.task.build_generator([trained.model], GenerationConfig(beam=beam, min_len=6))
    batch = {"net_input": {"src_tokens": tokens, "src_lengths": real.sum(1)}}
    ours = [row[0]["tokens"].tolist() for row in search.generate([trained.model], batch)]
    inputs = {"input_ids": tokens, "attention_mask": real.long(), "num_beams": beam}
    inputs |= {"min_new_tokens": 6, "early_stopping": beam > 1}
    found = load(export_to(trained)).generate(**inputs)
    theirs = [[token for token in row[1:] if token != 1] for row in found.tolist()]
    # At their limit the two do different things: fairseq forces an end, transformers stops.
    ended = [n for n in range(25) if max(len(ours[n]), len(theirs[n])) < 60]
    assert len(ended) >= 20
    assert [ours[n] for n in ended] == [theirs[n] for n in ended]


def check_lost_head(trained: Checkpoint, folder: Path) -> None:
    """Check that all of a fine-tuned model comes back, with zeros for the head that it lost."""
    for name, tensor in find_changes(trained, folder).items():
        assert name.startswith("encoder.lm_head.")
        assert not tensor.any(), name


def read_texts(raw: Path, task: str) -> list[list[str]]:
    """Read the columns of sentences of a development set."""
    with open(raw / task / "dev.tsv", encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if task == "CoLA":
        return [[line[3] for line in lines]]
    columns = [lines[0].index(name) for name in ("sentence1", "sentence2")]
    return [[line[column] for line in lines[1:]] for column in columns]


def compare_predictions(task: str, spec: str, raw: Path, data: Path, tokens: Path) -> Path:
    """Compare those for a development set, and what comes back; return the exported folder."""
    options = {"max_positions": 64, "max_update": 2, "pooler_activation_fn": "tanh"}
    trained = checkpoint("masked_lm", spec, data / task, "glue", **options)
    folder = export_to(trained, tokens=str(tokens))
    ours, _ = predict(trained.model, trained.task, "valid")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(*read_texts(raw, task), padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = load(folder)(**inputs).logits
    torch.testing.assert_close(theirs, ours.cpu(), atol=1e-5, rtol=1e-5)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))
    check_lost_head(trained, folder)
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "gpt2_bpe").is_dir(), reason="GLUE's files are not here")
def test_predictions_of_glues_published_set_are_those_of_fairseq(tmp_path):
    bpe, raw = DATA / "gpt2_bpe", DATA / "glue_data"
    tokens = ["--encoder-json", bpe / "encoder.json", "--vocab-bpe", bpe / "vocab.bpe"]
    tokens += ["--dict", bpe / "dict.txt"]
    start("glue", raw, "--out", tmp_path, "--tasks", "CoLA,RTE", *tokens)
    for task, size, longest in [("CoLA", 1043, 47), ("RTE", 277, 292)]:
        data = open_glue_data(tmp_path / task)
        assert (data.splits["valid"]["examples"], data.longest) == (size, longest)
        assert data.dictionary.read_bytes() == (bpe / "dict.txt").read_bytes()
        assert len(load_dictionary(data.dictionary)) == 50265
    compare_predictions("CoLA", "m4m", raw, tmp_path, bpe)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec"), product_of(["CoLA", "STS-B"], ["learned", "m4m+rope"]))
def test_predictions_of_glue_are_those_of_fairseq(task, spec):
    made = glue_data()
    folder = compare_predictions(task, spec, made / "raw", made / "glue", made / "pieces.model")
    labels = json.loads((folder / "config.json").read_text()).get("id2label")
    assert labels == ({"0": "LABEL_0"} if task == "STS-B" else {"0": "0", "1": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["learned", "m4m+rope"])
def test_answers_begin_and_end_at_the_same_tokens(spec):
    data = squad_files().data
    trained = checkpoint("masked_lm", spec, data, "squad", max_positions=48)
    folder = export_to(trained, tokens=str(data))
    check_lost_head(trained, folder)
    compare(trained.model, load(folder), longest=48)


@pytest.mark.parametrize(
    ("family", "spec", "labels"),
    [
        ("masked_lm", "m4m", {"pipeline_tag": "fill-mask"}),
        ("causal_lm", "rope", {"pipeline_tag": "text-generation"}),
        ("translation", "alibi", {"language": ["de", "en"]}),
    ],
)
def test_a_card_says_what_the_model_is_its_lines_run_and_nothing_names_the_machine(
    family, spec, labels, monkeypatch
):
    trained = checkpoint(family, spec, save_dir="/private/runs", restore_file="/private/x.pt")
    folder = export_to(trained)
    card = ModelCard.load(folder / "README.md")
    labels |= {"library_name": "transformers"}
    assert card.data.to_dict() == {**labels, "tags": ["fairseq", "position-encoding"]}
    assert labels.get("pipeline_tag", "fill-mask") in SUPPORTED_TASKS
    code = card.text.partition("```python\n")[2].partition("```")[0]
    assert (".generate(" in code) == (family != "masked_lm")
    names: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(code, names)
    assert names["tokenizer"]("w1 w2")["input_ids"][-1] == (6 if family == "causal_lm" else 2)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # all are for the same readers
    for secret in ("/private", str(trained.data), str(trained.path.parent)):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
