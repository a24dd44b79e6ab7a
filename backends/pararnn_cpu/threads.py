"""A small pool of threads for compiled code, which runs outside the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_lock = threading.Lock()
_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def thread_count() -> int:
    """Threads to use: PARARNN_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process may run on."""
    for name in ("PARARNN_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value):
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shares(units: int, most: int) -> list[tuple[int, int]]:
    """Ranges of `units` for the threads, at most `most` and at least one."""
    wanted = max(1, min(thread_count(), units, most))
    edges = [units * k // wanted for k in range(wanted + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def run_all(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs every task, the last one on the calling thread."""
    if len(tasks) > 1:
        # A forked child has its parent's pool object but none of its threads, so pools are kept by process.
        key = (os.getpid(), thread_count())
        with _lock:
            if key not in _pools:
                _pools[key] = ThreadPoolExecutor(max(1, key[1] - 1), thread_name_prefix="pararnn")
            pool = _pools[key]
        waiting = [pool.submit(task) for task in tasks[:-1]]
        tasks[-1]()
        for future in waiting:
            future.result()
    else:
        for task in tasks:
            task()
