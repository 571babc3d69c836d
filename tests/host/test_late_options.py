"""Options of fairseq that failed after hours, or did nothing, are refused at the start."""

from __future__ import annotations

import re
import runpy
import shutil
from types import SimpleNamespace

import pytest
from fairseq.dataclass.configs import CheckpointConfig

from fairseq_posenc.errors import UserError
from fairseq_posenc.host import checks, explanations, preparation
from fairseq_posenc.tasks.squad.criterion import SquadCriterion
from tests.helpers.commands import USER_DIR, new_directory, pairs, run, sentences, train, trained
from tests.helpers.products import product_of

pytestmark = pytest.mark.slow
BEST = ["--best-checkpoint-metric"]


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("causal_lm", ["--fp16", "--quant-noise-pq=0.1"], "--fp16 is for GPUs, and --cpu is given"),
        ("causal_lm", ["--memory-efficient-fp16", "--quant-noise-pq=1"], "(not memory-efficient)"),
        ("translation", ["--quant-noise-pq", 0.1], "would leave its noise in the weights"),
        ("translation", ["--bf16"], "common.bf16=false"),
        ("causal_lm", ["--fp16", "--amp"], "set two precisions"),
        ("causal_lm", ["--adaptive-softmax-cutoff", "8,12"], "is for --criterion adaptive_loss"),
        ("causal_lm", ["--criterion", "adaptive_loss"], "AdaptiveLoss is not compatible with"),
        ("causal_lm", ["--ddp-backend", "fully_sharded"], "Please install fairscale"),
        ("translation", ["--max-tokens", 9], "longer than --max-tokens 9: give more"),
        ("causal_lm", [*BEST, "bleu"], "add --maximize"),
        ("causal_lm", ["--maximize-best-checkpoint-metric"], "highest loss"),
        ("translation", [*BEST, "bleu", "--maximize-best-checkpoint-metric"], "with --eval-bleu"),
        ("causal_lm", [*BEST, "nll_loss"], "gives no metric 'nll_loss'"),
        ("masked_lm", ["--max-positions", 12, "--tokens-per-sample", 16], "16: blocks are longer"),
        ("causal_lm", ["--tokens-per-sample", 16, "--max-tokens", 8], "8: give at least --tokens"),
        ("masked_lm", ["--mask-whole-words"], "--mask-whole-words does not work"),
        ("masked_lm", ["--criterion", "cross_entropy"], "--task masked_lm --criterion masked_lm"),
        ("masked_lm", ["--criterion", "label_smoothed_cross_entropy"], "or the criterion does not"),
        ("causal_lm", ["--criterion", "masked_lm"], "or the criterion does not fit: roberta_*"),
        ("causal_lm", ["--task", "masked_lm"], "transformer_lm_* with --task language_modeling"),
        ("causal_lm", ["--tpu"], "torch_xla"),
        ("translation", ["--max-source-positions=2", "--required-batch-size-multiple=8"], "longer"),
        ("causal_lm", ["--required-batch-size-multiple", 512], "--required-batch-size-multiple 1"),
        ("masked_lm", ["--bpe", "characters"], "Could not find 'bpe/characters' Available"),
    ],
)
def test_refused_at_the_start(family, options, said):
    done = train(family, "--max-epoch", 1, *options, fails=True)
    assert said in done.run.error()
    assert not [*done.save_dir.glob("*.pt")]


def test_refused_without_logging():
    program = "import logging, fairseq_cli.train as x; logging.disable(); x.cli_main()"
    done = train("causal_lm", "--bf16", launcher=("python", "-c", program), fails=True)
    assert "common.bf16=false" in done.run.error()


def test_checkpoints_that_no_training_resumes_from_are_refused():
    with pytest.raises(UserError, match=r"no checkpoint_last\.pt to resume from"):
        checks.refuse_wrong_checkpoints(CheckpointConfig(write_checkpoints_asynchronously=True))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'tensorboardX'"), "None"),
        (AssertionError("--sampling requires --nbest to be equal to --beam"), "--sampling req"),
        (Exception("Size of sample #9 is invalid (=np.int32(8)) as"), "#9 is invalid (=8) as"),
        (ValueError("Valid paths ['valid1'] will be ignored. Set --combine-val"), "--combine-val"),
        (ValueError("optimizer is required!"), "no optimizer is chosen"),
        (RuntimeError("Cannot resume training due to dataloader mismatch"), "--reset-dataloader"),
        (FileNotFoundError(2, "", "runs/x.pt"), "there is no folder runs: correct its name"),
        (ValueError("MultilingualTask requires a FairseqMultiModel architecture"), "does not fit"),
        (ValueError("DistributedDataParallel device_ids and x"), "for processes without GPUs"),
        (AttributeError("'x' object has no attribute 'eval_lm_dataloader'"), "fairseq-generate or"),
        (AssertionError("Torch not compiled with CUDA enabled"), "an option needs a GPU"),
        (AssertionError("Either --max_update or --lr-period-updates must be"), "updates must"),
    ],
)
def test_known_errors_are_explained(error, said):
    assert said in str(explanations.explain_failure(error))


