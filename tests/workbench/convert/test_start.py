"""A checkpoint of fairseq gets other positions by ``--finetune-from-model`` and a flag of ours."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from tests.helpers.commands import new_directory, train
from tests.helpers.tiny_models import ARGS

# Ends of names: our record of positions, fairseq's version, a buffer of its sinusoids.
NOT_WEIGHTS = ("._extra_state", ".version", "._float_tensor")
SIZES = ARGS["masked_lm"] | {"encoder_layers": 2, "max_positions": 16}
OPTIONS = [x for name, value in SIZES.items() for x in (f"--{name.replace('_', '-')}", value)]


def name_as_first_releases(weights):
    """Return a stock model's weights as the first releases of RoBERTa name and join them."""
    old = {f"decoder.{k.partition('.')[2]}": v for k, v in weights.items() if "version" not in k}
    for name in [name for name in old if name.endswith("q_proj.weight")]:
        stem = name[: -len("q_proj.weight")]
        for kind in ("weight", "bias"):
            parts = [old.pop(f"{stem}{part}_proj.{kind}") for part in "qkv"]
            old[f"{stem}in_proj_{kind}"] = torch.cat(parts)
    return {name.replace(".layernorm_embedding.", ".emb_layer_norm."): v for name, v in old.items()}


@pytest.fixture(scope="module")
def trained():
    """fairseq's own RoBERTa."""
    return train("masked_lm", "--arch", "roberta_base", *OPTIONS, "--max-epoch", 2, user_dir=None)


@pytest.fixture(scope="module")
def released(trained):
    """The same in the format of fairseq's releases."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    task = {"task": "masked_lm", "criterion": "masked_lm", "data": "/x", "tokens_per_sample": 16}
    state = {
        "args": Namespace(arch="roberta_base", **SIZES, **task),
        "model": name_as_first_releases(trained.checkpoint()["model"]),
        "optimizer_history": [{**history, "num_updates": 500000}],
        "extra_state": {"train_iterator": {"epoch": 30}, "val_loss": 1.4},
        "last_optimizer_state": None,
    }
    path = new_directory() / "model.pt"
    torch.save(state, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["roberta_m4m", "roberta_rope"])
def test_a_released_model_keeps_all_but_its_positions(arch, trained, released):
    start = ["--finetune-from-model", released, "--init-positions", "--lr", 0, "--max-epoch", 1]
    started = train("masked_lm", "--arch", arch, *OPTIONS, *start)
    before, after = trained.checkpoint()["model"], started.checkpoint()["model"]
    kept = [name for name in before if name in after and not name.endswith(NOT_WEIGHTS)]
    assert set(before) - set(after) == {"encoder.sentence_encoder.embed_positions.weight"}
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    new = {name for name in after if name not in before and not name.endswith(NOT_WEIGHTS)}
    assert all(f"{name} " in started.run.log for name in new)


@pytest.mark.slow
def test_training_from_a_release_is_that_of_fairseq(released):
    start = ["--finetune-from-model", released, "--max-epoch", 3]
    theirs = train("masked_lm", "--arch", "roberta_base", *OPTIONS, *start)
    ours = train("masked_lm", "--arch", "roberta_learned", *OPTIONS, *start)
    for group, key in (("train", "loss"), ("train", "gnorm"), ("valid", "loss")):
        assert ours.figures(group, key) == pytest.approx(theirs.figures(group, key), rel=1e-5)
