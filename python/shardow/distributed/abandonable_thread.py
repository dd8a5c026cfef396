"""Waits that end when they should. What may stand still for ever is left to a thread of its own, and the caller leaves
at its deadline, or when a signal comes. Torch's waits for a store or a transfer can't be interrupted, and some have no
deadline: a TCPStore whose host stands still answers nothing, not even that a wait is over."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from shardow.base.signals import waited

_Jobs = queue.SimpleQueue[Callable[[], None] | None]  # of one thread, which ends at None
_MOST_IDLE = 4
#: The interpreter starts no thread at its end, when a save in the background may still have rounds (CPython from 3.12).
_idle: deque[_Jobs] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads


def beyond(seconds: float) -> float:
    """A deadline, and some time for what is waited for to say who was missing."""
    return 1.05 * seconds + 0.8


def failure_of(fn: Callable[[], object], seconds: float) -> BaseException | None:
    """Runs fn() on a thread of its own, and returns what it raised; TimeoutError where it has not ended after
    ``seconds``. Leaves fn() to itself then, or where a signal's handler raises, which is raised here.
    """
    failures: list[BaseException] = []
    ended, jobs = threading.Event(), _free()

    def run() -> None:
        try:
            fn()
        except BaseException as error:
            failures.append(error)
        ended.set()

    jobs.put(run)
    in_time = False
    try:
        in_time = waited(ended, min(max(seconds, 0.0), threading.TIMEOUT_MAX))
    finally:
        _idle.append(jobs) if in_time and len(_idle) < _MOST_IDLE else jobs.put(None)
    if not in_time:
        return TimeoutError("timed out")
    return failures.pop() if failures else None


def on_a_thread(fn: Callable[[], None]) -> None:
    """fn() on a thread of its own, for which nobody waits, and which ends with it."""
    jobs = _free()
    jobs.put(fn)
    jobs.put(None)


def keep_one() -> None:
    """Has a thread ready for waits at the interpreter's end."""
    if not _idle:
        _idle.append(_started())


def _free() -> _Jobs:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    return _started()


def _started() -> _Jobs:
    jobs: _Jobs = queue.SimpleQueue()
    threading.Thread(target=_work, args=(jobs,), name="shardow waits", daemon=True).start()
    return jobs


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
