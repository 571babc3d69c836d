"""What a user of fairseq takes for granted: its options, errors and programs with our models."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from fairseq import options
from fairseq.data import ListDataset, TokenBlockDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.modules.dynamic_crf_layer import DynamicCRF
from fairseq_cli import eval_lm, generate, preprocess, train

from fairseq_posenc.errors import UserError
from fairseq_posenc.host.explanations import explain_failure
from fairseq_posenc.models.masked_lm import PositionalRoberta
from fairseq_posenc.transformer.attention import PositionalAttention
from fairseq_posenc.workbench.experiments.compare.command import TRAIN_OPTIONS
from tests.helpers.commands import new_directory, pairs
from tests.helpers.commands import sentences as sentences_bin
from tests.helpers.products import some_of
from tests.helpers.tiny_models import ARCHITECTURES, STOCK, logits, make_model, make_tokens

ROOT = Path(__file__).parents[2]
SCORES = ("fairseq-generate", "fairseq-eval-lm", "fairseq-validate")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # fairseq's use of hydra
FAMILIES = list(ARCHITECTURES)


def model_options(arch: str) -> argparse.ArgumentParser:
    """Return a parser with the options of an architecture, as fairseq makes it."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    return parser


def configuration(arch: str, *more: str):
    """Return the configuration that ``fairseq-train`` makes of a command line."""
    families = {"roberta": "masked_lm", "transformer_lm": "language_modeling"}
    (task,) = [families[name] for name in families if arch.startswith(name)] or ["translation"]
    words = ["data-bin", "--task", task, "--arch", arch, *more]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    return convert_namespace_to_omegaconf(args)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_of_fairseqs_model_sets_the_same(family):
    """A flag that a user carries over must not mean its opposite."""
    theirs, ours = model_options(STOCK[family]), model_options(ARCHITECTURES[family])
    named = [each for each in theirs._actions if each.option_strings and each.dest != "help"]
    assert named
    for each in named:
        value = next(iter(each.choices or ["1"]))
        words = [each.option_strings[0], *([] if each.nargs == 0 else [str(value)])]
        assert vars(ours.parse_args(words)) == vars(theirs.parse_args(words)), words


@pytest.mark.parametrize(("flag", "expected"), [("", True), ("--", True), ("--no-", False)])
def test_flags_of_causal_models_set_what_they_say(flag, expected):
    """Without them, the architecture has both."""
    names = ["decoder_normalize_before", "share_decoder_input_output_embed"]
    more = [flag + name.replace("_", "-") for name in names if flag]
    model = configuration("transformer_lm_rope_tiny", *more).model
    assert [getattr(model, name) for name in names] == [expected] * 2


@pytest.mark.parametrize("saved", [True, False])
def test_an_old_models_norms_stay_where_they_were(saved):
    decoder = make_model("causal_lm", decoder_normalize_before=saved).decoder
    assert decoder.layers[0].normalize_before is saved
    assert (decoder.layer_norm is not None) is saved


