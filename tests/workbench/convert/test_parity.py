"""Models carried to transformers or CTranslate2 do there what they do in fairseq.

The commands compare scores and refuse a difference. Here what they wrote is used as its card says,
and compared with fairseq without their code, which could miss a difference.
"""

import importlib
import math
import random
import re
import shutil
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.data_utils import collate_tokens
from huggingface_hub import ModelCard, ModelCardData

import glue
from binarize import formats
from fairseq_posenc.encodings.base import ENCODINGS
from fairseq_posenc.hf import set_positions
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.tokens.subwords import Pieces
from fairseq_posenc.workbench.convert import comparison
from fairseq_posenc.workbench.convert.tokenizer import build_tokenizer, find_tokenization
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from fairseq_posenc.workbench.loading.open_model import load_tokenizer
from fairseq_posenc.workbench.translation import Translator
from tests.helpers import exchanged, preprocess, tiny_models
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import Checkpoint, carry, checkpoint, data_bin, export_words, refuse
from tests.helpers.hf_models import MODELS, SYMBOLS, edit_config, save_llama
from tests.helpers.products import some_of
from tests.workbench.finetuning.test_finetuning import data as finetuning_data

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
UNTIED = {"no_share_decoder_input_output_embed": True}
TWO_WAYS = {"attention_directions": "lr,rl"}
ALL_TIED = {"share_all_embeddings": True, "target_lang": "nl"}
SINUSOIDS = "sinusoidal(layout=fairseq)"
SINUSOIDS_IN_DECODER = {"position_encoding_decoder": SINUSOIDS}
# Class of transformers or CTranslate2 -> head and options of models, the class's own positions.
TARGETS: dict[str, tuple[str, dict[str, Any], str]] = {
    "RobertaForMaskedLM": ("masked_lm", {}, "learned"),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", {"encoder_normalize_before": True}, "learned"),
    "RobertaForSequenceClassification": ("classes", {"task": "glue"}, "learned"),
    "RobertaForQuestionAnswering": ("spans", {"task": "squad", "load_checkpoint_heads": True}, ""),
    "BioGptForCausalLM": ("causal_lm", {}, ""),
    "MarianMTModel": ("translation", {}, ""),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM, SINUSOIDS),
    "BartForConditionalGeneration": ("translation", {"layernorm_embedding": True}, ""),
    "MBartForConditionalGeneration": ("translation", PRE_NORM | {"layernorm_embedding": True}, ""),
    "Translator": ("translation", {}, ""),
    "Generator": ("causal_lm", {}, ""),
}
ENGINES = ("Translator", "Generator")
slow = partial(pytest.param, marks=pytest.mark.slow)
PUBLISHED = [preprocess.published, pytest.mark.matrix]
CASES: list[Any] = [
    ("RobertaForMaskedLM", "learned", {}),
    ("RobertaForMaskedLM", "learned", {**TWO_WAYS, "data": "gpt2"}),
    ("RobertaForMaskedLM", "sentence_learned+m4m", {**TWO_WAYS, "untie_weights_roberta": True}),
    ("RobertaPreLayerNormForMaskedLM", "m3(scale_factor=2)+tupe+documents", {"data": "gpt2"}),
    ("BioGptForCausalLM", "sentence_learned+t5", {**UNTIED, "activation_fn": "relu"}),
    ("BioGptForCausalLM", "learned", {}),  # the class's own, and not left to it
    ("BioGptForCausalLM", "learned+rope", {"no_scale_embedding": True, "add_bos_token": True}),
    ("MarianMTModel", "t5", {**ALL_TIED, "max_target_positions": 40}),
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
    ("Generator", "none,rope(scaling=linear:4)", UNTIED | {"add_bos_token": True}),
    ("Generator", "lerope(layout=half,scaling=yarn:4:length=9),shaw+shaw_values", UNTIED),
    ("Generator", "alibi", {"decoder_attention_heads": 2}),
    slow("RobertaForQuestionAnswering", "m4m+rope", {}),
    slow("RobertaForSequenceClassification", "m4m+rope", {"data": "glue/CoLA"}),
    slow("RobertaForSequenceClassification", "learned", {"data": "glue/STS-B"}),
    slow("RobertaForSequenceClassification", "m4m", {"data": "published"}, marks=PUBLISHED),
]
# One of each encoding, alone; each companion with rotations; compositions; layers that differ.
SPECS = [*tiny_models.NAMES, *(f"rope+{name}" for name in tiny_models.COMPANIONS)]
SPECS += [*tiny_models.COMPOSITIONS, *tiny_models.PATTERNS]
OTHERS = ["sinusoidal", "rope(scaling=llama3:4:length=9)", "lerope", "rope,none", "alibi"]
ALL: list[Any] = [
    (target, spec, {})
    for target, (head, *_) in TARGETS.items()
    for spec in (OTHERS if target in ENGINES else SPECS)
    if head == "causal_lm" or (head in exchanged.OPTIONS and not tiny_models.needs_causal(spec))
]
CASES += some_of([], ALL)
PARTS = [
    ("causal_lm", "rope", {**UNTIED, "adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
    ("causal_lm", "rope", {**UNTIED, "decoder_input_dim": 16}, "projections of embeddings"),
    ("translation", "rope(cross_attention=true)", {}, "with rope(cross_attention=true)"),
]
# Options of an export -> models, and the fault.
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "--tokens words": [
        *PARTS,
        ("causal_lm", "rope", {"layernorm_embedding": True}, "layernorm_embedding=True"),
        ("causal_lm", "rope", {"no_decoder_final_norm": True}, "lacks biogpt.layer_norm.weight"),
        ("causal_lm", "rope", {"scale_heads": True}, "transformers has no decoder.layers.0.c_attn"),
        ("translation", "rope", {"encoder_normalize_before": True}, "decoder_normalize_before=F"),
        ("translation", "rope", {"decoder_embed_dim": 48}, "decoder_embed_dim=48 beside 64"),
        ("translation", "learned", {"max_target_positions": 60}, "one number of positions"),
        ("translation", "rope", {**PRE_NORM, "target_lang": "fr"}, "one width, one dictionary and"),
        ("masked_lm", "rope", {"activation_fn": "relu"}, "activation_fn=relu"),
        ("masked_lm", None, {"arch": "roberta", "encoder_layers": 1}, "not a model of fairseq_pos"),
    ],
    "--tokens words --to ctranslate2": [
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
    "--tokens words --out {data}": [("masked_lm", "none", {}, "exists and is not empty")],
    "--to transformers": [("causal_lm", "none", {}, "name the tokenizer with --tokens")],
    "--tokens": [  # kinds of tokenizers, symbols of data
        ("bpe", {"treat_whitespace_as_suffix": True}, [1], "spaces at the ends"),
        ("bpe", {"user_defined_symbols": ["<x>"]}, [1], "user-defined symbols"),
        ("bpe", {"byte_fallback": True}, [1], "bytes is not supported; use --tokens none"),
        # Pieces are there by their numbers in GPT-2's file; one is so by its name as well.
        ("gpt2", {}, [1, 2, 3], "dict.txt: lacks 259 pieces of the tokenizer"),
        ("gpt2", {}, [*range(262), "!"], "has pieces of the tokenizer twice (1); use --t"),
        ("characters", {}, ["a", *range(10, 40)], "characters: only 1 of 3"),
    ],
    "import": [  # changes of a RoBERTa of transformers
        (partial(edit_config, layer_norm_eps=1e-12), "layer_norm_eps is 1e-12, and fairseq's is"),
        (partial(edit_config, hidden_act="relu"), "RobertaForMaskedLM differs from fairseq's"),
        (partial(edit_config, num_hidden_layers=5), "the weights lack"),
        (lambda x: (x / "dict.txt").write_text("x 1"), "dict.txt: has 6 symbols, the model has 97"),
        (partial(save_llama, words=[]), "a LlamaForCausalLM cannot be imported, only RoBERTa"),
        (shutil.rmtree, "--from {folder}: no config.json: give a model folder of transformers"),
    ],
}
SYLLABLES = ["ba", "ré", "ti", "nou", "ß", "ka", "lo", "1", "2", ",", "ment"]
draw = random.Random(0)
WORDS = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 4))) for _ in range(80)]
TEXT = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(60)]
TEXT += [line.replace(" ", "  ") for line in TEXT[:20]]
# What lines of cards have -> what they have here, for several texts and the likeliest tokens.
LINES = {
    'return_tensors="pt"': 'return_tensors="pt", padding=True',
    "max_length=50, sampling_topk=10": "max_length=30, sampling_topk=1",
    "beam_size=5": "beam_size=1",  # with more, it gives an end another probability than fairseq
}
TAGS = {"masked_lm": "fill-mask", "classes": "text-classification", "causal_lm": "text-generation"}