ODD_HEADS = "import fairseq.modules as x; made = x.MultiheadAttention(10, 3)"
UNKNOWN = {  # errors that are not fairseq's own refusals: files of a user's code, and their content
    "below a folder of this name": ("fairseq/mine.py", "raise ValueError('what a user refuses')"),
    "a file of this name": ("data_utils.py", "[][0]"),
    "a setting of a user's own": ("mine.py", "import ast; ast.literal_eval('f(x)')"),
    "in a fallback": ("mine.py", f"try: {ODD_HEADS}\nexcept AssertionError: 1 + ''"),
    "in what fairseq calls": (
        "mine.py",
        "from fairseq.utils import import_user_module as x\n"
        "from argparse import Namespace\n"
        "x(Namespace(user_dir=__file__.replace('mine.py', 'plugin')))",
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_bugs_and_errors_of_a_users_own_code_keep_their_trace(kind, tmp_path):
    name, code = UNKNOWN[kind]
    (path := tmp_path / name).parent.mkdir(exist_ok=True)
    path.write_text(code, encoding="utf-8")
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "__init__.py").write_text(ODD_HEADS, encoding="utf-8")
    with pytest.raises(Exception) as caught:  # noqa: PT011  (of several types)
        runpy.run_path(str(path))
    assert explanations.explain_failure(caught.value) is None


def test_a_validation_without_batches_and_a_training_without_data_are_explained():
    with pytest.raises(ZeroDivisionError) as caught:
        SquadCriterion.reduce_metrics([])
    assert "a split has no batches" in str(explanations.explain_failure(caught.value))
    words = ["task=translation", "criterion=cross_entropy", "optimizer=adam", "lr_scheduler=fixed"]
    words += ["dataset.batch_size=2", f"common.user_dir={USER_DIR}"]
    done = run("fairseq-hydra-train", *words, fails=True)
    assert done.err.endswith("fairseq-posenc: error: give --path, or task.data\n")


@pytest.mark.parametrize(
    ("options", "said", "reset"),
    [
        (["--lr-scheduler", "reduce_lr_on_plateau"], "LR scheduler", "--reset-lr-scheduler"),
        (["--optimizer", "sgd"], "Optimizer does not match; please reset", "--reset-optimizer"),
        (["--criterion", "label_smoothed_cross_entropy"], "Criterion does", "--reset-optimizer"),
        ([*BEST, "ppl"], "continue with --reset-meters", "--reset-meters"),
    ],
)
def test_a_state_of_another_class_is_loaded_only_with_the_named_option(options, said, reset):
    folder = shutil.copytree(trained("causal_lm").save_dir, new_directory() / "run")
    done = train("causal_lm", "--max-epoch", 5, *options, save_dir=folder, fails=True)
    assert said in done.run.error()
    assert reset in done.run.error()
    done = train("causal_lm", "--max-epoch", 5, *options, reset, save_dir=folder)
    assert done.checkpoint()["extra_state"]["train_iterator"]["epoch"] >= 5


def test_what_a_checkpoint_lacks_does_not_begin_unnoticed():
    options = ["--no-save-optimizer-state", "--max-epoch", 2]
    folder = train("causal_lm", *options).save_dir
    again = train("causal_lm", *options, save_dir=folder, fails=True)
    assert "(--no-save-optimizer-state), and its 2 updates" in again.run.error()
    train("causal_lm", *options, "--reset-optimizer", save_dir=folder)
    start = folder / "checkpoint_last.pt"
    for option in ("--finetune-from-model", "--restore-file"):
        tuned = train("causal_lm", "--store-ema", option, start, fails=True)
        assert "no average of its weights" in tuned.run.error()


def _damaged(kind):
    folder = new_directory() / "b"
    left_out = {"without its part": "train.*", "without a dictionary": "dict.txt"}.get(kind, "")
    if kind != "absent":
        shutil.copytree(sentences(), folder, ignore=shutil.ignore_patterns(left_out))
    if kind == "of another dictionary":
        (folder / "dict.txt").write_text("other 1\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("family", "kind", "said"),
    product_of(
        ["masked_lm", "causal_lm"],
        [
            ("absent", "{folder}, one of 2 shards, does not exist"),
            ("without its part", "{folder} has no split 'train' (--train-subset), but test, valid"),
            ("of another dictionary", "{folder}/dict.txt is not the dictionary of"),
        ],
    ),
)
def test_all_shards_are_looked_at(family, kind, said):
    folder = _damaged(kind)
    done = train(family, data=f"{sentences()}:{folder}", fails=True)
    assert said.format(folder=folder) in done.run.error()


@pytest.mark.parametrize(
    ("family", "data", "said"),
    [
        ("masked_lm", pairs, "has no dict.txt; tasks of running text read dict.txt"),
        ("translation", sentences, "the data folder has no file such as train.de-en.de.idx: give"),
        ("causal_lm", lambda: _damaged("without a dictionary"), "found: no dictionary"),
        ("causal_lm", lambda: _damaged("absent"), "run fairseq-posenc preprocess, or correct"),
    ],
)
def test_data_of_another_task(family, data, said):
    assert said in train(family, data=data(), fails=True).run.error()


def _evaluate(command, family, options, *more, fails=False):
    path = ["--path", trained(family).save_dir / "checkpoint_last.pt"] if family else []
    words = ["--user-dir", USER_DIR, *path, "--required-batch-size-multiple=1", *options.split()]
    data = sentences() if command == "eval-lm" else pairs()
    return run(f"fairseq-{command}", data, *words, *more, fails=fails)


@pytest.mark.parametrize(
    ("command", "family", "options", "said"),
    [
        ("eval-lm", "causal_lm", "", r"--tokens-per-sample 1024: .*would be left out; .*lm-length"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 512", "512: blocks are longer"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 16 --context-window 16", "from 0 to 15"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 16 --context-window -1", "-window -1"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 24 --context-window 12", "24: blocks are"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 16 --gen-subset none", "no split none"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 16 --fp16 --cpu", "--fp16 is for GPUs"),
        ("eval-lm", "translation", "", "models by fairseq-generate: "),
        ("generate", "translation", "--beam 4 --diverse-beam-groups 3", "be divisible by the num"),
        ("generate", "translation", "--min-len 99", "min_len cannot be larger than max_len"),
        ("generate", "translation", "--constraints", "read by fairseq-interactive alone"),
        ("generate", "translation", "--model-overrides {'dropout':no}", "not a Python literal"),
        ("generate", "translation", "--required-batch-size-multiple 8", "a split has no batches"),
        ("validate", "translation", "--task translation --max-tokens 9 --model-overrides {", "lit"),
        ("validate", "translation", "", "give --task"),
        ("eval-lm", "causal_lm", "--tokens-per-sample 16 --num-shards 9 --shard-id 8", "no batch"),
        ("generate", None, "", "--path required"),
        ("interactive", None, "", "give --path"),
    ],
)
def test_an_evaluation_refuses(command, family, options, said):
    assert re.search(said, _evaluate(command, family, options, fails=True).error())


def test_a_window_of_nearly_the_whole_block_makes_small_batches_and_the_same_perplexity():
    options = ["eval-lm", "causal_lm", "--tokens-per-sample 16 --context-window 15"]
    (perplexity,) = re.findall(r"Perplexity: \S+", _evaluate(*options, "--max-tokens", 32).log)
    assert perplexity in _evaluate(*options, "--batch-size", 1).log
    limits = {"max_positions": 16, "context_window": 15}
    assert [preparation.load_blocks(Blocks(), [], x, **limits) for x in (32, None)] == [2, None]


class Blocks:
    """A task of blocks of 16 tokens, less a window of 15."""

    args = SimpleNamespace(tokens_per_sample=1, sample_break_mode="none")

    def eval_lm_dataloader(self, dataset, max_tokens, **how):
        return max_tokens


HYDRA = [
    ("++model.position_encoding=null", "position"),
    ("++model.attention_directions=[lr,rl]", "lr"),
    ("common.fp16=true", "common.fp16=false"),
    ("dataset.train_subset=none", "no split none"),
    ("lr_scheduler=polynomial_decay", "give max_update, perhaps warmup_updates"),
    ("+model.position_encodng=alibi", "did you mean position_encoding or"),
]


@pytest.mark.parametrize(("family", "change", "why"), product_of(["masked_lm", "causal_lm"], HYDRA))
def test_hydra_settings_are_refused_in_a_line(family, change, why):
    lm = ("language_modeling", "transformer_lm_rope_tiny", "cross_entropy")
    task, arch, criterion = lm if family == "causal_lm" else (family, "roberta_m4m_tiny", family)
    done = run(
        "fairseq-hydra-train",
        *(f"common.user_dir={USER_DIR}", "common.cpu=true", f"task={task}"),
        *(f"task.data={sentences()}", "task.tokens_per_sample=16", "dataset.batch_size=4"),
        *("optimizer=adam", "optimization.max_epoch=1", "checkpoint.no_save=true"),
        *(f"criterion={criterion}", f"+model._name={arch}", change),
        fails=True,
    )
    assert done.status
    (line,) = [x for x in done.err.splitlines() if x.startswith("fairseq-posenc: error: ")]
    assert why in line
    assert "Traceback" not in done.err
