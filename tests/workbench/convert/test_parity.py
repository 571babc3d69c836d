"""Models carried to transformers or CTranslate2 compute there what they compute in fairseq.

A weight, option, tie, vector, bias or limit that a class or the engine reads otherwise is found
nowhere else; nor is a weight that does not come back.
"""

import importlib
import json
import math
import re
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
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
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.workbench.convert import comparison, stock_classes
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from tests.helpers import exchanged, tiny_models
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import Checkpoint, carry, checkpoint, export_to, export_words, refuse
from tests.helpers.glue_files import train_pieces, write_task
from tests.helpers.hf_models import MODELS, POSITIONS, SYMBOLS, edit_config, save_llama
from tests.helpers.preprocess import DATA, bpe_options, published, start
from tests.helpers.products import product_of, some_of
from tests.workbench.finetuning.test_finetuning import data as finetuning_data

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
UNTIED = {"no_share_decoder_input_output_embed": True}
ALL_TIED = {"share_all_embeddings": True}
SINUSOIDS = "sinusoidal(layout=fairseq)"
SINUSOIDS_IN_DECODER = {"position_encoding_decoder": SINUSOIDS}
# Name -> family and options of models, the class's own positions.
Kinds = dict[str, tuple[str, dict[str, Any], str]]
CLASSES: Kinds = {  # of transformers
    "RobertaForMaskedLM": ("masked_lm", {}, "learned"),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", {"encoder_normalize_before": True}, "learned"),
    "BioGptForCausalLM": ("causal_lm", {}, ""),
    "MarianMTModel": ("translation", {}, ""),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM, SINUSOIDS),
    "BartForConditionalGeneration": ("translation", {"layernorm_embedding": True}, ""),
    "MBartForConditionalGeneration": ("translation", PRE_NORM | {"layernorm_embedding": True}, ""),
}
SQUAD = {"task": "squad", "max_positions": 48}
FINE_TUNED: Kinds = {"RobertaForQuestionAnswering": ("masked_lm", SQUAD, "learned")}
# Of CTranslate2.
ENGINES: Kinds = {"Translator": ("translation", {}, ""), "Generator": ("causal_lm", {}, "")}
VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", *exchanged.WORDS]  # in the order of their numbers
CASES: list[Any] = [
    ("RobertaForMaskedLM", "learned", {}),
    ("RobertaForMaskedLM", "learned", {"attention_directions": "lr,rl"}),
    ("RobertaForMaskedLM", "m4m", {"untie_weights_roberta": True, "attention_directions": "lr,rl"}),
    ("RobertaPreLayerNormForMaskedLM", "m3", {}),
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
    ("Translator", "alibi", {"position_encoding_decoder": "rope(scaling=yarn:4:length=9)"}),
    ("Generator", "learned", {}),
    ("Generator", "none,rope(scaling=linear:4)", {"add_bos_token": True}),
    ("Generator", "lerope(layout=half,scaling=yarn:4:length=9),shaw+shaw_values", UNTIED),
    ("Generator", "alibi", {"decoder_attention_heads": 2}),
]
CASES += [
    pytest.param(*FINE_TUNED, spec, {}, marks=pytest.mark.slow)
    for spec in some_of(["m4m+rope"], ["learned", "m4m+rope"])
]
# One of each encoding, alone; each companion with rotations; compositions; layers that differ.
SPECS = [*tiny_models.NAMES, *(f"rope+{name}" for name in tiny_models.COMPANIONS)]
SPECS += [*tiny_models.COMPOSITIONS, *tiny_models.PATTERNS]
OTHERS = ["sinusoidal", "rope(scaling=llama3:4:length=9)", "lerope", "rope,none", "alibi"]
CASES += some_of(
    [],
    [
        (name, spec, {})
        for name, spec in product_of(CLASSES, SPECS) + product_of(ENGINES, OTHERS)
        if name in ("BioGptForCausalLM", "Generator") or not tiny_models.needs_causal(spec)
    ],
)
PARTS = [
    ("causal_lm", "rope", {**UNTIED, "adaptive_softmax_cutoff": "10,20"}, "adaptive softmax"),
    ("causal_lm", "rope", {**UNTIED, "decoder_input_dim": 16}, "projections of embeddings"),
    ("translation", "rope(cross_attention=true)", {}, "with rope(cross_attention=true)"),
]
ONE_OF_EACH = "one width, one dictionary and one number of positions"
REFUSED: dict[str, list[tuple[Any, ...]]] = {  # options of the command -> models, and the fault
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
        ("translation", "shaw(per_head=true)", {}, "perhaps of shaw"),
        ("translation", "shaw(reset=true)", {}, "perhaps of shaw"),
        ("translation", "learned+rope", {}, "perhaps of learned"),
        ("translation", "rope", {"attention_directions": "lr"}, "perhaps of rope"),
        ("translation", "rope(scaling=yarn:4:length=9,fraction=0.5)", {}, "perhaps of rope"),
        ("translation", "rope", {"activation_fn": "linear"}, "the activation linear"),
        ("masked_lm", "rope", {}, "only translation models and causal LMs"),
    ],
    "--quantization int8": [("masked_lm", "none", {}, "is for --to ctranslate2")],
    "--out {data}": [("masked_lm", "none", {}, "exists and is not empty")],
}
FOREIGN: list[tuple[Any, str]] = [  # a change of a RoBERTa of transformers, and the fault
    (partial(edit_config, layer_norm_eps=1e-12), "layer_norm_eps is 1e-12, and fairseq's is 1e-05"),
    (partial(edit_config, hidden_act="relu"), "RobertaForMaskedLM differs from fairseq's model by"),
    (partial(edit_config, num_hidden_layers=5), "the weights lack"),
    (lambda x: (x / "dict.txt").write_text("x 1"), "dict.txt: has 6 symbols, the model has 97"),
    (partial(save_llama, words=[]), "a LlamaForCausalLM cannot be imported, only RoBERTa"),
    (shutil.rmtree, "{folder} has no config.json: give a folder"),
]


