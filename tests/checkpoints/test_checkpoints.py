"""What is loaded, what is adapted, and what is refused."""

from __future__ import annotations

import logging
import os
import pickle
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_posenc.checkpoints.faults import find_message
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.loading.checkpoints import load_state
from fairseq_posenc.workbench.loading.open_model import list_stacks
from tests.helpers.products import product_of
from tests.helpers.tiny_models import STOCK, make_model, make_tokens, needs_causal


class _RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_refused_in_a_line(tmp_path):
    path, trace = tmp_path / "checkpoint.pt", tmp_path / "it_ran"
    torch.save({"model": _RunsCode(trace)}, path)
    with pytest.raises(Exception, match="Weights only load failed") as caught:
        torch.load(path)
    assert not trace.exists()
    message = find_message(caught.value)
    assert "checkpoint refused, because loading it could run code" in message
    assert "mkdir" in message
    assert "\n" not in message


def test_a_text_is_no_checkpoint_that_runs_code(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_text("A text.", encoding="utf-8")
    with pytest.raises(UserError, match="save did not write it; name a"):
        load_state(path, "--checkpoint")


def test_a_refusal_without_the_unpicklers_text_is_a_line():
    error = pickle.UnpicklingError("Weights only load failed.\nAnd why.")
    error.__context__ = KeyError()
    assert "could run code: Weights only load failed. Only" in find_message(error)


OTHER_POSITIONS = [
    ("learned", "m4m", "m4m.table.weight .* is not in the checkpoint.*is not in the model"),
    ("m4m", "none", "layers.0.self_attn.encodings.m4m.table.weight .* is not in the model"),
    ("m4m", "m4m(max_distance=5)", r"is \(1, 47, 8\) in the checkpoint, \(1, 11, 8\) in the model"),
]


@pytest.mark.parametrize(("old", "new", "message"), OTHER_POSITIONS)
def test_other_position_parameters_are_an_error_that_names_them(old, new, message):
    state = make_model("masked_lm", position_encoding=old).state_dict()
    model = make_model("masked_lm", position_encoding=new)
    with pytest.raises(UserError, match=message) as caught:
        model.load_state_dict(state)
    assert "--init-positions" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "where"), [("m4", "m4+reset", "checkpoint"), ("m4+reset", "m4", "model")]
)
def test_a_table_without_the_rows_of_the_reset_is_no_shorter_one(old, new, where):
    state = make_model("masked_lm", position_encoding=old).state_dict()
    model = make_model("masked_lm", position_encoding=new)
    with pytest.raises(UserError, match=rf"m4.table.reset \(1, 2, 8\) is not in the {where}"):
        model.load_state_dict(state)


@pytest.mark.parametrize(("old", "new", "message"), OTHER_POSITIONS)
def test_init_positions_accepts_them_and_names_each_in_the_log(old, new, message, caplog):
    source = make_model("masked_lm", position_encoding=old)
    model = make_model("masked_lm", position_encoding=new, init_positions=True)
    own = {k: v.clone() for k, v in model.state_dict().items() if is_position_parameter(k)}
    theirs = source.state_dict()
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(dict(theirs))
    for name, value in model.state_dict().items():
        if not is_identity(name):
            expected = own[name] if name in own else theirs[name]
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
    for name in own:
        assert name in caplog.text
    assert f"trained with {old}, the model has {new}" in caplog.text
    assert str(model.encoder.sentence_encoder.identity.positions) == new


def test_a_stock_learned_table_is_refused_by_a_model_with_other_positions():
    state = make_model("masked_lm", STOCK["masked_lm"]).state_dict()
    with pytest.raises(UserError, match="trained with learned, the model has rope"):
        make_model("masked_lm", position_encoding="rope").load_state_dict(state)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [([1.0], "must be a table, not list"), (torch.ones(32), r"must be a table, not \(32,\)")],
    ids=["list", "vector"],
)
def test_learned_positions_that_are_not_a_table_are_refused(damaged, message):
    state = make_model("masked_lm", STOCK["masked_lm"]).state_dict()
    (name,) = (name for name in state if name.endswith("embed_positions.weight"))
    model = make_model("masked_lm", position_encoding="learned")
    with pytest.raises(UserError, match=message):
        model.load_state_dict({**state, name: damaged})


