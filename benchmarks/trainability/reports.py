"""Parts that both reports share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from fairseq_posenc.files import write_whole
from measuring.commands import machine, own_command

BY_HAND = "<!-- Below this line: written by hand, and kept when the report is made again. -->"


def describe_origin() -> list[str]:
    """Tell the command and the machine of the figures."""
    return [f"    {own_command()}", f"Machine: {machine(torch.device('cpu'))}."]


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
