"""Models carried to transformers or CTranslate2 compute there what they compute in fairseq.

A weight, option, tie, vector, bias or limit that a class or the engine reads otherwise is found
nowhere else; nor is a weight that does not come back.
"""

import json
import math
import re
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fairseq import checkpoint_utils
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig

import glue
from fairseq_posenc import specs
from fairseq_posenc.checkpoints.dictionary import load_dictionary
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.workbench.convert import comparison, stock_classes
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from fairseq_posenc.workbench.hf.folders import is_stock
from fairseq_posenc.workbench.loading.checkpoints import load_state
from tests.helpers import tiny_models
from tests.helpers.commands import new_directory, refused
from tests.helpers.exchanged import (
    WORDS,
    Checkpoint,
    checkpoint,
    ctranslate2,
    export_to,
    import_from,
    refuse_export,
)
from tests.helpers.hf_models import MODELS, POSITIONS, SYMBOLS, edit_config, save_llama
from tests.helpers.preprocess import DATA, bpe_options, start
from tests.helpers.products import product_of, some_of
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
UNTIED = {"no_share_decoder_input_output_embed": True}
# Class of transformers -> family and options of the models that become it, its own positions.
CLASSES: dict[str, tuple[str, dict[str, bool], str]] = {
    "RobertaForMaskedLM": ("masked_lm", {}, "learned"),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", {"encoder_normalize_before": True}, "learned"),
    "BioGptForCausalLM": ("causal_lm", {}, ""),
    "MarianMTModel": ("translation", {}, ""),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM, "sinusoidal(layout=fairseq)"),
    "BartForConditionalGeneration": ("translation", {"layernorm_embedding": True}, ""),
    "MBartForConditionalGeneration": ("translation", PRE_NORM | {"layernorm_embedding": True}, ""),
}
ENGINES = {"Translator": "translation", "Generator": "causal_lm"}  # of CTranslate2
VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]  # in the order of their numbers
# One of each encoding, alone; each companion with rotations; compositions; layers that differ.
SPECS = [*tiny_models.NAMES, *(f"rope+{name}" for name in tiny_models.COMPANIONS)]
SPECS += [*tiny_models.COMPOSITIONS, *tiny_models.PATTERNS]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (name, spec, {})
        for name, spec in product_of(
            some_of([*CLASSES][1::2] + [*CLASSES][-1:], CLASSES),
            some_of(["none", "rope+m4(reset=true)", "m3", "learned"], SPECS),
        )
        if name == "BioGptForCausalLM" or not tiny_models.needs_causal(spec)
    ),
    ("RobertaPreLayerNormForMaskedLM", "learned", {}),
    ("RobertaForMaskedLM", "m4m", {"untie_weights_roberta": True, "attention_directions": "lr,rl"}),
    ("BioGptForCausalLM", "t5", {**UNTIED, "activation_fn": "relu"}),
    ("BioGptForCausalLM", "rope", {"no_scale_embedding": True, "add_bos_token": True}),
    ("MarianMTModel", "t5", {"share_all_embeddings": True, "max_target_positions": 60}),
    ("MarianMTModel", "rope", {"position_encoding_decoder": "m4m+alibi", "decoder_layers": 3}),
    ("M2M100ForConditionalGeneration", "rope", {"share_all_embeddings": True}),
    (
        "M2M100ForConditionalGeneration",
        "sinusoidal(layout=fairseq)",
        {"activation_fn": "gelu_fast"},
    ),
    ("BartForConditionalGeneration", "shaw", {"share_decoder_input_output_embed": True}),
    ("Translator", "learned", {"layernorm_embedding": True, "share_all_embeddings": True}),
    ("Translator", "none", {**PRE_NORM, "no_decoder_final_norm": True, "activation_fn": "gelu"}),
    ("Translator", "rope(layout=half,fraction=0.5)", {"activation_fn": "gelu_fast"}),
    ("Translator", "rope(scaling=yarn:4:length=9)", {"no_scale_embedding": True}),
    ("Translator", "none,rope(base=500)+t5", {"encoder_attention_heads": 2}),
    ("Translator", "shaw+shaw_values", {}),
    ("Translator", "shaw(max_distance=3,scale_factor=2)", PRE_NORM),
    ("Translator", "shaw_values+rope", {"encoder_embed_dim": 48}),
    ("Translator", "sandwich", {"activation_fn": "tanh"}),
    ("Translator", "alibi(mode=asymmetric)", {"position_encoding_decoder": "alibi"}),
    ("Generator", "learned", {}),
    ("Generator", "rope(scaling=linear:4)", {"add_bos_token": True}),
    ("Generator", "lerope(layout=half,scaling=yarn:4:length=9)", {}),
    ("Generator", "alibi", {"decoder_attention_heads": 2}),
    ("Generator", "shaw+shaw_values", UNTIED),
]
OTHERS = ["sinusoidal", "rope(scaling=llama3:4:length=9)", "lerope", "rope,none"]
SELDOM = [
    *((engine, spec, {}) for engine, spec in product_of(ENGINES, OTHERS)),
    ("M2M100ForConditionalGeneration", "sinusoidal(layout=fairseq)", {}),
    ("Translator", "lerope", PRE_NORM),
    ("Translator", "t5(scale_factor=3)", {}),
    ("Translator", "alibi", {"position_encoding_decoder": "rope"}),
    ("Generator", "none,rope", {}),
]
CASES += some_of([], SELDOM)
ONE_OF_EACH = "one width, one dictionary and one number of positions"
REFUSED: dict[str, list[tuple[Any, ...]]] = {  # options of the command -> models, and the fault
    "--to transformers": [
        ("causal_lm", "rope", {**UNTIED, "adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
        ("causal_lm", "rope", {**UNTIED, "decoder_input_dim": 16}, "projections of embeddings"),
        ("causal_lm", "rope", {"layernorm_embedding": True}, "layernorm_embedding=True"),
        ("causal_lm", "rope", {"no_decoder_final_norm": True}, "lacks biogpt.layer_norm.weight"),
        ("translation", "rope(cross_attention=true)", {}, "with rope(cross_attention=true)"),
        ("translation", "rope", {"encoder_normalize_before": True}, "decoder_normalize_before=F"),
        ("translation", "rope", {"decoder_embed_dim": 48}, "decoder_embed_dim=48 beside 64"),
        ("translation", "learned", {"max_target_positions": 60}, "one number of positions"),
        ("translation", "rope", {**PRE_NORM, "target_lang": "fr"}, ONE_OF_EACH),
        ("masked_lm", "rope", {"activation_fn": "relu"}, "activation_fn=relu"),
        ("masked_lm", None, {"arch": "roberta", "encoder_layers": 1}, "not a model of fairseq_pos"),
    ],
    "--to ctranslate2": [
        ("causal_lm", "rope", {**UNTIED, "adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
        ("causal_lm", "t5", {}, "t5 is not one of"),
        ("causal_lm", "alibi,none", {}, "perhaps of alibi"),
        ("translation", "rope+window(size=4)", {}, "window is not one of alibi, learned, "),
        ("translation", "shaw(per_head=true)", {}, "perhaps of shaw"),
        ("translation", "rope", {"attention_directions": "lr"}, "perhaps of rope"),
        ("translation", "rope", {"activation_fn": "linear"}, "the activation linear"),
        ("masked_lm", "rope", {}, "only translation models and causal LMs"),
        ("translation", "shaw(reset=true)", {}, "perhaps of shaw"),
        ("translation", "learned+rope", {}, "perhaps of learned"),
        ("translation", "rope(scaling=yarn:4:length=9,fraction=0.5)", {}, "perhaps of rope"),
    ],
    "--quantization int8": [("masked_lm", "none", {}, "is for --to ctranslate2")],
    "--out {data}": [("masked_lm", "none", {}, "exists and is not empty")],
}
SELDOM_REFUSED = [
    ("causal_lm", "rope", {**UNTIED, "decoder_input_dim": 16}, "projections of embeddings"),
    ("causal_lm", "xpos", {}, "xpos is not one of"),
    ("translation", "rope(cross_attention=true)", {}, "with rope(cross_attention=true)"),
    *(("translation", name, {}, f"{name} is not one of") for name in ("m4", "kerple")),
]
REFUSED["--to ctranslate2"] += some_of([], SELDOM_REFUSED)


def make(target: str, spec: str, **more: Any) -> Checkpoint:
    """Write a checkpoint that becomes a class or runs in an engine."""
    family, options, _ = CLASSES.get(target) or (ENGINES[target], {}, "")
    return checkpoint(family, spec, **{**options, **more})


def serve(trained: Checkpoint, engine: str) -> Any:
    """Export a checkpoint to CTranslate2; return its engine with the model."""
    return getattr(ctranslate2(), engine)(str(export_to(trained, "--to", "ctranslate2")))


def load(folder: Path) -> Any:
    """Load a folder by the class that its card names."""
    (name,) = re.findall(r"model = (\w+)\.from_pretrained", (folder / "README.md").read_text())
    return getattr(transformers, name).from_pretrained(folder).eval()


def spell(sentences: Iterable[list[int]]) -> list[list[str]]:
    """Return the symbols of sentences, which CTranslate2 reads."""
    return [[VOCABULARY[number] for number in sentence] for sentence in sentences]


def let_sentences_end(trained: Checkpoint, logit: float = 1.5, padding: float = -30.0) -> None:
    """Give logits to ends and to padding, which fairseq's search never writes; rewrite the file."""
    decoder = trained.model.decoder
    norm = decoder.layer_norm or decoder.layers[-1].final_layer_norm
    norm.weight.data[0], norm.bias.data[0] = 0.0, 1.0  # a channel that is 1 wherever it is read
    rows = decoder.output_projection.weight.data
    rows[1:3] = 0.0
    rows[1, 0], rows[2, 0] = padding, logit
    state = torch.load(trained.path, weights_only=False)
    torch.save({**state, "model": trained.model.state_dict()}, trained.path)


def open_checkpoint(path: Path) -> Any:
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    return model.eval()


def padded(side: str, rows: int = 4, longest: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sentences of several lengths; return them and where they are real."""
    lengths = torch.linspace(1, longest - 1, rows).long().tolist()
    sentences = [torch.tensor([*torch.randint(4, 44, (length,)), 2]) for length in lengths]
    tokens = collate_tokens(sentences, 1, left_pad=side == "left")
    return tokens, tokens.ne(1)


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


@torch.no_grad()
def compare_in_engine(trained: Checkpoint, name: str, start: int) -> None:
    """Compare log probabilities of sentences, one with an end within it; and continuations."""
    sources = [torch.randint(4, 44, (length,)).tolist() for length in (20, 9, 2)]
    targets = [torch.randint(4, 44, (length,)).tolist() for length in (3, 12, 22)]
    targets[2][11] = 2
    prompts = [[start, *target] for target in targets]
    engine = serve(trained, name)
    if name == "Translator":
        found = engine.score_batch(spell(sources), spell(targets))
    else:
        found = engine.score_batch(spell([*prompt, 2] for prompt in prompts))
    for source, prompt, theirs in zip(sources, prompts, found):
        given = [torch.tensor([prompt])]
        if name == "Translator":
            given = [torch.tensor([[*source, 2]]), torch.tensor([len(source) + 1]), *given]
        ours = trained.model(*given)[0][0].log_softmax(-1)
        ours = ours.gather(1, torch.tensor([*prompt[1:], 2])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(theirs.log_probs), ours, atol=1e-4, rtol=0)
    if name == "Generator":  # token by token with a cache there; here in one pass
        begun = spell(prompts[:2])
        found = engine.generate_batch(begun, max_length=9, include_prompt_in_result=False)
        assert any(theirs.sequences[0] for theirs in found)
        for prompt, theirs in zip(prompts, found):
            written = [*map(VOCABULARY.index, theirs.sequences[0])]
            best = trained.model(torch.tensor([[*prompt, *written]]))[0][0].argmax(-1)
            assert [*written, 2][:9] == best[len(prompt) - 1 :][:9].tolist()


@pytest.mark.parametrize(("target", "spec", "more"), CASES)
def test_scores_are_those_of_fairseq_and_all_weights_come_back(target, spec, more):
    trained = make(target, spec, **more)
    first = 0 if "add_bos_token" in more else 2  # token of a text
    if target in ENGINES:
        compare_in_engine(trained, target, first)
        return
    folder = export_to(trained)
    model = load(folder)
    assert type(model).__name__ == target
    assert target != "BioGptForCausalLM" or model.config.bos_token_id == first
    own = spec == CLASSES[target][2] and "attention_directions" not in more
    assert own == ("fairseq_posenc" not in (folder / "config.json").read_text())
    assert own == ("import fairseq_posenc" not in (folder / "README.md").read_text())
    assert read_positions(model).partition(" ")[0] == str(specs.parse(spec))
    compare(trained.model, model)
    # transformers has one number of positions for both sides.
    changes = {"encoder._extra_state"} if "max_target_positions" in more else set()
    assert find_changes(trained, folder).keys() == changes


@pytest.mark.parametrize(
    ("target", "spec", "more"),
    [
        ("RobertaForMaskedLM", "learned", {}),
        ("RobertaForMaskedLM", "learned", {"attention_directions": "lr,rl"}),
        *((name, "learned+m4m", {}) for name in some_of([*CLASSES][2:5:2], CLASSES)),
    ],
)
def test_a_model_that_was_made_longer_and_trained_in_transformers_comes_back(target, spec, more):
    trained = make(target, spec, **more)
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
    imported = import_from(folder)
    compare(open_checkpoint(imported), model.eval(), longest=48)
    weights = load_state(imported, "it")["model"]
    records = [Identity.from_tensor(weights[name]) for name in filter(is_identity, weights)]
    length = 48 if is_stock(folder) else 24  # a stock folder states that of its table alone
    assert {record.trained_length for record in records} == {length}
    assert len(find_changes(trained, folder)) > len(trained.model.state_dict()) / 2


def test_a_table_that_became_longer_after_the_recorded_training_is_exported_whole():
    short, trained = (checkpoint("masked_lm", "learned", max_positions=n) for n in (24, 48))
    state = torch.load(trained.path, weights_only=False)
    state["model"] |= {k: x for k, x in short.model.state_dict().items() if is_identity(k)}
    torch.save(state, trained.path)
    compare(trained.model, load(export_to(trained)), longest=48)


TRANSLATED = [("MarianMTModel", "m4+rope"), ("M2M100ForConditionalGeneration", "t5")]
STEPS = some_of(["rope", "shaw+t5"], ["rope", "shaw+t5", "alibi", "t5", "learned"])
TRANSLATED += [("Translator", spec) for spec in STEPS]


@pytest.mark.parametrize(("target", "spec", "beam"), product_of(TRANSLATED, [1, 5]))
def test_translations_are_those_of_fairseq(target, spec, beam):
    """Up to the limit, where fairseq forces an end, and the others stop."""
    trained = make(target, spec, max_source_positions=60, max_target_positions=60)
    # Below a least length, the engine leaves ends out of its softmax, so it gets none.
    least, *logits = (6, 2.1, 2.5) if target in CLASSES else (0, 1.5)
    let_sentences_end(trained, *logits)
    tokens, real = padded("left", rows=25)
    settings = GenerationConfig(beam=beam, min_len=least)
    search = trained.task.build_generator([trained.model], settings)
    batch = {"net_input": {"src_tokens": tokens, "src_lengths": real.sum(1)}}
    ours = [row[0] for row in search.generate([trained.model], batch)]
    if target == "Translator":
        sources = spell([i for i in row if i > 3] for row in tokens.tolist())
        how = {"beam_size": beam, "min_decoding_length": least, "max_decoding_length": 59}
        how |= {"return_end_token": True, "return_scores": True}
        found = serve(trained, target).translate_batch(sources, **how)
        theirs = [[*map(VOCABULARY.index, each.hypotheses[0])] for each in found]
    else:
        inputs = {"input_ids": tokens, "attention_mask": real.long()}
        how = {"num_beams": beam, "early_stopping": beam > 1, "min_new_tokens": least}
        found = load(export_to(trained)).generate(**inputs, **how).tolist()
        theirs = [[token for token in row[1:] if token != 1] for row in found]
    ended = [n for n, row in enumerate(ours) if len(row["tokens"]) < 60]
    assert len(ended) >= (20 if beam > 1 else 5)
    for n in ended if beam > 1 else range(25):
        expected = ours[n]["tokens"].tolist()
        assert theirs[n][:59] == expected[:59]
        assert target == "Translator" or len(theirs[n]) == len(expected)
        if target == "Translator" and len(expected) < 60:
            assert found[n].scores[0] == pytest.approx(ours[n]["score"].item(), abs=1e-4)


def check_lost_head(trained: Checkpoint, folder: Path) -> None:
    """Check that all of a fine-tuned model comes back, with zeros for the head that it lost."""
    for name, tensor in find_changes(trained, folder).items():
        assert name.startswith("encoder.lm_head.")
        assert not tensor.any(), name


@torch.no_grad()
def compare_predictions(task: str, spec: str, raw: Path, data: Path, tokens: Path) -> Path:
    """Compare those for a development set, and what comes back; return the exported folder."""
    options = {"task": "glue", "max_update": 2, "pooler_activation_fn": "tanh"}
    trained = checkpoint("masked_lm", spec, data / task, max_positions=64, **options)
    folder = export_to(trained, "--tokens", tokens)
    ours, _ = predict(trained.model, trained.task, "valid")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    file = glue.find_file(raw, TASKS[task], "valid")
    texts = glue.read_examples(file, TASKS[task], "valid").sentences
    theirs = load(folder)(**tokenizer(*texts, padding=True, return_tensors="pt")).logits
    torch.testing.assert_close(theirs, ours.cpu(), atol=1e-5, rtol=1e-5)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))
    check_lost_head(trained, folder)
    return folder


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.skipif(not (DATA / "gpt2_bpe").is_dir(), reason="GLUE's files are not here")
def test_predictions_of_glues_published_set_are_those_of_fairseq(tmp_path):
    bpe, raw = DATA / "gpt2_bpe", DATA / "glue_data"
    start("glue", raw, "--out", tmp_path, "--tasks", "CoLA,RTE", *bpe_options(bpe))
    made = [open_glue_data(tmp_path / task) for task in ("CoLA", "RTE")]
    sizes = [(data.splits["valid"]["examples"], data.longest) for data in made]
    assert sizes == [(1043, 47), (277, 292)]
    assert all(data.dictionary.read_bytes() == (bpe / "dict.txt").read_bytes() for data in made)
    assert [len(load_dictionary(data.dictionary)) for data in made] == [50265, 50265]
    compare_predictions("CoLA", "m4m", raw, tmp_path, bpe)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec"), product_of(["CoLA", "STS-B"], ["learned", "m4m+rope"]))
def test_predictions_of_glue_are_those_of_fairseq(task, spec):
    made = glue_data()
    folder = compare_predictions(task, spec, made / "raw", made / "glue", made / "pieces.model")
    labels = json.loads((folder / "config.json").read_text()).get("id2label")
    assert labels == ({"0": "LABEL_0"} if task == "STS-B" else {"0": "0", "1": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("spec", some_of(["m4m+rope"], ["learned", "m4m+rope"]))
def test_answers_begin_and_end_at_the_same_tokens(spec):
    data = squad_files().data
    trained = checkpoint("masked_lm", spec, data, task="squad", max_positions=48)
    folder = export_to(trained, "--tokens", data)
    check_lost_head(trained, folder)
    compare(trained.model, load(folder), longest=48)


def make_roberta(name: str = "roberta", types: int = 1) -> tuple[Any, Path]:
    """Make a random model of transformers, and the folder that it is in."""
    model = MODELS[name].build(type_vocab_size=types, layer_norm_eps=1e-5, pad_token_id=1)
    for parameter in model.parameters():  # vectors as well
        torch.nn.init.normal_(parameter, std=0.1)
    folder = new_directory() / "roberta"
    model.save_pretrained(folder)
    (folder / "dict.txt").write_text("".join(f"x{number} 1\n" for number in range(SYMBOLS - 5)))
    return model, folder


@pytest.mark.parametrize(("types", "name"), product_of([1, 2], ["roberta", "xlm_roberta"]))
def test_a_roberta_of_transformers_computes_the_same_in_fairseq(types, name):
    """Unlike exports, it has types of tokens and rows of positions for padding."""
    model, folder = make_roberta(name, types)
    compare(open_checkpoint(import_from(folder)), model, longest=POSITIONS - 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, and fairseq's is 1e-05"),
        ({"hidden_act": "relu"}, "RobertaForMaskedLM differs from fairseq's model by"),
        ({"num_hidden_layers": 5}, "the weights lack"),
        (lambda x: (x / "dict.txt").write_text("x 1"), "dict.txt: has 6 symbols, the model has 97"),
        (partial(save_llama, words=[]), "a LlamaForCausalLM cannot be imported, only RoBERTa"),
        (shutil.rmtree, "roberta has no config.json: give a folder"),
    ],
)
def test_what_fairseq_does_not_have_is_refused(change, message, capsys):
    _, folder = make_roberta()
    if callable(change):
        change(folder)
    else:
        edit_config(folder, **change)
    out = new_directory() / "start.pt"
    assert message in refused(capsys, "import", "--from", folder, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "family", "spec", "more", "message"),
    [(words, *case) for words, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_exported_is_refused_by_name(words, family, spec, more, message, capsys):
    trained = checkpoint(family, spec, **more)
    assert message in refuse_export(capsys, trained, *words.format(data=trained.data).split())


def test_a_model_that_differs_is_not_written(monkeypatch, capsys):
    monkeypatch.setitem(stock_classes.ACTIVATIONS, "gelu", "relu")  # a wrong row of the tables
    message = refuse_export(capsys, checkpoint("masked_lm", "m4m"))
    assert "RobertaForMaskedLM differs from the model by" in message


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [0.0, math.nan, math.inf, 2 * comparison.TOLERANCE])
def test_an_error_on_either_side_of_the_padding_is_seen_and_none_in_it(side, error):
    def theirs(input_ids, attention_mask):
        scores = model(input_ids)[0]
        if bool(attention_mask[-1, 0]) == (side == "right"):
            scores[0, -1, 0] += error * scores.abs().max()
        scores[attention_mask == 0] = torch.nan
        return SimpleNamespace(logits=scores)

    model = tiny_models.make_model("masked_lm", position_encoding="rope")
    difference = comparison.compare_with_transformers(model, "masked_lm", theirs)
    if not error:
        assert difference == 0
        return
    with pytest.raises(UserError, match=r"scores differ by .* of the largest number; rounding"):
        comparison.refuse_difference("scores differ", difference)