def test_a_longer_stock_table_is_an_error_that_gives_both_sizes():
    state = make_model("masked_lm", STOCK["masked_lm"], max_positions=40).state_dict()
    model = make_model("masked_lm", position_encoding="learned")
    with pytest.raises(UserError, match=r"is \(40, 32\) in the checkpoint, \(24, 32\) in the mod"):
        model.load_state_dict(state)


@pytest.mark.parametrize("spec", ["learned", "m4m", "learned+raffel"])
def test_layerdrop_pruning_keeps_each_layers_own_table(spec):
    whole = make_model("masked_lm", position_encoding=spec)
    options = {"arch": "roberta_none_tiny", "encoder_layers_to_keep": "0,2"}
    pruned = make_model("masked_lm", position_encoding=spec, encoder_layers_to_keep="0,2")
    pruned.load_state_dict(whole.state_dict(), model_cfg=Namespace(**options))
    for new, old in ((0, 0), (1, 2)):
        ours = pruned.encoder.sentence_encoder.layers[new].state_dict()
        torch.testing.assert_close(ours, whole.encoder.sentence_encoder.layers[old].state_dict())


def test_layerdrop_pruning_of_a_trained_model_with_directions_and_of_a_decoder():
    whole = make_model("masked_lm", "decbert_diff")
    options = {"arch": "decbert_diff_tiny", "encoder_layers_to_keep": "1,2"}
    pruned = make_model("masked_lm", "decbert_diff", encoder_layers_to_keep="1,2")
    pruned.load_state_dict(whole.state_dict(), model_cfg=Namespace(**options))
    assert pruned.encoder.sentence_encoder.identity.directions == "rl"
    whole = make_model("causal_lm", position_encoding="m4m", decoder_layers=3)
    options = {"arch": "transformer_lm", "decoder_layers_to_keep": "0,2"}
    pruned = make_model("causal_lm", position_encoding="m4m", decoder_layers_to_keep="0,2")
    pruned.load_state_dict(whole.state_dict(), model_cfg=Namespace(**options))
    assert pruned.decoder.identity == whole.decoder.identity


@pytest.mark.parametrize("spec", ["sinusoidal", "rope", "none"])
def test_fairseqs_sinusoids_are_not_taken_for_others(spec):
    """Older checkpoints of fairseq carry a mark of their sinusoids."""
    state = make_model("translation", position_encoding="none").state_dict()
    state = {name: value for name, value in state.items() if not is_identity(name)}
    state["encoder.embed_positions._float_tensor"] = torch.zeros(1)
    model = make_model("translation", position_encoding=spec)
    message = rf"encoder: trained with sinusoidal\(layout=fairseq\), the model has {spec}"
    with pytest.raises(UserError, match=message):
        model.load_state_dict(dict(state))
    make_model("translation", position_encoding="sinusoidal(layout=fairseq)").load_state_dict(state)


# What is trained, what reads it, and what the error must say; parameters fit in every case.
OTHER_MEANINGS = [
    ("causal_lm", "rope", "alibi"),
    ("causal_lm", "rope", "none"),
    ("causal_lm", "alibi", "sandwich"),
    ("causal_lm", "sinusoidal", "none"),
    ("masked_lm", "rope", "rope(base=500,layout=half)"),
    ("masked_lm", "m4", "m4(scale_factor=3)"),
    *(("causal_lm", f"rope+{x}", "rope") for x in ("ssmax", "sink", "logn", "softcap")),
    ("masked_lm", "rope+window(size=8)", "rope+window(size=16)"),
    *((family, "rope,none", "none,rope") for family in STOCK),
    ("translation", "rope alibi", "alibi rope"),  # the encoder's, the decoder's
]


