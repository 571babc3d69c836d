"""Runs in place of a program, and has a documented command do less of the same.

``python -IS shrink_command.py PROGRAM WORD...`` becomes the program, with options after its own
that make models tiny, trainings short and measured lengths few, and with the last of the encodings
that it names (two in ``make matrix``). It needs nothing but Python's own modules, as it starts
before each command.
"""

from __future__ import annotations

import os
import sys

AT_ONCE = ["--seeds", "1", "--lrs", "0.003", "--updates", "1", "--vocab-size", "60"]
SPEC = "--position-encoding"


def sizes(arch: str, layers: int = 1) -> list[str]:
    """Return options for a tiny model of an architecture with one stack."""
    stack = "decoder" if arch.startswith("transformer_lm") else "encoder"
    size = {"layers": layers, "embed-dim": 16, "ffn-embed-dim": 16, "attention-heads": 2}
    return [word for n, v in size.items() for word in (f"--{stack}-{n}", str(v))]


def less(program: str, words: list[str]) -> list[str]:
    """Return the words of a command that does less of the same."""
    if program == "fairseq-train":
        arch = words[words.index("--arch") + 1]
        words = [word for word in words if word != "--fp16"]  # needs a GPU
        spec = words[words.index(SPEC) + 1] if SPEC in words else "none"
        layers = 4 if "," in spec else 1  # room for a list of layers
        words = [*words, *sizes(arch, layers), "--max-update", "1", "--cpu", "--num-workers", "0"]
        return [*words, "--required-batch-size-multiple", "1"]
    if words[0] == "lm-length":
        return [*words, "--lengths", "64"]
    if words[0] != "compare":
        return words
    at = words.index("--encodings") + 1
    kept = 1 if os.environ.get("WHOLE_PRODUCTS", "0") == "0" else 2
    encodings = ",".join(words[at].split(",")[-kept:])
    return [*words[:at], encodings, *words[at + 1 :], *AT_ONCE, "--", *sizes("roberta")]


if __name__ == "__main__":
    path, *given = sys.argv[1:]
    os.execv(path, [path, *less(os.path.basename(path), given)])
