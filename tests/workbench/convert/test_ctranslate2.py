"""Models carried to CTranslate2 score and write there what they do in fairseq.

Nothing else runs the engine: a vector, bias or limit that it reads otherwise is found here alone.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from fairseq.dataclass.configs import GenerationConfig
from tokenizers import Tokenizer

from fairseq_posenc.workbench.translation import Translator
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import WORDS, checkpoint, data_bin, export_to, refuse_export
from tests.helpers.preprocess import write_pieces
from tests.helpers.products import product_of, some_of

ctranslate2 = pytest.importorskip("ctranslate2", reason="pip install 'fairseq-posenc[ctranslate2]'")
from fairseq_posenc.workbench.convert import to_ctranslate2  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
MODELS = [
    ("translation", "sinusoidal", {}),
    ("translation", "learned", {"layernorm_embedding": True, "share_all_embeddings": True}),
    ("translation", "none", {**PRE_NORM, "no_decoder_final_norm": True}),
    ("translation", "rope", {**PRE_NORM, "activation_fn": "gelu"}),
    ("translation", "rope(layout=half,fraction=0.5)", {"activation_fn": "gelu_fast"}),
    ("translation", "rope(scaling=yarn:4:length=9)", {"no_scale_embedding": True}),
    ("translation", "rope(scaling=llama3:4:length=9)", {"encoder_embed_dim": 48}),
    ("translation", "lerope", PRE_NORM),
    ("translation", "rope,none", {"encoder_attention_heads": 2}),
    ("translation", "none,rope(base=500)+t5", {}),
    ("translation", "shaw+shaw_values", {}),
    ("translation", "shaw(max_distance=3,scale_factor=2)", PRE_NORM),
    ("translation", "shaw_values+rope", {}),
    ("translation", "t5(scale_factor=3)", {}),
    ("translation", "sandwich", {"activation_fn": "tanh"}),
    ("translation", "alibi", {"position_encoding_decoder": "rope"}),
    ("translation", "alibi(mode=asymmetric)", {"position_encoding_decoder": "alibi"}),
    ("causal_lm", "learned", {}),
    ("causal_lm", "rope(scaling=linear:4)", {"add_bos_token": True}),
    ("causal_lm", "lerope(layout=half,scaling=yarn:4:length=9)", {}),
    ("causal_lm", "alibi", {"decoder_attention_heads": 2}),
    ("causal_lm", "shaw+shaw_values", {"no_share_decoder_input_output_embed": True}),
    ("causal_lm", "none,rope", {}),
]
REFUSED = [
    ("translation", "m4", {}, "m4 is not one of alibi, learned, "),
    ("translation", "kerple", {}, "kerple is not one of"),
    ("translation", "rope+window(size=4)", {}, "window is not one of"),
    *(
        ("translation", spec, {}, f"perhaps of {spec.partition('(')[0]}")
        for spec in (
            *("shaw(per_head=true)", "shaw(reset=true)", "learned+rope"),
            "rope(scaling=yarn:4:length=9,fraction=0.5)",
        )
    ),
    ("translation", "rope(cross_attention=true)", {}, "no model with rope(cross_attention=true)"),
    ("translation", "rope", {"attention_directions": "lr"}, "perhaps of rope"),
    ("translation", "rope", {"activation_fn": "linear"}, "the activation linear"),
    ("causal_lm", "xpos", {}, "xpos is not one of"),
    ("causal_lm", "t5", {}, "t5 is not one of"),
    ("causal_lm", "alibi,none", {}, "perhaps of alibi"),
    (
        *("causal_lm", "rope"),
        {"adaptive_softmax_cutoff": "10,20", "no_share_decoder_input_output_embed": True},
        "no model with an adaptive softmax",
    ),
    (
        *("causal_lm", "rope"),
        {"decoder_input_dim": 16, "no_share_decoder_input_output_embed": True},
        "no model with projections of embeddings",
    ),
    ("masked_lm", "rope", {}, "but translation models and causal LMs"),
]


def export(trained, *more, **tokens):
    """Return the folder of an export."""
    return export_to(trained, "--to", "ctranslate2", *more, **tokens)


def sentences(*lengths):
    return [torch.randint(4, 44, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize(("family", "spec", "more"), MODELS)
@torch.no_grad()
def test_log_probabilities_are_those_of_fairseq(family, spec, more):
    """Of sentences in one batch, with the end of a sentence within one of them."""
    start = 0 if more.get("add_bos_token") else 2
    trained = checkpoint(family, spec, **more)
    folder = str(export(trained))
    names = trained.task.target_dictionary.symbols
    sources, targets = sentences(20, 9, 2), sentences(3, 12, 22)
    targets[2][11] = 2
    lines = [[names[number] for number in target] for target in targets]
    if family == "translation":
        asked = [[names[number] for number in source] for source in sources]
        found = ctranslate2.Translator(folder).score_batch(asked, lines)
    else:
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        assert tokenizer.encode(names[5]).tokens == [names[start], names[5]]
        lines = [[names[start], *line, "</s>"] for line in lines]
        found = ctranslate2.Generator(folder).score_batch(lines)
    for source, target, theirs in zip(sources, targets, found):
        given = [torch.tensor([[start, *target]])]
        if family == "translation":
            given = [torch.tensor([[*source, 2]]), torch.tensor([len(source) + 1]), *given]
        ours = trained.model(*given)[0][0].log_softmax(-1)
        ours = ours.gather(1, torch.tensor([*target, 2])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(theirs.log_probs), ours, atol=1e-4, rtol=0)


def steady_ends(trained):
    """Give padding no chance, as fairseq's search does, and ends an even one; rewrite the file."""
    decoder = trained.model.decoder
    norm = decoder.layers[-1].final_layer_norm
    norm.weight.data[0], norm.bias.data[0] = 0.0, 1.0  # a channel that is 1 wherever it is read
    rows = decoder.output_projection.weight.data
    rows[1:3] = 0.0
    rows[1, 0], rows[2, 0] = -30.0, 1.5
    state = torch.load(trained.path, weights_only=False)
    torch.save({**state, "model": trained.model.state_dict()}, trained.path)
    return trained


