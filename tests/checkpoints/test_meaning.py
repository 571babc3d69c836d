"""What gives weights their meaning beside positions, and how another setting is refused."""

from __future__ import annotations

import logging
import re
import shutil
from argparse import Namespace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import CommonConfig, FairseqConfig
from omegaconf import OmegaConf

from fairseq_posenc.checkpoints import recovery
from fairseq_posenc.checkpoints.dictionary import Placeholders, fingerprint
from fairseq_posenc.checkpoints.state_dict_adapter import refuse_untied
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import Identity, WeightSettings, _decode_text
from fairseq_posenc.specs import parse
from fairseq_posenc.user_dir import USER_DIR
from fairseq_posenc.workbench.loading.open_model import list_stacks
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.commands import FAMILIES, new_directory, pairs, run, sentences, train
from tests.helpers.products import product_of, some_of
from tests.helpers.tiny_models import make_dictionary, make_model, of_the_last_version

# What is changed, and both sides as the error names them; all parameters fit.
OTHER = {
    "masked_lm": [
        ({"encoder_attention_heads": 8}, "trained with 4 heads, the model has 8 heads"),
        ({"encoder_attention_heads": 2}, "trained with 4 heads, the model has 2 heads"),
        ({"activation_fn": "relu"}, "trained with activation gelu, the model has activation relu"),
        ({"encoder_normalize_before": True}, "post-norm layers, the model has pre-norm layers"),
        ({"no_scale_embedding": False}, "unscaled token embeddings, the model has scaled"),
    ],
    "causal_lm": [
        ({"decoder_attention_heads": 8}, "trained with 4 heads, the model has 8 heads"),
        ({"decoder_attention_heads": 2}, "trained with 4 heads, the model has 2 heads"),
        ({"activation_fn": "relu"}, "trained with activation gelu, the model has activation relu"),
        ({"decoder_normalize_before": False}, "pre-norm layers, the model has post-norm layers"),
        ({"no_scale_embedding": True}, "scaled token embeddings, the model has unscaled"),
        ({"add_bos_token": True}, "with add_bos_token off, the model has add_bos_token on"),
    ],
    "translation": [
        ({"encoder_attention_heads": 8}, "encoder: trained with 4 heads, the model has 8 heads"),
        ({"decoder_attention_heads": 2}, "decoder: trained with 4 heads, the model has 2 heads"),
        ({"activation_fn": "gelu"}, "trained with activation relu, the model has activation gelu"),
        ({"encoder_normalize_before": True}, "encoder: trained with post-norm layers, the model"),
        ({"decoder_normalize_before": True}, "decoder: trained with post-norm layers, the model"),
        ({"no_scale_embedding": True}, "scaled token embeddings, the model has unscaled"),
    ],
}
CASES = [(family, *case) for family, cases in OTHER.items() for case in cases]


@pytest.mark.parametrize(
    ("family", "changed", "message", "spec"), product_of(CASES, ["rope", "alibi"])
)
def test_another_meaning_is_refused_whatever_the_positions(family, changed, message, spec):
    state = make_model(family, position_encoding=spec).state_dict()
    for accepting in (False, True):
        options = {"position_encoding": spec, "init_positions": accepting, **changed}
        with pytest.raises(UserError) as caught:
            make_model(family, **options).load_state_dict(dict(state))
        assert message in str(caught.value)
    make_model(family, position_encoding=spec).load_state_dict(dict(state))


@pytest.mark.parametrize(("family", "changed", "message"), CASES)
def test_a_checkpoint_of_the_last_version_is_not_compared(family, changed, message, caplog):
    state = of_the_last_version(make_model(family, position_encoding="rope").state_dict())
    if "normalize_before" not in "".join(changed):  # which has a layer norm more or less
        model = make_model(family, position_encoding="rope", **changed)
        with caplog.at_level(logging.INFO):
            model.load_state_dict(state)
        assert "the checkpoint does not record its heads, activation, norm" in caplog.text
        with pytest.raises(UserError, match=r"trained with .*, the model has"):  # from then on
            make_model(family, position_encoding="rope").load_state_dict(model.state_dict())


