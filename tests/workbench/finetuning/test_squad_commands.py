"""SQuAD from raw file to score: each real command takes what the one before it has written."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fairseq_posenc.folders import LOCK
from fairseq_posenc.specs import parse
from fairseq_posenc.tasks.squad.databin import Limits, SquadDataBin, open_data_bin
from fairseq_posenc.workbench import cli
from fairseq_posenc.workbench.finetuning.squad.command import compose_training
from fairseq_posenc.workbench.loading.pretrained import Pretrained
from tests.helpers.commands import halting, made_once, new_directory, refused, run, script
from tests.helpers.exchanged import checkpoint
from tests.helpers.preprocess import write_bpe
from tests.helpers.waiting import is_locked, wait_until

slow = pytest.mark.slow
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


def write_squad(path):
    """Write a file of SQuAD 2.0: 5 paragraphs, in each 3 questions with an answer, 1 without.

    Returns all texts of it.
    """
    paragraphs = []
    for name, town, year, subject in FACTS:
        context = (
            f"It is known that  {name} was born in {town} in the year {year}. For most of a life "
            f"that was long, and rich in friends, the subject of study was {subject}, no less."
        )
        qas = [
            {
                "id": f"{name} {asked}",
                "question": f"{asked} {name}?",
                "answers": [{"text": found, "answer_start": context.index(found)}] if found else [],
                "is_impossible": not found,
            }
            for asked, found in (
                ("In which town was", town),
                ("What was the year of", year),
                ("Which subject of study had", subject),
                ("Who knows why", ""),
            )
        ]
        paragraphs.append({"context": context, "qas": qas})
    content = {"version": "v2.0", "data": [{"title": "people", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(content), encoding="utf-8")
    asked = [qa["question"] for paragraph in paragraphs for qa in paragraph["qas"]]
    return [*(paragraph["context"] for paragraph in paragraphs), *asked]


class Files(NamedTuple):
    """What the commands need."""

    raw: Path
    data: Path
    pretrained: Path
    preprocess: list[str]


@made_once
def files():
    """Return the raw file, the data made of it, and a pre-trained model (untrained, but whole)."""
    folder = new_directory()
    write_bpe(folder, write_squad(folder / "people.json"), merges=400)
    command = [script("fairseq-posenc"), "preprocess", "squad", *SIZES]
    command += ["--train", folder / "people.json", "--valid", folder / "people.json"]
    command += ["--encoder-json", folder / "encoder.json", "--vocab-bpe", folder / "vocab.bpe"]
    command += ["--dict", folder / "dict.txt", "--out", folder / "bin"]
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0 questions left out, 0 answers moved, 0 answers in no window" in done.stdout
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}
    sizes |= {"max_positions": 48, "tokens_per_sample": 48}
    model = checkpoint("masked_lm", SPEC, folder, attention_directions="lr", **sizes)
    return Files(folder / "people.json", folder / "bin", model.path, command)


def changes(**more):
    settings = {
        "dataset.batch_size": 8,
        "dataset.num_workers": 0,
        "dataset.disable_validation": "true",
        "optimization.update_freq": "[1]",
        "optimization.lr": "[3e-3]",
        "optimization.max_epoch": EPOCHS,
        "model.dropout": 0,
        "model.attention_dropout": 0,
        "checkpoint.save_interval": 10,
        "checkpoint.save_interval_updates": 0,
        **more,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def train_words(out, **more):
    made = files()
    words = ["squad", "train", "--checkpoint", made.pretrained, "--data", made.data, "--out", out]
    return [str(word) for word in [*words, *changes(**more)]]


@made_once
def trained():
    """Return a model whose training was killed after its first checkpoint, and then went on.

    While it trains, another command in its folder is refused.
    """
    out = new_directory() / "run"
    environment, halted = halting(out)
    process = subprocess.Popen(
        [str(script("fairseq-posenc")), *train_words(out)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(halted.exists, process)
        second = run("fairseq-posenc", *train_words(out), fails=True).error()
        assert re.match(rf"{out}: process \d+ on .*, since ", second)
    finally:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    wait_until(lambda: not is_locked(out / LOCK))
    return out, run("fairseq-posenc", *train_words(out))


@slow
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


@slow
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


@slow
def test_wrong_input_is_told_in_one_line(tmp_path, capsys):
    made = files()
    predict = ["squad", "predict", "--questions", made.raw, "--out", tmp_path, "--checkpoint"]
    assert "was not fine-tuned on SQuAD" in refused(capsys, *predict, made.pretrained)
    assert refused(capsys, *predict, "none.pt") == "--checkpoint none.pt: no such file"
    half = refused(capsys, *predict, "none.pt", "--fp16")
    assert half == "--fp16 is for GPUs, and torch finds none here; leave it out"
    words = ["squad", "train", "--checkpoint", made.pretrained, "--out", tmp_path, "--data"]
    assert "was not made by fairseq-posenc preprocess squad" in refused(capsys, *words, tmp_path)
    out, _ = trained()
    other = refused(capsys, *train_words(out, **{"common.seed": 2}))
    assert "was made with other common, seed: 1, not 2; name another folder" in other
    again = subprocess.run(made.preprocess, capture_output=True, text=True, check=True)
    assert "exists already, made from the same inputs with the same options" in again.stderr


class SameDictionary(Pretrained):
    """A model whose dictionary is that of any data."""

    def check_dictionary(self, path):
        pass


def configured(spec="m4m", version="1.1", changes=()):
    data_bin = SquadDataBin(Path("bin"), version, Limits(), 87_777)
    pretrained = SameDictionary(
        path=Path("model.pt"),
        roberta_section={
            "_name": "roberta_m4m",
            "encoder_layers": 7,
            "position_encoding": spec,
            "max_positions": 512,
        },
        spec=parse(spec),
        max_positions=512,
        dictionary=None,
    )
    return compose_training(pretrained, data_bin, Path("run"), changes)[0]


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_the_recipe_is_the_papers(version):
    found = configured(version=version)
    assert (found.optimization.lr, found.optimization.max_epoch) == ([3e-5], 2)
    assert found.dataset.batch_size * found.optimization.update_freq[0] == 48
    updates = 2 * math.ceil(math.ceil(87_777 / 12) / 4)
    assert (found.optimization.max_update, found.lr_scheduler.warmup_updates) == (updates, 219)
    assert (found.model._name, found.model.encoder_layers) == ("roberta_m4m", 7)
    assert (found.model.dropout, found.optimizer.weight_decay) == (0.1, 0.01)
    assert found.common.fp16
    assert found.checkpoint.finetune_from_model == str(Path("model.pt").resolve())


def test_encodings_that_diverged_have_a_smaller_rate_unless_the_user_sets_one():
    """M4M's paper, section 5.3: Raffel diverged at 3e-5, and TUPE "suffers from the same issue"."""
    for encoding in ("raffel", "tupe(tie_projections=true)", "raffel(per_head=true)+learned"):
        assert configured(spec=encoding).optimization.lr == [2.5e-5]
    assert configured(spec="raffel", changes=["optimization.lr=[1e-4]"]).optimization.lr == [1e-4]


def test_four_gpus_share_the_batch_as_the_recipe_says():
    options = ["distributed_training.distributed_world_size=4", "optimization.update_freq=[1]"]
    updates = configured().optimization.max_update
    assert configured(changes=options).optimization.max_update == updates
