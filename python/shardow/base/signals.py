"""Signals that wait: what ranks do together is not to be left halfway, since the others would wait for it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

_PATIENCE = 1.0  # seconds that a signal waits for other ranks
_LOOK = 0.1  # seconds between two looks at the signals, in a wait

_holding: list[DeferredSignals] = []  # the main thread's, the innermost last


class DeferredSignals:
    """A block, in which Python's signal handlers are put off, in the main thread; its end delivers what came. Elsewhere
    they never run. A second signal of a kind is delivered at once. ``waits``: so is the first one in waits of other
    ranks, which can say that they were interrupted; nowhere else."""

    def __init__(self, waits: bool = False) -> None:
        self._waits = waits
        self._handlers: dict[int, Any] = {}
        self._pending: dict[int, float] = {}
        self._raised: list[BaseException] = []  # by handlers

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
            _holding.append(self)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self in _holding:
            _holding.remove(self)
        left = sorted(self._handlers, key=signal.SIGINT.__eq__, reverse=True)  # last the one that will raise
        while left or self._pending:  # whatever handlers raise meanwhile
            try:
                while left:
                    signal.signal(left[-1], self._handlers[left[-1]])
                    left.pop()
                while self._pending:
                    signal.raise_signal(self._pending.popitem()[0])
            except BaseException as raised:
                self._raised.append(raised)
        for error in self._raised:
            raise error

    def deliver(self) -> None:
        """Raises what the handler of a signal raises that came."""
        if self._raised:
            raise self._raised.pop()
        for number in list(self._pending):
            del self._pending[number]
            self._handlers[number](number, sys._getframe())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._pending:
            self._handlers[number](number, frame)
        self._pending[number] = time.monotonic()


def uninterrupted(
    run: Callable[[], None],
    stopped: Callable[[BaseException], None],
    undo: Callable[[BaseException], None] = lambda _: None,
) -> None:
    """run() with signals held, but in waits. One that comes before they are held ends in ``stopped(exception)``, in
    place of run(); one that has waited until run() was done, in ``undo(exception)``. The exception is raised then."""
    begun = done = False
    try:
        with DeferredSignals(waits=True):
            begun = True
            run()
            done = True
    except BaseException as error:
        if done or not begun:
            (undo if done else stopped)(error)
        raise


def impatient() -> bool:
    """True where a signal has waited long enough."""
    return any(time.monotonic() - came > _PATIENCE for held in _holding for came in list(held._pending.values()))


def waited(event: threading.Event, seconds: float) -> bool:
    """``event.wait(seconds)``, in which signals that are held for waits are delivered. One that comes when the event is
    there is not.
    """
    if not _in_waits():
        return event.wait(seconds)
    deadline = time.monotonic() + seconds
    while not event.wait(max(min(_LOOK, deadline - time.monotonic()), 0.0)):
        deliver()
        if time.monotonic() >= deadline:
            return False
    return True


def deliver() -> None:
    """Delivers signals that are held for waits; for a wait outside of Python, which calls it now and then."""
    if _in_waits():
        for held in list(_holding):
            held.deliver()


def put_off(error: BaseException) -> bool:
    """What a handler raised in a wait that was over all the same is raised in the next one, or at the block's end.
    False where no block holds signals."""
    if not _in_waits():
        return False
    _holding[-1]._raised.append(error)
    return True


def _in_waits() -> bool:
    return bool(_holding) and _holding[-1]._waits and threading.current_thread() is threading.main_thread()