def documented() -> list[str]:
    """Return the commands in the documentation that print a score."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith(SCORES)]


def test_no_command_that_gives_a_score_leaves_out_sentences():
    """By default fairseq drops what is left over from batches of 8."""
    commands = documented()
    assert {line.split()[0] for line in commands} == {"fairseq-generate", "fairseq-eval-lm"}
    commands += map(" ".join, TRAIN_OPTIONS.values())  # which validate
    for command in commands:
        if not command.startswith("fairseq-eval-lm"):  # which reads all blocks, whatever is given
            assert "--required-batch-size-multiple 1" in command, command


def sentences(count: int = 6) -> ListDataset:
    """Return sentences of 3, 4, 5, ... tokens, each with its end."""
    found = [torch.tensor([*range(4, 6 + index), 2]) for index in range(count)]
    return ListDataset(found, [len(each) for each in found])


def test_blocks_of_one_sentence_each():
    """fairseq asks numpy for a name that numpy 2 has not (``--sample-break-mode eos``)."""
    data = sentences()
    blocks = TokenBlockDataset(data, data.sizes, None, pad=1, eos=2, break_mode="eos")
    assert [list(block) for block in blocks] == [list(sentence) for sentence in data]


def test_a_layer_that_asks_numpy_for_an_old_name():
    crf = DynamicCRF(num_embedding=24, low_rank=4, beam_size=3)
    emissions, targets = torch.randn(2, 5, 24), torch.randint(4, 24, (2, 5))
    assert crf(emissions, targets, torch.ones(2, 5, dtype=torch.bool)).isfinite().all()


def attention_of(model):
    return next(each for each in model.modules() if isinstance(each, PositionalAttention))


def prune(attention) -> None:
    """Keep two heads of an attention, as fairseq's pruning does."""
    attention._set_skip_embed_dim_check()
    attention._adaptive_prune_heads(attention._get_reserve_head_index(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_pruning_heads_of_self_attention_is_refused(family):
    """Before anything is cut: the model still works."""
    model = make_model(family, position_encoding="alibi")
    expected = logits(model, family, tokens := make_tokens())
    attention = attention_of(model)
    with pytest.raises(UserError, match="heads cannot be pruned: tables by head"):
        prune(attention)
    torch.testing.assert_close(logits(model, family, tokens), expected)


@pytest.mark.parametrize("spec", ["none", "rope(cross_attention=true)"])
def test_heads_of_cross_attention_can_be_pruned(spec):
    model = make_model("translation", position_encoding="none", position_encoding_decoder=spec)
    attention = model.decoder.layers[0].encoder_attn
    for start, end in attention._get_reserve_head_index(4)[2:]:  # those that pruning takes away
        attention.out_proj.weight.data[:, start:end] = 0
    expected = logits(model, "translation", tokens := make_tokens())
    prune(attention)
    torch.testing.assert_close(logits(model, "translation", tokens), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_misspelled_activation_function_is_shown_at_once(family, capsys):
    """On the command line when it is read; in a configuration of hydra's, before any layer."""
    with pytest.raises(SystemExit):
        configuration(ARCHITECTURES[family], "--activation-fn", "gulu")
    assert "argument --activation-fn: invalid choice: 'gulu'" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="--activation-fn gulu not supported") as caught:
        make_model(family, activation_fn="gulu")
    assert explain_failure(caught.value) == "--activation-fn gulu not supported"
    assert make_model(family, activation_fn="relu_squared")  # which fairseq has, but does not list


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "sinusoidal"])
@pytest.mark.parametrize("family", ["causal_lm", "translation"])
def test_embed_positions_says_how_many_there_are(family, learned):
    """Users' code reads ``embed_positions.max_positions`` of fairseq's models, a number."""
    theirs = make_model(family, STOCK[family], decoder_learned_pos=learned)
    for spec in ["learned", "sentence_learned"] if learned else ["sinusoidal"]:
        ours = make_model(family, position_encoding=spec)
        expected = theirs.decoder.embed_positions.max_positions
        assert ours.decoder.embed_positions.max_positions == expected == (24 if learned else 1e5)
        assert ours.decoder.max_positions() == theirs.decoder.max_positions() == 24


def test_embed_positions_of_roberta_says_how_many_there_are():
    """``--max-positions``, else the tokens of a sample, else what the task says."""
    for given in ({}, {"max_positions": None}, {"max_positions": None, "tokens_per_sample": 16}):
        for arch in ("roberta", "roberta_learned"):
            stack = make_model("masked_lm", arch, **given).encoder.sentence_encoder
            assert stack.embed_positions.max_positions == given.get("tokens_per_sample", 24)


LIMITED = ["learned", "sentence_learned", "tupe", "tupe_shared", "tupe_shared+reset"]


@pytest.mark.parametrize("spec", [*LIMITED, "m4", "rope"])
def test_a_block_with_a_bos_before_it_fits(spec):
    """``--add-bos-token`` makes blocks of ``--tokens-per-sample`` one token longer."""
    model = make_model("causal_lm", position_encoding=spec, add_bos_token=True)
    assert logits(model, "causal_lm", make_tokens(2, 25)).isfinite().all()
    assert model.max_positions() == (25 if spec in LIMITED else 24)
    with pytest.raises(UserError, match="longer than") if spec in LIMITED else nullcontext():
        logits(model, "causal_lm", make_tokens(2, 26))
    options = {"position_encoding": spec, "add_bos_token": True, "tokens_per_sample": 23}
    shorter = make_model("causal_lm", **options)  # of 24 positions, as fairseq's
    message = "its length .with --add-bos-token, --tokens-per-sample . 1"
    with pytest.raises(UserError, match=message) if spec in LIMITED else nullcontext():
        model.load_state_dict(shorter.state_dict())


