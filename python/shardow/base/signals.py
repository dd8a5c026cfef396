"""Signals that wait: while ranks send each other parts, one that stopped halfway would leave the others waiting for it."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

_PATIENCE = 1.0  # seconds that a signal waits for other ranks


class Held:
    """From begin() to end(), in the main thread, Python's signal handlers are put off; end() delivers what came. Elsewhere they never run.

    A second signal of a kind is delivered at once. ``begin`` and ``end`` stand before and in the ``finally`` of one ``try``.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: dict[int, float] = {}

    def begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def end(self) -> None:
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)
        pending, self._pending = self._pending, {}
        for number in pending:
            signal.raise_signal(number)

    def impatient(self) -> bool:
        """True where a signal has waited long enough."""
        return any(time.monotonic() - came > _PATIENCE for came in list(self._pending.values()))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._pending:
            self._handlers[number](number, frame)
        self._pending[number] = time.monotonic()
