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
from typing import TypeVar

from shardow.base.signals import waited

T = TypeVar("T")


class Overdue(Exception):
    """What was waited for has not ended; it goes on where nobody looks."""


class Left(BaseException):
    """A signal's handler raised ``cause`` where fn() was waited for."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


_Jobs = queue.SimpleQueue[Callable[[], None] | None]  # of one thread, which ends at None
_MOST_IDLE = 4
#: The interpreter starts no thread at its end, when a save in the background may still have rounds (CPython from 3.12).
_idle: deque[_Jobs] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads


def beyond(seconds: float) -> float:
    """A deadline, and some time for what is waited for to say who was missing."""
    return 1.05 * seconds + 0.8


def wait_for(fn: Callable[[], T], seconds: float) -> T:
    """fn() on a thread of its own. Raises Overdue after ``seconds``, or Left at a signal, and leaves fn() to itself
    then.
    """
    answers: list[T] = []
    failures: list[BaseException] = []
    ended, jobs = threading.Event(), _free()

    def run() -> None:
        try:
            answers.append(fn())
        except BaseException as error:
            failures.append(error)
        ended.set()

    jobs.put(run)
    try:
        in_time = waited(ended, min(max(seconds, 0.0), threading.TIMEOUT_MAX))
    except BaseException as error:
        jobs.put(None)
        raise Left(error) from None
    if not in_time:
        jobs.put(None)
        raise Overdue
    _idle.append(jobs) if len(_idle) < _MOST_IDLE else jobs.put(None)
    if failures:
        raise failures.pop()  # an exception and its traceback would keep each other alive
    return answers[0]


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