@pytest.mark.parametrize("part", [lambda model: model, attention_of], ids=["model", "attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torchscript_is_refused_in_one_line(family, part):
    with pytest.raises(UserError, match="TorchScript is not supported"):
        torch.jit.script(part(make_model(family, position_encoding="learned+m4m")))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_is_refused_in_one_line():
    """It would keep the length and the padding of its example."""
    with pytest.raises(UserError, match="TorchScript is not supported"):
        torch.jit.trace(make_model("causal_lm", position_encoding="m4m"), make_tokens())


def test_a_checkpoint_with_two_matrices_is_not_loaded_into_one():
    """As all causal LMs of fairseq are without the option, and ours were."""
    apart = make_model("causal_lm", share_decoder_input_output_embed=False)
    assert apart.decoder.output_projection.weight is not apart.decoder.embed_tokens.weight
    with pytest.raises(UserError, match="--no-share-decoder-input-output-embed for a causal LM"):
        make_model("causal_lm").load_state_dict(apart.state_dict())
    again = make_model("causal_lm", share_decoder_input_output_embed=False)
    again.load_state_dict(apart.state_dict())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("causal_lm", {"adaptive_input": True, "adaptive_input_cutoff": "5,10"}),
        ("causal_lm", {"adaptive_softmax_cutoff": "5,10"}),
        ("translation", {"adaptive_softmax_cutoff": "5,10", "share_all_embeddings": True}),
        ("causal_lm", {"character_embeddings": True, "character_filters": "[(1, 4), (2, 8)]"}),
    ],
)
def test_embeddings_without_one_matrix_are_not_shared(family, options):
    model, trained = (make_model(family, **options) for _ in range(2))
    assert not model.decoder.share_input_output_embed
    model.load_state_dict(trained.state_dict())


def test_embeddings_of_two_widths_are_not_shared():
    with pytest.raises(UserError, match=r"widths 16 \(--decoder-input-dim\) and 32"):
        make_model("causal_lm", decoder_input_dim=16)
    options = {"decoder_input_dim": 16, "share_decoder_input_output_embed": False}
    assert make_model("causal_lm", **options)


CPU = ["--cpu", "--num-workers", 0, "--required-batch-size-multiple", 1]
STEPS = [
    *("--optimizer", "adam", "--lr", 0.001, "--max-update", 2, "--log-format", "json"),
    *("--no-epoch-checkpoints", "--disable-validation", "--batch-size", 4),
]


def called(parser: argparse.ArgumentParser, main, *words) -> None:
    """Call a program of fairseq in this process, as its console script would."""
    args = options.parse_args_and_arch(parser, [str(word) for word in (*words, *CPU)])
    main(convert_namespace_to_omegaconf(args))


def trains(data: Path, save_dir: Path, *words) -> Path:
    """Train two updates; return the checkpoint."""
    called(options.get_training_parser(), train.main, data, "--save-dir", save_dir, *STEPS, *words)
    return save_dir / "checkpoint_last.pt"


def generates(capsys, data: Path, checkpoint: Path, *words) -> list[str]:
    """Translate the test set; return the lines of hypotheses."""
    capsys.readouterr()
    words = ("--max-len-b", 12, *words)
    called(options.get_generation_parser(), generate.main, data, "--path", checkpoint, *words)
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("H-")]


TRANSLATION = [("transformer_m4m_tiny", "learned+rope"), ("transformer_tupe_shared_tiny", "alibi")]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "decoder"), some_of(TRANSLATION[:1], TRANSLATION))
def test_translation_as_fairseq_tests_it(arch, decoder, tmp_path, capsys):
    """Training, then every way of searching."""
    lengths = ["--max-source-positions", 64, "--max-target-positions", 64]
    positions = ["--position-encoding-decoder", decoder]
    checkpoint = trains(pairs(), tmp_path, "--arch", arch, *positions, *lengths)
    searches = [
        ["--beam", 3],
        ["--beam", 4, "--diverse-beam-groups", 2],
        ["--beam", 4, "--diversity-rate", 0.5],
        ["--sampling", "--temperature", 2, "--beam", 2, "--nbest", 2],
        ["--sampling", "--sampling-topk", 3, "--beam", 2, "--nbest", 2],
        ["--sampling", "--sampling-topp", 0.2, "--beam", 2, "--nbest", 2],
        ["--prefix-size", 2],
        ["--retain-dropout"],
    ]
    for words in searches:
        nbest = 2 if "--nbest" in words else 1
        assert len(generates(capsys, pairs(), checkpoint, *words)) == 5 * nbest, words
    with pytest.raises(UserError, match="--left-pad-target: padding would be read"):
        generates(capsys, pairs(), checkpoint, "--left-pad-target", "--score-reference")
    assert len(generates(capsys, pairs(), f"{checkpoint}:{checkpoint}")) == 5


