"""Parts that both reports share: the command, the machine, and the writing of files."""

from __future__ import annotations

import json
import math
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import fairseq_posenc
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.running.devices import processor_name

BY_HAND = "<!-- Below this line: written by hand, and kept when the report is made again. -->"


def own_command() -> str:
    """Build the command line of the report, as a reader would type it."""
    return shlex.join(["python", "benchmarks/trainability", *sys.argv[1:]])


def machine() -> str:
    """Describe the machine of the figures."""
    return (
        f"{processor_name()}, torch {torch.__version__} on {torch.get_num_threads()} thread(s), "
        f"Python {platform.python_version()}, fairseq-posenc {fairseq_posenc.__version__}"
    )


def last_loss(result: dict[str, Any]) -> float:
    """Read the last validation loss, in bits; infinite if the training diverged."""
    return math.inf if result["diverged"] else float(result["curve"][-1][1])


def write_report(path: Path, paragraphs: list[str]) -> None:
    """Write a report; keep the text below the mark of the old one, which people wrote."""
    old = path.read_text("utf-8") if path.exists() else ""
    by_hand = old.partition(BY_HAND)[2] or "\n"
    write_whole(path, "\n\n".join([*paragraphs, BY_HAND]) + by_hand)
    print(f"report: {path}", flush=True)


def write_figures(path: Path, facts: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write all figures: rows with curves, which the tables of a record cannot hold."""
    rows = ",\n".join(f"  {json.dumps(result)}" for result in results)
    write_whole(path, f'{{"data": {json.dumps(facts)},\n "runs": [\n{rows}\n]}}\n')
