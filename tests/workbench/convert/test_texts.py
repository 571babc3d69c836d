"""Exported folders besides weights: tokenizers, cards whose lines run, sizes, no machine's name.

No other tests compare texts with fairseq's dictionary, run a card's lines, or read what hubs show.
"""

import importlib
import random
import re
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoTokenizer, pipeline
from transformers.pipelines import SUPPORTED_TASKS

from binarize import formats
from fairseq_posenc.workbench.convert.tokenizer import build_tokenizer, find_tokenization
from fairseq_posenc.workbench.translation import Translator
from tests.helpers.commands import new_directory, run
from tests.helpers.exchanged import checkpoint, data_bin, export_to, export_words, refuse
from tests.helpers.preprocess import binarize, fairseqs_bpe, write_bpe, write_pieces
from tests.helpers.tiny_models import make_dictionary
from tests.workbench.convert.test_parity import let_sentences_end

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
    tokenizer, dictionary = AutoTokenizer.from_pretrained(out), trained.task.source_dictionary
    for line in ["ba tiba", "1 é", "日本"]:
        expected = [0, *map(dictionary.index, cut(line)), 2]
        assert tokenizer(line)["input_ids"] == expected
        assert tokenizer.decode(expected, skip_special_tokens=True) == line
    assert '_up_tokenization_spaces": false' in (out / "tokenizer_config.json").read_text()
    mask = dictionary.index("<mask>")
    special = {"bos": 0, "pad": 1, "eos": 2, "unk": 3, "cls": 0, "sep": 2, "mask": mask}
    assert {name: getattr(tokenizer, f"{name}_token_id") for name in special} == special
    before, after = ([*map(dictionary.index, cut(part))] for part in ("ba", " 1"))
    masked = torch.tensor([[0, *before, mask, *after, 2]])
    scores = trained.model(masked)[0][0, len(before) + 1]
    filled = pipeline("fill-mask", str(out))("ba <mask> 1")
    assert [answer["token"] for answer in filled] == scores.topk(5).indices.tolist()


@pytest.mark.parametrize(
    ("kind", "flags", "symbols", "message"),
    [
        ("bpe", {"treat_whitespace_as_suffix": True}, [], "spaces at the ends"),
        ("bpe", {"user_defined_symbols": ["<x>"]}, [], "user-defined symbols"),
        ("bpe", {"byte_fallback": True}, [], "single bytes is not supported; use --tokens none"),
        # Pieces are there by their numbers in GPT-2's file; one is so by its name as well.
        ("gpt2", {}, [1, 2, 3], "dict.txt: lacks 259 pieces of the tokenizer"),
        ("gpt2", {}, [*range(262), "!"], "has pieces of the tokenizer twice (1): --tokens"),
        ("data", {}, [], "name the tokenizer with --tokens"),
    ],
)
def test_tokens_that_no_tokenizer_has_are_refused(kind, flags, symbols, message, capsys):
    trained = checkpoint("masked_lm", "learned", data_bin(symbols))
    tokens = trained.data if kind == "data" else tokenize(kind, flags)[0]
    assert message in refuse(capsys, *export_words(trained, "--tokens", tokens))
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
IMPORTED = {
    "transformers": {"transformers", "fairseq_posenc"},
    "ctranslate2": {"ctranslate2", "tokenizers"},
}
PROMPT, MORE = "Un homme dort.", "Une femme court."


def run_alone(code):
    """Run lines that find CTranslate2, tokenizers and what those need; return what they print."""
    folder = new_directory()
    installed = Path(importlib.import_module("ctranslate2").__file__).parents[1]
    for name in ("ctranslate2", "numpy", "yaml", "tokenizers", "huggingface_hub"):
        for found in installed.glob(f"{name}*"):
            (folder / found.name).symlink_to(found)  # with its .libs
    code = f"import sys\nsys.path.append({str(folder)!r})\n{code}"
    how = ["-I", "-S", "-c", code]  # which find the standard library alone
    return run("python", *how, cwd=Path()).out.strip()


@pytest.mark.parametrize(
    ("library", "family", "more", "before", "after"),
    [
        ("transformers", "masked_lm", {}, [0], [2]),
        ("transformers", "causal_lm", {}, [2], []),
        ("transformers", "translation", {}, [], [2]),
        ("ctranslate2", "causal_lm", {}, [2], []),
        ("ctranslate2", "causal_lm", {"add_bos_token": True}, [0], []),
        ("ctranslate2", "translation", {}, [], [2]),
    ],
)
def test_a_card_says_what_the_model_is_its_lines_run_and_nothing_names_the_machine(
    library, family, more, before, after, monkeypatch, capsys
):
    """With a sentencepiece model for each language; special tokens are ``before`` and ``after``."""
    data, cuts = new_directory(), []
    for side, size in {".de": 18, ".en": 17}.items() if family == "translation" else [("", 18)]:
        model = data / f"sentencepiece{side}.model"
        shutil.copy(write_pieces(new_directory(), size, [PROMPT, MORE] * 9), model)
        cuts.append(SentencePieceProcessor(model_file=str(model)))
        pieces = [f"{cuts[-1].id_to_piece(n)} 1\n" for n in range(3, len(cuts[-1]))]
        order = -1 if side == ".en" else 1  # pieces have other numbers in the target
        (data / f"dict{side}.txt").write_text("".join(pieces[::order]), encoding="utf-8")
    private = {"save_dir": "/private/runs", "restore_file": "/private/x.pt"}
    trained = checkpoint(family, "rope", data, **private, **more)
    if family != "masked_lm":
        let_sentences_end(trained)
    state = torch.load(trained.path, weights_only=False)
    state["optimizer_history"][-1]["num_updates"] = 12345
    torch.save(state, trained.path)
    folder = export_to(trained, "--to", library, "--tokens", data)
    card = ModelCard.load(folder / "README.md")
    labels = LABELS[family] | {"library_name": library, "tags": ["fairseq", "position-encoding"]}
    assert card.data.to_dict() == labels
    assert labels.get("pipeline_tag", "fill-mask") in SUPPORTED_TASKS
    size = sum(weight.numel() for weight in trained.model.parameters())
    for row in (f"parameters | {size:,}", f"data | `{data.name}`", "updates | 12,345"):
        assert f"\n| {row} |\n" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
    if (library, family) == ("ctranslate2", "causal_lm"):
        assert f'[["{trained.task.source_dictionary[before[0]]}", *pieces]]' in code
    assert {*re.findall(r"^(?:from|import) (\w+)", code, re.M)} == IMPORTED[library]
    assert code.count("import ") == len(IMPORTED[library])  # none further down
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(code, found := {})
    printed = capsys.readouterr().out.strip()
    assert bool(printed) == (family != "masked_lm")
    side = "left" if family == "causal_lm" else "right"  # left, so that a batch can be continued
    assert library != "transformers" or found["tokenizer"].padding_side == side
    if family == "translation":
        assert Translator.load(trained.path).translate([PROMPT])[0][0].text in printed
        assert library != "ctranslate2" or run_alone(code) == printed
    dictionaries = trained.task.source_dictionary, trained.task.target_dictionary
    for place, dictionary, cut in zip((".", "target"), dictionaries, cuts):
        tokenizer = Tokenizer.from_file(f"{place}/tokenizer.json")
        for text in (PROMPT, "Un dort."):  # and one on which the pieces were not trained
            symbols = map(dictionary.index, cut.encode(text, out_type=str))
            assert tokenizer.encode(text).ids == [*before, *symbols, *after]
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
