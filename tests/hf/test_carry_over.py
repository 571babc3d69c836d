"""Trained weights of positions that a model keeps when its positions or its length change."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from fairseq_posenc.errors import UserError
from fairseq_posenc.hf import read_positions, set_positions
from fairseq_posenc.hf.families import FAMILIES
from fairseq_posenc.hf.own_positions import read_trained_length
from fairseq_posenc.identity import Identity, WeightSettings, is_identity
from fairseq_posenc.position_parameters import LengthRule
from fairseq_posenc.registry import names
from tests.helpers.hf_models import MODELS, compute_logits, make_inputs, position_parameters

pytestmark = pytest.mark.filterwarnings("error:set_positions.*untrained:UserWarning")
LENGTH = 8
TABLE = "model.positions.input.learned.table.weight"


def build(name: str, spec: str) -> PreTrainedModel:
    """Build a small model whose position parameters look trained."""
    torch.manual_seed(0)
    model = set_positions(MODELS[name].build(), spec, LENGTH)
    for parameter in position_parameters(model).values():
        nn.init.normal_(parameter)
    return model


def read(model: PreTrainedModel) -> Tensor:
    inputs = make_inputs(MODELS["llama"])
    return compute_logits(model, {key: x[:, :LENGTH] for key, x in inputs.items()})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((name, name) for name in ("shaw", "m4m", "deberta", "raffel")),
        ("shaw(max_distance=2)", "shaw(max_distance=5)"),
        ("raffel(reset=true)", "raffel(reset=true)"),
        ("inkling(extent=4)", "inkling(extent=7)"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "bert"])  # to the left, and to both sides
def test_tables_by_distance_grow_without_changing_the_model(name: str, old: str, new: str) -> None:
    model = build(name, old)
    logits = read(model)
    set_positions(model, new, 4 * LENGTH)
    assert torch.allclose(read(model), logits, atol=1e-5)


def test_a_table_by_distance_is_not_cut_as_if_its_rows_were_positions() -> None:
    model = build("llama", "inkling")
    name = "model.layers.1.self_attn.positions.encodings.inkling.table"
    old = model.get_parameter(name).clone()
    with pytest.warns(UserWarning, match=r"inkling\.table: untrained"):
        set_positions(model, "inkling", LENGTH // 2)
    assert not torch.isin(model.get_parameter(name), old).any()


@pytest.mark.parametrize("kind", ["Marian", "Pegasus"])
def test_sinusoids_are_no_trained_table(kind: str) -> None:
    """Both are an ``nn.Embedding`` in transformers, but hold nothing that was trained."""
    model = MODELS["marian"]._replace(model=f"{kind}Model", config=f"{kind}Config").build()
    stacks = FAMILIES[kind.lower()].find_stacks(model)
    assert len(stacks) == 2
    assert not any(stack.read_weights(stack.module) for stack in stacks)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("rule", ["copy", "interpolate", None])
def test_tables_by_position_grow_by_a_rule(rule: LengthRule | None, axes: int) -> None:
    model = build("llama", f"learned(axes={axes})")
    old = model.get_parameter(TABLE).clone().view(axes, LENGTH, -1)
    with nullcontext() if rule else pytest.warns(UserWarning, match="rows are new and untrained"):
        set_positions(model, "own", 2 * LENGTH, extend=rule)
    new = model.get_parameter(TABLE).view(axes, 2 * LENGTH, -1)
    for row in range(2 * LENGTH if rule else LENGTH):  # without a rule, the others are new
        if rule != "interpolate":
            expected = old[:, row % LENGTH]
        else:
            place = row * (LENGTH - 1) / (2 * LENGTH - 1)
            share, after = place % 1, old[:, min(int(place) + 1, LENGTH - 1)]
            expected = (1 - share) * old[:, int(place)] + share * after
        assert torch.allclose(new[:, row], expected, atol=1e-5), row
    cut = rf"{8 * axes} of {16 * axes} rows cut off; load the model"
    with pytest.warns(UserWarning, match=cut):
        set_positions(model, "own", LENGTH)
    assert torch.equal(model.get_parameter(TABLE).view(axes, LENGTH, -1), new[:, :LENGTH])


def test_rows_without_a_rule_are_new_and_reported() -> None:
    model = build("llama", "tupe")
    name = "model.layers.1.self_attn.positions.encodings.tupe.positions"
    old = model.get_parameter(name).clone()
    with pytest.warns(UserWarning, match=r"tupe\.positions: 8 of 16 rows are new .*extend='copy'"):
        set_positions(model, "tupe", 2 * LENGTH)
    assert torch.equal(model.get_parameter(name)[:LENGTH], old)
    with pytest.warns(UserWarning, match=r"tupe\.table.*: untrained"):
        set_positions(model, "tupe", LENGTH // 2)
    assert torch.equal(model.get_parameter(name), old[: LENGTH // 2])


def test_the_models_own_table_grows() -> None:
    model, inputs = MODELS["gpt2"].build(), make_inputs(MODELS["gpt2"])
    logits = compute_logits(model, inputs)
    set_positions(model, "own", 2 * read_trained_length(model), extend="copy")
    assert torch.allclose(compute_logits(model, inputs), logits, atol=1e-5)
    table = model.get_parameter("transformer.positions.input.learned.table.weight")
    assert torch.equal(*table.chunk(2))


@pytest.mark.parametrize(
    ("before", "after", "name", "change"),
    [
        ("learned(axes=2)", "learned", TABLE, "axes=2 before"),
        ("t5", "t5(max_distance=256)", "model.positions.shared.t5.table", "max_distance=256 now"),
    ],
)
def test_weights_of_other_meaning_are_not_taken(before, after, name, change):
    model = build("llama", before)
    old = model.get_parameter(name).clone()
    with pytest.warns(UserWarning, match=rf"\.table.*: untrained, .* options: {change}"):
        set_positions(model, after, 2 * LENGTH)
    assert model.get_parameter(name).shape == old.shape
    assert not torch.equal(model.get_parameter(name), old)


@pytest.mark.parametrize("spec", ["t5", "inkling"])
def test_tables_of_a_causal_model_are_not_taken_by_another(spec: str, tmp_path: Path) -> None:
    model = build("llama", spec)
    model.save_pretrained(tmp_path)
    model.model.config.is_causal = False
    with pytest.raises(UserError, match="with causal attention, the model has bidir"):
        AutoModel.from_pretrained(tmp_path, config=model.config)
    with pytest.warns(UserWarning, match="table: untrained, as the model is no longer causal"):
        set_positions(model, "own")


def test_records_without_causality_are_those_of_an_earlier_version(tmp_path: Path) -> None:
    model = build("bert", "t5")
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="with bidirectional attention, the model has causal"):
        AutoModelForCausalLM.from_pretrained(tmp_path, is_decoder=True)
    state = model.state_dict()
    name = next(filter(is_identity, state))
    earlier = Identity.from_tensor(state[name])._replace(weight_settings=WeightSettings())
    model.load_state_dict({**state, name: earlier.to_tensor()})


def test_trained_weights_that_are_taken_away_are_named_and_again_when_they_are_missed() -> None:
    model = MODELS["gpt2"].build()
    own = read_positions(model)
    table = "input.learned.table.weight"
    with pytest.warns(UserWarning, match=f"{table}: removed; if it was trained"):
        set_positions(model, "alibi")
    with pytest.warns(UserWarning, match=f"{table}: untrained, as the previous positions"):
        set_positions(model, own)


@pytest.mark.parametrize("name", names())
def test_every_encoding_stays_what_it_is_as_own(name: str) -> None:
    model = build("llama", name)
    logits = read(model)
    for spec in ("own", name, f"own+window(size={2 * LENGTH})"):
        set_positions(model, spec)
        assert torch.allclose(read(model), logits, atol=1e-5), spec


@pytest.mark.parametrize("name", ["llama", "gpt2", "roberta", "opt"])
def test_the_configuration_states_the_number_of_positions(name: str) -> None:
    """Other programs read it; the length of the training, on which scalings depend, is kept."""
    model = MODELS[name].build()
    before, trained = model.config.max_position_embeddings, read_trained_length(model)
    set_positions(model, "alibi", max_positions=trained + 10)
    assert model.config.max_position_embeddings == before + 10
    assert read_trained_length(model) == trained


def test_layers_that_were_removed_are_noticed() -> None:
    model = MODELS["smollm3"].build()  # its last layer does not rotate
    model.model.layers = model.model.layers[1:]
    with pytest.raises(UserError, match="layers of this model were removed or added"):
        set_positions(model, "own,none")
    plain = MODELS["llama"].build()
    plain.model.layers = plain.model.layers[1:]
    assert read_positions(set_positions(plain, "own,none")) == "rope(layout=half),none"
    plain.model.layers = plain.model.layers[1:]  # now the first one has no positions
    cut = set_positions(MODELS["llama"].build(), "3*alibi,none")
    cut.model.layers = cut.model.layers[:3]
    directed = set_positions(MODELS["bert"].build(), "own", directions="lr,rl")
    directed.bert.encoder.layer = directed.bert.encoder.layer[1:]
    saved = (plain.state_dict, cut.state_dict, directed.state_dict)
    for use in (*saved, lambda: set_positions(plain, "own,own")):
        with pytest.raises(UserError, match="layers of this model were removed or added"):
            use()
    assert read_positions(set_positions(cut, "own")) == "alibi"


@pytest.mark.parametrize("spec", ["rope(layout=half)", "alibi"])
def test_layers_that_were_added_have_the_positions_that_are_set_next(spec: str) -> None:
    stock, model = MODELS["llama"].build(), build("llama", "alibi")
    model.model.layers[1] = copy.deepcopy(stock.model.layers[1])  # has its own configuration
    for use in (lambda: read(model), model.state_dict, lambda: set_positions(model, "own")):
        with pytest.raises(UserError, match="layer"):
            use()
    expected = read(set_positions(stock, spec))
    torch.testing.assert_close(read(set_positions(model, spec)), expected)
    model.set_attn_implementation("fairseq_posenc")
    torch.testing.assert_close(read(model), expected)
    model.model.layers[1].self_attn.config._attn_implementation = "eager"
    model(torch.tensor([[7]]), past_key_values=stock(torch.tensor([[5, 6]])).past_key_values)
    model.model.layers[1].self_attn.layer_idx = 0  # as of a copy of the first layer
    with pytest.raises(UserError, match="give copied layers their own layer_idx"):
        read(model)


@pytest.mark.parametrize("ours", ["alibi", "own,none"])
@pytest.mark.parametrize("theirs", ["t5", "own", "2*none,alibi"])
def test_a_layer_of_a_model_with_other_positions_is_refused(ours: str, theirs: str) -> None:
    model, other = build("llama", ours), build("llama", theirs)
    model.model.layers[1] = other.model.layers[1]
    with pytest.raises(UserError, match="a layer with other positions was put into this model"):
        read(model)


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(UserError, match="extend must be copy or interpolate, not 'twice'"):
        set_positions(MODELS["llama"].build(), "learned", extend="twice")  # type: ignore[arg-type]
