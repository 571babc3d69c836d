"""Positions replaced in trained models: what is kept, permuted, mapped, made longer, and fresh."""

from __future__ import annotations

import shlex
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_posenc.identity import Identity, is_identity
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.cli import main
from fairseq_posenc.workbench.loading.checkpoints import read_updates
from tests.helpers.commands import new_directory
from tests.helpers.exchanged import Checkpoint, checkpoint
from tests.helpers.tiny_models import ARGS, STOCK, make_model
from tests.workbench.convert.test_exchange import padded, scores
from tests.workbench.convert.test_swap_roberta import write

LAYOUTS = [
    ("masked_lm", "rope", "rope(layout=half)"),
    ("causal_lm", "xpos+alibi", "xpos(layout=half)+alibi"),
    ("causal_lm", "rope(fraction=0.5)", "rope(fraction=0.5,layout=half)"),
    ("translation", "rope(cross_attention=true)", "rope(cross_attention=true,layout=half)"),
]


def swap(trained, *more, code=0):
    """Run the command; return the new model and its checkpoint."""
    out = new_directory() / "start.pt"
    words = ["--checkpoint", trained.path, "--out", out, *more]
    assert main(["swap", *map(str, words)]) == code
    if code:
        assert not out.exists()
        return None
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(out)], {"data": str(trained.data)}
    )
    return Checkpoint(out, trained.data, model.eval(), trained.task)


def weights(trained):
    state = torch.load(trained.path)["model"]
    return {name: value for name, value in state.items() if not is_identity(name)}


def others(trained):
    return {n: v for n, v in weights(trained).items() if not is_position_parameter(n)}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(("family", "one", "other"), LAYOUTS)
def test_another_layout_is_the_same_model_and_back_bit_for_bit(family, one, other, capsys):
    trained = checkpoint(family, one)
    swapped = swap(trained, "--position-encoding", other)
    assert "on random sentences all scores are equal to" in capsys.readouterr().out
    for side in ("left", "right"):
        tokens, real = padded(side)
        ours, theirs = (scores(each, family, tokens)[real] for each in (swapped, trained))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    changed = {n for n, v in weights(trained).items() if not torch.equal(v, weights(swapped)[n])}
    assert changed
    assert all(".q_proj." in name or ".k_proj." in name for name in changed)
    assert_equal(weights(swap(swapped, "--position-encoding", one)), weights(trained))


def test_a_layout_is_refused_beside_vectors_in_the_order_of_coordinates(capsys):
    trained = checkpoint("masked_lm", "rope+m4m")
    swap(trained, "--position-encoding", "rope(layout=half)+m4m", code=2)
    assert "if other encodings add numbers to the scores" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("causal_lm", "rope", "none"),
        ("translation", "sinusoidal", "rope"),
        ("translation", "sinusoidal(layout=fairseq)", "alibi"),
        ("masked_lm", "learned", "alibi+m4m"),
        ("causal_lm", "learned", "t5"),
    ],
)
def test_any_positions_become_any_others(family, old, new, capsys):
    trained = checkpoint(family, old)
    swapped = swap(trained, "--position-encoding", new)
    assert_equal(others(swapped), others(trained))
    told = capsys.readouterr().out
    assert f"kept bit for bit: the {len(others(trained))} tensors that are not positions" in told
    fates = {line.split(" (")[0]: line.split(": ")[1] for line in told.splitlines() if " (" in line}
    for one, fate in ((swapped, "new"), (trained, "dropped")):
        for name in weights(one).keys() - others(one).keys():
            assert fates[name] == fate
    (stack, *_) = [name for name in torch.load(swapped.path)["model"] if is_identity(name)]
    assert Identity.from_tensor(torch.load(swapped.path)["model"][stack]).positions == new


def test_the_decoder_may_have_other_positions():
    trained = checkpoint("translation", "learned")
    swapped = swap(trained, "--position-encoding-decoder", "rope")
    assert str(swapped.model.encoder.assembly.spec) == "learned"
    assert str(swapped.model.decoder.assembly.spec) == "rope"
    table = "encoder.embed_positions.encodings.learned.table.weight"
    assert torch.equal(weights(swapped)[table], weights(trained)[table])


@pytest.mark.parametrize("family", ["masked_lm", "causal_lm", "translation"])
@pytest.mark.parametrize("rule", ["copy", "interpolate"])
def test_tables_by_position_become_longer(family, rule, capsys):
    """To 47 positions, by interpolation each second one is an old one."""
    trained = checkpoint(family, "learned")
    swap(trained, "--max-positions", 47, code=2)
    error = capsys.readouterr().err
    assert "24 rows in the source and would have 47: say how a longer table is made" in error
    assert "--extend copy" in error
    assert "--extend interpolate" in error
    swapped = swap(trained, "--max-positions", 47, "--extend", rule)
    stack = "encoder.sentence_encoder" if family == "masked_lm" else "decoder"
    name = f"{stack}.embed_positions.encodings.learned.table.weight"
    assert f"24 rows: --extend {rule}" in capsys.readouterr().out
    old, new = weights(trained)[name], weights(swapped)[name]
    assert new.shape == (47, old.size(1))
    if rule == "copy":
        assert torch.equal(new, torch.cat([old, old[:23]]))
    else:
        torch.testing.assert_close(new[::2], old)
        torch.testing.assert_close(new[1::2], (old[1:] + old[:-1]) / 2)
    tokens, _ = padded("right", longest=46)
    assert scores(swapped, family, tokens).isfinite().all()


