"""Models exported to transformers compute there what they compute in fairseq, and come back."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from fairseq.dataclass.configs import GenerationConfig
from huggingface_hub import ModelCard
from transformers.pipelines import SUPPORTED_TASKS

from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.hf import read_positions
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.convert import to_transformers
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import SPECS, checkpoint, export_to, import_from, padded
from tests.helpers.glue_files import DATA
from tests.helpers.preprocess import start
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import needs_causal
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LAYOUTS = {  # a class of transformers -> family and options of the models that become it
    "RobertaForMaskedLM": ("masked_lm", {}),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", {"encoder_normalize_before": True}),
    "BioGptForCausalLM": ("causal_lm", {}),
    "MarianMTModel": ("translation", {}),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM),
    "BartForConditionalGeneration": ("translation", {"layernorm_embedding": True}),
    "MBartForConditionalGeneration": ("translation", {**PRE_NORM, "layernorm_embedding": True}),
}
MORE = [  # ties and other options of fairseq
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


def load(folder: Path):
    (name,) = re.findall(r"model = (\w+)\.from_pretrained", (folder / "README.md").read_text())
    return getattr(transformers, name).from_pretrained(folder).eval()


def measure(name: str, spec: str, **more) -> float:
    """Export a model and import it again; check that all its tensors come back bit for bit.

    Returns:
        The largest difference of its scores in transformers, as a share, padded on either side.
    """
    family, options = LAYOUTS[name]
    trained = checkpoint(family, spec, **{**options, **more})
    folder = export_to(trained)
    model = load(folder)
    assert type(model).__name__ == name
    before, after = (load_state(x, "it")["model"] for x in (trained.path, import_from(folder)))
    assert before.keys() == after.keys()
    for weight in before:
        # transformers has one number of positions for both sides.
        if not ("max_target_positions" in more and weight.endswith("_extra_state")):
            assert torch.equal(before[weight], after[weight]), weight
    worst = 0.0
    for side in ("left", "right"):
        tokens, real = padded(side)
        with torch.no_grad():
            ours, theirs = compute_both(trained.model, model, tokens, real)
        difference = (ours - theirs)[real].abs().max() / ours[real].abs().max()
        worst = max(worst, float(difference))
    return worst


def compute_both(ours, theirs, tokens, real):
    """Compute the scores of a model of fairseq and of one of transformers; targets are sources."""
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    if not theirs.config.is_encoder_decoder:
        return ours(tokens)[0], theirs(**inputs).logits
    inputs |= {f"decoder_{key}": value for key, value in inputs.items()}
    return ours(tokens, real.sum(1), tokens)[0], theirs(**inputs).logits


def list_cases(specs):
    return [
        (name, spec)
        for name, (family, _) in LAYOUTS.items()
        for spec in specs
        if family == "causal_lm" or not needs_causal(spec)
    ]


@pytest.mark.parametrize(
    ("name", "spec"),
    some_of(product_of(LAYOUTS, ["none", "learned", "rope+m4(reset=true)", "t5", "m3"]), [])
    or list_cases(SPECS),
)
def test_scores_are_those_of_fairseq_and_all_weights_come_back(name, spec):
    assert measure(name, spec) < 1e-5


@pytest.mark.parametrize(("name", "spec", "more"), MORE)
def test_other_options_change_nothing(name, spec, more):
    assert measure(name, spec, **more) < 1e-5


@pytest.mark.parametrize(
    ("family", "spec", "more"),
    [
        ("masked_lm", "learned", {}),
        ("masked_lm", "learned", {"encoder_normalize_before": True}),
        ("translation", "sinusoidal(layout=fairseq)", PRE_NORM),
    ],
)
def test_a_class_with_these_positions_needs_nothing_of_the_package(family, spec, more):
    folder = export_to(checkpoint(family, spec, **more))
    assert "fairseq_posenc" not in (folder / "config.json").read_text()
    assert "import fairseq_posenc" not in (folder / "README.md").read_text()
    assert read_positions(load(folder)) == spec


@pytest.mark.parametrize(
    ("family", "spec", "more", "message"),
    [
        ("causal_lm", "rope", {"adaptive_softmax_cutoff": "10,20"}, "with an adaptive softmax"),
        ("causal_lm", "rope", {"layernorm_embedding": True}, "layernorm_embedding=True"),
        ("translation", "rope(cross_attention=true)", {}, r"with rope\(cross_attention=true\)"),
        ("translation", "rope", {"encoder_normalize_before": True}, "decoder_normalize_before=F"),
        ("translation", "rope", {"decoder_embed_dim": 48}, "decoder_embed_dim=48 beside 64"),
        ("causal_lm", "rope", {"no_decoder_final_norm": True}, r"lacks biogpt\.layer_norm\.weight"),
        ("masked_lm", "rope", {"activation_fn": "relu"}, "has a masked LM with .*=relu"),
        ("translation", "learned", {"max_target_positions": 60}, "one number of positions"),
    ],
)
def test_what_no_class_computes_is_refused_by_name(family, spec, more, message, capsys):
    if "adaptive_softmax_cutoff" in more:
        more = {**more, "no_share_decoder_input_output_embed": True}
    trained, out = checkpoint(family, spec, **more), new_directory() / "out"
    words = ["--checkpoint", str(trained.path), "--out", str(out), "--tokens", "words"]
    assert main(["export", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(out.parent.iterdir()) == []


def test_one_dictionary_for_two_is_refused(capsys):
    trained = checkpoint("translation", "rope", **PRE_NORM)
    with open(trained.data / "dict.en.txt", "a", encoding="utf-8") as file:
        file.write("more 1\n")
    trained = checkpoint("translation", "rope", trained.data, **PRE_NORM)
    words = ["--checkpoint", trained.path, "--out", new_directory() / "out", "--tokens", "words"]
    assert main(["export", *map(str, words)]) == 2
    assert "one width, one dictionary" in capsys.readouterr().err


def test_a_model_that_differs_is_not_written(monkeypatch, capsys):
    def build_another(*args, **options):
        model = right(*args, **options)
        torch.nn.init.zeros_(model.get_input_embeddings().weight[5])
        return model

    right = to_transformers.build_stock_model
    monkeypatch.setattr(to_transformers, "build_stock_model", build_another)
    out = new_directory() / "out"
    words = ["--checkpoint", checkpoint("masked_lm", "m4m").path, "--out", out, "--tokens", "none"]
    assert main(["export", *map(str, words)]) == 2
    assert "RobertaForMaskedLM differs from the model by" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []


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


def read_texts(raw: Path, task: str):
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
    check_way_back(trained, folder)
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


def check_way_back(trained, folder: Path) -> None:
    """Check that all of a fine-tuned model comes back bit for bit, but a head that it lost."""
    before, after = (load_state(x, "it")["model"] for x in (trained.path, import_from(folder)))
    assert before.keys() == after.keys()
    for name in before:
        is_lost = "lm_head" in name and name != "encoder.lm_head.weight"
        assert torch.equal(after[name], before[name] * (not is_lost)), name


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["learned", "m4m+rope"])
def test_answers_begin_and_end_at_the_same_tokens(spec):
    data = squad_files().data
    trained = checkpoint("masked_lm", spec, data, "squad", max_positions=48)
    folder = export_to(trained, tokens=str(data))
    check_way_back(trained, folder)
    model = load(folder)
    for side in ("left", "right"):
        tokens, real = padded(side, longest=48)
        with torch.no_grad():
            theirs = model(input_ids=tokens, attention_mask=real.long())
            ours = trained.model(tokens, span_scores=True)
        for ours_scores, name in zip(ours, ("start_logits", "end_logits")):
            torch.testing.assert_close(theirs[name][real], ours_scores[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "spec", "labels"),
    [
        ("masked_lm", "m4m", {"pipeline_tag": "fill-mask"}),
        ("causal_lm", "rope", {"pipeline_tag": "text-generation"}),
        ("translation", "alibi", {"language": ["de", "en"]}),
    ],
)
def test_a_card_says_what_the_model_is_and_its_lines_run(family, spec, labels, monkeypatch):
    folder = export_to(checkpoint(family, spec))
    card = ModelCard.load(folder / "README.md")
    labels |= {"library_name": "transformers"}
    assert card.data.to_dict() == {**labels, "tags": ["fairseq", "position-encoding"]}
    assert labels.get("pipeline_tag", "fill-mask") in SUPPORTED_TASKS
    code = card.text.partition("```python\n")[2].partition("```")[0]
    assert (".generate(" in code) == (family != "masked_lm")
    names: dict = {}
    monkeypatch.chdir(folder)
    exec(code, names)
    assert names["tokenizer"]("w1 w2")["input_ids"][-1] == (6 if family == "causal_lm" else 2)
    kinds = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert len(kinds) == 1  # all are for the same readers


def test_nothing_of_the_machine_is_in_a_folder():
    trained = checkpoint("masked_lm", "m4m", save_dir="/private/runs", restore_file="/private/x.pt")
    for path in filter(Path.is_file, export_to(trained).rglob("*")):
        for secret in (b"/private", str(trained.data).encode(), str(trained.path.parent).encode()):
            assert secret not in path.read_bytes(), path


def test_nothing_of_an_export_is_left_where_it_is_refused(tmp_path, capsys):
    trained = checkpoint("masked_lm", "learned")

    def refuse(*words, out=tmp_path / "out"):
        assert main(["export", "--out", str(out), *map(str, words)]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    words = ["--checkpoint", trained.path, "--tokens", "words"]
    assert "exists and is not empty" in refuse(*words, out=full)
    assert "say with --tokens" in refuse("--checkpoint", trained.path)
    assert "is for --to ctranslate2" in refuse(*words, "--quantization", "int8")
    stock = checkpoint("masked_lm", "none")
    state = torch.load(stock.path)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "roberta"  # fairseq's own
    state["cfg"]["model"].no_token_positional_embeddings = True
    state["model"] = {k: v for k, v in state["model"].items() if "_extra_state" not in k}
    torch.save(state, stock.path)
    message = refuse("--checkpoint", stock.path, "--tokens", "words")
    assert "a RobertaModel, not a model of fairseq_posenc" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
