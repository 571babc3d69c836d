"""What a trained model is opened with: its settings, its family, its sizes, its updates."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from fairseq_posenc.checkpoints.dictionary import Placeholders
from fairseq_posenc.errors import UserError
from fairseq_posenc.workbench.loading import checkpoints, open_model
from fairseq_posenc.workbench.loading.open_model import STOCK_CLASSES, open_task, translates
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.exchanged import checkpoint, write_release
from tests.helpers.tiny_models import ARCHITECTURES, STOCK, make_model


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_families_are_found_by_the_class_of_an_architecture(family):
    for arch in (ARCHITECTURES[family], STOCK[family]):
        assert open_model.find_family(arch) == family
    for other in ("lstm", "no_such_architecture"):
        assert open_model.find_family(other) is None


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_model_of_default_options_is_built_and_has_its_stacks(family):
    task = "language_modeling" if family == "causal_lm" else family
    options = {"_name": ARCHITECTURES[family], "tokens_per_sample": 16, "max_positions": 16}
    settings = open_model.build_settings(options, {"_name": task})
    model = open_model.build_model(settings, [Placeholders(40)])
    assert isinstance(model, STOCK_CLASSES[family])
    stacks = open_model.list_stacks(model)
    sides = {"masked_lm": {"encoder"}, "causal_lm": {"decoder"}}
    assert stacks.keys() == sides.get(family, {"encoder", "decoder"})
    for stack in stacks.values():
        assert stack.embed_tokens.num_embeddings == 40


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_checkpoint_is_loaded_with_its_task(family, tmp_path):
    trained = checkpoint(family, "alibi")
    state = checkpoints.load_state(trained.path, "--checkpoint")
    state["optimizer_history"][-1]["num_updates"] = 7
    assert checkpoints.read_updates(state) == 7
    assert state["cfg"].model.position_encoding == "alibi"
    assert translates(state["cfg"].task) == (family == "translation")
    opened = open_task(trained.path, state)
    assert opened.data == trained.data
    names = ["dict.de.txt", "dict.en.txt"] if family == "translation" else ["dict.txt"]
    assert list(opened.dictionaries) == names
    with pytest.raises(UserError, match=f"--data {tmp_path / 'none'}: no such folder"):
        open_task(trained.path, state, tmp_path / "none")
    for name in names:
        with pytest.raises(UserError, match=f"--data {tmp_path}: holds no {name};"):
            open_task(trained.path, state, tmp_path)
        text = (trained.data / name).read_text()
        (tmp_path / name).write_text(text)
    (tmp_path / names[-1]).write_text(text.partition("\n")[2])
    with pytest.raises(UserError, match=f"{names[-1]} has .* symbols"):
        open_task(trained.path, state, tmp_path)


def test_a_kill_while_a_checkpoint_is_loaded_leaves_no_file(tmp_path, monkeypatch):
    load = checkpoints.checkpoint_utils.load_checkpoint_to_cpu

    def load_and_look(path):
        assert not any(tmp_path.iterdir())
        return load(path)

    path = checkpoint("masked_lm", "alibi").path  # first, as it makes temporary folders too
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fairseq.checkpoint_utils.load_checkpoint_to_cpu", load_and_look)
    checkpoints.load_state(path, "--checkpoint")


def test_a_missing_file_is_named_with_its_option(tmp_path):
    path = tmp_path / "a.pt"
    for option, label in (("--checkpoint", f"--checkpoint {path}"), ("", path)):
        with pytest.raises(UserError, match=f"^{label}: no such file$"):
            checkpoints.load_state(path, option)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"a folder without a checkpoint \(\*.pt\), and without the config.json"),
        (["b.pt", "a.pt"], "a folder; name a checkpoint in it, such as .*a.pt"),
        (["config.json"], "a folder of transformers, and this command reads a checkpoint"),
    ],
)
def test_a_folder_is_no_checkpoint(files, message, tmp_path):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"^--checkpoint {tmp_path}: {message}"):
        checkpoints.load_state(tmp_path, "--checkpoint")


@pytest.mark.parametrize("state", [{}, {"optimizer_history": []}, {"optimizer_history": [{}]}])
def test_a_state_without_updates_has_none(state):
    assert checkpoints.read_updates(state) == 0


@pytest.mark.parametrize("error", [ValueError("no\nway"), KeyError("x"), AttributeError("y")])
def test_what_cannot_be_built_is_one_line(error):
    match = r"^a\.pt: no model can be built from its settings: "
    refuse = checkpoints.refuse_unusable_settings("", Path("a.pt"))
    with pytest.raises(UserError, match=match) as printed, refuse:
        raise error
    assert "\n" not in str(printed.value)
    assert printed.value.__cause__ is error


def test_lines_for_users_get_the_name_of_the_file():
    with pytest.raises(UserError) as caught, checkpoints.refuse_unusable_settings("", Path("a.pt")):
        raise UserError("the checkpoint is x")
    assert str(caught.value) == "a.pt: the checkpoint is x"


def test_a_state_is_written_whole(tmp_path):
    checkpoints.write_state({"model": {"a": torch.ones(3)}}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["model"]["a"], torch.ones(3))
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(UserError, match=str(tmp_path)):
        checkpoints.write_state({}, tmp_path / "none" / "a.pt")


M4M = "learned+m4m(max_distance=5)"


@pytest.mark.parametrize(
    ("arch", "options", "spec"),
    [
        ("roberta_none_tiny", {"position_encoding": M4M}, M4M),
        ("roberta", {}, "learned"),
        ("roberta", {"encoder_learned_pos": False}, "sinusoidal(layout=fairseq)"),
        ("roberta", {"no_token_positional_embeddings": True}, "none"),
    ],
)
def test_a_model_and_fairseqs_own_are_built_again_from_a_checkpoint(arch, options, spec):
    """As older fairseqs wrote it, with which RoBERTa was released."""
    directions = "" if arch == "roberta" else "lr,rl"
    model = make_model("masked_lm", arch, attention_directions=directions, **options)
    args = Namespace(**(vars(model.args) | {"arch": arch, "task": "masked_lm", "data": "x"}))
    args.max_positions = 20 if spec == "learned" else 24  # the table of 24 positions wins
    pretrained = read_pretrained(write_release(args, model.state_dict()))
    assert str(pretrained.spec) == pretrained.model_options["position_encoding"] == spec
    assert pretrained.model_options.get("attention_directions", "") == directions
    assert pretrained.model_options["_name"].startswith("roberta_")  # ours, not "roberta"
    assert (pretrained.max_positions, pretrained.dictionary.size) == (24, 24)
    rebuilt = make_model("masked_lm", **pretrained.model_options)
    rebuilt.load_state_dict(torch.load(pretrained.path)["model"], strict=True)
    tokens = torch.tensor([[0, 5, 6, 7, 2], [0, 9, 2, 1, 1]])
    torch.testing.assert_close(rebuilt(tokens)[0], model(tokens)[0])
    args.attention_directions = "lr,up"
    with pytest.raises(UserError, match=r"^--checkpoint .*: .*unknown direction 'up'"):
        read_pretrained(write_release(args, model.state_dict()))