@cache
def write_data(kind: str) -> Path:
    """Write a folder of data with what cut its text."""
    if kind == "spans" or kind.startswith("glue"):
        return finetuning_data() / kind.replace("spans", "squad")
    folder = new_directory() / "data"
    if kind == "published":
        shutil.copytree(preprocess.DATA / "gpt2_bpe", folder)
        (folder / "raw").symlink_to(preprocess.DATA / "glue_data")
        tokens = ["--tasks", "CoLA,RTE", *preprocess.bpe_options(folder)]
        preprocess.start("glue", folder / "raw", "--out", folder / "glue", *tokens)
        made = [open_glue_data(folder / "glue" / name) for name in ("CoLA", "RTE")]
        assert [x.longest for x in made] == [47, 292]
        return folder / "glue/CoLA"
    if kind == "gpt2":
        folder.mkdir()
        return preprocess.write_bpe(folder, TEXT, merges=6)
    model = preprocess.write_pieces(new_directory(), 40, TEXT)
    folder = data_bin(Pieces(model).build_dictionary().symbols[4:])
    for name in (".de", ".en", ".fr", ".nl") if kind == "translation" else ("",):
        shutil.copyfile(model, folder / f"sentencepiece{name}.model")
    return folder


def make(target: str, spec: str, more: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint of a kind of model, trained at fewer positions than it has by now."""
    head, options, _ = TARGETS[target]
    family = head if head in exchanged.OPTIONS else "masked_lm"
    options = {**options, **more}
    trained = checkpoint(family, spec, write_data(options.pop("data", head)), **options)
    if head == "spans":
        trained.model.register_classification_head("earlier", num_classes=2)  # is not exported
    if head == "causal_lm":
        exchanged.let_sentences_end(trained, logit=0.0)
    elif head == "translation":  # transformers must leave out padding, which fairseq never writes
        exchanged.let_sentences_end(trained, 1.8, -30.0 if target in ENGINES else 2.5)
    for stack in comparison.list_stacks(trained.model).values():
        stack.set_extra_state(stack.identity._replace(trained_length=20).to_tensor())
    exchanged.rewrite(trained, updates=12345)
    return trained


def run_card(texts: list[str], engine: bool) -> tuple[dict[str, Any], list[str]]:
    """Run the lines of this folder's card; return their names, and what they print of texts."""
    (code,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.S)
    printed: list[str] = []
    names: dict[str, Any] = {"print": printed.append if engine else printed.extend}
    if engine:  # nothing else has to be installed
        modules = re.findall(r"\b(?:import|from) (\w+)", code)
        assert {*modules} == {"ctranslate2", "tokenizers", "Tokenizer"}
        assert any(option in code for option in LINES)
    for option, other in LINES.items():
        code = code.replace(option, other)
    prompt = "Un homme dort." if re.search("Seq2Seq|Translator", code) else "A man is sleeping."
    for given in texts if engine else ['", "'.join(texts)]:
        exec(code.replace(prompt, given), names)
    return names, printed


def write_in_fairseq(trained: Checkpoint, texts: list[str], rows: Any, engine: bool) -> list[str]:
    """Translate texts, or continue their ids up to an end, or as the lines of the card limit it."""
    if hasattr(trained.model, "encoder"):
        found = Translator.load(trained.path).translate(texts, beam=1 if engine else 5)
        return [translations[0].text for translations in found]
    written = []
    for row in rows:
        ids = [*row]
        while len(ids) < (31 if engine else len(row) + 20) and 2 not in ids[1:]:
            ids.append(int(trained.model(torch.tensor([ids]))[0][0, -1].argmax()))
        written.append(trained.task.source_dictionary.string(ids[1:], "sentencepiece"))
    return written


def compare_log_probabilities(trained: Checkpoint, target: str, first: int) -> None:
    """Compare those of the first symbols, as the engine of this folder scores them."""
    engine, ids = getattr(importlib.import_module("ctranslate2"), target)("."), [*range(4, 24), 2]
    sides = [trained.task.source_dictionary, trained.task.target_dictionary]
    words = [[side[n] for n in ids[:-1]] for side in sides]
    given = []
    if target == "Translator":
        given = [torch.tensor([ids]), torch.tensor([21])]
        (found,) = engine.score_batch(*([x] for x in words))
    else:
        (found,) = engine.score_batch([[sides[0][first], *words[0], "</s>"]])
    scores = trained.model(*given, torch.tensor([[first, *ids[:-1]]]))[0][0].log_softmax(-1)
    assert found.log_probs == pytest.approx(scores[range(21), ids].tolist(), rel=0, abs=1e-4)


def check_folder(folder: Path, trained: Checkpoint, head: str, **labels: Any) -> None:
    """Check what a card says, and that no file names a folder of this machine."""
    card = ModelCard.load(folder / "README.md")
    labels |= {"pipeline_tag": TAGS.get(head), "tags": ["fairseq", "position-encoding"]}
    assert card.data.to_dict() == ModelCardData(**labels).to_dict()
    size = sum(weight.numel() for weight in trained.model.parameters())
    for row in (f"parameters | {size:,}", f"data | `{trained.data.name}`", "updates | 12,345"):
        assert f"\n| {row} |\n" in card.text
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # all are for the same readers
    for secret in ("/private", str(trained.data), str(trained.path.parent)):
        assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.parametrize(("target", "spec", "more"), CASES)
@torch.no_grad()
def test_scores_are_those_of_fairseq_and_all_weights_come_back(target, spec, more, monkeypatch):
    head, _, own_spec = TARGETS[target]
    engine, is_translation = target in ENGINES, head == "translation"
    library = "ctranslate2" if engine else "transformers"
    trained = make(target, spec, more)
    task, folders = trained.task, (trained.data, *trained.data.parents)
    root = next(x for x in folders if [*x.glob("sentencepiece*"), *x.glob("encoder.json")])
    tokens = ["--tokens", root] if root != trained.data else []
    folder = carry(*export_words(trained, "--to", library, *tokens))
    languages = [task.cfg.source_lang, task.cfg.target_lang] if is_translation else None
    check_folder(folder, trained, head, language=languages, library_name=library)

    monkeypatch.chdir(folder)
    texts = [x for x in TEXT if len(x) < 30][:3]
    first = 0 if "add_bos_token" in more else 2  # token of a text
    start, end = {"translation": ([], [2]), "causal_lm": ([first], [])}.get(head, ([0], [2]))
    rows = []  # ids of the texts in the source, and in the target
    dictionaries = (task.source_dictionary, task.target_dictionary)
    for language, dictionary in zip(languages or [""], dictionaries):
        encode = load_tokenizer(root, dictionary, language).encode
        rows.append([[*start, *encode([x]).tokens[:-1].tolist(), *end] for x in texts])
    names, printed = run_card(texts, engine)
    if head in ("causal_lm", "translation"):
        expected = write_in_fairseq(trained, texts, rows[0], engine)
        if is_translation and not engine:  # at the limit, fairseq forces an end
            ended = [2 in row[1:] for row in names["written"].tolist()]
            printed = [x if end else y for x, y, end in zip(printed, expected, ended)]
            limit = 1 + trained.model.max_positions()[1]
            assert all(ended) or (any(ended) and names["written"].size(1) == limit)
        assert [x.strip() for x in printed] == [x.strip() for x in expected]
    if target == "Generator":  # results begin with the text, without the token before it
        pieces = names["pieces"]
        assert names["result"].sequences[0][: len(pieces)] == pieces
    if engine:
        compare_log_probabilities(trained, target, first)
        return

    model, tokenizer = names["model"], names["tokenizer"]
    assert type(model).__name__ == target
    assert ("target" in names) == (is_translation and "share_all_embeddings" not in more)
    batches = []
    for side, given in zip((tokenizer, names.get("target", tokenizer)), rows):
        ids = side(texts, padding=True, return_tensors="pt")["input_ids"]
        batches.append(collate_tokens([*map(torch.tensor, given)], 1, left_pad=head == "causal_lm"))
        assert torch.equal(ids, batches[-1])
    special = {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "cls": 0, "sep": 2}
    if head == "masked_lm":
        special["mask"] = mask = task.source_dictionary.index("<mask>")
        masked = f"{texts[0]} <mask>{texts[1]}"
        ids = tokenizer(masked)["input_ids"]
        assert ids == [*rows[0][0][:-1], mask, *rows[0][1][1:]]
        best = trained.model(torch.tensor([ids]))[0][0, ids.index(mask)].topk(5).indices.tolist()
        filled = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)(masked)
        assert [answer["token"] for answer in filled] == best
    assert {x: getattr(tokenizer, f"{x}_token_id") for x in special} == special
    if head == "classes":
        name = trained.data.name
        file = glue.find_file(root / "raw", TASKS[name], "valid")
        texts = glue.read_examples(file, TASKS[name], "valid").sentences  # of each column
        scores = model(**tokenizer(*texts, padding=True, return_tensors="pt")).logits
        ours, _ = predict(trained.model, task, "valid")
        assert [*model.config.id2label.values()] == (["LABEL_0"] if name == "STS-B" else ["0", "1"])
    else:
        real = batches[-1].ne(1)
        scores = comparison.compute_hf_scores(model, head, *batches)[real]
        ours = comparison.compute_scores(trained.model, head, *batches)[real]
    torch.testing.assert_close(scores, ours, atol=1e-5 * float(ours.abs().max()), rtol=0)

    own = spec == own_spec and "attention_directions" not in more
    assert own == ("fairseq_posenc" not in Path("config.json").read_text())
    assert own == ("\nimport fairseq_posenc" not in Path("README.md").read_text())
    longest = max(x.dims.max_positions for x in comparison.list_stacks(trained.model).values())
    assert read_trained_length(model) == (longest if own else 20)
    assert own or model.config.position_encoding_max_positions == longest
    assert head != "causal_lm" or model.config.bos_token_id == first
    untied = more.keys() & {*UNTIED, "untie_weights_roberta"}
    ties = "share_all_embeddings" in more if is_translation else not untied
    output = model.get_output_embeddings()  # none of spans
    assert not output or ties == (output.weight is model.get_input_embeddings().weight)

    imported = carry("import", "--from", folder)
    states = [torch.load(path, weights_only=False) for path in (trained.path, imported)]
    assert len({state["cfg"]["task"]["_name"] for state in states}) == 1
    before, after = (state["model"] for state in states)
    heads = {name for name in after if "lm_head" in name and not after[name].any()}
    changed = {name for name in after if not torch.equal(before[name], after[name])} - heads
    # Stock folders lack a place for the length of training, all for two numbers of positions, that
    # of spans for the earlier head; fine-tuned models, for a head for masked tokens: zeros then.
    lost = own or head == "spans" or "max_target_positions" in more
    assert all(lost and name.endswith("_extra_state") for name in changed)
    data = trained.data if head in ("spans", "classes") else folder  # the former has a manifest
    again = carry("export", "--checkpoint", imported, "--data", data, "--tokens", root)
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (again / name).read_bytes()


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
    path, given = carry("import", "--from", folder), data_bin(range(SYMBOLS - 5))
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
        message = message.format(folder=folder)
        given = ["import", "--from", folder]
    elif words == "--tokens":
        kind, flags, symbols = model
        trained = checkpoint("causal_lm", "learned", data_bin(symbols))
        given = export_words(trained, words, tokenize(kind, flags)[0])
        assert not [*carry(*export_words(trained, "--tokens", "none")).glob("tokenizer*")]
    else:
        family, spec, more = model
        trained = checkpoint(family, spec, **more)
        given = export_words(trained, *words.format(data=trained.data).split())
    assert message in refuse(capsys, *given)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [9e-6, math.nan, math.inf, 2e-5])
