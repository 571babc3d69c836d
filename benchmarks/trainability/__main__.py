"""Trains every position encoding for a few hundred updates on real text, and reports the losses.

Models are built and trained by fairseq's own ``fairseq-train`` (its ``main``, called here, so that
the start-up is paid once), with equal seeds, sizes and order of the data. Two subjects:

* ``methods``: every encoding in a masked LM and in a translation model; those that only causal
  models have, in a causal LM. Writes ``trainability.md`` and ``trainability.json``.
* ``m4m-start``: starting values of M4M's table. Writes ``m4m_start.md``, ``.json`` and ``.png``.

Finished runs are kept in the working folder: the same command continues there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `measuring`
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else waiting threads count as work
# Else fairseq's `basicConfig` adds a handler, which prints every model.
logging.getLogger().addHandler(logging.NullHandler())

import torch  # noqa: E402
from data import prepare  # noqa: E402
from m4m_start import SETTINGS, report_starts  # noqa: E402
from methods import report_methods  # noqa: E402
from starts import STARTS  # noqa: E402
from training import FAMILIES, Store  # noqa: E402

from fairseq_posenc import registry  # noqa: E402
from fairseq_posenc.workbench.running.folders import lock_output_folder  # noqa: E402


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/trainability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("subject", choices=("methods", "m4m-start"))
    add("--updates", type=int, default=300, help="training updates of each model (default: 300)")
    add("--seeds", type=int, nargs="+", default=[1], help="seeds (default: 1)")
    names = registry.names()
    add("--methods", nargs="+", choices=names, metavar="NAME", help="encodings (default: all)")
    add("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="(default: all)")
    add("--threads", type=int, default=1, help="threads of torch (default: 1)")
    add("--source", type=Path, help="training text, source language, a sentence a line; or .gz")
    add("--target", type=Path, help="the same sentences in the target language")
    add("--valid-source", type=Path, help="validation text, source language")
    add("--valid-target", type=Path, help="validation text, target language")
    first = list(SETTINGS)[:1]
    add("--settings", nargs="+", choices=SETTINGS, default=first, help="where M4M's starts compete")
    others = "starts in the settings and seeds after the first (default: all)"
    add("--starts", nargs="+", choices=STARTS, default=list(STARTS), help=others)
    add("--out", type=Path, default=Path("build/trainability"), help="working folder")
    add("--results", type=Path, default=Path("docs/results"), help="folder of the reports")
    args = parser.parse_args()
    sides = (args.source, args.target, args.valid_source, args.valid_target)
    if not all(sides) and (any(sides) or needs_parallel_text(args)):
        parser.error("translation needs --source, --target, --valid-source and --valid-target")
    parts = ("train.source", "train.target", "valid.source", "valid.target")
    args.files = dict(zip(parts, sides)) if all(sides) else {}
    return args


def needs_parallel_text(args: argparse.Namespace) -> bool:
    """Whether nothing can be left out; ``methods`` can leave out one of several families."""
    if args.subject == "m4m-start":
        return "translation" in args.settings
    return args.families == ["translation"]


def main() -> None:
    """Train what is missing, and write the report."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    with lock_output_folder(args.out) as lock:
        folders, facts = prepare(args.out, args.files, lock)
        store = Store(args.out / "runs", folders)
        args.results.mkdir(parents=True, exist_ok=True)
        if args.subject == "methods":
            report_methods(args, facts, store)
        else:
            report_starts(args, store)


if __name__ == "__main__":
    main()
