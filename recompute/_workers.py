"""Processes that do one kind of work side by side, and end immediately when the user interrupts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor


@contextmanager
def workers(count: int, start: Callable[..., None], *arguments: Any) -> Iterator[ProcessPoolExecutor]:
    """Inside the block, `count` processes that have called `start(*arguments)`; if it raises, they are terminated.

    They are spawned (a fork of a process with threads is not safe), so a script needs `if __name__ == "__main__":`.
    """
    from concurrent.futures import ProcessPoolExecutor  # here: once it is loaded, Python's exit waits for its pools
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (start, arguments))
    try:
        yield pool
    except BaseException:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        raise
    pool.shutdown()


def _begin(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's business
    start(*arguments)