def test_an_error_beside_the_padding_is_seen_and_none_in_it(side, error, monkeypatch, capsys):
    def compute_wrong(model, head, tokens):
        scores = compute(model, head, tokens)
        if (tokens[-1, 0] == 0) == (side == "right"):
            late = tokens[0].tolist().index(2) + 8  # in the second of the two sentences of a row
            scores[0, late, 0] += error * scores.abs().max()
        scores[tokens == 1] = torch.nan
        return scores

    compute = comparison.compute_hf_scores
    monkeypatch.setattr(comparison, "compute_hf_scores", compute_wrong)
    words = export_words(checkpoint("masked_lm", "rope"), "--tokens", "none")
    if error < 1e-5:
        carry(*words)
    else:
        message = "RobertaForMaskedLM differs from the model by"
        assert re.search(f"{message} .* of the largest number; rounding", refuse(capsys, *words))


def test_a_wrong_score_of_the_last_token_is_seen_in_ctranslate2(monkeypatch, capsys):
    compute = comparison.compute_scores  # of 48 + 8 tokens
    monkeypatch.setattr(comparison, "compute_scores", lambda *inputs: compute(*inputs).triu(-54))
    trained = checkpoint("causal_lm", "rope")
    words = export_words(trained, "--tokens", "words", "--to", "ctranslate2")
    assert "log probabilities differ by" in refuse(capsys, *words)


