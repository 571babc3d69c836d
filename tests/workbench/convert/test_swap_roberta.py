"""Starting from a trained RoBERTa: what is kept, what is new, what is refused, and training on."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from fairseq_posenc.checkpoints.state_dict_adapter import COPIES, is_copy
from fairseq_posenc.errors import UserError
from fairseq_posenc.identity import is_identity
from fairseq_posenc.position_parameters import is_position_parameter
from fairseq_posenc.workbench.cli import main
from tests.helpers.commands import (
    BLOCKS,
    TRAINING,
    USER_DIR,
    kill_in_training,
    new_directory,
    refused,
    run,
    script,
    sentences,
    train,
)
from tests.helpers.tiny_models import ARGS, STOCK, logits, make_model, make_tokens

SIZES = ARGS["masked_lm"]
# What released checkpoints have beside the model's options; they hold no optimizer.
OLD_ARGS = {"task": "masked_lm", "criterion": "masked_lm", "data": "/x", "tokens_per_sample": 24}
HISTORY = {
    "criterion_name": "MaskedLmLoss",
    "optimizer_name": "FairseqAdam",
    "lr_scheduler_state": {"best": 1.5},
    "num_updates": 500000,
}
TABLE = "encoder.sentence_encoder.embed_positions.encodings.learned.table.weight"
IN_FILE = "decoder.sentence_encoder.embed_positions.weight"


def oldest_names(weights):
    """Return a stock model's weights as the first releases of RoBERTa name and join them."""
    old = {f"decoder.{k.partition('.')[2]}": v for k, v in weights.items() if "version" not in k}
    for name in [name for name in old if name.endswith("q_proj.weight")]:
        stem = name[: -len("q_proj.weight")]
        for kind in ("weight", "bias"):
            parts = [old.pop(f"{stem}{part}_proj.{kind}") for part in "qkv"]
            old[f"{stem}in_proj_{kind}"] = torch.cat(parts)
    return {name.replace(".layernorm_embedding.", ".emb_layer_norm."): v for name, v in old.items()}


def released(weights, path, arch="roberta_base", **args):
    """Write weights in the format of fairseq's releases."""
    return write(weights, path, args=Namespace(arch=arch, **{**OLD_ARGS, **SIZES, **args}))


def write(weights, path, **settings):
    position = {"epoch": 30, "iterations_in_epoch": 7}
    state = {
        **settings,
        "model": weights,
        "optimizer_history": [HISTORY],
        "extra_state": {"train_iterator": position, "val_loss": 1.4},
        "last_optimizer_state": None,
    }
    torch.save(state, path)
    return path


@pytest.fixture
def stock():
    """A stock RoBERTa whose parameters all count: fairseq starts biases at 0."""
    model = make_model("masked_lm", STOCK["masked_lm"])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def source(stock, tmp_path):
    return released(oldest_names(stock.state_dict()), tmp_path / "model.pt")


