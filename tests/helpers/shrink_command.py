"""Stands before a program on the PATH, and has a documented command do less of the same.

``python -IS shrink_command.py PROGRAM WORD...`` becomes the program, with options after its own
that make models tiny and trainings short, and with a few of the encodings that it names. It needs
nothing but Python's own modules, as it starts before each command.
"""

from __future__ import annotations

import os
import sys

QUICK = [
    *("--learning-rates", "3e-3", "--set", "optimization.max_epoch=1"),
    *("--set", "dataset.num_workers=0", "--set", "lr_scheduler.warmup_updates=2"),
]
SQUAD = ["--set", "optimization.max_epoch=1", "--set", "dataset.num_workers=0"]
SQUAD += ["--set", "lr_scheduler.warmup_updates=2", "--set", "dataset.batch_size=8"]
AT_ONCE = ["--seeds", "1", "--lrs", "0.003", "--updates", "1", "--vocab-size", "34"]
# By command of fairseq-posenc.
OPTIONS = {
    "compare": AT_ONCE,
    "export": ["--tokens", "words"],
    "glue": QUICK,
    "squad train": SQUAD,
}
# By program of preprocess/.
DATA = {
    "squad": ["--max-length", "48", "--stride", "16", "--max-question", "16"],
    "glue": ["--tasks", "CoLA", "--max-tokens", "40"],
    "translation": ["--vocab-size", "72"],
}
SPEC = "--position-encoding"
# Of the values of a list, so many from the end.
FEWER = {"compare": {"--encodings": 2}}


def sizes(arch: str, layers: int = 1) -> list[str]:
    """Return options for a tiny model of an architecture's family."""
    masked, causal = arch.startswith(("roberta", "decbert")), arch.startswith("transformer_lm")
    stacks = ["encoder"] if masked else ["decoder"] if causal else ["encoder", "decoder"]
    size = {"layers": layers, "embed-dim": 16, "ffn-embed-dim": 16, "attention-heads": 2}
    found = [
        word for stack in stacks for n, v in size.items() for word in (f"--{stack}-{n}", str(v))
    ]
    if len(stacks) == 2:  # or an untrained model writes long translations
        found += ["--max-source-positions", "40", "--max-target-positions", "40"]
    return found


def less(program: str, words: list[str]) -> list[str]:
    """Return the words of a command that does less of the same."""
    if program == "fairseq-train":
        arch = words[words.index("--arch") + 1]
        words = [word for word in words if word != "--fp16"]  # needs a GPU
        spec = words[words.index(SPEC) + 1] if SPEC in words else "none"
        layers = 4 if "," in spec else 1  # room for a list of layers
        words = [*words, *sizes(arch, layers), "--max-update", "1", "--cpu", "--num-workers", "0"]
        return [*words, "--required-batch-size-multiple", "1"]
    if program == "fairseq-posenc" and words[0] == "preprocess":
        return [*words, *DATA.get(words[1], [])]
    return ours(words) if program == "fairseq-posenc" else words


def ours(words: list[str]) -> list[str]:
    """Return the words of a command of fairseq-posenc that does less of the same."""
    command = " ".join(words[:2]) if words[0] == "squad" else words[0]
    end = words.index("--") if "--" in words else len(words)
    asked, passed = words[:end], words[end + 1 :]
    if command == "glue" and "--tasks" in asked:
        asked[asked.index("--tasks") + 1] = "CoLA"
    if "--dry-run" in asked or "--help" in asked:
        return [*asked, *words[end:]]
    for option, number in FEWER.get(command, {}).items():
        if option in asked:
            at = asked.index(option) + 1
            asked[at] = ",".join(asked[at].split(",")[-number:])
    asked += OPTIONS.get(command, [])
    if command == "compare":
        asked += [] if "--text" in asked else ["--text", "my.txt"]
        passed += sizes("transformer_lm" if "causal-lm" in asked else "roberta")
    return [*asked, *(["--", *passed] if passed else [])]


if __name__ == "__main__":
    path, *given = sys.argv[1:]
    os.execv(path, [path, *less(os.path.basename(path), given)])