@pytest.mark.parametrize("family", ["causal_lm", "translation"])
@pytest.mark.parametrize("learned", [True, False])
def test_fairseqs_own_models_are_sources(family, learned, capsys):
    """A stock checkpoint with ours in its place computes the same, before other positions."""
    kinds = {f"{side}_learned_pos": learned for side in ("encoder", "decoder")}
    model = make_model(family, STOCK[family], **kinds)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    arch = STOCK[family]
    args = Namespace(_name=arch, arch=arch, **{**ARGS[family], **kinds})
    task = {"_name": "translation" if family == "translation" else "language_modeling"}
    task |= {"data": "/x", "source_lang": "de", "target_lang": "en", "tokens_per_sample": 24}
    path = new_directory() / "stock.pt"
    write(model.state_dict(), path, args=None, cfg={"task": task, "model": args})
    out = path.with_name("start.pt")
    spec = "learned" if learned else "sinusoidal(layout=fairseq)"
    words = ["--checkpoint", path, "--out", out, "--position-encoding", spec]
    assert main(["swap", *map(str, words)]) == 0
    state = torch.load(out)
    assert read_updates(state) == 0
    ours = make_model(family, **{"position_encoding": spec, **kinds})
    ours.load_state_dict(dict(state["model"]))
    tokens, real = padded("right", symbols=16)
    one, other = (
        scores(Checkpoint(path, path, each.eval(), None), family, tokens)[real]
        for each in (ours, model)
    )
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert ("mapped from" in capsys.readouterr().out) == learned


@pytest.mark.parametrize(
    ("old", "new", "length"),
    [
        ("rope", "rope(scaling=yarn:4)", 24),  # whose ramp is that of the trained length
        ("t5", "t5", 24),
        ("learned", "rope(scaling=yarn:4)", 96),
    ],
)
def test_what_depends_on_the_trained_length_keeps_it(old, new, length):
    trained = checkpoint("causal_lm", old)
    swapped = swap(trained, "--position-encoding", new, "--max-positions", 96)
    assert swapped.model.decoder.identity.trained_length == length
    assert swapped.model.decoder.assembly.dims.max_positions == 96


@pytest.mark.parametrize(
    ("family", "spec", "more"),
    [
        ("masked_lm", "rope+m4m", {"encoder_normalize_before": True}),
        ("causal_lm", "t5", {"no_share_decoder_input_output_embed": True}),
        ("translation", "alibi", {"encoder_embed_dim": 48, "decoder_layers": 1}),
    ],
)
def test_the_printed_options_build_the_model(family, spec, more, capsys):
    trained = checkpoint(family, "none", **more)
    swapped = swap(trained, "--position-encoding", spec)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("fairseq-train DATA")[2])
    at = words.index("--user-dir")
    words = [str(trained.data), *words[:at], *words[at + 2 : -1]]
    config = convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), words)
    )
    assert config.checkpoint.finetune_from_model == str(swapped.path)
    model = tasks.setup_task(config.task).build_model(config.model)
    model.load_state_dict(dict(torch.load(swapped.path)["model"]))
    tokens, _ = padded("right")
    ours = scores(Checkpoint(swapped.path, swapped.data, model.eval(), None), family, tokens)
    torch.testing.assert_close(ours, scores(swapped, family, tokens))


def test_what_is_no_swap_is_told_in_a_line(capsys):
    trained = checkpoint("causal_lm", "rope")
    for words, told in (
        ([], "nothing to swap"),
        (["--position-encoding", "rpoe"], "unknown position encoding 'rpoe'"),
        (["--position-encoding", "none", "--max-positions", 9], "never cut"),
        (["--position-encoding", "rope", "--attention-directions", "lr"], "sees only lr"),
        (["--position-encoding", "rope", "--checkpoint", "no.pt"], "no.pt: no such file"),
    ):
        swap(trained, *words, code=2)
        error = capsys.readouterr().err
        assert told in error
        assert len(error.splitlines()) == 1
    swap(trained, "--arch", "roberta_m4m", code=2)
    assert "a model of the architecture transformer_lm" in capsys.readouterr().err
    state = torch.load(trained.path)
    state["cfg"]["model"]["_name"] = "lightconv"
    torch.save(state, trained.path)
    swap(trained, "--position-encoding", "none", code=2)
    assert "a model of the architecture lightconv, not a RoBERTa" in capsys.readouterr().err
