"""Models carried to transformers or CTranslate2 compute there what they compute in fairseq.

The commands compare scores and refuse a difference. Here what they wrote is compared without their
code, which could miss one, and so is what they do not see: fields, searches, continuations, texts.
"""

import importlib
import math
import re
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig

import glue
from fairseq_posenc.encodings.base import ENCODINGS
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.workbench.convert import comparison, stock_classes
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from tests.helpers import exchanged, tiny_models
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import Checkpoint, carry, checkpoint, export_to, export_words, refuse
from tests.helpers.hf_models import MODELS, SYMBOLS, edit_config, save_llama
from tests.helpers.preprocess import DATA, bpe_options, published, start
from tests.helpers.products import product_of, some_of
from tests.workbench.finetuning.test_finetuning import data as finetuning_data

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
UNTIED = {"no_share_decoder_input_output_embed": True}
UNTIED_ROBERTA = {"untie_weights_roberta": True}
TWO_WAYS = {"attention_directions": "lr,rl"}
ALL_TIED = {"share_all_embeddings": True}
SQUAD = {"task": "squad", "max_positions": 48, "load_checkpoint_heads": True}
SINUSOIDS = "sinusoidal(layout=fairseq)"
SINUSOIDS_IN_DECODER = {"position_encoding_decoder": SINUSOIDS}
# Name -> family and options of models, the class's own positions.
CLASSES: dict[str, tuple[str, dict[str, Any], str]] = {  # of transformers
    "RobertaForMaskedLM": ("masked_lm", {}, "learned"),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", {"encoder_normalize_before": True}, "learned"),
    "RobertaForQuestionAnswering": ("masked_lm", SQUAD, "learned"),
    "BioGptForCausalLM": ("causal_lm", {}, ""),
    "MarianMTModel": ("translation", {}, ""),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM, SINUSOIDS),
    "BartForConditionalGeneration": ("translation", {"layernorm_embedding": True}, ""),
    "MBartForConditionalGeneration": ("translation", PRE_NORM | {"layernorm_embedding": True}, ""),
}
ENGINES = {"Translator": "translation", "Generator": "causal_lm"}  # of CTranslate2
CASES: list[Any] = [
    ("RobertaForMaskedLM", "learned", {}),
    ("RobertaForMaskedLM", "learned", TWO_WAYS),
    ("RobertaForMaskedLM", "sentence_learned+m4m", UNTIED_ROBERTA | TWO_WAYS),
    (
        "RobertaPreLayerNormForMaskedLM",
        "m3(scale_factor=2)+tupe(tie_projections=true)+documents",
        {},
    ),
    ("BioGptForCausalLM", "t5", {**UNTIED, "activation_fn": "relu"}),
    ("BioGptForCausalLM", "learned", {}),  # the class's own, and not left to it
    ("BioGptForCausalLM", "learned+rope", {"no_scale_embedding": True, "add_bos_token": True}),
    ("MarianMTModel", "t5", {**ALL_TIED, "max_target_positions": 60}),
    ("MarianMTModel", "rope+m4(reset=true)", {"target_lang": "fr"}),  # of more symbols
    ("MarianMTModel", "rope", {"position_encoding_decoder": "m4m+alibi", "decoder_layers": 3}),
    ("M2M100ForConditionalGeneration", "learned+rope", ALL_TIED | SINUSOIDS_IN_DECODER),
    ("M2M100ForConditionalGeneration", SINUSOIDS, {"activation_fn": "gelu_fast"}),
    ("BartForConditionalGeneration", "none", {}),
    ("BartForConditionalGeneration", "shaw", {"share_decoder_input_output_embed": True}),
    ("MBartForConditionalGeneration", "learned", {}),
    ("Translator", "learned", {**ALL_TIED, "layernorm_embedding": True}),
    ("Translator", "none", {**PRE_NORM, "no_decoder_final_norm": True, "activation_fn": "gelu"}),
    ("Translator", "rope(layout=half,fraction=0.5)", {"activation_fn": "gelu_fast"}),
    ("Translator", "none,rope(base=500)+t5(scale_factor=3)", {"encoder_attention_heads": 2}),
    ("Translator", "lerope,shaw(max_distance=3,scale_factor=2)", PRE_NORM),
    ("Translator", "shaw+shaw_values,sandwich", {"activation_fn": "tanh"}),
    ("Translator", "shaw_values+rope", {"encoder_embed_dim": 48, "no_scale_embedding": True}),
    ("Translator", "alibi(mode=asymmetric)", {"position_encoding_decoder": "alibi"}),
    ("Translator", "shaw(max_distance=3)+t5", {"max_source_positions": 8}),  # and more tokens
    ("Translator", "alibi", {"position_encoding_decoder": "rope(scaling=yarn:4:length=9)"}),
    ("Generator", "learned", {}),
    ("Generator", "none,rope(scaling=linear:4)", {"add_bos_token": True}),
    ("Generator", "lerope(layout=half,scaling=yarn:4:length=9),shaw+shaw_values", UNTIED),
    ("Generator", "alibi", {"decoder_attention_heads": 2}),
]
SPANS = "RobertaForQuestionAnswering"
CASES += [pytest.param(SPANS, "m4m+rope", {}, marks=pytest.mark.slow)]
# One of each encoding, alone; each companion with rotations; compositions; layers that differ.
SPECS = [*tiny_models.NAMES, *(f"rope+{name}" for name in tiny_models.COMPANIONS)]
SPECS += [*tiny_models.COMPOSITIONS, *tiny_models.PATTERNS]
OTHERS = ["sinusoidal", "rope(scaling=llama3:4:length=9)", "lerope", "rope,none", "alibi"]
CASES += some_of(
    [],
    [
        (name, spec, {})
        for name, spec in product_of(CLASSES, SPECS) + product_of(ENGINES, OTHERS)
        if name in ("BioGptForCausalLM", "Generator")
        or not (name == SPANS or tiny_models.needs_causal(spec))
    ],
)
PARTS = [
    ("causal_lm", "rope", {**UNTIED, "adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
    ("causal_lm", "rope", {**UNTIED, "decoder_input_dim": 16}, "projections of embeddings"),
    ("translation", "rope(cross_attention=true)", {}, "with rope(cross_attention=true)"),
]
ONE_OF_EACH = "one width, one dictionary and one number of positions"
# Options of an export -> models, and the fault.
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "--to transformers": [
        *PARTS,
        ("causal_lm", "rope", {"layernorm_embedding": True}, "layernorm_embedding=True"),
        ("causal_lm", "rope", {"no_decoder_final_norm": True}, "lacks biogpt.layer_norm.weight"),
        ("causal_lm", "rope", {"scale_heads": True}, "transformers has no decoder.layers.0.c_attn"),
        ("translation", "rope", {"encoder_normalize_before": True}, "decoder_normalize_before=F"),
        ("translation", "rope", {"decoder_embed_dim": 48}, "decoder_embed_dim=48 beside 64"),
        ("translation", "learned", {"max_target_positions": 60}, "one number of positions"),
        ("translation", "rope", {**PRE_NORM, "target_lang": "fr"}, ONE_OF_EACH),
        ("masked_lm", "rope", {"activation_fn": "relu"}, "activation_fn=relu"),
        ("masked_lm", None, {"arch": "roberta", "encoder_layers": 1}, "not a model of fairseq_pos"),
    ],
    "--to ctranslate2": [
        *PARTS,
        *(("causal_lm", name, {}, f"{name} is not one of") for name in ("t5", "xpos")),
        *(("translation", name, {}, f"{name} is not one of") for name in ("m4", "kerple")),
        ("causal_lm", "alibi,none", {}, "perhaps of alibi"),
        ("translation", "rope+window(size=4)", {}, "window is not one of alibi, learned, "),
        *(("translation", f"shaw({x}=true)", {}, "perhaps of shaw") for x in ("per_head", "reset")),
        ("translation", "learned+rope", {}, "perhaps of learned"),
        ("translation", "learned+t5", {"max_source_positions": 2}, "perhaps of learned"),
        ("translation", "rope", {"attention_directions": "lr"}, "perhaps of rope"),
        ("translation", "rope(scaling=yarn:4:length=9,fraction=0.5)", {}, "perhaps of rope"),
        ("translation", "rope", {"activation_fn": "linear"}, "the activation linear"),
        ("masked_lm", "rope", {}, "only translation models and causal LMs"),
    ],
    "--quantization int8": [("masked_lm", "none", {}, "is for --to ctranslate2")],
    "--out {data}": [("masked_lm", "none", {}, "exists and is not empty")],
    "import": [  # changes of a RoBERTa of transformers
        (partial(edit_config, layer_norm_eps=1e-12), "layer_norm_eps is 1e-12, and fairseq's is"),
        (partial(edit_config, hidden_act="relu"), "RobertaForMaskedLM differs from fairseq's"),
        (partial(edit_config, num_hidden_layers=5), "the weights lack"),
        (lambda x: (x / "dict.txt").write_text("x 1"), "dict.txt: has 6 symbols, the model has 97"),
        (partial(save_llama, words=[]), "a LlamaForCausalLM cannot be imported, only RoBERTa"),
        (shutil.rmtree, "--from {folder}: no config.json: give a model folder of transformers"),
    ],
}


def make(target: str, spec: str, **more: Any) -> Checkpoint:
    """Write a checkpoint of a kind of model, trained at fewer positions than it has by now."""
    family, options, _ = CLASSES.get(target) or (ENGINES[target], {}, "")
    is_squad = "task" in options
    data = finetuning_data() / "squad" if is_squad else None
    trained = checkpoint(family, spec, data, **{**options, **more})
    if is_squad:
        trained.model.register_classification_head("earlier", num_classes=2)  # is not exported
    for stack in comparison.list_stacks(trained.model).values():
        stack.set_extra_state(stack.identity._replace(trained_length=20).to_tensor())
    exchanged.rewrite(trained)
    return trained


def load(folder: Path) -> Any:
    """Load a folder by the class that its card names."""
    (name,) = re.findall(r"model = (\w+)\.from_pretrained", (folder / "README.md").read_text())
    return getattr(transformers, name).from_pretrained(folder).eval()


def find_changes(trained: Checkpoint, imported: Path) -> set[str]:
    """Return the tensors of an import that are not those of the checkpoint that was exported.

    The head for masked tokens may be zeros: fine-tuned models lose it, and others would differ.
    """
    states = [torch.load(path, weights_only=False) for path in (trained.path, imported)]
    assert len({state["cfg"]["task"]["_name"] for state in states}) == 1
    before, after = (state["model"] for state in states)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    return {name for name in changed if after[name].any() or "lm_head" not in name}


@torch.no_grad()
def compare(trained: Checkpoint, theirs: Any, is_squad: bool) -> None:
    """Compare scores of two sentences, one of them padded; the targets are the sources."""
    tokens = torch.tensor([[*range(4, 23), 2], [*range(9, 15), 2] + [1] * 13])
    real = tokens.ne(1)
    inputs = {"input_ids": tokens, "attention_mask": real.long()}
    if theirs.config.is_encoder_decoder:
        inputs |= {f"decoder_{name}": value for name, value in inputs.items()}
        ours = trained.model(tokens, real.sum(1), tokens)
    else:
        ours = trained.model(tokens, **({"span_scores": True} if is_squad else {}))
    for name, expected in zip(["start_logits", "end_logits"] if is_squad else ["logits"], ours):
        bound = 1e-5 * float(expected[real].abs().max())
        torch.testing.assert_close(theirs(**inputs)[name][real], expected[real], atol=bound, rtol=0)


@torch.no_grad()
def compare_in_engine(trained: Checkpoint, target: str, first: int) -> None:
    """Compare log probabilities of a sentence; and a translation, or how a text goes on."""
    folder = export_to(trained, "--to", "ctranslate2")
    engine = getattr(importlib.import_module("ctranslate2"), target)(str(folder))
    words, sentence = exchanged.WORDS[:20], [*range(4, 24), 2]
    symbols = trained.task.target_dictionary
    if target == "Translator":
        given, begun = [torch.tensor([sentence]), torch.tensor([21])], [first]
        (found,) = engine.score_batch([words], [words])
        how = {"beam_size": 1, "min_decoding_length": 0, "max_decoding_length": 9}
        (written,) = engine.translate_batch([words], **how)[0].hypotheses
    else:
        given, begun, prompt = [], [first, *sentence[:9]], [symbols[first], *words]
        (found,) = engine.score_batch([[*prompt, "</s>"]])
        (written,) = engine.generate_batch([prompt[:10]], max_length=18)[0].sequences
    scores = trained.model(*given, torch.tensor([[first, *sentence[:-1]]]))[0][0].log_softmax(-1)
    assert found.log_probs == pytest.approx(scores[range(21), sentence].tolist(), rel=0, abs=1e-4)
    ids = [first, *map(symbols.index, written)]  # results are without it
    best = trained.model(*given, torch.tensor([ids]))[0][0].argmax(-1)  # in one pass
    assert [*ids, 2][len(begun) :][:9] == best[len(begun) - 1 :][:9].tolist()


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
    compare(trained, model, target == SPANS)
    own = spec == CLASSES[target][2] and "attention_directions" not in more
    for name in ("config.json", "README.md"):  # the second imports it
        assert own == ("fairseq_posenc" not in (folder / name).read_text())
    longest = max(x.dims.max_positions for x in comparison.list_stacks(trained.model).values())
    assert read_trained_length(model) == (longest if own else 20)
    assert own or model.config.position_encoding_max_positions == longest
    assert target != "BioGptForCausalLM" or model.config.bos_token_id == first
    ties = not more.keys() & (UNTIED | UNTIED_ROBERTA).keys()
    if model.config.is_encoder_decoder:  # two tied tables of three become copies
        ties = "share_all_embeddings" in more
    output = model.get_output_embeddings()  # none of spans
    assert not output or ties == (output.weight is model.get_input_embeddings().weight)
    imported = carry("import", "--from", folder)
    # Stock folders lack a place for the length of training, all for two numbers of positions.
    is_squad = target == SPANS  # its record has the earlier head
    lost = own or is_squad or "max_target_positions" in more
    assert all(lost and x.endswith("_extra_state") for x in find_changes(trained, imported))
    data = trained.data if is_squad else folder  # the data's has a manifest
    again = carry("export", "--checkpoint", imported, "--data", data, "--tokens", "words")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


TRANSLATED = [("MarianMTModel", "m4+rope"), ("M2M100ForConditionalGeneration", "t5")]


@pytest.mark.parametrize(("target", "spec", "beam"), product_of(TRANSLATED, [1, 5]))
def test_translations_are_those_of_fairseq(target, spec, beam):
    """Up to the limit, where fairseq forces an end, and transformers stops."""
    trained = make(target, spec, max_source_positions=60, max_target_positions=60)
    exchanged.let_sentences_end(trained, logit=1.8, padding=2.5)
    lengths = torch.linspace(1, 19, 25).long()
    sentences = [torch.tensor([*torch.randint(4, 44, (length,)), 2]) for length in lengths]
    tokens = collate_tokens(sentences, 1, left_pad=True)
    search = trained.task.build_generator([trained.model], GenerationConfig(beam=beam))
    batch = {"net_input": {"src_tokens": tokens, "src_lengths": lengths + 1}}
    ours = [row[0]["tokens"].tolist() for row in search.generate([trained.model], batch)]
    how = {} if beam == 5 else {"num_beams": 1, "early_stopping": False}
    mask = tokens.ne(1).long()
    written = load(export_to(trained)).generate(tokens, attention_mask=mask, **how).tolist()
    theirs = [[token for token in row[1:] if token != 1] for row in written]
    ended = [n for n, row in enumerate(ours) if len(row) < 60]
    assert len(ended) >= 20 if beam > 1 else 5 <= len(ended) < 25
    for n in ended if beam > 1 else range(25):
        assert theirs[n][:59] == ours[n][:59]
        assert len(theirs[n]) == len(ours[n])


def published_glue() -> Path:
    """Return published files and their tokenizer, and data made of them."""
    folder = Path(shutil.copytree(DATA / "gpt2_bpe", new_directory() / "data"))
    (folder / "raw").symlink_to(DATA / "glue_data")
    tasks = ["--tasks", "CoLA,RTE", *bpe_options(folder)]
    start("glue", folder / "raw", "--out", folder / "glue", *tasks)
    for task, longest in {"CoLA": 47, "RTE": 292}.items():
        assert (made := open_glue_data(folder / "glue" / task)).longest == longest
        assert made.dictionary.read_bytes() == (folder / "dict.txt").read_bytes()
    return folder


PUBLISHED = pytest.param("CoLA", "m4m", published_glue, marks=[published, pytest.mark.matrix])
SMALL = product_of(["CoLA", "STS-B"], ["learned", "m4m+rope"], [finetuning_data])


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec", "make_data"), [*SMALL, PUBLISHED])
@torch.no_grad()
def test_predictions_of_glue_are_those_of_fairseq(task, spec, make_data):
    data = make_data()
    trained = checkpoint("masked_lm", spec, data / "glue" / task, task="glue", max_positions=64)
    folder = export_to(trained, "--tokens", data)
    texts = glue.find_file(data / "raw", TASKS[task], "valid")
    sentences = glue.read_examples(texts, TASKS[task], "valid").sentences
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    scores = model(**tokenizer(*sentences, padding=True, return_tensors="pt")).logits
    ours, _ = predict(trained.model, trained.task, "valid")
    torch.testing.assert_close(scores, ours.cpu(), atol=1e-5, rtol=1e-5)
    assert [*model.config.id2label.values()] == (["LABEL_0"] if task == "STS-B" else ["0", "1"])
    imported = carry("import", "--from", folder)
    assert not find_changes(trained, imported)
    carry("export", "--checkpoint", imported, "--data", trained.data, "--tokens", data)  # compares


def save_model(name: str, spec: str = "own", types: int = 1) -> tuple[Any, Path]:
    """Save a random model of transformers with given positions; return it, too."""
    model = MODELS[name].build(type_vocab_size=types, layer_norm_eps=1e-5, pad_token_id=1)
    for parameter in model.parameters():  # vectors as well
        parameter.data += 0.1 * torch.randn_like(parameter)
    if spec != "own":
        set_positions(model, spec)
    folder = new_directory()
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize(
    ("name", "spec", "types"), [("roberta", "own", 2), ("xlm_roberta", "documents_2", 1)]
)
@torch.no_grad()
def test_a_roberta_of_transformers_computes_the_same(name, spec, types, monkeypatch, capsys):
    """Unlike exports, it has types of tokens and rows of positions for padding."""
    monkeypatch.setitem(ENCODINGS, "documents_2", ENCODINGS["m4m"])  # of a user's own
    model, folder = save_model(name, spec, types)
    path, given = carry("import", "--from", folder), exchanged.data_bin(range(SYMBOLS - 5))
    assert f"DATA ... --finetune-from-model '{path}'\n" in capsys.readouterr().out
    (imported,), _, task = load_model_ensemble_and_task([str(path)], {"data": str(given)})
    assert not task.cfg.include_target_tokens
    tokens = torch.randint(4, SYMBOLS, (2, 20))
    torch.testing.assert_close(imported.eval()(tokens)[0], model(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("words", "model", "message"),
    [(words, case[:-1], case[-1]) for words, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_carried_is_refused_by_name(words, model, message, capsys):
    if words == "import":
        _, folder = save_model("roberta")
        model[0](folder)
        assert message.format(folder=folder) in refuse(capsys, "import", "--from", folder)
    else:
        family, spec, more = model
        trained = checkpoint(family, spec, **more)
        words = words.format(data=trained.data).split()
        assert message in refuse(capsys, *export_words(trained, *words))


def test_a_model_that_differs_is_not_written(monkeypatch, capsys):
    monkeypatch.setitem(stock_classes.ACTIVATIONS, "gelu", "relu")  # a wrong row of the tables
    message = refuse(capsys, *export_words(checkpoint("masked_lm", "m4m")))
    assert "RobertaForMaskedLM differs from the model by" in message
    compute = comparison.compute_scores  # of which one is wrong, of the 24 + 8 tokens' last
    monkeypatch.setattr(comparison, "compute_scores", lambda *inputs: compute(*inputs).triu(-30))
    words = export_words(checkpoint("causal_lm", "rope"), "--to", "ctranslate2")
    assert "log probabilities differ by" in refuse(capsys, *words)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [0.0, math.nan, math.inf, 2e-5])
def test_an_error_on_either_side_of_the_padding_is_seen_and_none_in_it(side, error):
    def theirs(input_ids, attention_mask):
        scores = model(input_ids)[0]
        if bool(attention_mask[-1, 0]) == (side == "right"):
            late = input_ids[0].tolist().index(2) + 8  # in the second of the two sentences of a row
            scores[0, late, 0] += error * scores.abs().max()
        scores[attention_mask == 0] = torch.nan
        return SimpleNamespace(logits=scores)

    model = tiny_models.make_model("masked_lm", position_encoding="rope")
    difference = comparison.compare_with_transformers(model, "masked_lm", theirs)
    assert error or difference == 0
    message = r"scores differ by .* of the largest number; rounding"
    with pytest.raises(UserError, match=message) if error else nullcontext():
        comparison.refuse_difference("scores differ", difference)