def make(target: str, spec: str, **more: Any) -> Checkpoint:
    """Write a checkpoint that becomes a class or runs in an engine."""
    family, options, _ = (CLASSES | FINE_TUNED | ENGINES)[target]
    data = finetuning_data() / "squad" if options.get("task") == "squad" else None
    return checkpoint(family, spec, data, **{**options, **more})


def load(folder: Path) -> Any:
    """Load a folder by the class that its card names."""
    (name,) = re.findall(r"model = (\w+)\.from_pretrained", (folder / "README.md").read_text())
    return getattr(transformers, name).from_pretrained(folder).eval()


def serve(trained: Checkpoint, engine: str) -> Any:
    """Export a checkpoint to CTranslate2; return its engine with the model."""
    folder = export_to(trained, "--to", "ctranslate2")
    return getattr(importlib.import_module("ctranslate2"), engine)(str(folder))


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
    exchanged.rewrite(trained)


def padded(side: str, rows: int = 4, longest: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw sentences of several lengths; return them and where they are real."""
    lengths = torch.linspace(1, longest - 1, rows).long().tolist()
    sentences = [torch.tensor([*torch.randint(4, 44, (length,)), 2]) for length in lengths]
    tokens = collate_tokens(sentences, 1, left_pad=side == "left")
    return tokens, tokens.ne(1)


def score(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the scores of a model of transformers; the targets are the sources."""
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}
    if model.config.is_encoder_decoder:
        inputs |= {f"decoder_{key}": value for key, value in inputs.items()}
    found = model(**inputs)
    scores: torch.Tensor = found.get("logits")
    return torch.stack([*found.values()], -1) if scores is None else scores


@torch.no_grad()
def compare(ours: Any, theirs: Any, longest: int = 20) -> None:
    """Compare scores of sentences padded on either side."""
    family = "translation" if theirs.config.is_encoder_decoder else ""
    for side in ("left", "right"):
        tokens, real = padded(side, longest=longest)
        if getattr(ours, "span_head", None):
            expected = torch.stack(ours(tokens, span_scores=True), -1)[real]
        else:
            expected = tiny_models.logits(ours, family, tokens)[real]
        bound = 1e-5 * min(1.0, float(expected.abs().max()))
        torch.testing.assert_close(score(theirs, tokens)[real], expected, atol=bound, rtol=0)


