"""Models carried to transformers or CTranslate2 compute there what they compute in fairseq.

A weight, option, tie, vector, bias or limit that a class or the engine reads otherwise is found
nowhere else; nor is a weight that does not come back, or what a folder has besides weights.
"""

import importlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig
from huggingface_hub import ModelCard
from tokenizers import Tokenizer
from transformers.pipelines import SUPPORTED_TASKS

import glue
from fairseq_posenc import specs
from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.tasks.glue.data import open_glue_data
from fairseq_posenc.tasks.glue.definitions import TASKS
from fairseq_posenc.workbench.convert import comparison, stock_classes
from fairseq_posenc.workbench.finetuning.glue.worker import predict
from fairseq_posenc.workbench.loading.checkpoints import load_state
from fairseq_posenc.workbench.loading.open_model import open_model
from tests.helpers.commands import new_directory, refused
from tests.helpers.exchanged import (
    Checkpoint,
    checkpoint,
    ctranslate2,
    export_to,
    import_from,
    pieces,
    refuse_export,
)
from tests.helpers.glue_files import DATA
from tests.helpers.hf_models import edit_config, save_llama
from tests.helpers.preprocess import start
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import COMPANIONS, COMPOSITIONS, NAMES, PATTERNS, needs_causal
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

PRE_NORM = "--encoder-normalize-before --decoder-normalize-before"
EMBEDDING_NORM = "--layernorm-embedding"
DECODER = "--position-encoding-decoder"
UNTIED = "--no-share-decoder-input-output-embed"
CLASSES = {  # of transformers, engines of CTranslate2 -> family, options that make its models
    "RobertaForMaskedLM": ("masked_lm", ""),
    "RobertaPreLayerNormForMaskedLM": ("masked_lm", "--encoder-normalize-before"),
    "BioGptForCausalLM": ("causal_lm", ""),
    "MarianMTModel": ("translation", ""),
    "M2M100ForConditionalGeneration": ("translation", PRE_NORM),
    "BartForConditionalGeneration": ("translation", EMBEDDING_NORM),
    "MBartForConditionalGeneration": ("translation", f"{PRE_NORM} {EMBEDDING_NORM}"),
    "Translator": ("translation", ""),
    "Generator": ("causal_lm", ""),
}
# Class with positions of its own -> their spec.
OWN = {"RobertaForMaskedLM": "learned", "RobertaPreLayerNormForMaskedLM": "learned"}
OWN |= {"M2M100ForConditionalGeneration": "sinusoidal(layout=fairseq)"}
# One of each encoding, alone; each companion with rotations; compositions; layers that differ.
SPECS = [*NAMES, *(f"rope+{name}" for name in COMPANIONS), *COMPOSITIONS, *PATTERNS]
CHOSEN = some_of(["none", "learned", "rope+m4(reset=true)", "t5", "m3"], SPECS)
CASES = [
    *(
        f"{name} {spec}"
        for name, spec in product_of([*CLASSES][:-2], CHOSEN)
        if name == "BioGptForCausalLM" or not needs_causal(spec)
    ),
    "RobertaForMaskedLM learned",
    "RobertaForMaskedLM m4m --untie-weights-roberta --attention-directions lr,rl",
    "RobertaPreLayerNormForMaskedLM learned",
    f"BioGptForCausalLM t5 {UNTIED} --activation-fn relu",
    "BioGptForCausalLM rope --no-scale-embedding --add-bos-token",
    "MarianMTModel t5 --share-all-embeddings --max-target-positions 60",
    f"MarianMTModel rope {DECODER} m4m+alibi --decoder-layers 3",
    "M2M100ForConditionalGeneration rope --share-all-embeddings",
    "M2M100ForConditionalGeneration sinusoidal(layout=fairseq)",
    "BartForConditionalGeneration shaw --share-decoder-input-output-embed",
    "BartForConditionalGeneration m4m --activation-fn gelu_fast",
    f"Translator learned {EMBEDDING_NORM} --share-all-embeddings {DECODER} sinusoidal",
    f"Translator none {PRE_NORM} --no-decoder-final-norm",
    f"Translator rope {PRE_NORM} --activation-fn gelu {DECODER} lerope",
    f"Translator shaw_values+rope {DECODER} rope(layout=half,fraction=0.5)",
    "Translator rope(scaling=yarn:4:length=9) --no-scale-embedding",
    "Translator rope(scaling=llama3:4:length=9) --encoder-embed-dim 48",
    f"Translator rope,none --encoder-attention-heads 2 {DECODER} none,rope(base=500)+t5",
    f"Translator shaw+shaw_values --activation-fn gelu_fast {DECODER} t5(scale_factor=3)",
    f"Translator shaw(max_distance=3,scale_factor=2) {PRE_NORM} {DECODER} shaw+shaw_values",
    f"Translator sandwich --activation-fn tanh {DECODER} rope,none",
    f"Translator alibi {DECODER} rope",
    f"Translator alibi(mode=asymmetric) {DECODER} alibi",
    "Generator learned",
    "Generator rope(scaling=linear:4) --add-bos-token",
    "Generator lerope(layout=half,scaling=yarn:4:length=9)",
    "Generator alibi --decoder-attention-heads 2",
    f"Generator shaw+shaw_values {UNTIED}",
    "Generator none,rope",
]
TRANSLATED = ["MarianMTModel m4+rope", "M2M100ForConditionalGeneration t5"]
TRANSLATED += [f"Translator {spec}" for spec in ("rope", "shaw+t5", "alibi", "t5", "learned")]
SERVED = " | --to ctranslate2"
ODD_PARTS = {
    f"causal_lm rope {UNTIED} --adaptive-softmax-cutoff 10,20": "adaptive softmax",
    f"causal_lm rope {UNTIED} --decoder-input-dim 16": "projections of embeddings",
    "translation rope(cross_attention=true)": "with rope(cross_attention=true)",
}
# Family, spec and options of models, and of the command after a bar -> part of the message.
REFUSED = {
    **{f"{model}{to}": words for model, words in ODD_PARTS.items() for to in ("", SERVED)},
    "causal_lm rope --layernorm-embedding": "layernorm_embedding=True",
    "causal_lm rope --no-decoder-final-norm": "lacks biogpt.layer_norm.weight",
    "translation rope --encoder-normalize-before": "decoder_normalize_before=F",
    "translation rope --decoder-embed-dim 48": "decoder_embed_dim=48 beside 64",
    "translation learned --max-target-positions 60": "one number of positions",
    f"translation rope {PRE_NORM} --target-lang fr": "one width, one dictionary and one number of",
    "masked_lm rope --activation-fn relu": "activation_fn=relu",
    "masked_lm --arch roberta --encoder-layers 1": "not a model of fairseq_pos",
    "masked_lm none | --quantization int8": "is for --to ctranslate2",
    "masked_lm none | --out ..": "exists and is not empty",
    "causal_lm t5" + SERVED: "t5 is not one of",
    "causal_lm xpos" + SERVED: "xpos is not one of",
    "causal_lm alibi,none" + SERVED: "perhaps of alibi",
    "translation m4" + SERVED: "m4 is not one of alibi, learned, ",
    "translation kerple" + SERVED: "kerple is not one of",
    "translation rope+window(size=4)" + SERVED: "window is not one of",
    "translation shaw(per_head=true)" + SERVED: "perhaps of shaw",
    "translation shaw(reset=true)" + SERVED: "perhaps of shaw",
    "translation learned+rope" + SERVED: "perhaps of learned",
    "translation rope(scaling=yarn:4:length=9,fraction=0.5)" + SERVED: "perhaps of rope",
    "translation rope --attention-directions lr" + SERVED: "perhaps of rope",
    "translation rope --activation-fn linear" + SERVED: "the activation linear",
    "masked_lm rope" + SERVED: "but translation models and causal LMs",
}


