"""Exported folders besides weights: tokenizers, cards whose lines run, sizes, no machine's name.

No other tests compare texts with fairseq's dictionary, run a card's lines, or read what hubs show.
"""

import importlib
import random
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoTokenizer, pipeline

from binarize import formats
from fairseq_posenc.workbench.convert.tokenizer import build_tokenizer, find_tokenization
from fairseq_posenc.workbench.translation import Translator
from tests.helpers import exchanged
from tests.helpers.commands import new_directory, run
from tests.helpers.exchanged import checkpoint, data_bin, export_to, export_words, refuse
from tests.helpers.preprocess import binarize, fairseqs_bpe, write_bpe, write_pieces
from tests.helpers.tiny_models import make_dictionary

SYLLABLES = ["ba", "ré", "ti", "nou", "ß", "ka", "lo", "1", "2", ",", "ment"]


def sentences(count=60):
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(80)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 9))) for _ in range(count)]


TEXT = [*sentences(), *(line.replace(" ", "  ") for line in sentences(20))]
HOSTILE = ["ba  ré\tti", " ba  ré ", "½ ① ﬁn x", "ba" * 20, "𝔸 it's 12", "日本", ""]
SIZES = {"bpe": 90, "unigram": 50}  # of sentencepiece models
FLAGS: list[dict[str, Any]] = [
    *({"normalization_rule_name": rule} for rule in ("identity", "nmt_nfkc")),
    {"add_dummy_prefix": False},
    {"remove_extra_whitespaces": False},
    {"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
    {"split_by_whitespace": False},
]
OTHERS = ("gpt2", "words", "characters", "characters and spaces")


def joined(line):
    return " ".join(line.split())


def tokenize(kind, flags):
    """Return a tokenization's name or files, how fairseq cuts a line, and what it decodes then."""
    folder = new_directory()
    if kind in SIZES:
        size = 400 if "byte_fallback" in flags else SIZES[kind]
        path = write_pieces(folder, size, TEXT, model_type=kind, **flags)
        model = SentencePieceProcessor(model_file=str(path))
        given = joined if flags.get("remove_extra_whitespaces", True) else str
        return (
            path,
            lambda line: [model.id_to_piece(n) for n in model.encode(given(line))],
            lambda line: model.decode(model.encode(line)),
        )
    if kind == "gpt2":  # a dictionary has the numbers of pieces
        encode = fairseqs_bpe(write_bpe(folder, sentences(), merges=6)).encode
        return folder, lambda line: [*map(str, encode(line))], str
    if kind == "words":
        return kind, str.split, joined
    space, read = ("▁", " ") if kind == "characters and spaces" else ("", "")
    return "characters", lambda x: space.join(x.split()), lambda x: read.join(x.split())


@pytest.mark.parametrize(
    ("kind", "flags"),
    [*((kind, flags) for kind in SIZES for flags in FLAGS), *((kind, {}) for kind in OTHERS)],
    ids=str,
)
def test_numbers_are_those_of_the_dictionary_and_are_decoded(kind, flags):
    """Also where it lacks pieces; decoded where it has all."""
    tokens, cut, decode = tokenize(kind, flags)
    for known in (sentences(20), TEXT):
        dictionary = make_dictionary(chain(*map(cut, known), ["<mask>"]))
        dictionary.finalize()
        tokenizer = build_tokenizer(tokens, dictionary)
        for line in [*TEXT, *HOSTILE]:
            found = tokenizer.encode(line, add_special_tokens=False).ids
            # Later numbers are unknown to a model.
            read = [i if i < len(dictionary) else dictionary.unk() for i in found]
            assert read == [*map(dictionary.index, cut(line))]
    for line in TEXT:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == decode(line)


def test_a_tokenizer_loads_with_its_special_symbols():
    folder, cut, _ = tokenize("gpt2", {})
    trained = checkpoint("masked_lm", "learned", data_bin(range(262)))
    out = export_to(trained, "--tokens", folder)
    tokenizer, find = AutoTokenizer.from_pretrained(out), trained.task.source_dictionary.index
    special = {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "cls": 0, "sep": 2, "mask": find("<mask>")}
    assert {name: getattr(tokenizer, f"{name}_token_id") for name in special} == special
    before, after = ([*map(find, cut(part))] for part in ("ba", " 1 é 日本"))
    expected = [0, *before, find("<mask>"), *after, 2]
    assert tokenizer("ba <mask> 1 é 日本")["input_ids"] == expected
    assert tokenizer.decode(expected, skip_special_tokens=True) == "ba 1 é 日本"
    assert '_up_tokenization_spaces": false' in (out / "tokenizer_config.json").read_text()
    scores = trained.model(torch.tensor([expected]))[0][0, len(before) + 1]
    filled = pipeline("fill-mask", str(out))("ba <mask> 1 é 日本")
    assert [answer["token"] for answer in filled] == scores.topk(5).indices.tolist()


@pytest.mark.parametrize(
    ("kind", "flags", "symbols", "message"),
    [
        ("bpe", {"treat_whitespace_as_suffix": True}, [1], "spaces at the ends"),
        ("bpe", {"user_defined_symbols": ["<x>"]}, [1], "user-defined symbols"),
        ("bpe", {"byte_fallback": True}, [1], "bytes is not supported; use --tokens none"),
        # Pieces are there by their numbers in GPT-2's file; one is so by its name as well.
        ("gpt2", {}, [1, 2, 3], "dict.txt: lacks 259 pieces of the tokenizer"),
        ("gpt2", {}, [*range(262), "!"], "has pieces of the tokenizer twice (1); use --t"),
        ("data", {}, [1], "name the tokenizer with --tokens"),
        ("characters", {}, ["a", *range(10, 40)], "characters: are 1 of the dictionary's 3"),
    ],
)
def test_tokens_that_no_tokenizer_has_are_refused(kind, flags, symbols, message, capsys):
    trained = checkpoint("causal_lm", "learned", data_bin(symbols))
    known = {"data": trained.data, "characters": kind}
    tokens = known.get(kind) or tokenize(kind, flags)[0]
    to = "ctranslate2" if "twice" in message else "transformers"  # later ids would fit neither
    assert message in refuse(capsys, *export_words(trained, "--tokens", tokens, "--to", to))
    assert not [*export_to(trained, "--tokens", "none").glob("tokenizer*")]


def test_a_data_folder_says_what_cut_its_text(tmp_path):
    (tmp_path / "text").write_text("one two\n")
    for way, words in (("words", ["--words"]), ("characters", [])):
        given = ["--train", tmp_path / "text", "--out", tmp_path / way, *words]
        binarize(formats.plain, *given, characters=not words)
        assert find_tokenization(None, tmp_path / way, "") == way
    (tmp_path / "sentencepiece.de.model").touch()
    assert find_tokenization(None, tmp_path, "de").name == "sentencepiece.de.model"
    assert find_tokenization("words", tmp_path, "de") == "words"


LABELS = {  # what the hub reads of a card
    "masked_lm": {"pipeline_tag": "fill-mask"},
    "causal_lm": {"pipeline_tag": "text-generation"},
    "translation": {"language": ["de", "en"]},
}
PROMPT = "Un homme dort."
TEXTS = [PROMPT, "Une femme court.", "Un dort."]  # the pieces are of the first two
# Options of CTranslate2, which draws tokens, or gives an end another probability than fairseq.
GREEDY = {"sampling_topk=10": "sampling_topk=1", "beam_size=5": "beam_size=1"}
UNTIED = {"no_share_decoder_input_output_embed": True}


def write_data(sides):
    """Write data with pieces for each side, which have other numbers in the target."""
    data, cuts = new_directory(), []
    for number, side in enumerate(sides):
        model = data / f"sentencepiece{side}.model"
        write_pieces(new_directory(), 18 - number, TEXTS[:2] * 9).rename(model)
        cuts.append(SentencePieceProcessor(model_file=str(model)))
        pieces = [f"{cuts[-1].id_to_piece(n)} 1\n" for n in range(3, len(cuts[-1]))]
        text = "".join(reversed(pieces) if number else pieces)
        (data / f"dict{side}.txt").write_text(text, encoding="utf-8")
    return data, cuts


def run_alone(code):
    """Run lines that find CTranslate2, tokenizers and what those need; return what they print."""
    folder = new_directory()
    installed = Path(importlib.import_module("ctranslate2").__file__).parents[1]
    for name in ("ctranslate2", "numpy", "yaml", "tokenizers", "huggingface_hub"):
        for found in installed.glob(f"{name}*"):
            (folder / found.name).symlink_to(found)  # with its .libs
    code = f"import sys\nsys.path.append({str(folder)!r})\n{code}"
    return run("python", "-I", "-S", "-c", code, cwd=Path()).out  # the standard library alone


def continue_text(trained, ids, cut):
    """Return a text with what the model writes after it, up to an end or the model's limit."""
    ids = [*ids]
    while len(ids) < trained.model.max_positions() and 2 not in ids[1:]:
        ids.append(int(trained.model(torch.tensor([ids]))[0][0, -1].argmax()))
    return cut.decode([trained.task.source_dictionary[n] for n in ids if n > 3])


@pytest.mark.parametrize(
    ("library", "family", "spec", "more", "before", "after"),
    [
        ("transformers", "masked_lm", "rope", {}, [0], [2]),
        ("transformers", "causal_lm", "rope", UNTIED, [2], []),
        ("transformers", "translation", "rope", {}, [], [2]),
        ("ctranslate2", "causal_lm", "lerope,shaw+shaw_values", UNTIED, [2], []),
        ("ctranslate2", "causal_lm", "alibi", {**UNTIED, "add_bos_token": True}, [0], []),
        ("ctranslate2", "translation", "shaw+t5", {}, [], [2]),
    ],
)
def test_a_card_says_what_the_model_is_its_lines_run_and_nothing_names_the_machine(
    library, family, spec, more, before, after, monkeypatch, capsys
):
    """Texts are written as in fairseq; special tokens are ``before`` and ``after`` them."""
    data, (cut, *target) = write_data([".de", ".en"] if family == "translation" else [""])
    private = {"save_dir": "/private/runs", "restore_file": "/private/x.pt"}
    trained = checkpoint(family, spec, data, **private, **more)
    if family != "masked_lm":
        exchanged.let_sentences_end(trained, 0.0 if family == "causal_lm" else 1.3)
    state = torch.load(trained.path, weights_only=False)
    state["optimizer_history"][-1]["num_updates"] = 12345
    torch.save(state, trained.path)
    folder = export_to(trained, "--to", library, "--tokens", data)
    card = ModelCard.load(folder / "README.md")
    labels = LABELS[family] | {"library_name": library, "tags": ["fairseq", "position-encoding"]}
    assert card.data.to_dict() == labels
    size = sum(weight.numel() for weight in trained.model.parameters())
    for row in (f"parameters | {size:,}", f"data | `{data.name}`", "updates | 12,345"):
        assert f"\n| {row} |\n" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
    beam = 5
    if library == "ctranslate2":
        (option,) = (x for x in GREEDY if x in code)
        code, beam = code.replace(option, GREEDY[option]), 1
    monkeypatch.chdir(folder)
    for text in TEXTS:
        symbols = cut.encode(text, out_type=str)
        ids = [*before, *map(trained.task.source_dictionary.index, symbols), *after]
        assert Tokenizer.from_file("tokenizer.json").encode(text).ids == ids
        for other in target:
            symbols = other.encode(text, out_type=str)
            ids_of_target = [*map(trained.task.target_dictionary.index, symbols), 2]
            assert Tokenizer.from_file("target/tokenizer.json").encode(text).ids == ids_of_target
        lines = code.replace(PROMPT, text)
        if library == "ctranslate2":
            printed = run_alone(lines)
        else:
            capsys.readouterr()
            exec(lines, found := {})
            printed = capsys.readouterr().out
            side = "left" if family == "causal_lm" else "right"  # left: a batch can be continued
            assert found["tokenizer"].padding_side == side
        expected = ""
        if family == "causal_lm":
            expected = continue_text(trained, ids, cut)
        elif family == "translation":
            expected = Translator.load(trained.path).translate([text], beam)[0][0].text
        assert expected in printed
        assert bool(expected) == bool(printed)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # all are for the same readers
    for secret in ("/private", str(data), str(trained.path.parent)):
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_weights_are_quantized():
    trained, sizes = checkpoint("translation", "rope"), []
    for kind in ("int8", "float16", "float32"):
        folder = export_to(trained, "--to", "ctranslate2", "--quantization", kind)
        engine = importlib.import_module("ctranslate2").Translator(str(folder))
        assert engine.compute_type.startswith("int8") == (kind == "int8")
        sizes.append((folder / "model.bin").stat().st_size)
    assert sizes == sorted({*sizes})


def test_the_page_lists_the_encodings_that_have_a_place_in_ctranslate2():
    pytest.importorskip("ctranslate2")
    module = importlib.import_module("fairseq_posenc.workbench.convert.to_ctranslate2")
    text = (Path(__file__).parents[3] / "docs/exchange.md").read_text(encoding="utf-8")
    families = {"translation": module.FOR_TRANSLATION, "causal_lm": module.FOR_CAUSAL_LMS}
    for family, names in families.items():
        assert f"\n| {family} | `{'`, `'.join(sorted(names))}` |\n" in text