def compare_imported(folder: Path, model: Any, longest: int, data: Path) -> dict[str, torch.Tensor]:
    """Import a folder of a model; compare what comes of it with the model; return its weights."""
    path, given = carry("import", "--from", folder), {"data": str(data)}
    (imported,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)], given)
    compare(imported.eval(), model, longest)
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=False)["model"]
    return weights


def find_changes(trained: Checkpoint, folder: Path) -> set[str]:
    """Import an exported folder; return the tensors that do not come back bit for bit.

    The head for masked tokens may be zeros: fine-tuned models lose it, and others would differ.
    """
    files = trained.path, carry("import", "--from", folder)
    states = [torch.load(file, weights_only=False) for file in files]
    assert len({state["cfg"]["task"]["_name"] for state in states}) == 1
    before, after = (state["model"] for state in states)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    return {name for name in changed if after[name].any() or "lm_head" not in name}


def check_longer(trained: Checkpoint, model: Any, length: int) -> None:
    """Make a model longer, train it in transformers, and import it, which records a length."""
    model = set_positions(model, "own", max_positions=48, extend="copy").train()
    tokens, real = padded("right", longest=12)
    score(model, tokens)[real].logsumexp(-1).mean().backward()
    untrained = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert untrained <= {"model.shared.weight"}  # not read where both sides have tables of theirs
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    folder = Path(shutil.copytree(trained.data, new_directory() / "trained"))  # dictionaries
    model.save_pretrained(folder)
    weights = compare_imported(folder, model.eval(), 48, folder)
    records = [Identity.from_tensor(weights[name]) for name in filter(is_identity, weights)]
    assert {record.trained_length for record in records} == {length}


@torch.no_grad()
def compare_in_engine(trained: Checkpoint, name: str, start: int) -> None:
    """Compare log probabilities of sentences, one with an end within it; and continuations."""
    if name == "Generator":
        let_sentences_end(trained, logit=0.0)
    engine = serve(trained, name)
    sentences = [torch.randint(4, 44, (length,)).tolist() for length in (1, 11, 22)]
    sentences[2][11] = 2
    sources = [sentences[-1], *sentences[:-1]]
    if name == "Translator":
        results = engine.score_batch(spell(sources), spell(sentences))
    else:
        results = engine.score_batch(spell([start, *sentence, 2] for sentence in sentences))
    for source, sentence, found in zip(sources, sentences, results):
        given = [torch.tensor([[start, *sentence]])]
        if name == "Translator":
            given = [torch.tensor([[*source, 2]]), torch.tensor([len(source) + 1]), *given]
        scores = trained.model(*given)[0][0].log_softmax(-1)
        expected = scores[range(len(scores)), [*sentence, 2]]
        torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-4, rtol=0)
    if name == "Generator":  # token by token with a cache there; here in one pass
        begun = [[start, *sentence] for sentence in sentences[:2]]
        (whole,) = engine.generate_batch(spell(begun[:1]), max_length=1)
        assert whole.sequences == spell(sentences[:1])  # the prompt but for its start
        found = engine.generate_batch(spell(begun), max_length=9, include_prompt_in_result=False)
        assert any(each.sequences[0] for each in found)
        for prompt, each in zip(begun, found):
            written = [*map(VOCABULARY.index, each.sequences[0])]
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
    own = spec == (CLASSES | FINE_TUNED)[target][2] and "attention_directions" not in more
    assert own == ("fairseq_posenc" not in (folder / "config.json").read_text())
    assert own == ("import fairseq_posenc" not in (folder / "README.md").read_text())
    assert read_positions(model).partition(" ")[0] == str(specs.parse(spec))
    compare(trained.model, model)
    stack, *_ = comparison.list_stacks(trained.model).values()
    assert torch.equal(model.get_input_embeddings().weight, stack.embed_tokens.weight)
    # transformers has one number of positions for both sides.
    changes = {"encoder._extra_state"} if "max_target_positions" in more else set()
    assert find_changes(trained, folder) == changes
    if spec.startswith(("learned", "m3")):  # a stock folder states the length of its table
        check_longer(trained, model, 48 if own or (target[:3], spec) == ("Bio", "learned") else 24)


