"""SQuAD from raw file to score: a real command that cannot take what the one before it wrote."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fairseq_posenc.specs import parse
from fairseq_posenc.tasks.squad.databin import open_data_bin
from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.finetuning.squad.command import compose_training
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.commands import halting, kill_command, made_once, new_directory, refused, run
from tests.helpers.exchanged import checkpoint
from tests.helpers.preprocess import write_bpe

pytestmark = pytest.mark.slow
FACTS = [
    ("Zoë Müller", "Århus", "1912", "naïve physics"),
    ("Łukasz Żak", "Gdańsk", "1877", "the cello"),
    ("Søren Ødegård", "北京 (Běijīng)", "1933", "“modern” chess"),
    ("Ana Núñez", "A Coruña", "1850", "ﬁne arts"),
    ("İpek Çelik", "Eskişehir", "1901", "½-tone music 😀"),
]
EPOCHS = 30
SPEC = "learned+m4(max_distance=30)"
SIZES = ["--max-length", 48, "--stride", 16, "--max-question", 16]


TEXT = (
    "It is known that  {0} was born in {1} in the year {2}. For most of a life that was long, and "
    "rich in friends, the subject of study was {3}, no less."
)
ASKED = ("In which town was", "What was the year of", "Which subject of study had", "Who knows why")


def write_squad(path):
    """Write a file of SQuAD 2.0: of each fact, 3 questions with an answer, 1 without.

    Returns all texts of it.
    """
    paragraphs, texts = [], []
    for name, *answers in FACTS:
        context = TEXT.format(name, *answers)
        qas = [
            {
                "id": f"{name} {asked}",
                "question": f"{asked} {name}?",
                "answers": [{"text": x, "answer_start": context.index(x)} for x in found],
                "is_impossible": not found,
            }
            for asked, found in zip(ASKED, [*([x] for x in answers), []])
        ]
        paragraphs.append({"context": context, "qas": qas})
        texts += [context, *(qa["question"] for qa in qas)]
    content = {"version": "v2.0", "data": [{"title": "people", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(content), encoding="utf-8")
    return texts


class Files(NamedTuple):
    """What the commands need."""

    raw: Path
    data: Path
    pretrained: Path
    preprocess: list[Any]


@made_once
def files():
    """Return the raw file, the data made of it, and a pre-trained model (untrained, but whole)."""
    folder = new_directory()
    write_bpe(folder, write_squad(folder / "people.json"), merges=400)
    command = ["preprocess", "squad", *SIZES]
    command += ["--train", folder / "people.json", "--valid", folder / "people.json"]
    command += ["--encoder-json", folder / "encoder.json", "--vocab-bpe", folder / "vocab.bpe"]
    command += ["--dict", folder / "dict.txt", "--out", folder / "bin"]
    done = run("fairseq-posenc", *command)
    assert "0 questions left out, 0 answers moved, 0 answers in no window" in done.out
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}
    sizes |= {"max_positions": 48, "tokens_per_sample": 48}
    model = checkpoint("masked_lm", SPEC, folder, attention_directions="lr", **sizes)
    return Files(folder / "people.json", folder / "bin", model.path, command)


SETTINGS = [
    *("dataset.batch_size=8", "dataset.num_workers=0", "dataset.disable_validation=true"),
    *("optimization.update_freq=[1]", "optimization.lr=[3e-3]", f"optimization.max_epoch={EPOCHS}"),
    *("model.dropout=0", "model.attention_dropout=0"),
    *("checkpoint.save_interval=10", "checkpoint.save_interval_updates=0"),
]


def train_words(out, *more):
    made = files()
    words = ["squad", "train", "--checkpoint", made.pretrained, "--data", made.data, "--out", out]
    return [*words, *(word for change in (*SETTINGS, *more) for word in ("--set", change))]


@made_once
def trained():
    """Return a model whose training was killed after its first checkpoint, and then went on.

    While it trains, another command in its folder is refused.
    """
    out = new_directory() / "run"
    environment, halted = halting(out)

    def is_refused():
        if halted.exists():
            second = run("fairseq-posenc", *train_words(out), fails=True).error()
            assert re.match(rf"{out}: process \d+ on .*, since ", second)
        return halted.exists()

    kill_command(train_words(out), is_refused, out, env=environment)
    return out, run("fairseq-posenc", *train_words(out))


def test_a_training_goes_on_where_it_was_interrupted():
    out, done = trained()
    log = (out / "train.log").read_text(encoding="utf-8")
    assert "span_head.scores.weight starts fresh" in log
    assert f"Loaded checkpoint {out}/checkpoint_last.pt (epoch " in log
    assert log.count("loading pretrained model from") == 1
    assert f"encoder position encoding: {SPEC} | directions: lr x1 both" in log
    assert f"{out}: resuming from update " in done.err
    state = torch.load(out / "checkpoint_last.pt")
    windows = open_data_bin(files().data).train_windows
    assert state["optimizer_history"][-1]["num_updates"] == EPOCHS * math.ceil(windows / 8)
    assert windows > 20  # some paragraphs are longer than a window


def test_twenty_questions_learnt_by_heart_are_answered(tmp_path, capsys):
    out, _ = trained()
    arguments = ["--checkpoint", out / "checkpoint_last.pt", "--questions", files().raw]
    done = run("fairseq-posenc", "squad", "predict", *arguments, "--out", tmp_path)
    figures = json.loads(done.out)
    assert figures["total"] == 20
    assert figures["exact"] >= 95
    assert figures["HasAns_exact"] >= 93
    assert figures["best_exact"] >= figures["exact"]
    found = {
        name: json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("predictions", "answers", "null_odds", "score")
    }
    assert found["score"]["spec"] == SPEC
    assert found["score"]["figures"] == {"scores": [figures]}
    raw = json.loads(files().raw.read_text(encoding="utf-8"))["data"][0]["paragraphs"]
    for paragraph in raw:
        for qa in paragraph["qas"]:
            odds = found["null_odds"][qa["id"]]
            answer = found["answers"][qa["id"]]
            assert found["predictions"][qa["id"]] == ("" if odds > 0 else answer)
            assert answer in paragraph["context"]
            assert answer

    # The official figures of the written files are those that were printed.
    def scored(*words):
        assert cli.main(["squad", "score", str(files().raw), *map(str, words)]) == 0
        return capsys.readouterr().out

    odds = ["--na-prob-file", tmp_path / "null_odds.json", "--na-prob-thresh", 0]
    assert scored(tmp_path / "answers.json", *odds) == done.out
    plain = json.loads(scored(tmp_path / "predictions.json"))
    assert plain == {key: value for key, value in figures.items() if "best" not in key}


def test_wrong_input_is_shown_in_one_line(tmp_path, capsys):
    made = files()
    predict = ["squad", "predict", "--questions", made.raw, "--out", tmp_path, "--checkpoint"]
    assert "was not fine-tuned on SQuAD" in refused(capsys, *predict, made.pretrained)
    assert refused(capsys, *predict, "none.pt") == "--checkpoint none.pt: no such file"
    half = refused(capsys, *predict, "none.pt", "--fp16")
    assert half == "--fp16 is for GPUs, and torch finds none here; leave it out"
    words = ["squad", "train", "--checkpoint", made.pretrained, "--out", tmp_path, "--data"]
    assert "was not made by fairseq-posenc preprocess squad" in refused(capsys, *words, tmp_path)
    out, _ = trained()
    other = refused(capsys, *train_words(out, "common.seed=2"))
    assert "was made with other common, seed: 1, not 2; name another folder" in other
    again = run("fairseq-posenc", *made.preprocess).err
    assert "exists already, made from the same inputs with the same options" in again


def configured(spec=SPEC, version="1.1", changes=()):
    pretrained = read_pretrained(files().pretrained)._replace(spec=parse(spec))
    data_bin = open_data_bin(files().data)._replace(version=version, train_windows=87_777)
    return compose_training(pretrained, data_bin, Path("run"), changes)[0]


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_the_recipe_is_the_papers(version):
    found = configured(version=version)
    assert (found.optimization.lr, found.optimization.max_epoch) == ([3e-5], 2)
    assert found.dataset.batch_size * found.optimization.update_freq[0] == 48
    updates = 2 * math.ceil(math.ceil(87_777 / 12) / 4)
    assert (found.optimization.max_update, found.lr_scheduler.warmup_updates) == (updates, 219)
    assert (found.model._name, found.model.encoder_layers) == ("roberta_none_tiny", 2)
    assert (found.model.dropout, found.optimizer.weight_decay) == (0.1, 0.01)
    assert found.common.fp16
    assert found.checkpoint.finetune_from_model == str(files().pretrained.resolve())
    # Four GPUs share the batch.
    options = ["distributed_training.distributed_world_size=4", "optimization.update_freq=[1]"]
    assert configured(version=version, changes=options).optimization.max_update == updates


def test_encodings_that_diverged_have_a_smaller_rate_unless_the_user_sets_one():
    """M4M's paper, section 5.3: Raffel diverged at 3e-5, and TUPE "suffers from the same issue"."""
    for encoding in ("raffel", "tupe(tie_projections=true)", "raffel(per_head=true)+learned"):
        assert configured(encoding).optimization.lr == [2.5e-5]
    assert configured("raffel", changes=["optimization.lr=[1e-4]"]).optimization.lr == [1e-4]
