"""A release of fairseq begins a training with our positions: old names, nothing of ours in it."""

from argparse import Namespace

import pytest
import torch

from tests.helpers.commands import sentences, train
from tests.helpers.exchanged import checkpoint, write_release
from tests.helpers.products import some_of
from tests.helpers.tiny_models import ARGS

pytestmark = pytest.mark.slow
SIZES = ARGS["masked_lm"] | {"encoder_layers": 2, "max_positions": 16}
OPTIONS = [x for name, value in SIZES.items() for x in (f"--{name.replace('_', '-')}", value)]


@pytest.fixture(scope="module")
def release():
    """fairseq's own RoBERTa: its weights, and the file, with the names of its first releases."""
    model = checkpoint("masked_lm", None, sentences(), arch="roberta_base", **SIZES).model
    weights = model.state_dict()
    old = {f"decoder.{k.partition('.')[2]}": v for k, v in weights.items() if "version" not in k}
    for name in [x for x in old if "q_proj." in x]:  # one tensor for queries, keys and values
        parts = [old.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        old[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
    old = {k.replace(".layernorm_embedding.", ".emb_layer_norm."): v for k, v in old.items()}
    task = {"task": "masked_lm", "criterion": "masked_lm", "data": "/x", "tokens_per_sample": 16}
    args = Namespace(arch="roberta_base", **SIZES, **task)  # with none of the later options
    return weights, write_release(args, old)


@pytest.mark.parametrize("arch", some_of(["roberta_m4m"], ["roberta_m4m", "roberta_rope"]))
def test_a_released_model_keeps_all_but_its_positions(arch, release):
    before, path = release
    start = ["--finetune-from-model", path, "--init-positions", "--lr", 0, "--max-epoch", 1]
    started = train("masked_lm", "--arch", arch, *OPTIONS, *start)
    after = started.checkpoint()["model"]
    assert before.keys() - after.keys() == {"encoder.sentence_encoder.embed_positions.weight"}
    for name in after:
        # Not our record of positions, fairseq's version, and a buffer of its sinusoids.
        if not name.endswith(("._extra_state", ".version", "._float_tensor")):
            kept = name in before and torch.equal(before[name], after[name])
            assert kept or (name not in before and f"{name} " in started.run.log), name


def test_training_from_a_release_is_that_of_fairseq(release):
    start = ["--finetune-from-model", release[1], "--max-epoch", 3]
    theirs = train("masked_lm", "--arch", "roberta_base", *OPTIONS, *start)
    ours = train("masked_lm", "--arch", "roberta_learned", *OPTIONS, *start)
    for group, key in (("train", "loss"), ("train", "gnorm"), ("valid", "loss")):
        assert ours.figures(group, key) == pytest.approx(theirs.figures(group, key), rel=1e-5)