@pytest.mark.parametrize("spec", ["learned", "learned+m4m"])
def test_a_table_that_became_longer_after_the_recorded_training_is_exported_whole(spec):
    trained = checkpoint("masked_lm", spec, max_positions=48)
    stack = trained.model.encoder.sentence_encoder
    stack.set_extra_state(stack.identity._replace(trained_length=24).to_tensor())
    exchanged.rewrite(trained)
    folder = export_to(trained)
    compare(trained.model, load(folder), longest=48)
    # Only a stock folder has no place for the length of the training.
    assert bool(find_changes(trained, folder)) == (spec == "learned")


TRANSLATED = [("MarianMTModel", "m4+rope"), ("M2M100ForConditionalGeneration", "t5")]
STEPS = some_of(["rope", "shaw+t5"], ["rope", "shaw+t5", "alibi", "t5", "learned"])
TRANSLATED += [("Translator", spec) for spec in STEPS]


@pytest.mark.parametrize(("target", "spec", "beam"), product_of(TRANSLATED, [1, 5]))
def test_translations_are_those_of_fairseq(target, spec, beam):
    """Up to the limit, where fairseq forces an end, and the others stop."""
    trained = make(target, spec, max_source_positions=60, max_target_positions=60)
    # Below a least length, the engine leaves ends out of its softmax, so it gets none.
    least, *logits = (1, 2.1, 2.5) if target in CLASSES else (0, 1.5)
    let_sentences_end(trained, *logits)
    tokens, real = padded("left", rows=25)
    settings = GenerationConfig(beam=beam, min_len=least)
    search = trained.task.build_generator([trained.model], settings)
    batch = {"net_input": {"src_tokens": tokens, "src_lengths": real.sum(1)}}
    ours = [row[0] for row in search.generate([trained.model], batch)]
    if target == "Translator":
        sources = spell([i for i in row if i > 3] for row in tokens.tolist())
        how = {"beam_size": beam, "min_decoding_length": 0, "max_decoding_length": 59}
        how |= {"return_end_token": True, "return_scores": True}
        found = serve(trained, target).translate_batch(sources, **how)
        theirs = [[*map(VOCABULARY.index, each.hypotheses[0])] for each in found]
    else:
        how = {} if beam == 5 else {"num_beams": 1, "early_stopping": False}
        written = load(export_to(trained)).generate(tokens, attention_mask=real.long(), **how)
        theirs = [[token for token in row[1:] if token != 1] for row in written.tolist()]
    ended = [n for n, row in enumerate(ours) if len(row["tokens"]) < 60]
    assert len(ended) >= (20 if beam > 1 else 5)
    for n in ended if beam > 1 else range(25):
        expected = ours[n]["tokens"].tolist()
        assert theirs[n][:59] == expected[:59]
        assert target == "Translator" or len(theirs[n]) == len(expected)
        if target == "Translator" and len(expected) < 60:
            assert found[n].scores[0] == pytest.approx(ours[n]["score"].item(), abs=1e-4)


def published_glue() -> tuple[Path, Path, Path]:
    raw, bpe, out = DATA / "glue_data", DATA / "gpt2_bpe", new_directory()
    start("glue", raw, "--out", out, "--tasks", "CoLA,RTE", *bpe_options(bpe))
    for task, longest in {"CoLA": 47, "RTE": 292}.items():
        assert (made := open_glue_data(out / task)).longest == longest
        assert made.dictionary.read_bytes() == (bpe / "dict.txt").read_bytes()
    return raw, out, bpe


def small_glue() -> tuple[Path, Path, Path]:
    folder, tasks = new_directory(), ["CoLA", "STS-B"]
    for task in tasks:
        write_task(folder / "raw", task, {"train": 9, "valid": 29, "test": 4})
    tokens = ["--sentencepiece-model", train_pieces(folder), "--tasks", ",".join(tasks)]
    start("glue", folder / "raw", "--out", folder / "glue", *tokens)
    return folder / "raw", folder / "glue", folder / "pieces.model"


PUBLISHED = pytest.param("CoLA", "m4m", published_glue, marks=[published, pytest.mark.matrix])
SMALL = product_of(["CoLA", "STS-B"], ["learned", "m4m+rope"], [small_glue])


