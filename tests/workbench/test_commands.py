"""The three families through fairseq's commands: train, resume, validate, generate, evaluate."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.commands import (
    BLOCKS,
    EPOCHS,
    FAMILIES,
    USER_DIR,
    assert_positions,
    pairs,
    run,
    sentences,
    train,
    trained,
    validate,
)
from tests.helpers.products import some_of

pytestmark = pytest.mark.slow
each_family = pytest.mark.parametrize("family", FAMILIES)
TRANSLATE = ["--user-dir", USER_DIR, "--path"]


@each_family
def test_training_says_which_positions_are_on_and_learns(family):
    model = trained(family)
    assert_positions(model.run, family)
    losses = model.figures("train")
    assert len(losses) == EPOCHS
    assert losses[-1] < losses[0]
    assert all(gradient > 0 for gradient in model.figures("train", "gnorm"))


@each_family
def test_a_resumed_run_equals_the_uninterrupted_one(family):
    """It draws the same batches, masks and dropout."""
    several = ["--batch-size", 4, "--dropout", 0.1, "--max-epoch", 2]
    whole = train(family, *several)
    resumed = train(family, *several, "--restore-file", whole.save_dir / "checkpoint1.pt")
    for group, key in (("train", "loss"), ("train", "gnorm"), ("valid", "loss")):
        assert resumed.figures(group, key) == whole.figures(group, key)[1:]
    ours, theirs = (each.checkpoint()["model"] for each in (resumed, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@each_family
def test_validation_after_loading_equals_validation_in_training(family):
    model = trained(family)
    done = validate(family, model.save_dir / "checkpoint_last.pt")
    assert_positions(done, family)
    assert done.valid() == model.run.valid()[-1:]


def hypotheses(done):
    """Return the hypotheses of a command by sentence: lists of score and words."""
    found = {}
    for line in done.out.splitlines():
        if line.startswith("H-"):
            number, score, words = line.split("\t")
            found.setdefault(int(number[2:]), []).append((float(score), words))
    return found


@pytest.fixture(scope="module")
def generated():
    """Translations of the test set: needs nothing but the checkpoint and --user-dir."""
    path = trained("translation").save_dir / "checkpoint_best.pt"
    search = ["--beam", 5, "--nbest", 5, "--required-batch-size-multiple", 1]
    return run("fairseq-generate", pairs(), *TRANSLATE, path, *search)


def test_interactive_translates_a_sentence_as_generate_does_in_a_batch(generated):
    path = trained("translation").save_dir / "checkpoint_best.pt"
    text = (pairs().parent / "test.src").read_text(encoding="utf-8")
    lengths = [len(line.split()) for line in text.splitlines()]
    shortest = lengths.index(min(lengths))  # which has padding in the batch
    assert lengths[shortest] < max(lengths)
    words = [pairs(), *TRANSLATE, path, "--beam", 5, "--nbest", 5]
    alone = run("fairseq-interactive", *words, given=text.splitlines()[shortest] + "\n")
    for ours, theirs in zip(hypotheses(alone)[0], hypotheses(generated)[shortest]):
        assert ours[1] == theirs[1]
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)


def test_eval_lm_gives_the_validation_loss_of_training():
    model = trained("causal_lm")
    path = model.save_dir / "checkpoint_last.pt"
    done = run(
        "fairseq-eval-lm",
        sentences(),
        *["--user-dir", USER_DIR, "--path", path, "--gen-subset", "valid", *BLOCKS],
    )
    assert_positions(done, "causal_lm")
    (line,) = [line for line in done.log.splitlines() if "Loss (base 2): " in line]
    loss = float(line.split("Loss (base 2): ")[1].split(",")[0])
    assert loss == pytest.approx(model.figures("valid")[-1], abs=1e-4)


@pytest.mark.parametrize("family", some_of(["masked_lm"], ["masked_lm", "translation"]))
def test_checkpointed_activations_and_update_freq_change_no_loss(family):
    whole = trained(family)
    halves = ["--batch-size", 8, "--update-freq", 2]
    divided = train(family, *halves, "--checkpoint-activations", "--max-epoch", EPOCHS)
    for key in ("loss", "gnorm"):
        assert divided.figures("train", key) == pytest.approx(whole.figures("train", key), rel=1e-4)


@pytest.mark.parametrize("family", some_of(["translation"], ["masked_lm", "translation"]))
def test_layerdrop_with_checkpointed_activations(family):
    options = ["--encoder-layerdrop", 0.2, "--checkpoint-activations"]
    losses = train(family, *options, "--max-epoch", EPOCHS).figures("train")
    assert losses[-1] < losses[0]
    # All else is the same, so a difference means that a layer was left out of an update.
    assert losses != pytest.approx(trained(family).figures("train"))
