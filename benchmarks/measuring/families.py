"""Models of fairseq's three families, trained by its own trainer on its dummy tasks."""

from __future__ import annotations

import shlex
from argparse import Namespace
from typing import Any, NamedTuple

import fairseq.benchmark  # noqa: F401  (registers the dummy tasks)
import torch
from fairseq import criterions, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import setup_task
from fairseq.trainer import Trainer

from fairseq_posenc import registry
from fairseq_posenc.backends.base import AttentionCall
from fairseq_posenc.encodings.base import Dims
from fairseq_posenc.encodings.terms import Terms
from fairseq_posenc.user_dir import register
from measuring.contenders import STOCK, Contender
from measuring.timing import Pass

register()

SEED = 1
TIMING_LR = 1e-7  # so small that a model stays about the same while its updates are timed
PRECISION = {torch.float32: [], torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}


class Size(NamedTuple):
    """The sizes of a stack; an encoder-decoder has two of them."""

    embed_dim: int
    num_heads: int
    ffn_dim: int
    layers: int


TINY = Size(64, 4, 128, 2)
ROBERTA_BASE = Size(768, 12, 3072, 12)
LARGE = Size(1024, 16, 4096, 24)


class Family(NamedTuple):
    """How fairseq names and sizes the models of a family."""

    task: list[str]  # options of the dummy task and its loss
    stock: str  # fairseq's architecture
    ours: str  # this package's, to which a position encoding is given
    sides: tuple[str, ...]  # `encoder`, `decoder` or both
    sizes: dict[str, Size]


FAMILIES = {
    "masked_lm": Family(
        shlex.split("--task dummy_masked_lm --criterion masked_lm"),
        stock="roberta",
        ours="roberta_none",
        sides=("encoder",),
        sizes={"tiny": TINY, "base": ROBERTA_BASE, "large": LARGE},
    ),
    "causal_lm": Family(
        shlex.split(
            "--task dummy_lm --criterion cross_entropy --decoder-normalize-before "
            "--activation-fn gelu --share-decoder-input-output-embed"
        ),
        stock="transformer_lm",
        ours="transformer_lm_none",
        sides=("decoder",),
        sizes={"tiny": TINY, "base": ROBERTA_BASE._replace(layers=8), "large": LARGE},
    ),
    "translation": Family(
        shlex.split(
            "--task dummy_mt --criterion label_smoothed_cross_entropy --label-smoothing 0.1 "
            "--share-all-embeddings"
        ),
        stock="transformer",
        ours="transformer_none",
        sides=("encoder", "decoder"),
        sizes={"tiny": TINY, "base": Size(512, 8, 2048, 6), "large": Size(1024, 16, 4096, 6)},
    ),
}


class Case(NamedTuple):
    """A model, or one of its layers, and its batch; in the mode ``forward``, give no dropout."""

    length: int  # tokens of a sentence
    batch: int  # sentences
    dropout: float
    dtype: torch.dtype
    device: torch.device
    mode: str = "training"  # or ``forward``, which is evaluation
    family: str = "masked_lm"
    size: Size = ROBERTA_BASE
    vocabulary: int = 50_000

    @classmethod
    def from_args(cls, args: Namespace, **changes: Any) -> Case:
        """Build a case of the options that benchmarks share, with ``changes`` of its fields."""
        fields = {
            "batch": args.batch or (8 if args.device.type == "cuda" else 1),
            "dtype": getattr(torch, args.dtype),
            "device": args.device,
        }
        fields |= {name: getattr(args, name) for name in ("length", "dropout") if name in args}
        return cls(**{**fields, **changes})

    def encodings(self, requested: list[str]) -> list[str]:
        """List the encodings of a command line; ``all`` means those of the family."""
        known = registry.names(encoder="encoder" in FAMILIES[self.family].sides)
        return known if requested == ["all"] else requested

    @property
    def causal(self) -> bool:
        """Whether a layer is a causal LM's."""
        return self.family == "causal_lm"

    @property
    def dims(self) -> Dims:
        """The sizes that encodings are built for."""
        return Dims(self.size.embed_dim, self.size.num_heads, self.length, self.causal)

    @property
    def call(self) -> AttentionCall:
        """A call of one head, by which a backend is chosen; it has no values."""
        shape = (1, 1, self.length, self.dims.head_dim)
        x = torch.empty(shape, dtype=self.dtype, device=self.device)
        return AttentionCall(x, x, x, Terms(), dropout=self.dropout)


def train_options(contender: Contender, case: Case, lr: float) -> list[str]:
    """List the options of ``fairseq-train`` for a model."""
    family = FAMILIES[case.family]
    words = [*family.task, "--arch", family.stock if contender == STOCK else family.ours]
    if contender != STOCK:
        words += ["--position-encoding", contender.encoding]
        words += ["--position-backend", contender.backend]
    for side in family.sides:
        words += [f"--{side}-embed-dim", str(case.size.embed_dim)]
        words += [f"--{side}-attention-heads", str(case.size.num_heads)]
        words += [f"--{side}-ffn-embed-dim", str(case.size.ffn_dim)]
        words += [f"--{side}-layers", str(case.size.layers)]
    words += ["--dropout", str(case.dropout), "--attention-dropout", str(case.dropout)]
    words += ["--dict-size", str(case.vocabulary), "--batch-size", str(case.batch)]
    words += _list_sizes(case)
    words += ["--optimizer", "adam", "--lr", str(lr), "--clip-norm", "1.0"]
    words += ["--seed", str(SEED), "--distributed-world-size", "1", *PRECISION[case.dtype]]
    return words if case.device.type == "cuda" else [*words, "--cpu"]


def _list_sizes(case: Case) -> list[str]:
    if case.family == "translation":
        words = str(case.length - 1)  # the task appends an end of sentence
        sides = ["--src-len", words, "--tgt-len", words]
        positions = str(case.length + 2)  # fairseq numbers them from 2, after that of padding
        return [*sides, "--max-source-positions", positions, "--max-target-positions", positions]
    tokens = ["--tokens-per-sample", str(case.length)]
    if case.family == "masked_lm":
        return [*tokens, "--max-positions", str(case.length)]
    width = str(case.size.embed_dim)
    return [*tokens, "--decoder-input-dim", width, "--decoder-output-dim", width]


def build(contender: Contender, case: Case, lr: float = TIMING_LR) -> tuple[Any, Any, Any]:
    """Build the configuration, task and model that ``fairseq-train`` would make."""
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, train_options(contender, case, lr))
    args.tpu = False  # --bf16 sets it, and fairseq would look for a TPU
    config = convert_namespace_to_omegaconf(args)
    torch.manual_seed(SEED)
    task = setup_task(config.task)
    return config, task, task.build_model(config.model)


def trainer_step(contender: Contender, case: Case) -> Pass:
    """Build an update with gradient clipping and Adam, or a validation step, of a whole model."""
    trainer, batch = build_trainer(contender, case)

    def run() -> None:
        if case.mode == "training":
            trainer.train_step([batch])
            trainer.zero_grad()  # so that no pass begins with another's gradients
        else:
            trainer.valid_step(batch)

    return run


def build_trainer(contender: Contender, case: Case, lr: float = TIMING_LR) -> tuple[Trainer, Any]:
    """Build fairseq's trainer of a model, and a batch."""
    config, task, model = build(contender, case, lr)
    trainer = Trainer(config, task, model, criterions.build_criterion(config.criterion, task))
    trainer.begin_epoch(1)
    task.load_dataset("train")
    return trainer, task.dataset("train").collater([0])  # a dummy batch whatever it is given
