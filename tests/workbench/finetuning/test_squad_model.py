"""SQuAD: a head, a loss or a best answer unlike its formula, and a start that is not the model."""

import math
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.logging import metrics

from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.tasks.squad.criterion import SquadCriterion
from fairseq_posenc.tasks.squad.databin import Limits
from fairseq_posenc.tokens.squad_windows import make_windows
from fairseq_posenc.tokens.tokenizer import TextTokens
from fairseq_posenc.workbench.finetuning.squad import predict
from fairseq_posenc.workbench.loading.pretrained import read_pretrained
from tests.helpers.exchanged import write_release
from tests.helpers.products import some_of
from tests.helpers.tiny_models import make_model

TOKENS = torch.tensor([[0, 5, 6, 2, 2, 7, 8, 9, 2], [0, 9, 2, 2, 6, 2, 1, 1, 1]])


def with_head():
    model = make_model("masked_lm", position_encoding="learned+m4m")
    model.register_span_head()
    return model


def test_scores_are_those_of_a_linear_layer_without_padding_in_float32():
    model = with_head()
    features, _ = model(TOKENS, features_only=True)
    layer = model.span_head.scores
    expected = (features @ layer.weight.T + layer.bias).unbind(-1)
    for ours, theirs in zip(model(TOKENS, span_scores=True), expected):
        torch.testing.assert_close(ours, theirs.masked_fill(TOKENS == 1, -math.inf))
    halved = model.to(torch.bfloat16)(TOKENS, span_scores=True)
    assert {scores.dtype for scores in halved} == {torch.float32}


def test_a_head_starts_fresh_on_a_pretrained_model_and_is_kept_on_a_fine_tuned_one():
    pretrained = make_model("masked_lm", position_encoding="learned+m4m")
    model, again = with_head(), with_head()
    before = model.span_head.scores.weight.clone()
    assert before.std() < 0.03  # BERT's weights: 0.02
    assert not model.span_head.scores.bias.any()
    model.load_state_dict(pretrained.state_dict(), strict=True)
    assert torch.equal(model.span_head.scores.weight, before)
    tuned = {k: v if is_identity(k) else v + 1 for k, v in model.state_dict().items()}
    again.load_state_dict(dict(tuned), strict=True)
    assert torch.equal(again.span_head.scores.weight, before + 1)
    pretrained.load_state_dict(dict(tuned), strict=True)  # the head is left out
    assert "span_head.scores.weight" not in pretrained.state_dict()


def test_the_loss_is_the_cross_entropy_of_both_ends_and_ranks_add_up():
    model, criterion = with_head(), SquadCriterion(SimpleNamespace())
    targets = {"starts": torch.tensor([5, 0]), "ends": torch.tensor([6, 4])}

    def compute(rows):
        tokens = TOKENS[rows]
        numbers = {"net_input": {"src_tokens": tokens}, "ntokens": int((tokens != 1).sum())}
        return criterion(model, numbers | {name: x[rows] for name, x in targets.items()})

    loss, size, logged = compute([0, 1])
    both = [scores.detach() for scores in model(TOKENS, span_scores=True)]
    terms = [F.cross_entropy(*pair, reduction="sum") for pair in zip(both, targets.values())]
    expected = float(sum(terms)) / 2
    assert (float(loss.detach()), size) == (pytest.approx(expected, rel=1e-5), 2)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert model.span_head.scores.weight.grad.abs().sum() > 0

    halves = [compute([row])[2] for row in (0, 1)]
    summed = {key: sum(half[key] for half in halves) for key in logged}
    means = {"loss": pytest.approx(expected / 2 / math.log(2), abs=1e-3)}
    for side, scores, right in zip(("start", "end"), both, targets.values()):
        means[f"{side}_accuracy"] = 100 * (scores.argmax(-1) == right).float().mean().item()
    for outputs in ([logged], halves, [summed]):
        with metrics.aggregate(new_root=True) as meters:
            SquadCriterion.reduce_metrics(outputs)
        assert meters.get_smoothed_values() == means


@pytest.mark.parametrize("seed", range(30))
def test_best_spans_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    context = np.arange(rng.integers(1, 90))
    for window in make_windows(np.arange(3), context, Limits(50, 17, 3), Dictionary()):
        start, end = rng.normal(size=(2, len(window.tokens)))
        size, at = len(window.has_max_context), window.offset
        sums = {
            (window.first + first, window.first + last): start[at + first] + end[at + last]
            for first in range(size)
            for last in range(first, min(first + predict.MAX_ANSWER, size))
            if window.has_max_context[first]
        }
        expected = sorted(sums.items(), key=lambda item: -item[1])[: predict.NBEST]
        found = predict.find_best_spans(window, start, end)
        assert [((first, last), score) for first, last, score in found.spans] == expected
        assert found.null == start[0] + end[0]


def test_windows_together_give_the_best_text_and_the_surest_that_there_is_one():
    context = "  the cat, the\n cat "
    spans = [(2, 5), (6, 9), (9, 10), (11, 14), (14, 15), (16, 19)]
    tokens = TextTokens(np.arange(6), *(np.array(side) for side in zip(*spans)))
    first = [predict.Guess(0, 1, 5.0), predict.Guess(1, 1, 3.0)]
    second = [predict.Guess(3, 5, 6.0), predict.Guess(5, 5, 4.0), predict.Guess(4, 4, 9.0)]
    scored = [predict.WindowSpans(first, null=2.0), predict.WindowSpans(second, null=7.0)]
    found = predict.combine_windows("q", context, tokens, scored)
    assert found == ("q", "the\n cat", 2.0 - 6.0)  # the span with 9.0 has no text
    empty = predict.WindowSpans([], null=1.0)
    assert predict.combine_windows("q", "", tokens, [empty]) == ("q", "", 0.0)


def test_no_questions_have_no_predictions():
    assert predict.Predictor(with_head(), None, "learned").predict([], max_tokens=64) == []


SPECS = some_of(["learned+m4m(max_distance=5)"], ["learned+m4m(max_distance=5)", "rope", "none"])


@pytest.mark.parametrize(
    ("arch", "options", "spec"),
    [
        *(("roberta_none_tiny", {"position_encoding": x}, x) for x in SPECS),
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
    pretrained = read_pretrained(write_release(args, model.state_dict()))
    assert str(pretrained.spec) == pretrained.roberta_section["position_encoding"] == spec
    assert pretrained.roberta_section.get("attention_directions", "") == directions
    assert (pretrained.max_positions, pretrained.dictionary.size) == (24, 24)
    rebuilt = make_model("masked_lm", **pretrained.roberta_section)
    rebuilt.load_state_dict(torch.load(pretrained.path)["model"], strict=True)
    torch.testing.assert_close(rebuilt(TOKENS)[0], model(TOKENS)[0])
    args.attention_directions = "lr,up"
    with pytest.raises(UserError, match="unknown direction 'up'"):
        read_pretrained(write_release(args, model.state_dict()))