def ours(path, **options):
    """Write a checkpoint of ours, in the format of today's fairseq; return the model."""
    model = make_model("masked_lm", **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    args = Namespace(_name="roberta_none", arch="roberta_none", **{**SIZES, **options})
    task = {"_name": "masked_lm", "data": "/x", "tokens_per_sample": 24}
    write(model.state_dict(), path, args=None, cfg={"task": task, "model": args})
    return model


def initialise(source, arch, *more):
    """Run the command; return the checkpoint that it wrote."""
    out = source.with_name("start.pt")
    words = ["--checkpoint", str(source), "--arch", arch, "--out", str(out)]
    assert main(["swap", *words, *more]) == 0
    return torch.load(out)


def loaded(state):
    """Return the model of a checkpoint."""
    args = state["cfg"]["model"]
    options = ("position_encoding", "attention_directions", "max_positions")
    model = make_model("masked_lm", args.arch, **{name: getattr(args, name) for name in options})
    model.load_state_dict(dict(state["model"]))
    return model


def fates(printed):
    """Collect the fate of each position parameter, by name."""
    lines = [line.split(": ", 1) for line in printed.splitlines() if ".weight (" in line]
    return {name.split(" ")[0]: fate for name, fate in lines}


def test_with_learned_positions_the_start_is_the_released_model(source, stock, capsys):
    state = initialise(source, "roberta_learned")
    assert state["optimizer_history"][-1]["num_updates"] == 0
    assert state["extra_state"]["train_iterator"]["epoch"] == 1
    tokens = make_tokens(3, 20)
    ours, theirs = (logits(model, "masked_lm", tokens) for model in (loaded(state), stock))
    torch.testing.assert_close(ours, theirs)
    assert fates(capsys.readouterr().out) == {TABLE: f"mapped from {IN_FILE}[2:]"}


@pytest.mark.parametrize("arch", ["roberta_m4m", "roberta_learned_m4m", "decbert_diff_nope"])
def test_all_but_positions_is_kept_bit_for_bit(arch, source, stock, capsys):
    state = initialise(source, arch)
    shared = {
        k: v
        for k, v in state["model"].items()
        if not is_position_parameter(k) and not is_identity(k)
    }
    expected = {
        k: v for k, v in stock.state_dict().items() if "embed_positions" not in k and not is_copy(k)
    }
    assert shared.keys() == expected.keys()
    for name in shared:
        if "version" not in name:  # fairseq's mark of old files
            assert torch.equal(shared[name], expected[name]), name
    positions = {k for k in state["model"] if is_position_parameter(k)}
    dropped = set() if TABLE in positions else {IN_FILE}
    told = fates(capsys.readouterr().out)
    assert told.keys() == positions | dropped
    assert {name for name, fate in told.items() if fate == "new"} == positions - {TABLE}


def test_copies_of_weights_count_for_nothing(stock, tmp_path, capsys):
    """Encoder layers of the official fairseq 0.12.2 write them; nothing trained them."""
    weights = {name: x for name, x in stock.state_dict().items() if not is_copy(name)}
    layers = [f"encoder.sentence_encoder.layers.{n}" for n in range(SIZES["encoder_layers"])]
    copies = {f"{layer}.{name}": torch.ones(3) for layer in layers for name in COPIES}
    assert all(map(is_copy, copies))
    assert not any(map(is_copy, oldest_names(weights)))  # which join projections inside attentions
    states = []
    for found in (weights, {**weights, **copies}):
        path = released(found, tmp_path / "model.pt")
        states.append(initialise(path, "roberta_m4m", "--overwrite"))
    without, with_them = (state["model"] for state in states)
    assert without.keys() == with_them.keys()
    assert all(torch.equal(without[name], with_them[name]) for name in without)


def test_half_precision_stays_as_it_is(stock, tmp_path):
    weights = {k: v.half() for k, v in oldest_names(stock.state_dict()).items()}
    state = initialise(released(weights, tmp_path / "model.pt"), "roberta_m4m")
    name = "encoder.sentence_encoder.embed_tokens.weight"
    assert torch.equal(state["model"][name], stock.state_dict()[name].half())
    loaded(state)


def test_what_is_new_is_drawn_from_the_seed(source):
    name = "encoder.sentence_encoder.layers.1.self_attn.encodings.m4m.table.weight"
    one, again, two = (
        initialise(source, "roberta_m4m", "--seed", seed, "--overwrite")["model"][name]
        for seed in ("1", "1", "2")
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    assert one.std() == pytest.approx(0.02, rel=0.2)


def test_rows_that_belong_to_no_position_stay_in_front(tmp_path):
    model = ours(tmp_path / "model.pt", position_encoding="tupe_shared(reset=true)")
    old = model.encoder.sentence_encoder.encodings["tupe_shared"].positions
    more = ["--position-encoding", "tupe_shared+reset", "--max-positions", "30"]
    state = initialise(tmp_path / "model.pt", "roberta_none", *more, "--extend", "copy")
    new = state["model"]["encoder.sentence_encoder.encodings.tupe_shared.positions"]
    assert torch.equal(new, torch.cat([old, old[1:7]]))


@pytest.mark.parametrize("spec", ["m4m", "m4(reset=true)", "raffel", "inkling"])
def test_tables_by_distance_grow_without_a_change_of_the_model(spec, tmp_path, capsys):
    model = ours(tmp_path / "model.pt", position_encoding=spec)
    more = ["--position-encoding", spec, "--max-positions", "60"]
    state = initialise(tmp_path / "model.pt", "roberta_none", *more)
    tokens = make_tokens(2, 60)  # beyond its table the source clips
    torch.testing.assert_close(loaded(state)(tokens)[0], model(tokens)[0])
    told = fates(capsys.readouterr().out).items()
    assert all("extended to longer distances" in f for name, f in told if "projection" not in name)


OTHER_SOURCES = [
    ("m4", "m4m", {"m4.table": "dropped", "m4m.table": "new"}),
    ("learned+m4", "m4", {"learned.table": "dropped", "m4.table": "mapped from"}),
    ("m4", "m4+reset", {"m4.table": "new, as the source has other options: reset=True"}),
    ("m4", "m4(max_distance=5)", {"m4.table": "new, as the source's is (1, 47, 8)"}),
    ("m4", "m4(scale_factor=3)", {"m4.table": "mapped from"}),
]


@pytest.mark.parametrize(("old", "new", "expected"), OTHER_SOURCES)
def test_a_checkpoint_of_ours_with_other_positions(old, new, expected, tmp_path, capsys):
    ours(tmp_path / "model.pt", position_encoding=old)
    state = initialise(tmp_path / "model.pt", "roberta_none", "--position-encoding", new)
    loaded(state)
    told = fates(capsys.readouterr().out)
    for part, fate in expected.items():
        names = [name for name in told if f".encodings.{part}" in name]
        starting = [name for name in names if told[name].startswith(fate)]
        assert len(starting) == (1 if part == "learned.table" else 3), told


def test_an_encodings_old_values_are_not_taken_for_what_has_changed(tmp_path):
    model = ours(tmp_path / "model.pt", position_encoding="m4")
    state = initialise(tmp_path / "model.pt", "roberta_m4_reset")
    name = "encoder.sentence_encoder.layers.0.self_attn.encodings.m4.table.weight"
    assert not torch.equal(state["model"][name], model.state_dict()[name])


def test_heads_of_tasks_are_left_out_and_named(source, stock, capsys):
    weights = oldest_names(stock.state_dict())
    weights["classification_heads.rte.dense.weight"] = torch.zeros(32, 32)
    weights["classification_heads.rte.out_proj.weight"] = torch.zeros(2, 32)
    state = initialise(released(weights, source), "roberta_m4m")
    assert not any("heads" in name for name in state["model"])
    printed = capsys.readouterr().out
    assert "left out, as they belong to a task: classification_heads.rte.dense.weight" in printed


def test_directions_are_the_architectures_or_the_users(source):
    state = initialise(source, "decbert_diff")
    assert loaded(state).encoder.sentence_encoder.directions == ("lr", "rl", "both")
    more = ["--attention-directions", "rl", "--overwrite"]
    state = initialise(source, "decbert_diff", *more)
    assert loaded(state).encoder.sentence_encoder.directions == ("rl", "both", "both")


MISTAKES = [
    (["--arch", "roberta_m4m_large"], "has 24 layers of width 1024 and 4096, 16 heads, but"),
    (["--arch", "roberta_m4m_large"], "3 layers of width 32 and 48, 4 heads: write --arch rob"),
    (["--arch", "roberta_base"], "--arch roberta_base: no such masked language model"),
    (["--arch", "transformer_rope"], "--arch transformer_rope: no such masked language model"),
    (["--arch", "roberta_m4m", "--max-positions", "9"], "never cut"),
    (["--arch", "roberta_m4m", "--position-encoding", "m5"], "unknown position encoding 'm5'"),
    (["--arch", "roberta_m4m", "--checkpoint", "no.pt"], "--checkpoint no.pt: no such file"),
    (
        ["--arch", "roberta_m4m", "--checkpoint", __file__],
        f"--checkpoint {__file__}: not a complete checkpoint of fairseq",
    ),
    (["--arch", "roberta_m4m", "--out", "/no/such/start.pt"], "there is no folder /no/such"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_told_in_a_line(arguments, message, source, capsys):
    given = ["--checkpoint", str(source), "--out", str(source.with_name("start.pt")), *arguments]
    assert message in refused(capsys, "swap", *given)
    assert not source.with_name("start.pt").exists()


def test_a_file_that_is_no_checkpoint_of_fairseq_is_refused(tmp_path, capsys):
    torch.save({"model": {}}, tmp_path / "model.pt")
    assert main(["swap", "--checkpoint", str(tmp_path / "model.pt"), "--arch", "roberta_m4m"]) == 2
    assert "model.pt: not a complete checkpoint of fairseq" in capsys.readouterr().err


def test_the_right_name_is_told_for_a_size_that_has_one(stock, tmp_path, capsys):
    """The weights are not read before the sizes are known to be right."""
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 128, "encoder_ffn_embed_dim": 512}
    path = released(oldest_names(stock.state_dict()), tmp_path / "model.pt", **sizes)
    assert main(["swap", "--checkpoint", str(path), "--arch", "decbert_diff"]) == 2
    assert "write --arch decbert_diff_tiny" in capsys.readouterr().err


def test_without_out_the_architecture_names_the_file(source, monkeypatch):
    named = initialise(source, "roberta_m4m")["model"]
    monkeypatch.chdir(source.parent)
    assert main(["swap", "--checkpoint", str(source), "--arch", "roberta_m4m"]) == 0
    found = torch.load("roberta_m4m.pt")["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lacks", "it lacks 1"),
        ("more", "it has, unlike the new model, 1"),
        ("size", "it has other sizes in 1"),
    ],
)
def test_weights_that_the_options_do_not_tell_of_are_refused(
    change, message, stock, tmp_path, capsys
):
    weights = oldest_names(stock.state_dict())
    if change == "lacks":
        del weights["decoder.lm_head.dense.weight"]
    elif change == "size":
        weights["decoder.lm_head.dense.weight"] = torch.zeros(16, 32)
    else:
        weights["decoder.sentence_encoder.segment_embeddings.weight"] = torch.zeros(2, 32)
    path = released(weights, tmp_path / "model.pt")
    assert main(["swap", "--checkpoint", str(path), "--arch", "roberta_m4m"]) == 2
    assert message in capsys.readouterr().err


def test_unasked_or_failed_writes_leave_the_old_file_alone(source, small_disk, capsys):
    out = small_disk / "start.pt"
    out.write_bytes(b"old")
    given = ["swap", "--checkpoint", str(source), "--arch", "roberta_m4", "--out", str(out)]
    full = f"{out} could not be written (No space left on device)"
    for more, code, message in (
        ([], 2, "exists: name another file, or add --overwrite"),
        (["--overwrite"], 1, full),
    ):
        assert main([*given, *more]) == code
        assert message in capsys.readouterr().err
        assert out.read_bytes() == b"old"
    assert [path.name for path in out.parent.iterdir()] == ["start.pt"]


def test_another_dictionary_is_an_error_that_gives_both_sizes(source):
    state = initialise(source, "roberta_m4m")
    name = "encoder.sentence_encoder.embed_tokens.weight"
    state["model"][name] = torch.zeros(30, 32)
    with pytest.raises(UserError, match=r"dictionary of 30 symbols .* the data one of 24"):
        loaded(state)


# Training: on real data, from a checkpoint that fairseq-train made without this package.

STOCK_SIZE = [
    *("--arch", "roberta_base", "--encoder-layers", 2, "--encoder-embed-dim", 32),
    *("--encoder-ffn-embed-dim", 48, "--encoder-attention-heads", 4, "--max-positions", 16),
]
OURS = [*STOCK_SIZE[2:], "--arch"]


@pytest.fixture(scope="module")
def trained_by_stock():
    """A stock checkpoint, put into the format of fairseq's releases."""
    training = train("masked_lm", *STOCK_SIZE, "--max-epoch", 2, user_dir=None)
    state = training.checkpoint()
    sizes = {name: getattr(state["cfg"]["model"], name) for name in SIZES}
    blocks = {"sample_break_mode": "complete", "tokens_per_sample": 16, "seed": 1}
    path = new_directory() / "model.pt"
    return released(oldest_names(state["model"]), path, **sizes, **blocks)


def start_of(source, arch):
    out = new_directory() / "start.pt"
    assert main(["swap", "--checkpoint", str(source), "--arch", arch, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_training_from_the_start_equals_fairseqs_own_from_the_release(trained_by_stock):
    start = start_of(trained_by_stock, "roberta_learned")
    more = ["--max-epoch", 3]
    released = ["--finetune-from-model", trained_by_stock]
    theirs = train("masked_lm", *STOCK_SIZE, *more, *released)
    ours = train("masked_lm", *OURS, "roberta_learned", *more, "--restore-file", start)
    for group, key in (("train", "loss"), ("train", "gnorm"), ("valid", "loss")):
        assert ours.figures(group, key) == pytest.approx(theirs.figures(group, key), rel=1e-5)


@pytest.mark.slow
def test_the_printed_options_train_and_begin_with_the_starts_own_loss(trained_by_stock, capsys):
    start = start_of(trained_by_stock, "roberta_m4m")
    printed = capsys.readouterr().out.splitlines()[-1]
    told = printed.partition("--user-dir fairseq_posenc ")[2].split()[:-1]
    frozen = ["--lr", 0, "--max-epoch", 1]
    began = train("masked_lm", *told, *frozen)
    options = ["--user-dir", USER_DIR, "--task", "masked_lm", "--path", start]
    data = ["--batch-size", 16, "--required-batch-size-multiple", 1, "--log-format", "json"]
    alone = run("fairseq-validate", sentences(), *options, *data)
    assert began.run.valid() == alone.valid()


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_own_last_checkpoint(trained_by_stock):
    start = start_of(trained_by_stock, "roberta_m4m")
    more = [*OURS, "roberta_m4m", "--finetune-from-model", start]
    save_dir = new_directory()
    model = ["--user-dir", USER_DIR, "--task", "masked_lm", "--criterion", "masked_lm"]
    command = [script("fairseq-train"), sentences(), *model, *BLOCKS, *TRAINING, *more]
    command += ["--save-dir", save_dir, "--max-epoch", 100000]
    kill_in_training(command, save_dir / "checkpoint_last.pt", save_dir)
    updates = last_update(save_dir)
    resumed = train("masked_lm", *more, "--max-update", updates + 2, save_dir=save_dir)
    assert f"Loaded checkpoint {save_dir}/checkpoint_last.pt" in resumed.run.log
    assert updates >= 1
    assert last_update(save_dir) == updates + 2


def last_update(save_dir):
    state = torch.load(save_dir / "checkpoint_last.pt")
    return state["optimizer_history"][-1]["num_updates"]


@pytest.mark.slow
def test_hydra_trains_from_a_start(trained_by_stock):
    start = start_of(trained_by_stock, "roberta_m4m")
    save_dir = new_directory()
    model = {name.lstrip("-").replace("-", "_"): v for name, v in zip(OURS[0:-1:2], OURS[1::2])}
    run(
        "fairseq-hydra-train",
        *(f"common.user_dir={USER_DIR}", "common.cpu=true", f"task.data={sentences()}"),
        *("task=masked_lm", "task.sample_break_mode=complete", "task.tokens_per_sample=16"),
        *("criterion=masked_lm", "+model._name=roberta_m4m"),
        *(f"+model.{name}={value}" for name, value in model.items()),
        *("optimizer=adam", "optimization.lr=[0.001]", "optimization.max_epoch=1"),
        *("dataset.batch_size=16", "dataset.required_batch_size_multiple=1"),
        *("dataset.num_workers=0", f"checkpoint.save_dir={save_dir}"),
        f"checkpoint.finetune_from_model={start}",
    )
    state = torch.load(save_dir / "checkpoint_last.pt")
    before = torch.load(start)["model"]
    assert state["optimizer_history"][-1]["num_updates"] == 1
    # Adam's first step is the learning rate at most; the trained model also says its dictionary.
    for name, value in before.items():
        if is_identity(name):
            continue
        torch.testing.assert_close(state["model"][name], value, rtol=0, atol=0.0011)