def test_the_hash_is_of_the_symbols_in_their_order():
    dictionary, other = make_dictionary(), make_dictionary()
    assert fingerprint(dictionary) == fingerprint(other)
    other.symbols[5:7] = other.symbols[6:4:-1]
    assert fingerprint(dictionary) != fingerprint(other)
    other.add_symbol("<mask>")
    assert fingerprint(Placeholders(24)) is None
    assert len(Placeholders(24)) == 24


def test_what_a_model_does_not_know_is_kept_as_the_checkpoint_says_it():
    """Models that import builds may have no dictionary and no language."""
    model = make_model("translation", position_encoding="rope")
    encoder = list_stacks(model)["encoder"]
    known = encoder.weight_settings._replace(language="de")
    state = model.state_dict()
    state["encoder._extra_state"] = encoder.identity._replace(weight_settings=known).to_tensor()
    encoder.weight_settings = encoder.weight_settings._replace(dictionary=None)
    model.load_state_dict(state)
    assert encoder.weight_settings == known
    encoder.weight_settings = encoder.weight_settings._replace(language="en")
    with pytest.raises(UserError, match="encoder: trained with language de, the model has languag"):
        model.load_state_dict(state)


@pytest.mark.parametrize(
    "wrong", [{"heads": "4"}, {"heads": True}, {"activation": 3}, {"language": "a\nb"}]
)
def test_a_field_of_another_kind_is_refused(wrong):
    state = Identity(parse("rope"), "", 24, WeightSettings(**wrong)).to_tensor()
    with pytest.raises(UserError, match=f"cannot be read: {next(iter(wrong))} is"):
        Identity.from_tensor(state)


def test_an_identity_without_the_new_fields_is_as_it_was():
    old = Identity(parse("rope"), "lr", 24)
    assert Identity.from_tensor(old.to_tensor()) == old
    assert "heads" not in _decode_text(old.to_tensor())


def test_two_matrices_are_not_loaded_into_one():
    apart = make_model("translation", position_encoding="rope").state_dict()
    shared = make_model("translation", position_encoding="rope", share_all_embeddings=True)
    with pytest.raises(UserError, match=r"is not its encoder\.embed_tokens\.weight, and this"):
        shared.load_state_dict(dict(apart))
    copied = {name: value.clone() for name, value in shared.state_dict().items()}
    shared.load_state_dict(copied)  # equal, if no longer one
    refuse_untied(apart, shared.to("meta").state_dict())  # there, all addresses are 0


class Distributed(torch.Tensor):
    """Stands for tensors that no file holds, such as those of a GPU, or torch's DTensor."""


def test_weights_in_memory_may_be_of_any_class_of_tensors():
    model = make_model("causal_lm", position_encoding="rope")
    state = {name: x.clone() for name, x in model.state_dict().items()}
    name = "decoder.layers.0.fc1.weight"
    model.load_state_dict({**state, name: (state[name] + 1).as_subclass(Distributed)})
    assert torch.equal(model.state_dict()[name], state[name] + 1)


def test_a_pooler_of_another_activation_is_refused_once_there_is_one():
    def model(activation, head):
        built = make_model("masked_lm", position_encoding="rope", pooler_activation_fn=activation)
        if head:
            built.register_classification_head("x", num_classes=2)
        return built

    model("relu", head=True).load_state_dict(model("tanh", head=False).state_dict())
    with pytest.raises(UserError, match="pooler activation tanh, the model has pooler activation"):
        model("relu", head=True).load_state_dict(model("tanh", head=True).state_dict())


def test_what_changed_is_listed_and_what_only_says_how_a_training_runs_is_not():
    before = {
        "model": SimpleNamespace(),
        "task": {"_name": "masked_lm", "mask_prob": 0.15},
        "optimizer": {"_name": "adam", "adam_eps": 1e-8},
        "optimization": {"lr": [0.001], "max_update": 5},
        "checkpoint": {"save_dir": "a"},
        "common": {"seed": 1, "log_interval": 1},
    }
    now = {
        **before,
        "task": {"_name": "masked_lm", "mask_prob": 0.2},
        "optimization": {"lr": [0.0005], "max_update": 5},
        "checkpoint": {"save_dir": "b"},
        "common": {"seed": 2, "log_interval": 10},
    }
    expected = ["mask_prob 0.15 -> 0.2", "lr [0.001] -> [0.0005]", "seed 1 -> 2"]
    select = recovery.select_training_settings
    old, new = select(before), select(now)
    assert recovery.list_changes(old, new) == expected
    assert recovery.list_changes(select({"model": 3, "task": None}), new) == []


