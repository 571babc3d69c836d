"""Processes chunks in several worker processes: results in order, few chunks in memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from fairseq_posenc.errors import RunError

Key = TypeVar("Key")
PENDING_PER_WORKER = 3  # chunks that were submitted and not yet yielded


def map_chunks(
    chunks: Iterable[tuple[Key, bytes]], workers: int, function: Callable[[bytes], Any]
) -> Iterator[tuple[Key, Any]]:
    """Yield the key of each chunk with ``function(data)`` for its bytes, in order.

    The function is passed to a worker only once, when it starts.

    Raises:
        RunError: a worker was killed.
    """
    # Forked workers share the function's memory, and need not import modules.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(function,))
    pending: deque[tuple[Key, Future[Any]]] = deque()
    try:
        for key, data in chunks:
            pending.append((key, pool.submit(_call, data)))
            if len(pending) >= workers * PENDING_PER_WORKER:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        for key, future in pending:
            yield key, future.result()
    except BrokenProcessPool:
        raise RunError(
            "a worker process was killed, often for lack of memory; to continue, run the same "
            "command again, perhaps with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_function: Callable[[bytes], Any]  # of `map_chunks`; set in each worker process only


def _start_worker(function: Callable[[bytes], Any]) -> None:
    """Initialize a worker, which ignores Ctrl-C and ends with the main process."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it when a job's time is up
    for number in (signal.SIGTERM, signal.SIGHUP):  # the main process handles them like Ctrl-C
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(data: bytes) -> Any:
    return _function(data)