def make(case: str, *more: str) -> tuple[str, str, Checkpoint]:
    """Write a checkpoint that becomes a class or runs in an engine; return its name and spec."""
    target, spec, *options = [*case.split(), *more]
    family, own = CLASSES[target]
    return target, spec, checkpoint(family, " ".join([spec, own, *options]))


def read_folder(
    trained: Checkpoint, capsys: pytest.CaptureFixture[str], *more: str, writes: bool = True
) -> tuple[Path, dict[str, Any], str]:
    """Export a checkpoint, check all but its model, run the lines of its card.

    Without ``writes``, the lines with which transformers generates are left out.

    Returns the folder, what the lines defined, and what they printed.
    """
    folder, (data, cut), task = export_to(trained, *more), pieces(), trained.task
    library = "ctranslate2" if "ctranslate2" in more else "transformers"
    card, name = ModelCard.load(folder / "README.md"), type(task).__name__
    title = {"MaskedLMTask": "fill-mask", "LanguageModelingTask": "text-generation"}.get(name)
    assert title in {*SUPPORTED_TASKS, None}
    labels: dict[str, Any] = {"pipeline_tag": title} if title else {"language": ["de", "en"]}
    labels |= {"library_name": library, "tags": ["fairseq", "position-encoding"]}
    assert card.data.to_dict() == labels
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
    imported = {*re.findall(r"^(?:from|import) (\w+)", code, re.M)}
    other = "fairseq_posenc" if library == "transformers" else "tokenizers"
    assert library in imported <= {library, other}
    home = Path.cwd()
    found: dict[str, Any] = {}
    os.chdir(folder)
    capsys.readouterr()
    try:
        exec(code if writes else code.partition("\ninputs")[0], found)
    finally:
        os.chdir(home)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if name == "LanguageModelingTask":
        before, after = [0 if task.args.add_bos_token else 2], []
    else:
        before, after = [0] * (name == "MaskedLMTask"), [2]
    symbols = map(task.target_dictionary.index, cut.encode("Un dort.", out_type=str))
    assert tokenizer.encode("Un dort.").ids == [*before, *symbols, *after]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # all are for the same readers
    for secret in ("/private", str(data), str(trained.path.parent)):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    return folder, found, capsys.readouterr().out.strip()


