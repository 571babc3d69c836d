"""A training whose numbers explode stops with a line that says where."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from fairseq.trainer import Trainer

from fairseq_posenc.host.divergence import (
    _describe_largest_score,
    explain_divergence,
    parse_stop_update,
)
from tests.helpers.commands import FAMILIES, new_directory, train
from tests.helpers.tiny_models import STOCK, make_model, make_tokens

pytestmark = pytest.mark.slow
FIRST = {
    "masked_lm": r"encoder layer 1, head \d \(m4m\)",
    "causal_lm": r"decoder layer 1, head \d \(learned\+rope\)",
    "translation": r"encoder layer 1, head \d \(m4\)",
}


def test_another_failure_is_no_divergence():
    assert parse_stop_update("the disk is full") == 0


def test_the_update_is_told_where_memory_does_not_suffice_to_measure_scores():
    trainer = mock.Mock(spec=Trainer)
    trainer.cfg = mock.Mock(**{"checkpoint.save_dir": "checkpoints"})
    trainer.get_num_updates.return_value = 41
    trainer.get_model.side_effect = torch.OutOfMemoryError

    def train_step(self, samples):
        raise FloatingPointError("gradients are Nan/Inf")

    with pytest.raises(FloatingPointError) as stopped:
        train_step(trainer, [{}])
    said = explain_divergence(stopped.value)
    assert said.startswith("training stopped at update 42: gradients are Nan/Inf; the checkpoints")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_names_update_layer_and_encoding(family):
    save_dir = new_directory()
    train(family, "--max-update", 1, save_dir=save_dir)
    before = torch.load(save_dir / "checkpoint_last.pt")["model"]
    options = ("--max-update", 9, "--lr", 1e30, "--reset-lr-scheduler", "--save-interval", 99)
    done = train(family, *options, save_dir=save_dir, fails=True).run
    assert done.status == 1
    said = done.err.splitlines()[-1]
    assert re.search(r"training stopped at update \d: gradients are Nan/Inf", said)
    assert re.search(rf"not finite is in {FIRST[family]}; ", said)
    after = torch.load(save_dir / "checkpoint_last.pt")["model"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("family", STOCK)
def test_models_of_fairseqs_own_have_no_encoding_to_name(family):
    model = make_model(family, STOCK[family])
    tokens = make_tokens()
    inputs = {"src_tokens": tokens}
    if family != "causal_lm":
        inputs["src_lengths"] = tokens.ne(1).sum(1)
    if family == "translation":
        inputs["prev_output_tokens"] = tokens
    trainer = mock.Mock(
        **{"get_model.return_value": model, "_prepare_sample": lambda sample: (sample, False)}
    )
    said = _describe_largest_score(trainer, [{"net_input": inputs}])
    assert re.fullmatch(r"the largest attention score is \S+, in \w+ layer \d, head \d; ", said)


def test_large_scores_are_told_where_all_are_finite():
    """The loss overflows before the scores do, where the output layer alone is enormous."""
    save_dir = new_directory()
    train("masked_lm", "--max-update", 1, save_dir=save_dir)
    state = torch.load(save_dir / "checkpoint_last.pt")
    weight = state["model"]["encoder.lm_head.dense.weight"]
    weight *= 9e17 / weight.abs().max()  # larger ones are refused as damaged
    state["model"]["encoder.sentence_encoder.layers.1.final_layer_norm.weight"] *= 1e4
    torch.save(state, save_dir / "checkpoint_last.pt")
    done = train("masked_lm", "--max-update", 9, save_dir=save_dir, fails=True).run
    assert done.status == 1
    said = done.err.splitlines()[-1]
    assert re.search(r"the largest attention score is \S+, in encoder layer \d, head \d", said)
