"""Threads for compiled code, which runs outside the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

Task = Callable[[], None]


def thread_count() -> int:
    """Threads to use: PARARNN_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process may run on."""
    for name in ("PARARNN_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").strip()
        if value.isdecimal() and int(value):
            return int(value)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shares(units: int, most: int) -> list[tuple[int, int]]:
    """Ranges of `units` for the threads, at most `most` and at least one."""
    wanted = max(1, min(thread_count(), units, most))
    edges = [units * k // wanted for k in range(wanted + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


class _Worker:
    """A thread that runs one task at a time; two locks wake it and say that it is done.

    An executor's queue and futures take twice as long, and a gradient waits for all threads a few dozen times.
    """

    def __init__(self) -> None:
        self.task: Task | None = None
        self.error: BaseException | None = None
        self.begin, self.end = threading.Lock(), threading.Lock()
        self.begin.acquire()
        self.end.acquire()
        threading.Thread(target=self._serve, name="pararnn", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.begin.acquire()
            try:
                assert self.task is not None
                self.task()
            except BaseException as error:
                self.error = error
            self.task = None
            self.end.release()

    def start(self, task: Task) -> None:
        self.task, self.error = task, None
        self.begin.release()

    def wait(self) -> BaseException | None:
        """What went wrong, if anything. An interrupt is kept until the task, which works on our arrays, is done."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.end.acquire()
                return interrupt or self.error
            except BaseException as error:
                interrupt = error


# Workers that nobody uses now. Callers on several threads each take their own; append and pop are atomic.
_idle: list[_Worker] = []

if hasattr(os, "register_at_fork"):
    # A forked child has its parent's list but none of its threads.
    os.register_at_fork(after_in_child=_idle.clear)


def _borrow() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        return _Worker()


def run_all(tasks: Sequence[Task]) -> None:
    """Runs every task, each on a thread of its own, the last one on the caller's."""
    used: list[_Worker] = []
    errors: list[BaseException] = []
    try:
        for task in tasks[:-1]:
            worker = _borrow()
            worker.start(task)
            used.append(worker)
        for task in tasks[-1:]:
            task()
    finally:
        errors += [error for worker in used if (error := worker.wait()) is not None]
        _idle.extend(used)
    for error in errors:
        raise error