@pytest.mark.slow
def test_a_head_of_an_earlier_training_is_not_exported():
    trained = make("RobertaForQuestionAnswering", "none", load_checkpoint_heads=True)
    trained.model.register_classification_head("earlier", num_classes=2)
    exchanged.rewrite(trained)
    compare(trained.model, load(export_to(trained)))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "spec", "make_data"), [*SMALL, PUBLISHED])
@torch.no_grad()
def test_predictions_of_glue_are_those_of_fairseq(task, spec, make_data):
    raw, data, tokens = make_data()
    options = {"task": "glue", "max_positions": 64, "max_update": 2}
    trained = checkpoint("masked_lm", spec, data / task, **options)
    folder = export_to(trained, "--tokens", tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = glue.read_examples(glue.find_file(raw, TASKS[task], "valid"), TASKS[task], "valid")
    inputs = tokenizer(*texts.sentences, padding=True, return_tensors="pt")
    ours, _ = predict(trained.model, trained.task, "valid")
    torch.testing.assert_close(load(folder)(**inputs).logits, ours.cpu(), atol=1e-5, rtol=1e-5)
    labels = json.loads((folder / "config.json").read_text()).get("id2label")
    assert labels == ({"0": "LABEL_0"} if task == "STS-B" else {"0": "0", "1": "1"})
    assert not find_changes(trained, folder)


def save_roberta(name: str = "roberta", types: int = 1) -> tuple[Any, Path]:
    """Save a random model of transformers; return it and the folder that it is in."""
    model = MODELS[name].build(type_vocab_size=types, layer_norm_eps=1e-5, pad_token_id=1)
    for parameter in model.parameters():  # vectors as well
        parameter.data += 0.1 * torch.randn_like(parameter)
    folder = new_directory()
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize(("types", "name"), product_of([1, 2], ["roberta", "xlm_roberta"]))
def test_a_roberta_of_transformers_computes_the_same_in_fairseq(types, name):
    """Unlike exports, it has types of tokens and rows of positions for padding."""
    model, folder = save_roberta(name, types)
    compare_imported(folder, model, POSITIONS - 2, exchanged.data_bin(range(SYMBOLS - 5)))


@pytest.mark.parametrize(("change", "message"), FOREIGN)
def test_what_fairseq_does_not_have_is_refused(change, message, capsys):
    _, folder = save_roberta()
    change(folder)
    assert message.format(folder=folder) in refuse(capsys, "import", "--from", folder)


@pytest.mark.parametrize(
    ("words", "family", "spec", "more", "message"),
    [(words, *case) for words, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_be_exported_is_refused_by_name(words, family, spec, more, message, capsys):
    trained = checkpoint(family, spec, **more)
    words = words.format(data=trained.data).split()
    assert message in refuse(capsys, *export_words(trained, *words))


def test_a_model_that_differs_is_not_written(monkeypatch, capsys):
    monkeypatch.setitem(stock_classes.ACTIVATIONS, "gelu", "relu")  # a wrong row of the tables
    message = refuse(capsys, *export_words(checkpoint("masked_lm", "m4m")))
    assert "RobertaForMaskedLM differs from the model by" in message


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("error", [0.0, math.nan, math.inf, 2 * comparison.TOLERANCE])
def test_an_error_on_either_side_of_the_padding_is_seen_and_none_in_it(side, error):
    def theirs(input_ids, attention_mask):
        scores = model(input_ids)[0]
        if bool(attention_mask[-1, 0]) == (side == "right"):
            second = input_ids[0].tolist().index(2) + 1  # of the two sentences of a row
            scores[0, second, 0] += error * scores.abs().max()
        scores[attention_mask == 0] = torch.nan
        return SimpleNamespace(logits=scores)

    model = tiny_models.make_model("masked_lm", position_encoding="rope")
    difference = comparison.compare_with_transformers(model, "masked_lm", theirs)
    assert error or difference == 0
    message = r"scores differ by .* of the largest number; rounding"
    with pytest.raises(UserError, match=message) if error else nullcontext():
        comparison.refuse_difference("scores differ", difference)
