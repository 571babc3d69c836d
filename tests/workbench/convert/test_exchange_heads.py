"""Fine-tuned models decide in transformers as they do in fairseq."""

from __future__ import annotations

import csv

import pytest
import torch

from fairseq_posenc.workbench.finetuning.glue.worker import predict
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import checkpoint
from tests.helpers.glue_files import DATA, start
from tests.helpers.products import product_of
from tests.workbench.convert.exchange_reader import answer
from tests.workbench.convert.test_exchange import export, padded
from tests.workbench.finetuning.test_glue_commands import data as glue_data
from tests.workbench.finetuning.test_squad_commands import files as squad_files

pytestmark = pytest.mark.slow
NATIVE = ("learned", {"pooler_activation_fn": "tanh"})
OWN = ("m4m+rope", {"attention_directions": "lr,rl", "pooler_activation_fn": "relu"})


def rows(raw, task, columns):
    with open(raw / task / "dev.tsv", encoding="utf-8") as file:
        lines = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if task == "CoLA":
        return [line[3] for line in lines]
    return [[line[lines[0].index(column)] for column in columns] for line in lines[1:]]


@pytest.mark.parametrize(("spec", "more", "task"), product_of([NATIVE, OWN], ["CoLA", "STS-B"]))
def test_no_decision_on_a_dev_set_changes(task, spec, more):
    folder = glue_data()
    data, tokens = folder / "glue" / task, folder / "pieces.model"
    no_decision_changes(folder / "raw", task, data, tokens, spec, more)


@pytest.mark.skipif(not (DATA / "glue_data").is_dir(), reason="GLUE's files are not here")
@pytest.mark.parametrize(("spec", "more"), [NATIVE, OWN])
def test_no_decision_on_the_published_dev_set_changes(spec, more):
    bpe, out = DATA / "gpt2_bpe", new_directory()
    tokens = ["--encoder-json", bpe / "encoder.json", "--vocab-bpe", bpe / "vocab.bpe"]
    words = ["--tasks", "CoLA", *tokens, "--dict", bpe / "dict.txt"]
    start("glue", [DATA / "glue_data", "--out", out, *words])
    no_decision_changes(DATA / "glue_data", "CoLA", out / "CoLA", bpe, spec, more)


def no_decision_changes(raw, task, data, tokens, spec, more):
    more = {**more, "max_positions": 64, "max_update": 2}
    trained = checkpoint("masked_lm", spec, data, "glue", **more)
    out = export(trained, tokens=str(tokens))
    ours, _ = predict(trained.model, trained.task, "valid")
    texts = rows(raw, task, ("sentence1", "sentence2"))
    assert len(texts) == len(ours)
    asked = {"auto": "AutoModelForSequenceClassification", "texts": texts}
    ids = answer(str(out), asked)["ids"]
    longest = max(map(len, ids))
    tokens = torch.tensor([each + [1] * (longest - len(each)) for each in ids])
    asked["inputs"] = {"input_ids": tokens, "attention_mask": tokens.ne(1).long()}
    theirs = answer(str(out), asked)["scores"]
    torch.testing.assert_close(theirs, ours.cpu(), atol=1e-5, rtol=1e-5)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))


@pytest.mark.parametrize(("spec", "more"), [NATIVE, OWN])
def test_answers_begin_and_end_at_the_same_tokens(spec, more):
    data = squad_files().data
    trained = checkpoint("masked_lm", spec, data, "squad", **{**more, "max_positions": 48})
    out = export(trained, tokens=str(data))
    asked = {"auto": "AutoModelForQuestionAnswering"}
    for side in ("left", "right"):
        tokens, real = padded(side, longest=48)
        asked["inputs"] = {"input_ids": tokens, "attention_mask": real.long()}
        theirs = answer(str(out), asked)["spans"]
        with torch.no_grad():
            ours = trained.model(tokens, span_scores=True)
        for one, other in zip(theirs, ours):
            torch.testing.assert_close(one[real], other[real], atol=1e-5, rtol=1e-5)
