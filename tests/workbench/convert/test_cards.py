"""Exported folders besides weights: a card whose lines run, sizes, and no machine's name.

Nothing else runs these lines, or reads what the hub shows.
"""

import importlib
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers.pipelines import SUPPORTED_TASKS

from fairseq_posenc.workbench.translation import Translator
from tests.helpers.commands import new_directory, run
from tests.helpers.exchanged import checkpoint, ctranslate2, data_bin, export_to
from tests.helpers.preprocess import write_pieces
from tests.workbench.convert.test_parity import let_sentences_end

IMPORTED = {
    "transformers": {"transformers", "fairseq_posenc"},
    "ctranslate2": {"ctranslate2", "tokenizers"},
}
WRITES = {"pipeline_tag": "text-generation"}
LANGUAGES = {"language": ["de", "en"]}
TEXT = ["Un homme dort.", "Une femme court."]


def run_alone(code: str) -> str:
    """Run lines that find CTranslate2, tokenizers and what those need; return what they print."""
    folder, installed = new_directory(), Path(ctranslate2().__file__).parents[1]
    for name in ("ctranslate2", "numpy", "yaml", "tokenizers", "huggingface_hub"):
        for found in installed.glob(f"{name}*"):
            (folder / found.name).symlink_to(found)  # with its .libs
    code = f"import sys\nsys.path.append({str(folder)!r})\n{code}"
    how = ["-I", "-S", "-c", code]  # which find the standard library alone
    return run("python", *how, cwd=Path()).out.strip()


@pytest.mark.parametrize(
    ("library", "family", "more", "labels", "before", "after"),
    [
        ("transformers", "masked_lm", {}, {"pipeline_tag": "fill-mask"}, [0], [2]),
        ("transformers", "causal_lm", {}, WRITES, [2], []),
        ("transformers", "translation", {}, LANGUAGES, [], [2]),
        ("ctranslate2", "causal_lm", {}, WRITES, [2], []),
        ("ctranslate2", "causal_lm", {"add_bos_token": True}, WRITES, [0], []),
        ("ctranslate2", "translation", {}, LANGUAGES, [], [2]),
    ],
)
def test_a_card_says_what_the_model_is_its_lines_run_and_nothing_names_the_machine(
    library, family, more, labels, before, after, monkeypatch, capsys
):
    names = ["de.model", "en.model"] if family == "translation" else ["model"]
    models = [write_pieces(new_directory(), size, TEXT * 9) for _, size in zip(names, (18, 17))]
    cuts = [SentencePieceProcessor(model_file=str(model)) for model in models]
    pieces = dict.fromkeys(cut.id_to_piece(n) for cut in cuts for n in range(3, len(cut)))
    data = data_bin(family, [*pieces])
    for name, model in zip(names, models):
        shutil.copy(model, data / f"sentencepiece.{name}")
    if family == "translation":  # pieces have other numbers in the target
        shutil.copy(data_bin(family, [*reversed(pieces)]) / "dict.en.txt", data)
    places = {"save_dir": "/private/runs", "restore_file": "/private/x.pt"}
    trained = checkpoint(family, "rope", data, **places, **more)
    if family != "masked_lm":
        let_sentences_end(trained)
    folder = export_to(trained, "--to", library, "--tokens", data)
    card = ModelCard.load(folder / "README.md")
    labels = {**labels, "library_name": library, "tags": ["fairseq", "position-encoding"]}
    assert card.data.to_dict() == labels
    assert labels.get("pipeline_tag", "fill-mask") in SUPPORTED_TASKS
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
    if (library, family) == ("ctranslate2", "causal_lm"):
        assert f'[["{trained.task.source_dictionary[before[0]]}", *pieces]]' in code
    assert {*re.findall(r"^(?:from|import) (\w+)", code, re.M)} == IMPORTED[library]
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(code, found := {})
    printed = capsys.readouterr().out.strip()
    assert bool(printed) == (family != "masked_lm")
    side = "left" if family == "causal_lm" else "right"  # left, so that a batch can be continued
    assert library != "transformers" or found["tokenizer"].padding_side == side
    if family == "translation":
        assert Translator.load(trained.path).translate(TEXT[:1])[0][0].text in printed
        assert library != "ctranslate2" or run_alone(code) == printed
    dictionaries = trained.task.source_dictionary, trained.task.target_dictionary
    for place, dictionary, cut in zip((".", "target"), dictionaries, cuts):
        tokenizer = Tokenizer.from_file(f"{place}/tokenizer.json")
        for text in (TEXT[0], "Un dort."):  # and one on which the pieces were not trained
            symbols = map(dictionary.index, cut.encode(text, out_type=str))
            assert tokenizer.encode(text).ids == [*before, *symbols, *after]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1  # all are for the same readers
    for secret in ("/private", str(trained.data), str(trained.path.parent)):
        assert not [path for path in files if secret.encode() in path.read_bytes()]


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
    text = (Path(__file__).parents[3] / "docs/exchange.md").read_text(encoding="utf-8")
    families = {"translation": module.FOR_TRANSLATION, "causal_lm": module.FOR_CAUSAL_LMS}
    for family, names in families.items():
        assert f"\n| {family} | `{'`, `'.join(sorted(names))}` |\n" in text
