"""Disturbs commands while they write, starts them again, and compares what they made.

    python -m tests.helpers.fault_runs --rounds 200 --seed 1 --record kills.json

A round runs one command (`disturbed.py`) under one fault (`disturbing.py`), then the same command
without: it has to end well, with the same files as a run that nobody disturbed, byte by byte, and
checkpoints with the same weights, bit by bit. What is asked beyond that is in `judge`. Rounds that
the record has already are not run again; `--every` takes all write points of the chosen commands in
turn. Faults of the disk need the right to mount one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from fairseq_posenc.checkpoints.recovery import LAST, _read_if_whole, newest_checkpoint
from fairseq_posenc.checkpoints.safe_loading import is_torn
from fairseq_posenc.files import write_whole
from fairseq_posenc.workbench.results.markdown import table
from tests.helpers import fault_jobs as disturbed
from tests.helpers import programs
from tests.helpers.fault_injection import (
    AT_WRITES,
    DISKS,
    KINDS,
    MARK,
    Bench,
    Fault,
    Said,
    contents,
    disk,
    disturb,
    draw,
    raw_contents,
    remount,
)


def living(mark: str) -> list[str]:
    """Return the processes of a round."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(path.name)
    return found


def judge(bench: Bench, fault: Fault, met: bool, said: Said, mark: str) -> list[str]:
    """Describe what is wrong when a command has met its fault, before it is started again.

    No process of it lives on. It says a line, and no stack trace but that of Ctrl-C in a command of
    fairseq's. It fails where the disk did, or has made everything. Of two at once, the second is
    refused.
    """
    wrong = []
    deadline = time.monotonic() + 60
    while (alive := living(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if alive:
        wrong.append(f"{len(alive)} processes live on")
        for each in alive:
            with suppress(ProcessLookupError):
                os.kill(int(each), signal.SIGKILL)
        while living(mark):  # what they hold open keeps a disk from being remounted
            time.sleep(0.1)
    own = bench.words[0] in ("fairseq-posenc", "python")
    if "Traceback" in said.text and (own or fault.kind != "SIGINT"):
        wrong.append(f"a stack trace: {said.text.strip().splitlines()[-1][:200]}")
    if not met:
        return wrong
    if fault.kind in ("no room at a write", "full disk"):
        if said.status == 0:
            wrong += differences(bench)
        elif not re.search(r"error: ", said.text):
            wrong.append(f"no line of error, but {said.text[-200:]!r}")
    if fault.kind == "two at once" and not re.search("trains there|running there", said.text):
        wrong.append(f"the second was not refused, but {said.text[-200:]!r}")
    return wrong


def differences(bench: Bench) -> list[str]:
    """Describe how a folder differs from that of a run that nobody disturbed."""
    try:
        found = contents(bench.out)
    except Exception as error:
        return [f"a file that cannot be read: {error}"]
    names = sorted(found.keys() | bench.expected.keys())
    return [
        f"{name}: {found.get(name, 'lacks')[:8]}, {bench.expected.get(name, 'lacks')[:8]} expected"
        for name in names
        if name not in bench.varying and found.get(name) != bench.expected.get(name)
    ]


def while_read_only(bench: Bench, before: Any) -> list[str]:
    """Describe what is wrong with a command on a disk that cannot be written."""
    remount(bench.out, "ro")
    said = bench.run()
    remount(bench.out, "rw")
    wrong = []
    if said.status == 0:
        wrong += differences(bench)
    elif "Traceback" in said.text or "error: " not in said.text:
        wrong.append(f"read-only: status {said.status}, {said.text.strip()[-300:]!r}")
    if raw_contents(bench.out) != before:
        wrong.append("read-only: files have changed")
    return wrong


def round_of(bench: Bench, fault: Fault, mark: str) -> dict[str, Any]:
    """Disturb a command, start it again, and return what was found."""
    bench.clear()
    size = {"full disk": fault.size, "read-only disk": 1 << 30}.get(fault.kind)
    with disk(bench.out, size) if size else nullcontext():
        met, said = disturb(bench, fault, mark)
        wrong = judge(bench, fault, met, said, mark)
        if fault.kind == "full disk":
            remount(bench.out, f"size={1 << 30}")
        if fault.kind == "read-only disk":
            wrong += while_read_only(bench, raw_contents(bench.out))
        wrong += while_again(bench, goes_on_from(bench.out / "run"))
    return {"job": bench.job, **fault._asdict(), "met": met, "status": said.status, "wrong": wrong}


def goes_on_from(folder: Path) -> int | None:
    """Return the updates of a training's last checkpoint, or of the newest if that is torn.

    Without a last one, fairseq begins anew: None, as for all that is not a training.
    """
    last = folder / LAST
    if not last.exists():
        return None
    found = newest_checkpoint(folder) if is_torn(last) else _read_if_whole(last)
    return found.updates if found else None


def while_again(bench: Bench, updates: int | None) -> list[str]:
    """Start a command once more; return what is wrong with it, and with all that is there then.

    Args:
        bench: the command.
        updates: that a training has to go on from.
    """
    said = bench.run()
    if said.status or "Traceback" in said.text:
        return [f"again: status {said.status}, {said.text.strip()[-300:]!r}"]
    wrong = differences(bench)
    places = (f"@ {updates} updates)", f"has made {updates} updates")
    from_it = updates is None or any(place in said.text for place in places)
    if bench.words[0] == "fairseq-train" and not from_it:
        wrong.append(f"again: not from update {updates}")
    return wrong


def planned(bench: Bench, args: argparse.Namespace) -> Iterator[Fault]:
    """Yield the faults of a job."""
    kinds = args.faults or [kind for kind in KINDS if os.geteuid() == 0 or kind not in DISKS]
    rng = random.Random(f"{args.seed} {bench.job}")
    if args.every:
        for kind in [kind for kind in kinds if kind in AT_WRITES]:
            for number in range(1, bench.writes + 1):
                yield draw(bench, kind, rng)._replace(number=number)
        return
    order = rng.sample(kinds, len(kinds))
    for number in range(args.rounds):
        yield draw(bench, order[number % len(order)], rng)


def summary(rounds: list[dict[str, Any]]) -> str:
    """Count the rounds that each command had of each fault, and those that went wrong."""
    rows = []
    for job in dict.fromkeys(each["job"] for each in rounds):
        own = [each for each in rounds if each["job"] == job]
        met = sum(each["met"] for each in own)
        rows.append([job, str(len(own)), str(met), str(sum(bool(each["wrong"]) for each in own))])
    total = [str(sum(int(row[i]) for row in rows)) for i in (1, 2, 3)]
    return table(["command", "rounds", "faults met", "losses"], [*rows, ["all", *total]], "lrrr")


def main() -> int:
    """Run the rounds that the record lacks; return 1 if something was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="for each command (default: %(default)s)")
    add("--seed", type=int, default=1, help="(default: 1)")
    add("--jobs", nargs="+", default=[], help=f"parts of the names {'; '.join(disturbed.JOBS)}")
    add("--faults", nargs="+", choices=KINDS, help="(default: all that this user may)")
    add("--every", action="store_true", help="every write point, for faults at a write")
    add("--record", type=Path, help="a JSON file to keep the rounds in")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
    rounds = json.loads(args.record.read_text()) if args.record and args.record.exists() else []
    done = {each["round"] for each in rounds}
    for job in disturbed.choose(args.jobs, random.Random(args.seed)):
        called = f"{job}, seed {args.seed}{', every' * args.every}, round"
        if not args.every and done.issuperset(f"{called} {n}" for n in range(args.rounds)):
            continue
        bench = Bench(job)
        print(bench, flush=True)
        for number, fault in enumerate(planned(bench, args)):
            name = f"{called} {number}"
            if name in done:
                continue
            found = {"round": name, **round_of(bench, fault, name)}
            rounds.append(found)
            print(json.dumps(found), flush=True)
            if args.record:
                lines = ",\n".join(json.dumps(each) for each in rounds)
                write_whole(args.record, f"[\n{lines}\n]\n")
    print(summary(rounds))
    return int(any(each["wrong"] for each in rounds))


if __name__ == "__main__":
    with programs.fast():
        sys.exit(main())