HOSTILE = ["ba  ré\tti", " ba  ré ", "½ ① ﬁn x", "ba" * 20, "𝔸 it's 12", "日本", ""]
SIZES = {"bpe": 90, "unigram": 50}  # of sentencepiece models
FLAGS: list[dict[str, Any]] = [
    *({"normalization_rule_name": rule} for rule in ("identity", "nmt_nfkc")),
    {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": False},
    {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
    {"split_by_whitespace": False},
]
KINDS = [(kind, flags) for kind in SIZES for flags in FLAGS]
KINDS += [(kind, {}) for kind in ("gpt2", "words", "characters", "characters and spaces")]


def joined(line):
    return " ".join(line.split())


def tokenize(kind, flags):
    """Return a tokenization's name or files, how fairseq cuts a line, and what it reads then."""
    folder = new_directory()
    if kind in SIZES:
        size = 400 if "byte_fallback" in flags else SIZES[kind]
        path = preprocess.write_pieces(folder, size, TEXT, model_type=kind, **flags)
        model = Pieces(path).model
        given = joined if flags.get("remove_extra_whitespaces", True) else str
        return path, lambda line: model.encode(given(line), out_type=str), given
    if kind == "gpt2":  # a dictionary has the numbers of pieces
        encode = preprocess.fairseqs_bpe(preprocess.write_bpe(folder, TEXT, merges=6)).encode
        return folder, lambda line: [*map(str, encode(line))], str
    (folder / "text").write_text("\n".join(TEXT), encoding="utf-8")
    words = ["--words"] if kind == "words" else []
    given = ["--train", folder / "text", "--out", folder / "data", *words]
    preprocess.binarize(formats.plain, *given, characters=not words)
    name = find_tokenization(None, folder / "data", "")  # as the data says
    if words:
        return name, str.split, joined
    space, read = ("▁", " ") if kind == "characters and spaces" else ("", "")
    return name, lambda x: space.join(x.split()), lambda x: read.join(x.split())


@pytest.mark.parametrize(("kind", "flags"), KINDS, ids=str)
def test_numbers_are_those_of_the_dictionary_and_are_decoded(kind, flags):
    """Also where it lacks pieces; decoded where it has all."""
    tokens, cut, read = tokenize(kind, flags)
    for known in (TEXT[:20], TEXT):
        dictionary = tiny_models.make_dictionary(chain(*map(cut, known), ["<mask>"]))
        dictionary.finalize()
        tokenizer = build_tokenizer(tokens, dictionary)
        for line in [*TEXT, *HOSTILE]:
            ids = tokenizer.encode(line, add_special_tokens=False).ids
            # Later numbers are unknown to a model.
            known_ids = [i if i < len(dictionary) else dictionary.unk() for i in ids]
            assert known_ids == [*map(dictionary.index, cut(line))]
            assert known is not TEXT or line in HOSTILE or tokenizer.decode(ids) == read(line)


def test_weights_are_quantized():
    trained, sizes = checkpoint("translation", "rope"), []
    for how in (["--quantization", "int8"], ["--quantization", "float16"], []):
        folder = carry(*export_words(trained, "--tokens", "none", "--to", "ctranslate2", *how))
        engine = importlib.import_module("ctranslate2").Translator(str(folder))
        assert engine.compute_type.startswith("int8") == ("int8" in how)
        sizes.append((folder / "model.bin").stat().st_size)
    assert sizes == sorted({*sizes})


def test_the_page_lists_the_encodings_that_have_a_place_in_ctranslate2():
    pytest.importorskip("ctranslate2")
    module = importlib.import_module("fairseq_posenc.workbench.convert.to_ctranslate2")
    text = (Path(__file__).parents[3] / "docs/exchange.md").read_text(encoding="utf-8")
    families = {"translation": module.FOR_TRANSLATION, "causal_lm": module.FOR_CAUSAL_LMS}
    for family, names in families.items():
        assert f"\n| {family} | `{'`, `'.join(sorted(names))}` |\n" in text