@pytest.mark.parametrize(
    ("spec", "beam"),
    product_of(
        some_of(["rope", "shaw+t5", "learned"], ["rope", "shaw+t5", "alibi", "t5", "learned"]),
        [1, 5],
    ),
)
def test_translations_are_those_of_fairseq(spec, beam):
    trained = steady_ends(checkpoint("translation", spec, max_target_positions=60))
    sources = sentences(*range(1, 21))
    names = trained.task.target_dictionary.symbols
    translator = ctranslate2.Translator(str(export(trained)))
    found = translator.translate_batch(
        [[names[number] for number in source] for source in sources],
        beam_size=beam,
        max_decoding_length=59,
        min_decoding_length=0,
        return_end_token=True,
        return_scores=True,
    )
    settings = GenerationConfig(beam=beam, min_len=0)
    search = trained.task.build_generator([trained.model], settings)
    ended = 0
    for source, theirs in zip(sources, found):
        tokens = torch.tensor([[*source, 2]])
        batch = {"src_tokens": tokens, "src_lengths": torch.tensor([tokens.size(1)])}
        ours = search.generate([trained.model], {"net_input": batch})[0][0]
        written = [names.index(word) for word in theirs.hypotheses[0]]
        assert written == ours["tokens"].tolist()[: len(written)]
        if written[-1] == 2:  # else fairseq forces it at the limit, and counts it
            ended += 1
            assert theirs.scores[0] == pytest.approx(ours["score"].item(), abs=1e-4)
    assert ended


@pytest.mark.parametrize("spec", ["rope", "shaw"])
@torch.no_grad()
def test_continuations_are_the_most_probable_words_of_fairseqs_model(spec):
    """Token by token with a cache there; here each word from a whole pass."""
    trained, prompts = checkpoint("causal_lm", spec), sentences(1, 4, 9)
    names = trained.task.target_dictionary.symbols
    generator = ctranslate2.Generator(str(export(trained)))
    lines = [["</s>", *(names[number] for number in prompt)] for prompt in prompts]
    found = generator.generate_batch(lines, max_length=12, include_prompt_in_result=False)
    for prompt, theirs in zip(prompts, found):
        symbols, written = [2, *prompt], [names.index(word) for word in theirs.sequences[0]]
        assert written
        for word in written if len(written) == 12 else [*written, 2]:
            assert word == trained.model(torch.tensor([symbols]))[0][0, -1].argmax()
            symbols.append(word)


@pytest.mark.parametrize(("family", "spec", "more", "why"), REFUSED)
def test_what_has_no_place_is_refused_in_a_line(family, spec, more, why, capsys):
    assert why in refuse_export(capsys, checkpoint(family, spec, **more), "--to", "ctranslate2")


def test_the_page_lists_the_encodings_that_have_a_place():
    text = (ROOT / "docs" / "exchange.md").read_text(encoding="utf-8")
    families = {"translation": to_ctranslate2.FOR_TRANSLATION}
    families["causal_lm"] = to_ctranslate2.FOR_CAUSAL_LMS
    for family, names in families.items():
        assert f"\n| {family} | `{'`, `'.join(sorted(names))}` |\n" in text


def test_weights_are_quantized():
    trained = checkpoint("translation", "rope")
    sizes = {}
    for quantization in ("float32", "float16", "int8"):
        folder = export(trained, "--quantization", quantization)
        sizes[quantization] = (folder / "model.bin").stat().st_size
    assert ctranslate2.Translator(str(folder)).compute_type.startswith("int8")
    assert sizes["int8"] < sizes["float16"] < sizes["float32"]


@pytest.mark.parametrize(
    ("family", "cuts"),
    product_of(["translation", "causal_lm"], ["sentencepiece", "tokenizers"]),
)
def test_the_example_of_a_card_needs_the_two_libraries_alone(family, cuts):
    symbols, folder = ["Un", "homme", "dort.", *WORDS], new_directory()
    if cuts == "sentencepiece":
        model = write_pieces(folder, 18, ["Un homme dort.", "Une femme court."] * 9)
        cut = sentencepiece.SentencePieceProcessor(model_file=str(model))
        symbols = [cut.id_to_piece(number) for number in range(3, len(cut))]
    data = data_bin(family, symbols)
    if cuts == "sentencepiece":
        shutil.copy(model, data / "sentencepiece.model")
    trained = steady_ends(checkpoint(family, "rope", data))
    out = export(trained, tokens="words" if cuts == "tokenizers" else str(data))
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.S)
    installed = Path(ctranslate2.__file__).parents[1]
    for name in ("ctranslate2", "numpy", "yaml", "tokenizers", "huggingface_hub"):
        for found in installed.glob(f"{name}*"):
            (folder / found.name).symlink_to(found)  # with its .libs
    code = f"import os, sys\nsys.path.append({str(folder)!r})\nos.chdir({str(out)!r})\n{code}"
    command = [sys.executable, "-I", "-S", "-c", code]  # which find the standard library alone
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    assert printed
    if (family, cuts) == ("translation", "sentencepiece"):
        translator = Translator.load(trained.path)
        assert printed == translator.translate(["Un homme dort."])[0][0].text
