"""SQuAD from raw file to score: a real command that cannot take what the one before it wrote."""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fairseq_posenc.specs import parse
from fairseq_posenc.tasks.squad.databin import MANIFEST, open_data_bin
from fairseq_posenc.tokens.squad_file import read_squad
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.finetuning.squad.command import compose_training
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.commands import halting, kill_command, made_once, new_directory, refused, run
from tests.helpers.exchanged import checkpoint
from tests.helpers.preprocess import bpe_options, write_bpe, write_squad

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
TEXT = (
    "It is known that  {0} was born in {1} in the year {2}. For most of a life that was long, and "
    "rich in friends, the subject of study was {3}, no less."
)
ASKED = ("In which town was", "What was the year of", "Which subject of study had", "Who knows why")
# Of each text, 3 questions with an answer, 1 without.
QUESTIONS = {
    TEXT.format(name, *answers): [
        {"question": f"{asked} {name}?", "answers": found, "is_impossible": not found}
        for asked, found in zip(ASKED, [*([x] for x in answers), []])
    ]
    for name, *answers in FACTS
}
posenc = partial(run, "fairseq-posenc")


class Files(NamedTuple):
    """What the commands need."""

    raw: Path
    data: Path
    pretrained: Path


def data_words(folder):
    raw = folder / "people.json"
    words = ["preprocess", "squad", "--train", raw, "--valid", raw, "--out", folder / "bin"]
    return [*words, "--max-length", 48, "--stride", 16, "--max-question", 16, *bpe_options(folder)]


@made_once
def files():
    """Return the raw file, the data made of it, and a pre-trained model (untrained, but whole)."""
    folder = new_directory()
    raw = write_squad(folder / "people.json", QUESTIONS, "v2.0")
    asked = [question["question"] for questions in QUESTIONS.values() for question in questions]
    write_bpe(folder, [*QUESTIONS, *asked], merges=400)
    said = posenc(*data_words(folder)).out
    assert "0 questions left out, 0 answers moved, 0 answers in no window" in said
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}
    sizes |= {"max_positions": 48, "tokens_per_sample": 48}
    model = checkpoint("masked_lm", SPEC, folder, attention_directions="lr", **sizes)
    return Files(raw, folder / "bin", model.path)


def test_data_that_are_there_are_not_made_again(capsys):
    assert main([*map(str, data_words(files().raw.parent))]) == 0
    assert "exists already, made from the same inputs with the same" in capsys.readouterr().err


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
            second = posenc(*train_words(out), fails=True).error()
            assert re.match(rf"{out}: process \d+ on .*, since ", second)
        return halted.exists()

    kill_command(train_words(out), is_refused, out, env=environment)
    return out, posenc(*train_words(out)).err


def test_a_training_goes_on_where_it_was_interrupted():
    out, said = trained()
    log = (out / "train.log").read_text(encoding="utf-8")
    assert "span_head.scores.weight starts fresh" in log
    assert f"Loaded checkpoint {out}/checkpoint_last.pt (epoch " in log
    assert log.count("loading pretrained model from") == 1
    assert f"encoder position encoding: {SPEC} | directions: lr x1 both" in log
    assert f"{out}: resuming from update " in said
    state = torch.load(out / "checkpoint_last.pt")
    windows = open_data_bin(files().data).train_windows
    assert state["optimizer_history"][-1]["num_updates"] == EPOCHS * math.ceil(windows / 8)
    assert windows > 20  # some paragraphs are longer than a window


def test_twenty_questions_learnt_by_heart_are_answered(tmp_path):
    given = ["--checkpoint", trained()[0] / "checkpoint_last.pt", "--questions", files().raw]
    printed = posenc("squad", "predict", *given, "--out", tmp_path).out
    figures = json.loads(printed)
    assert figures["total"] == 20
    assert figures["exact"] >= 95
    assert figures["HasAns_exact"] >= 93
    assert figures["best_exact"] >= figures["exact"]
    names = ("predictions", "answers", "null_odds", "score")
    found = {name: json.loads((tmp_path / f"{name}.json").read_text("utf-8")) for name in names}
    assert found["score"]["spec"] == SPEC
    assert found["score"]["figures"] == {"scores": [figures]}
    for question in read_squad(files().raw).questions:
        answer, odds = found["answers"][question.id], found["null_odds"][question.id]
        assert found["predictions"][question.id] == ("" if odds > 0 else answer)
        assert answer in question.context
        assert answer

    # The official figures of the written files are those that were printed.
    score = ["squad", "score", files().raw]
    odds = ["--na-prob-file", tmp_path / "null_odds.json", "--na-prob-thresh", 0]
    assert posenc(*score, tmp_path / "answers.json", *odds).out == printed
    plain = json.loads(posenc(*score, tmp_path / "predictions.json").out)
    assert plain == {key: value for key, value in figures.items() if "best" not in key}


@pytest.mark.parametrize(
    ("make", "cause"),
    [(Path.mkdir, "Is a directory"), (lambda path: path.symlink_to(path), "symbolic links")],
    ids=["folder", "link_loop"],
)
def test_a_manifest_that_cannot_be_read_is_shown_in_one_line(make, cause, tmp_path, capsys):
    make(tmp_path / MANIFEST)
    shown = refused(capsys, *train_words(tmp_path / "out"), "--data", tmp_path)
    assert "was not made by fairseq-posenc preprocess squad" in shown
    assert cause in shown


def test_wrong_input_is_shown_in_one_line(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "m4.json").write_text("3")
    predict = ["--questions", files().raw, "--out", tmp_path, "--checkpoint", files().pretrained]
    assert "was not fine-tuned on SQuAD" in refused(capsys, "squad", "predict", *predict)
    other = refused(capsys, *train_words(tmp_path), "--data", tmp_path)
    assert "was not made by fairseq-posenc preprocess squad" in other
    other = refused(capsys, *train_words(trained()[0], "common.seed=2"))
    assert "was made with other common, seed: 1, not 2; name another folder" in other
    (tmp_path / "request.json").write_text('{"updates": 9}')  # of another command's folder
    assert "was made with other" in refused(capsys, *train_words(tmp_path))
    assert json.loads((tmp_path / "results" / "m4.json").read_text()) == 3  # nothing was deleted


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
