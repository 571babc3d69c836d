"""The identity of weights survives arithmetic over state dicts, and a mixture is refused."""

from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fairseq_posenc.encodings.local_attention import Window
from fairseq_posenc.encodings.rope import Rope
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import Identity, WeightSettings, is_identity
from fairseq_posenc.specs import parse
from tests.helpers.commands import train
from tests.helpers.products import product_of
from tests.helpers.tiny_models import make_model

SETTINGS = WeightSettings(heads=4, activation="gelu", norm="post", dictionary="1a2b")
ROPE = Identity(parse("rope(base=500)"), "lr,rl", 128, SETTINGS)
ALIBI = Identity(parse("alibi"), "", 64)
NUMBERS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def move_average(x: torch.Tensor, decay: float, steps: int) -> torch.Tensor:
    average = x.clone()
    for _ in range(steps):
        average.mul_(decay).add_(x, alpha=1 - decay)
    return average


ARITHMETIC = {
    "nothing": lambda x: x,
    "a mean of three": lambda x: (x + x + x) / 3,
    "weights that add up to 1": lambda x: 0.1 * x + 0.2 * x + 0.7 * x,
    "interpolation": lambda x: torch.lerp(x, x, 0.3),
    "a task vector": lambda x: x + 0.4 * (x - x),
    "a moving average": lambda x: move_average(x, 0.9999, 20_000),
    "a short moving average": lambda x: move_average(x, 0.9, 500),
}


@pytest.mark.parametrize("change", ARITHMETIC)
@pytest.mark.parametrize("identity", [ROPE, ALIBI])
def test_an_identity_survives_arithmetic(identity, change):
    again = Identity.from_tensor(ARITHMETIC[change](identity.to_tensor()))
    assert again == identity
    assert torch.equal(again.to_tensor(), identity.to_tensor())


@pytest.mark.parametrize("change", ARITHMETIC)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_an_identity_survives_arithmetic_in_every_type(dtype, change):
    assert Identity.from_tensor(ARITHMETIC[change](ROPE.to_tensor().to(dtype))) == ROPE


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_identity_is_made_whatever_the_default_device(device):
    with torch.device(device):
        assert Identity.from_tensor(ROPE.to_tensor()) == ROPE


@pytest.mark.parametrize("share", [-2.0, -0.5, 0.01, 0.3, 0.5, 0.9, 0.99, 1.5])
def test_a_mixture_of_two_is_refused(share):
    mixture = torch.lerp(ROPE.to_tensor(), ALIBI.to_tensor(), share)
    with pytest.raises(UserError, match="a mixture of models"):
        Identity.from_tensor(mixture)


@pytest.mark.parametrize("broken", [torch.zeros(4096), torch.ones(7), torch.full((512,), 9.0)])
def test_what_is_not_an_identity_is_refused(broken):
    with pytest.raises(UserError):
        Identity.from_tensor(broken)


def test_a_changed_default_changes_no_saved_model(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "rope(scaling=yarn:2)+window"
    saved = make_model("causal_lm", position_encoding=spec).state_dict()
    monkeypatch.setitem(Window.__init__.__kwdefaults__ or {}, "size", 3)
    monkeypatch.setitem(Rope.__init__.__kwdefaults__ or {}, "base", 500.0)
    (name,) = filter(is_identity, saved)
    kept = str(Identity.from_tensor(saved[name]).positions)
    assert kept == "rope(base=10000,scaling=yarn:2)+window(size=512)"
    assert str(Identity.from_tensor(Identity(parse(kept), "", 64).to_tensor()).positions) == kept
    make_model("causal_lm", position_encoding=kept).load_state_dict(saved)
    with pytest.raises(UserError, match=r"trained with rope.*window\(size=512\), the model has"):
        make_model("causal_lm", position_encoding=spec).load_state_dict(saved)


@pytest.mark.parametrize("multi_avg_fn", [None, get_ema_multi_avg_fn(0.99)])
def test_averaged_models_of_torch_keep_it(multi_avg_fn):
    model = make_model("masked_lm", position_encoding="rope")
    average = AveragedModel(model, multi_avg_fn=multi_avg_fn)
    for _ in range(3):
        average.update_parameters(model)
    state = {name.removeprefix("module."): x for name, x in average.state_dict().items()}
    names = [name for name in state if is_identity(name)]
    assert names
    for name in names:
        assert str(Identity.from_tensor(state[name]).positions) == "rope"
    model.load_state_dict({name: x for name, x in state.items() if name != "n_averaged"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kept"), product_of(["masked_lm", "translation"], ["ema", "ema_fp32_params"])
)
def test_training_keeps_a_moving_average(family, kept, tmp_path):
    words = ["--store-ema", "--ema-decay", 0.9, *["--ema-fp32"] * (kept != "ema")]
    state = train(family, *words, "--max-update", 4, save_dir=tmp_path).checkpoint()
    for weights in (state["model"], state["extra_state"][kept]):
        names = [name for name in weights if is_identity(name)]
        assert names
        for name in names:
            assert Identity.from_tensor(weights[name]) == Identity.from_tensor(state["model"][name])
    again = train(family, *words, "--max-update", 6, save_dir=tmp_path)
    assert "Loaded checkpoint" in again.run.log
    assert "Loading EMA from checkpoint" in again.run.log