CAUSAL: list[tuple[str, list[str]]] = [
    *(("learned", ["--add-bos-token"]), ("sentence_learned", [])),
    *(("tupe_shared", ["--add-bos-token"]), ("rope", [])),
]


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "bos"), some_of(CAUSAL[1:3], CAUSAL))
def test_language_models_as_fairseq_tests_them(encoding, bos, tmp_path, capsys):
    """Blocks of 500 tokens; scores with and without a window of context; continuations."""
    data, task = long_text(), ["--task", "language_modeling", "--tokens-per-sample", 500, *bos]
    arch = ["--arch", f"transformer_lm_{encoding}_tiny"]
    checkpoint = trains(data, tmp_path, *task, *arch, "--max-tokens", 500 + len(bos))
    for window in ([], ["--context-window", 200]):
        parser = options.get_eval_lm_parser()
        called(parser, eval_lm.main, data, "--path", checkpoint, *task[2:], *window)
    sampled = [*task, "--sample-break-mode", "eos", "--max-len-b", 30, "--beam", 2]
    if not bos:  # with it fairseq's own models, too, stop at an assertion of its generator
        assert len(generates(capsys, data, checkpoint, *sampled)) == 4


@cache
def long_text() -> Path:
    """Return data with more than 500 tokens to train on."""
    folder = new_directory()
    words = [f"w{index % 20}" for index in range(1200)]
    lines = [" ".join(words[start : start + 12]) + "\n" for start in range(0, 1200, 12)]
    for split, some in (("train", lines), ("valid", lines), ("test", lines[:4])):
        (folder / split).write_text("".join(some), encoding="utf-8")
    splits = [x for name in ("train", "valid", "test") for x in (f"--{name}pref", folder / name)]
    preprocessed(folder / "bin", "--only-source", *splits)
    return folder / "bin"


def preprocessed(folder: Path, *words) -> None:
    parser = options.get_preprocessing_parser()
    preprocess.main(parser.parse_args([str(each) for each in (*words, "--destdir", folder)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", some_of(["decbert_diff_tiny"], ["roberta_m4m_tiny", "decbert_diff_tiny"])
)
def test_roberta_as_fairseq_tests_it(arch, tmp_path):
    """Masked words, then sentences with a class or a number, and features for users."""
    size = ["--arch", arch, "--max-positions", 64]
    masked = ["--task", "masked_lm", "--criterion", "masked_lm", "--tokens-per-sample", 64]
    checkpoint = trains(sentences_bin(), tmp_path / "mlm", *masked, *size)
    labeled = tmp_path / "labeled"
    for split in ("train", "valid"):
        (tmp_path / split).write_text("".join(f"{index % 2}\n" for index in range(8)))
    text = sentences_bin().parent
    dictionary = ["--srcdict", sentences_bin() / "dict.txt"]
    inputs = [*("--trainpref", text / "valid", "--validpref", text / "valid"), "--only-source"]
    preprocessed(labeled / "input0", *inputs, *dictionary)
    labels = ["--trainpref", tmp_path / "train", "--validpref", tmp_path / "valid"]
    preprocessed(labeled / "label", *labels, "--only-source")
    (labeled / "label" / "train.label").write_text((tmp_path / "train").read_text())
    for more in (["--num-classes", 2], ["--num-classes", 1, "--regression-target"]):
        head = ["--task", "sentence_prediction", "--criterion", "sentence_prediction"]
        start = ["--finetune-from-model", checkpoint, "--init-token", 0]
        trains(labeled, tmp_path / f"head{len(more)}", *head, *size, *more, *start)
    model = PositionalRoberta.from_pretrained(
        str(checkpoint.parent), checkpoint.name, str(sentences_bin()), bpe=None
    ).eval()
    tokens = model.task.source_dictionary.encode_line("w1 w2 w3", add_if_not_exist=False).long()
    layers = model.extract_features(tokens, return_all_hiddens=True)
    assert [tuple(each.shape) for each in layers] == [(1, 4, 128)] * 3
    model.register_classification_head("new", num_classes=3)
    assert model.predict("new", tokens).exp().sum().item() == pytest.approx(1)
