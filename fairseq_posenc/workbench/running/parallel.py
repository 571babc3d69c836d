"""Work side by side: a few pieces at a time, none of which outlives the others' failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Optional, TypeVar

from fairseq_posenc.workbench.running.programs import end_all

Result = TypeVar("Result")
_MOMENT = 0.2  # seconds; without a limit, signals would wait as well


def run_parallel(
    works: Sequence[Callable[[], Result]], jobs: int, watch: Optional[Callable[[], None]] = None
) -> list[Result]:
    """Do pieces of work that start programs, each in a thread; return their results in order.

    Ctrl-C, or the first piece that fails, ends the programs of all and is raised.

    Args:
        works: the pieces, begun in this order.
        jobs: how many at a time.
        watch: called now and then, several times a second.
    """
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work) for work in works]
        running = set(futures)
        try:
            while running:
                done, running = wait(running, _MOMENT, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if watch:
                    watch()
        finally:
            for future in running:
                future.cancel()
            while wait(running, _MOMENT).not_done:  # a piece may have been about to start another
                end_all()
    return [future.result() for future in futures]