def test_a_training_with_settings_of_an_older_form_is_not_compared(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    torch.save({"cfg": Namespace(checkpoint=Namespace()), "last_optimizer_state": {}}, path)
    settings = OmegaConf.structured(FairseqConfig(common=CommonConfig(fp16=True)))
    assert recovery.check_resumption(path, settings).loads_optimizer


def test_a_state_of_another_form_is_refused_in_a_line(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    torch.save({"extra_state": [1, 2]}, path)
    with pytest.raises(UserError, match=str(path)):
        recovery.check_resumption(path, OmegaConf.structured(FairseqConfig()))
    torch.save({"cfg": {"checkpoint": {"maximize_best_checkpoint_metric": True}}}, path)
    with pytest.raises(UserError, match="has the best metric of its training"):
        recovery.check_resumption(path, OmegaConf.structured(FairseqConfig()))


POSITIONS = {
    "masked_lm": ["--position-encoding", "rope"],
    "causal_lm": ["--position-encoding", "alibi"],
    "translation": [
        *("--position-encoding", "rope", "--position-encoding-decoder", "alibi"),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
    ],
}


@cache
def base(family, *positions):
    return train(family, *(positions or POSITIONS[family]), "--max-update", 2).save_dir


@cache
def reordered(family):
    """Return the family's data with the symbols of its dictionaries in another order."""
    folder = new_directory() / "bin"
    shutil.copytree(FAMILIES[family].data(), folder)
    for path in folder.glob("dict*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(reversed(lines)), encoding="utf-8")
    return folder


def resumed(family, *more, positions=(), **how):
    """Resume a copy of a training with other settings, for an update."""
    folder = new_directory() / "run"
    shutil.copytree(base(family, *positions), folder)
    options = [*(positions or POSITIONS[family]), "--max-update", 3, *more]
    return train(family, *options, save_dir=folder, **how).run


REFUSED: dict[str, list] = {  # fairseq goes on with most without a word; more, in memory, above
    "masked_lm": [
        (["--untie-weights-roberta"], "optimizer state is for other parameters than the model's"),
        (["--encoder-layers", 3, "--position-encoding", "m4m"], "has 2 layers, the model 3: bu"),
    ],
    "causal_lm": [(["--add-bos-token"], "add_bos_token off, the model has add_bos_token on")],
    "translation": [
        (
            ["--source-lang", "tgt", "--target-lang", "src"],
            "encoder: trained with language src, the model has language tgt; decoder: trained with",
        ),
        (["--share-all-embeddings"], "and this model shares them"),
    ],
}
MAY = {  # of each family several at once
    "masked_lm": (
        ["--lr", 0.002, "--dropout", 0.1, "--mask-prob", 0.2, "--max-positions", 64],
        [
            *("lr [0.001] -> [0.002]", "dropout 0.0 -> 0.1", "mask_prob 0.15 -> 0.2"),
            "max_positions 16 -> 64",
        ],
    ),
    "causal_lm": (
        ["--lr", 0.002, "--attention-dropout", 0.1, "--tokens-per-sample", 20],
        ["lr [0.001] -> [0.002]", "attention_dropout 0.0 -> 0.1", "tokens_per_sample 16 -> 20"],
    ),
    "translation": (
        ["--label-smoothing", 0.2, "--dropout", 0.1, "--max-source-positions", 64],
        ["label_smoothing 0.1 -> 0.2", "dropout 0.0 -> 0.1", "max_source_positions 16 -> 64"],
    ),
}
REFUSALS = [(family, *row) for family, rows in REFUSED.items() for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more", "message"), REFUSALS)
def test_a_training_is_not_resumed_with_another_meaning(family, more, message):
    assert message in resumed(family, *more, fails=True).error()


@pytest.mark.slow
@pytest.mark.parametrize("family", some_of(["translation"], FAMILIES))
def test_a_dictionary_in_another_order_is_refused(family, monkeypatch):
    base(family)
    data = reordered(family)
    monkeypatch.setitem(FAMILIES, family, FAMILIES[family]._replace(data=lambda: data))
    said = "trained with a dict.txt of other symbols, or the same in another order; give"
    assert said in resumed(family, fails=True).error()


@pytest.mark.slow
@pytest.mark.parametrize("family", MAY)
def test_what_may_change_does_and_the_log_says_it(family):
    more, changes = MAY[family]
    printed, start = re.findall(".*(?:resumes with|starts from).*", resumed(family, *more).log)
    for change in [*changes, "max_update 2 -> 3"]:
        assert change in printed
    assert "save_dir" not in printed
    assert start.endswith("checkpoint_last.pt, at update 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    some_of(
        [("causal_lm", ["--tokens-per-sample", 64])],
        [("masked_lm", ["--max-positions", 64]), ("causal_lm", ["--tokens-per-sample", 64])],
    ),
)
def test_tables_do_not_grow_under_an_optimizers_state(family, more):
    positions = ("--position-encoding", "m4m" if family == "masked_lm" else "m4")
    error = resumed(family, *more, positions=positions, fails=True).error()
    message = r"optimizer's state in .*checkpoint_last.pt is for other sizes: .*(16|31)"
    assert re.search(message, error)
    assert "--reset-optimizer" in error
    resumed(family, *more, "--reset-optimizer", positions=positions)


def _trained_on(*options):
    """Build a command that trains a causal model on, from a checkpoint."""
    fixed = [*POSITIONS["causal_lm"], "--max-update", 1]
    return lambda path: train("causal_lm", *fixed, *options, path, fails=True).run


def _read(program, data, *options):
    """Build a command that runs a program of fairseq's on a checkpoint."""
    fixed = ["--user-dir", USER_DIR, *options]
    return lambda path: run(program, data(), *fixed, "--path", path, fails=True)


SHORT = ["--tokens-per-sample", 12]  # blocks that the model has positions for
HEADS = "{'decoder_attention_heads': 2}"
SIDE = ["--model-overrides", "{'attention_directions': 'lr'}"]
COMMANDS = {
    "fine-tune": (
        "causal_lm",
        _trained_on("--decoder-attention-heads", 8, "--finetune-from-model"),
        "trained with 4 heads, the model has 8 heads",
    ),
    "restore": (
        "causal_lm",
        _trained_on("--activation-fn", "relu", "--reset-optimizer", "--restore-file"),
        "activation gelu, the model has activation relu",
    ),
    "eval-lm": (
        "causal_lm",
        _read("fairseq-eval-lm", sentences, *SHORT, "--add-bos-token"),
        "add_bos_token off, the model has add_bos_token on",
    ),
    "overrides": (
        "causal_lm",
        _read("fairseq-eval-lm", sentences, *SHORT, "--model-overrides", HEADS),
        "trained with 4 heads, the model has 2 heads",
    ),
    "validate": (
        "masked_lm",
        _read("fairseq-validate", sentences, *SIDE, "--task", "masked_lm", "--batch-size", 16),
        "trained with attention directions both, the model has lr",
    ),
    "generate": (
        "translation",
        _read("fairseq-generate", pairs, "--source-lang", "tgt", "--target-lang", "src"),
        "trained with language src, the model has language t",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", some_of(["fine-tune", "eval-lm", "validate", "generate"], COMMANDS)
)
def test_no_command_reads_weights_with_another_meaning(name):
    family, command, message = COMMANDS[name]
    assert message in command(base(family) / "checkpoint_last.pt").error()


@pytest.mark.slow
def test_a_pre_trained_model_refuses_a_dictionary_in_another_order():
    """Also where the one of its training is gone, as GLUE's and SQuAD's data are made of it."""
    source = read_pretrained(base("masked_lm") / "checkpoint_last.pt")
    source = source._replace(dictionary=source.dictionary._replace(trained_file=None))
    source.check_dictionary(sentences() / "dict.txt")
    with pytest.raises(UserError, match="differs in its symbols, or in their order, from the dict"):
        source.check_dictionary(reordered("masked_lm") / "dict.txt")