def let_sentences_end(trained: Checkpoint) -> None:
    """Give ends a good chance, and other special symbols none; rewrite the file."""
    decoder = trained.model.decoder
    norm = decoder.layer_norm or decoder.layers[-1].final_layer_norm
    norm.weight.data[0], norm.bias.data[0] = 0.0, 1.0  # a channel that is 1 wherever it is read
    rows = decoder.output_projection.weight.data
    rows[:4] = 0.0
    rows[:4, 0] = torch.tensor([-30.0, -30.0, 2.0, -30.0])
    state = torch.load(trained.path, weights_only=False)
    torch.save({**state, "model": trained.model.state_dict()}, trained.path)


def draw(trained: Checkpoint, *lengths: int) -> list[list[int]]:
    size = len(trained.task.source_dictionary)
    return [torch.randint(4, size, (length,)).tolist() for length in lengths]


@torch.no_grad()
def compare(ours: Any, theirs: Any, rows: list[list[int]]) -> None:
    """Compare scores of sentences padded on either side; the targets are the sources."""
    for left_pad in (False, True):
        tokens = collate_tokens([torch.tensor([*row, 2]) for row in rows], 1, left_pad=left_pad)
        real, given = tokens.ne(1), [tokens]
        inputs = {"input_ids": tokens, "attention_mask": real.long()}
        if theirs.config.is_encoder_decoder:
            inputs |= {f"decoder_{key}": value for key, value in inputs.items()}
            given = [tokens, real.sum(1), tokens]
        found = theirs(**inputs)
        if "start_logits" in found:
            scores = torch.stack([found.start_logits, found.end_logits], -1)[real]
            expected = torch.stack(ours(tokens, span_scores=True), -1)[real]
        else:
            scores, expected = found.logits[real], ours(*given)[0][real]
        bound = 1e-5 * min(1.0, float(expected.abs().max()))
        torch.testing.assert_close(scores, expected, atol=bound, rtol=0)