@pytest.mark.parametrize(("family", "trained", "read"), OTHER_MEANINGS)
def test_weights_are_never_taken_for_what_they_are_not(family, trained, read):
    sides = ("position_encoding", "position_encoding_decoder")
    trained, read = (dict(zip(sides, specs.split())) for specs in (trained, read))
    state = make_model(family, **trained).state_dict()
    with pytest.raises(UserError) as caught:
        make_model(family, **read).load_state_dict(dict(state))
    for side in trained:
        assert f"trained with {trained[side]}, the model has {read[side]}" in str(caught.value)
    assert "--init-positions" in str(caught.value)
    make_model(family, **trained).load_state_dict(dict(state))
    accepting = make_model(family, **read, init_positions=True)
    accepting.load_state_dict(dict(state))
    make_model(family, **read).load_state_dict(accepting.state_dict())  # its identity is its own


def test_tied_projections_are_not_taken_for_two_which_earlier_versions_saved():
    model = make_model("masked_lm", position_encoding="deberta(tie_projections=true)")
    copies = {x.replace("query_proj", "key_proj"): y for x, y in model.state_dict().items()}
    model.load_state_dict(copies | model.state_dict())
    untied = make_model("masked_lm", position_encoding="deberta").state_dict()
    with pytest.raises(UserError, match=r"trained with deberta, the model has deberta\(tie_proj"):
        model.load_state_dict(dict(untied))
    with pytest.raises(UserError, match=r"key_projection \(8, 8\) is not in the model"):
        model.load_state_dict({x: y for x, y in untied.items() if not is_identity(x)})


@pytest.mark.parametrize("spec", ["learned", "none"])
def test_layers_that_saw_one_side_are_not_made_to_see_both(spec):
    state = make_model("masked_lm", position_encoding=spec, attention_directions="lr").state_dict()
    for directions in ("", "lr,lr", "lr,rl", "rl"):
        model = make_model("masked_lm", position_encoding=spec, attention_directions=directions)
        printed = f"attention directions lr, the model has {directions or 'both'}"
        with pytest.raises(UserError, match=printed):
            model.load_state_dict(dict(state))
    same = make_model("masked_lm", position_encoding=spec, attention_directions="lr,both,")
    same.load_state_dict(dict(state))


def test_a_checkpoint_of_an_earlier_version_loads_and_the_log_says_for_what(caplog):
    state = make_model("masked_lm", position_encoding="rope").state_dict()
    old = {name: value for name, value in state.items() if not is_identity(name)}
    with caplog.at_level(logging.WARNING):
        make_model("masked_lm", position_encoding="rope").load_state_dict(dict(old))
    assert "did not record positions; assuming rope" in caplog.text


def test_a_broken_identity_is_shown_in_a_line():
    model = make_model("masked_lm", position_encoding="rope")
    state = model.state_dict()
    (name,) = filter(is_identity, state)
    for broken in (torch.zeros(3), torch.tensor([123]), torch.tensor([-1])):
        with pytest.raises(UserError, match="record of its positions cannot be read"):
            model.load_state_dict({**state, name: broken})


LONGER = ["rope(scaling=yarn:4)", "xpos(scaling=yarn:4)", "deberta_v2", "m1", "m2", "t5", "kerple"]
LONGER += ["m4m", "m4(reset=true)", "raffel", "deberta", "inkling(rank=1)"]  # whose tables grow
LONGER_ENCODERS = [("masked_lm", spec) for spec in LONGER if not needs_causal(spec)]


@pytest.mark.parametrize(("family", "spec"), LONGER_ENCODERS + product_of(["causal_lm"], LONGER))
def test_a_longer_limit_moves_nothing(family, spec):
    """How long tables are is one number, the length that weights were trained at another."""
    short = make_model(family, position_encoding=spec)
    for name, parameter in short.named_parameters():
        if is_position_parameter(name):
            parameter.data.normal_(std=0.5).abs_()
    limit = {"causal_lm": "max_target_positions", "masked_lm": "max_positions"}[family]
    long, longer = (make_model(family, position_encoding=spec, **{limit: n}) for n in (96, 99))
    long.load_state_dict(short.state_dict())
    torch.nn.Sequential(longer).load_state_dict(long.state_dict(prefix="0."))  # as a part
    tokens = make_tokens(2, 40)
    for model in (long, longer):
        torch.testing.assert_close(model(tokens)[0], short(tokens)[0], rtol=0, atol=0)
    (ours,), (theirs,) = (list_stacks(model).values() for model in (long, short))
    assert ours.identity == theirs.identity


