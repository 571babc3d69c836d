"""What one training is: the recipes, a family of models each, and the choices of a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fairseq_posenc.workbench.experiments.text_settings import (
    KEEP_ALL,
    LEARNING_RATE,
    TRAIN_OPTIONS,
)
from fairseq_posenc.workbench.experiments.variants import MASKED

NEVER = "1000000000"
VALIDATE_EVERY = 50
SIZES = ("--warmup-updates", "100", "--max-tokens", "2048")
_ADAM = (
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", LEARNING_RATE),
    *("--lr-scheduler", "inverse_sqrt", *SIZES, "--dropout", "0", "--criterion", "cross_entropy"),
    *KEEP_ALL,
)
FAMILIES: dict[str, tuple[str, ...]] = {
    "masked LM": (*TRAIN_OPTIONS[MASKED], "--lr", LEARNING_RATE, *SIZES),
    "translation": (
        *("--task", "translation", "--arch", "transformer_none_tiny", *_ADAM),
        *("--encoder-embed-dim", "128", "--encoder-ffn-embed-dim", "512"),
        *("--share-all-embeddings", "--skip-invalid-size-inputs-valid-test"),
        *("--max-tokens", "1024"),
        *("--max-source-positions", "128", "--max-target-positions", "128"),
    ),
    "causal LM": (
        *("--task", "language_modeling", "--arch", "transformer_lm_none_tiny", *_ADAM),
        *("--decoder-embed-dim", "128", "--decoder-input-dim", "128"),
        *("--decoder-output-dim", "128", "--decoder-ffn-embed-dim", "512"),
        *("--share-decoder-input-output-embed", "--sample-break-mode", "none"),
        *("--tokens-per-sample", "64", "--max-target-positions", "64"),
    ),
}


class Run(NamedTuple):
    """One training.

    Attributes:
        family: a key of ``FAMILIES``.
        encoding: a spec.
        seed: of initial weights, order of the data, and masks.
        updates: number of training updates.
        start: a key of ``STARTS``: how tables of ``m4m`` are drawn.
        extra: options added to the family's.
    """

    family: str
    encoding: str
    seed: int
    updates: int
    start: str = "plain"
    extra: tuple[str, ...] = ()

    def command(self, data: Path) -> list[str]:
        """Return the options of ``fairseq-train``."""
        return [
            *(str(data), *FAMILIES[self.family], "--position-encoding", self.encoding),
            *("--max-update", str(self.updates), "--seed", str(self.seed), "--no-save"),
            *("--validate-interval-updates", str(VALIDATE_EVERY), "--validate-interval", NEVER),
            *("--log-format", "json", "--log-interval", "1", "--num-workers", "0", "--cpu"),
            *("--save-dir", str(data.parent / "unused"), "--distributed-world-size", "1"),
            *self.extra,
        ]
