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

Key = TypeVar("Key")  # stays with the caller while a worker processes the chunk
_PENDING_PER_WORKER = 3  # chunks that are processed, or wait for it or to be yielded
# Signals that end the main process, and its workers with it.
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Pool:
    """Worker processes that call ``function(data, *arguments)``; use it in a ``with`` block.

    The arguments are passed to a worker only once, when it starts.
    """

    def __init__(self, workers: int, function: Callable[..., Any], *arguments: Any) -> None:
        # Forked workers share the arguments' memory, and need not import modules.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._max_pending = workers * _PENDING_PER_WORKER
        self._executor = ProcessPoolExecutor(
            workers, context, initializer=_start_worker, initargs=(function, arguments)
        )

    def map(self, chunks: Iterable[tuple[Key, bytes]]) -> Iterator[tuple[Key, Any]]:
        """Yield the key of each chunk with the function's result for its bytes, in order.

        Raises:
            RunError: a worker was killed.
        """
        pending: deque[tuple[Key, Future[Any]]] = deque()
        try:
            for key, data in chunks:
                pending.append((key, self._submit(data)))
                if len(pending) >= self._max_pending:
                    oldest, future = pending.popleft()
                    yield oldest, future.result()
            for key, future in pending:
                yield key, future.result()
        except BrokenProcessPool:
            raise RunError(
                "a worker process was ended from outside, often for lack of memory; "
                "start the same command again, perhaps with fewer --workers, to go on"
            ) from None

    def _submit(self, data: bytes) -> Future[Any]:
        """Submit a chunk; the first one starts the workers.

        Signals are blocked while workers are forked, as a KeyboardInterrupt in a fork would be
        lost.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        try:
            return self._executor.submit(_call, data)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers, and drop chunks that are still waiting."""
        self._executor.shutdown(cancel_futures=True)


_task: tuple[Callable[..., Any], tuple[Any, ...]]  # function and arguments, set in a worker


def _start_worker(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Initialise a worker, which ignores Ctrl-C and ends with the main process."""
    global _task
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it when a job's time is up
    for number in (signal.SIGTERM, signal.SIGHUP):  # the main process handles them like Ctrl-C
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _task = (function, arguments)


def _end_with_parent() -> None:
    """End this worker when its parent ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(data: bytes) -> Any:
    function, arguments = _task
    return function(data, *arguments)