def find_changes(trained: Checkpoint, start: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an imported export that did not come back bit for bit."""
    before, after = (load_state(path, "it")["model"] for path in (trained.path, start))
    assert before.keys() == after.keys()
    return {name: after[name] for name in before if not torch.equal(before[name], after[name])}


@torch.no_grad()
def compare_log_probs(trained: Checkpoint, engine: Any, start: int) -> None:
    """Compare log probabilities of an engine's sentences, one of them with an end within it."""
    names = trained.task.target_dictionary.symbols
    sources, targets = draw(trained, 20, 9, 2), draw(trained, 3, 12, 22)
    targets[2][11] = 2
    served = hasattr(engine, "translate_batch")
    spelt = [[[names[i] for i in row] for row in rows] for rows in (sources, targets)]
    if not served:
        spelt = [[[names[start], *row, "</s>"] for row in spelt[1]]]
    for source, target, theirs in zip(sources, targets, engine.score_batch(*spelt)):
        given = [torch.tensor([[start, *target]])]
        if served:
            given = [torch.tensor([[*source, 2]]), torch.tensor([len(source) + 1]), *given]
        ours = trained.model(*given)[0][0].log_softmax(-1)
        ours = ours.gather(1, torch.tensor([*target, 2])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(theirs.log_probs), ours, atol=1e-4, rtol=0)


@torch.no_grad()
def compare_continuations(trained: Checkpoint, engine: Any, start: int) -> None:
    """Compare texts that an engine writes token by token, with a cache, with those of one pass."""
    names = trained.task.target_dictionary.symbols
    prompts = [[start, *row] for row in draw(trained, 3, 12)]
    spelt = [[names[number] for number in prompt] for prompt in prompts]
    found = engine.generate_batch(spelt, max_length=9, include_prompt_in_result=False)
    assert any(theirs.sequences[0] for theirs in found)
    for prompt, theirs in zip(prompts, found):
        written = [*map(names.index, theirs.sequences[0])]
        best = trained.model(torch.tensor([[*prompt, *written]]))[0][0].argmax(-1)
        assert [*written, 2][:9] == best[len(prompt) - 1 :][:9].tolist()


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_fairseq_and_all_weights_come_back(case, capsys):
    target, spec, trained = make(case)
    if target in ("Translator", "Generator"):
        engine = read_folder(trained, capsys, "--to", "ctranslate2")[1]["engine"]
        start = 0 if "--add-bos" in case else 2
        compare_log_probs(trained, engine, start)
        if target == "Generator":
            compare_continuations(trained, engine, start)
        return
    writes = target == "BioGptForCausalLM"  # below, translations are
    folder, found, printed = read_folder(trained, capsys, writes=writes)
    assert bool(printed) == writes
    assert type(found["model"]).__name__ == target
    own = spec == OWN.get(target) and "--attention-directions" not in case
    assert own == ("fairseq_posenc" not in (folder / "config.json").read_text())
    assert own == ("import fairseq_posenc" not in (folder / "README.md").read_text())
    assert read_positions(found["model"]).partition(" ")[0] == str(specs.parse(spec))
    compare(trained.model, found["model"], draw(trained, 1, 7, 13, 19))
    # transformers has one number of positions for both sides.
    changes = {"encoder._extra_state"} if "--max-target-positions" in case else set()
    assert find_changes(trained, import_from(folder)).keys() == changes


@pytest.mark.parametrize(
    "case",
    [
        "RobertaForMaskedLM learned",
        "RobertaForMaskedLM learned --attention-directions lr,rl",
        *(f"{name} learned+m4m" for name in some_of([*CLASSES][2:7:2], [*CLASSES][:-2])),
    ],
)
def test_a_model_that_was_made_longer_and_trained_in_transformers_comes_back(case, capsys):
    _, _, trained = make(case)
    model = read_folder(trained, capsys, writes=False)[1]["model"]
    set_positions(model, "own", max_positions=96, extend="copy")
    compare(trained.model, model, draw(trained, 1, 7, 13, 19))
    tokens = torch.tensor(draw(trained, 12, 12))
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    folder = new_directory() / "trained"
    model.save_pretrained(folder)
    for dictionary in trained.data.glob("dict*"):
        shutil.copy(dictionary, folder)
    imported = import_from(folder)
    compare(open_model(imported).model, model.eval(), draw(trained, 1, 47))
    assert len(find_changes(trained, imported)) > len(trained.model.state_dict()) / 2


@pytest.mark.parametrize(("case", "beam"), product_of(TRANSLATED, [1, 5]))
def test_translations_are_those_of_fairseq(case, beam, capsys):
    """Up to the limit, where fairseq forces an end, and the others stop."""
    target, _, trained = make(case, "--max-source-positions 60 --max-target-positions 60")
    let_sentences_end(trained)
    served = target == "Translator"
    _, found, printed = read_folder(trained, capsys, *["--to", "ctranslate2"] * served)
    names, cut = trained.task.target_dictionary.symbols, pieces()[1]
    sources = draw(trained, *torch.linspace(1, 19, 25).long().tolist())
    sources.append([*map(names.index, cut.encode("Un homme dort.", out_type=str))])  # the card's
    tokens = collate_tokens([torch.tensor([*row, 2]) for row in sources], 1, left_pad=True)
    real = tokens.ne(1)
    # Below a least length, the engine leaves ends out of its softmax, so it gets none.
    settings = GenerationConfig(beam=beam, min_len=0 if served else 1)
    search = trained.task.build_generator([trained.model], settings)
    batch = {"net_input": {"src_tokens": tokens, "src_lengths": real.sum(1)}}
    ours = [row[0] for row in search.generate([trained.model], batch)]
    if served:
        texts = [[names[number] for number in row] for row in sources]
        how = {"beam_size": beam, "max_decoding_length": 59, "min_decoding_length": 0}
        how |= {"return_end_token": True, "return_scores": True}
        written = found["engine"].translate_batch(texts, **how)
        theirs = [[*map(names.index, each.hypotheses[0])] for each in written]
    else:
        how = {} if beam == 5 else {"num_beams": beam, "early_stopping": False}
        inputs = {"input_ids": tokens, "attention_mask": real.long()}
        rows = found["model"].generate(**inputs, **how).tolist()
        theirs = [[token for token in row[1:] if token != 1] for row in rows]
    ended = [n for n, row in enumerate(ours) if len(row["tokens"]) < 60]
    assert len(ended) >= (20 if beam > 1 else 5)
    for n in ended if beam > 1 else range(26):
        expected = ours[n]["tokens"].tolist()
        assert theirs[n][:59] == expected[:59]
        if served and len(expected) < 60:
            assert written[n].scores[0] == pytest.approx(ours[n]["score"].item(), abs=1e-4)
    if beam == 5:
        assert cut.decode([names[number] for number in ours[25]["tokens"][:-1]]) in printed


def check_lost_head(trained: Checkpoint, folder: Path) -> None:
    """Check that all of a fine-tuned model comes back, with zeros for the head that it lost."""
    for name, tensor in find_changes(trained, import_from(folder)).items():
        assert name.startswith("encoder.lm_head.")
        assert not tensor.any(), name


def published_glue() -> tuple[Path, Path, Path]:
    """Return GLUE's files, the data made of them, and their tokenizer."""
    bpe, raw, out = DATA / "gpt2_bpe", DATA / "glue_data", new_directory()
    if not bpe.is_dir():
        pytest.skip("GLUE's files are not here")
    tokens = ["--encoder-json", bpe / "encoder.json", "--vocab-bpe", bpe / "vocab.bpe"]
    start("glue", raw, "--out", out, "--tasks", "CoLA", *tokens, "--dict", bpe / "dict.txt")
    made = open_glue_data(out / "CoLA")
    assert (made.splits["valid"]["examples"], made.longest) == (1043, 47)
    assert made.dictionary.read_bytes() == (bpe / "dict.txt").read_bytes()
    return raw, out, bpe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spec", "published"),
    [("CoLA", "learned", False), ("STS-B", "m4m+rope", False), ("CoLA", "m4m", True)],
)
def test_predictions_of_glue_are_those_of_fairseq(name, spec, published):
    made = glue_data()
    raw, data, tokens = made / "raw", made / "glue", made / "pieces.model"
    if published:
        raw, data, tokens = published_glue()
    trained = checkpoint("glue", spec, data / name)
    folder = export_to(trained, "--tokens", tokens)
    ours, _ = predict(trained.model, trained.task, "valid")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = glue.read_examples(glue.find_file(raw, TASKS[name], "valid"), TASKS[name], "valid")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        inputs = tokenizer(*texts.sentences, padding=True, return_tensors="pt")
        theirs = model(**inputs).logits
    torch.testing.assert_close(theirs, ours.cpu(), atol=1e-5, rtol=1e-5)
    check_lost_head(trained, folder)
    labels = json.loads((folder / "config.json").read_text()).get("id2label")
    assert labels == ({"0": "LABEL_0"} if name == "STS-B" else {"0": "0", "1": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["learned", "m4m+rope"])
def test_answers_of_squad_are_those_of_fairseq(spec):
    trained = checkpoint("squad", spec, squad_files().data)
    folder = export_to(trained)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
    compare(trained.model, model, draw(trained, 1, 7, 13, 19))
    check_lost_head(trained, folder)


def make_roberta(kind: str = "Roberta", types: int = 1) -> tuple[Any, Path]:
    """Make a random model of transformers, and the folder that it is in."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 60}
    sizes |= {"max_position_embeddings": 34, "num_attention_heads": 4, "type_vocab_size": types}
    config = getattr(transformers, f"{kind}Config")(**sizes, layer_norm_eps=1e-5, pad_token_id=1)
    model = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    folder = new_directory() / "roberta"
    model.save_pretrained(folder)
    (folder / "dict.txt").write_text("".join(f"x{number} 1\n" for number in range(55)))
    return model, folder


@pytest.mark.parametrize(("kind", "types"), [("Roberta", 2), ("XLMRoberta", 1)])
def test_a_roberta_of_transformers_computes_the_same_in_fairseq(kind, types):
    """Unlike exports, it has types of tokens and rows of positions for padding."""
    model, folder = make_roberta(kind, types)
    tokens = torch.tensor([[0, *range(4, 34 - 4), 2], [0, 5, 6, 2, 7, 2, *[1] * 22]])
    ours, theirs = open_model(import_from(folder)).model, model(tokens, tokens.ne(1).long())
    real = tokens.ne(1)
    torch.testing.assert_close(ours(tokens)[0][real], theirs.logits[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, and fairseq's is 1e-05"),
        ({"hidden_act": "relu"}, "RobertaForMaskedLM differs from fairseq's model by"),
        ({"num_hidden_layers": 3}, "the weights lack"),
        ("x 1\n", "dict.txt: has 6 symbols, and the model 60"),
        ("llama", "a LlamaForCausalLM cannot be imported, only RoBERTa"),
        ("nowhere", "no such folder"),
    ],
)
def test_what_fairseq_does_not_have_is_refused(changes, message, capsys):
    _, folder = make_roberta()
    if changes == "llama":
        save_llama(folder, [])
    elif changes == "nowhere":
        folder /= changes
    elif isinstance(changes, str):
        (folder / "dict.txt").write_text(changes)
    else:
        edit_config(folder, **changes)
    out = new_directory() / "start.pt"
    assert message in refused(capsys, "import", "--from", folder, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(case, capsys):
    model, _, command = case.partition(" | ")
    trained = checkpoint(*model.split(" ", 1))
    assert REFUSED[case] in refuse_export(capsys, trained, *command.split())


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

    model = checkpoint("masked_lm", "rope").model
    difference = comparison.compare_with_transformers(model, "masked_lm", theirs)
    if not error:
        assert difference == 0
        return
    with pytest.raises(UserError, match=r"scores differ by .* of the largest number, and 1e-05 is"):
        comparison.refuse_difference("scores differ", difference)


def test_weights_are_quantized():
    trained, sizes = checkpoint("translation", "rope"), []
    for quantization in ("int8", "float16", "float32"):
        folder = export_to(trained, "--to", "ctranslate2", "--quantization", quantization)
        engine = ctranslate2().Translator(str(folder))
        assert engine.compute_type.startswith("int8") == (quantization == "int8")
        sizes.append((folder / "model.bin").stat().st_size)
    assert sizes == sorted({*sizes})


def test_the_page_lists_the_encodings_that_have_a_place_in_ctranslate2():
    ctranslate2()
    module = importlib.import_module("fairseq_posenc.workbench.convert.to_ctranslate2")
    page = Path(__file__).resolve().parents[3] / "docs" / "exchange.md"
    families = {"translation": module.FOR_TRANSLATION, "causal_lm": module.FOR_CAUSAL_LMS}
    for family, names in families.items():
        row = f"\n| {family} | `{'`, `'.join(sorted(names))}` |\n"
        assert row in page.read_text(encoding="utf-8")