NOT_FINITE = "has 32 of .* NaN or infinite"
BROKEN_WEIGHTS = {
    "NaN": (lambda w: w.index_fill(0, torch.tensor([1]), torch.nan), NOT_FINITE),
    "inf": (lambda w: w.index_fill(0, torch.tensor([0]), torch.inf), NOT_FINITE),
    "half": (lambda w: w.half() / 0, "has 1,536 of 1,536 numbers that are NaN or infinite"),
    "integers": (lambda w: w.long(), "holds numbers .* torch.int64, not floating-point ones"),
    "booleans": (lambda w: w.bool(), "holds numbers of the type torch.bool"),
    "a list": (lambda w: w.tolist(), "is not a tensor, but of the type list"),
}


@pytest.mark.parametrize("family", ["masked_lm", "causal_lm", "translation"])
@pytest.mark.parametrize(("broken", "message"), BROKEN_WEIGHTS.values(), ids=BROKEN_WEIGHTS)
def test_weights_that_no_training_leaves_are_refused(family, broken, message):
    model = make_model(family, position_encoding="none")
    state = model.state_dict()
    name = next(name for name in state if name.endswith("layers.1.fc1.weight"))
    with pytest.raises(UserError, match=f"or its training diverged: {name} {message}"):
        model.load_state_dict({**state, name: broken(state[name])})


def test_large_weights_and_those_of_other_precisions_are_loaded():
    model = make_model("masked_lm", position_encoding="m4m")
    state = model.state_dict()
    name = next(name for name in state if name.endswith("fc1.weight"))
    for fitting in (torch.full_like(state[name], 3e38), state[name].half(), state[name].double()):
        model.load_state_dict({**state, name: fitting})


def test_fairseqs_own_mean_of_checkpoints_keeps_an_identity():
    state = make_model("translation", position_encoding="rope").state_dict()
    mean = {name: (x + x) // 2 if is_identity(name) else x for name, x in state.items()}
    make_model("translation", position_encoding="rope").load_state_dict(mean)


def test_parameters_of_another_size_are_one_line_that_names_them(monkeypatch):
    model = make_model("masked_lm", position_encoding="none")
    name = "encoder.sentence_encoder.layers.0.fc1.weight"
    weights = {**model.state_dict(), name: torch.ones(3)}
    read = {"model": weights, "cfg": SimpleNamespace(model=None)}
    monkeypatch.setattr("fairseq.file_io.PathManager.exists", lambda path: path == "x.pt")
    task = SimpleNamespace(build_model=lambda cfg: model)
    with pytest.raises(RuntimeError) as caught:
        checkpoint_utils.load_model_ensemble_and_task(["x.pt"], task=task, state=read)
    printed = find_message(caught.value)
    message = "the checkpoint's parameters are not the model's: size mismatch for"
    assert printed.startswith(f"{message} {name}")
    assert "\n" not in printed


def test_of_parameters_that_are_missing_the_first_is_named():
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(1, 1).load_state_dict({})
    assert find_message(caught.value).endswith('Missing key(s) in state_dict: "weight"')


def test_a_mistake_of_ours_while_a_checkpoint_is_loaded_keeps_its_stack_trace(monkeypatch):
    monkeypatch.setattr("fairseq.file_io.PathManager.exists", lambda path: path == "x.pt")
    read = {"model": {}, "cfg": SimpleNamespace(model=None)}
    task = SimpleNamespace(build_model=lambda cfg: {}["a mistake"])
    with pytest.raises(KeyError) as caught:
        checkpoint_utils.load_model_ensemble_and_task(["x.pt"], task=task, state=read)
    assert find_message(caught.value) is None


def test_other_errors_keep_their_stack_trace():
    assert find_message(KeyError("x")) is None
