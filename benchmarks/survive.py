r"""Checks that small models stay free of NaN for a few hundred updates, with each encoding.

Trains fairseq's dummy tasks with a learning rate that moves the weights, and reports the mean loss
of the first and of the last tenth of the updates, in bits. The loss and all weights must stay
finite; updates whose gradients overflow in fp16 are skipped, as in fairseq. With a text, each batch
is another part of it, in which only the most frequent words are known. The script prints all rows,
and fails if any of them did not stay finite.

    python benchmarks/survive.py --device cuda --dtype float16 --backends triton --encodings all
    python benchmarks/survive.py --dtype bfloat16 --encodings all --updates 1000 \
        --families masked_lm causal_lm translation --text wiki.train.tokens --json > survived.json
"""

from __future__ import annotations

from measuring.process import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()  # of the allocator and of logs, which torch reads when imported

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fairseq_posenc.errors import UserError, chain
from fairseq_posenc.workbench.results.markdown import table
from measuring import commands
from measuring.contenders import Contender, backend_names, contenders
from measuring.families import FAMILIES, Case, build_trainer

PADDING, UNKNOWN, FIRST_WORD = 1, 3, 4  # ids in fairseq's dictionaries
SPECIAL_SYMBOLS = 10  # room for them in a vocabulary


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = commands.new_parser(__doc__)
    commands.add_encodings(parser, ["shaw", "m4", "m4m"])
    commands.add_backends(parser)
    commands.add_device(parser)
    commands.add_threads_and_json(parser)
    add = parser.add_argument
    add("--batch", type=int, default=8, help="sentences (default: 8)")
    add("--dropout", type=float, default=0.1, help="(default: 0.1)")
    add("--updates", type=int, default=300, help="(default: 300)")
    add("--length", type=int, default=128, help="(default: 128)")
    add("--families", nargs="+", choices=FAMILIES, default=["masked_lm"], help="default: masked_lm")
    add("--text", type=Path, metavar="FILE", help="text with the words to train on")
    return parser.parse_args()


def read_words(path: Path, case: Case) -> torch.Tensor:
    """Convert a text to fairseq's ids of words; rare ones become ``<unk>``.

    Raises:
        UserError: the text is too short for a batch.
    """
    words = path.read_text(encoding="utf-8").split()
    # A batch, the word after it, and one more, so that `fill_batch` does not divide by 0.
    needed = case.batch * case.length + 2
    if len(words) < needed:
        raise UserError(f"--text {path}: has {len(words):,} words; a batch needs {needed:,}")
    frequent = Counter(words).most_common(case.vocabulary - SPECIAL_SYMBOLS)
    ids = {word: index for index, (word, _) in enumerate(frequent, start=FIRST_WORD)}
    return torch.tensor([ids.get(word, UNKNOWN) for word in words])


def fill_batch(batch: dict[str, Any], text: torch.Tensor, update: int) -> None:
    """Put a part of a text into a batch of a dummy task.

    The translation of a sentence is the reversed sentence, a masked LM has the dummy's masked
    places, and a causal LM predicts the next word.
    """
    inputs = batch["net_input"]
    target = batch["target"]
    tokens = inputs["src_tokens"]
    start = update * tokens.numel() % (len(text) - tokens.numel() - 1)
    words = text[start : start + tokens.numel() + 1].to(tokens.device)
    current = words[:-1].view_as(tokens)
    following = words[1:].view_as(tokens)
    masked = target != PADDING
    if "prev_output_tokens" in inputs:  # translation; the dummy's last symbols stay, as ends
        tokens[:, :-1] = current[:, :-1]
        target[:, :-1] = current[:, :-1].flip(1)
        inputs["prev_output_tokens"][:, 1:] = target[:, :-1]
    elif not masked.all():  # masked LM: only masked places have targets
        target[masked] = current[masked]
        tokens.copy_(torch.where(masked, tokens, current))
    else:  # causal LM
        tokens.copy_(current)
        target.copy_(following)


def survive(
    contender: Contender, case: Case, updates: int, text: torch.Tensor | None
) -> dict[str, Any]:
    """Train a model; return losses in bits, skipped updates and whether all numbers are finite."""
    trainer, batch = build_trainer(contender, case, lr=1e-3)
    losses: list[float] = []
    skipped = 0
    stopped = False
    with TemporaryDirectory() as folder:
        trainer.cfg.checkpoint.save_dir = folder  # for the checkpoint of a stopped training
        for update in range(updates):
            if text is not None:
                fill_batch(batch, text, update)
            try:
                log = trainer.train_step([batch])
            except Exception as error:
                if not any(isinstance(link, FloatingPointError) for link in chain(error)):
                    raise
                stopped = True
                break
            if log is None:
                skipped += 1
            else:
                losses.append(float(log["loss"]))
    checked = [torch.tensor(losses), *trainer.model.parameters()]
    tenth = max(1, len(losses) // 10)
    return {
        "skipped": skipped,
        "finite": not stopped and bool(losses) and all(bool(x.isfinite().all()) for x in checked),
        "first": fmean(losses[:tenth]) if losses else None,
        "last": fmean(losses[-tenth:]) if losses else None,
    }


def rows_table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a table; its first three columns are names."""
    return table(list(rows[0]), ([str(x) for x in row.values()] for row in rows), "lllr")


def main() -> None:
    """Train with each encoding in turn, and fail if one does not survive."""
    args = parse_args()
    commands.prepare(args)
    settings = {
        "device": args.device.type,
        **{name: getattr(args, name) for name in ("dtype", "length", "batch", "dropout")},
        "text": args.text.name if args.text else None,
        "updates": args.updates,
    }
    rows = []
    for family in args.families:
        size = FAMILIES[family].sizes["tiny"]
        case = Case.from_args(args, family=family, size=size, vocabulary=1_000)
        names = case.encodings(args.encodings)
        group = contenders(names, backend_names(args.backends), case.dims, case.call)
        text = read_words(args.text, case) if args.text else None
        for contender in group:
            options = {"family": family, **contender._asdict(), **settings}
            named = f"{family}, {contender.encoding}, {contender.backend}"
            print(f"{named} ...", file=sys.stderr, flush=True)
            torch.manual_seed(1)
            rows.append(options | survive(contender, case, args.updates, text))
    commands.print_rows(args, rows, rows_table)
    if not all(row["finite"] for row in rows):
        raise UserError("not every encoding survived")


if __name__ == "__main__":
    commands.exit_on_error(main)
