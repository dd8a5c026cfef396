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
from typing import Any, Generic, TypeVar

from shardow.base.signals import waited

T = TypeVar("T")


class Overdue(Exception):
    """What was waited for has not ended; it goes on where nobody looks."""


class Left(BaseException):
    """A signal's handler raised ``cause`` where fn() was waited for."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(cause)
        self.cause = cause


class _Job(Generic[T]):
    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._answer: list[T] = []
        self._error: BaseException | None = None
        self.over = threading.Event()

    def do(self) -> None:
        try:
            self._answer.append(self._fn())
        except BaseException as error:
            self._error = error
        self.over.set()

    def answer(self) -> T:
        try:
            if self._error is not None:
                raise self._error
            return self._answer[0]
        finally:
            self._error = None  # an exception and its traceback would keep each other alive


class _Helper:
    """One thread; ends after what it was left with."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="shardow waits", daemon=True).start()

    def give(self, job: _Job[Any] | None) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.do()
            del job


_MOST_IDLE = 4
_idle: deque[_Helper] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of these threads


def beyond(seconds: float) -> float:
    """A deadline, and some time for what is waited for to say who was missing."""
    return 1.05 * seconds + 0.8


def wait_for(fn: Callable[[], T], seconds: float) -> T:
    """fn() on a thread of its own. Raises Overdue after ``seconds``, or Left at a signal, and leaves fn() to itself
    then.
    """
    helper, job = _free(), _Job(fn)
    helper.give(job)
    try:
        over = waited(job.over, min(max(seconds, 0.0), threading.TIMEOUT_MAX))
    except BaseException as error:
        helper.give(None)
        raise Left(error) from None
    if not over:
        helper.give(None)
        raise Overdue
    helper.give(None) if len(_idle) >= _MOST_IDLE else _idle.append(helper)
    return job.answer()


def _free() -> _Helper:
    with contextlib.suppress(IndexError):
        return _idle.pop()
    return _Helper()
