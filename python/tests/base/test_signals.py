"""Signals that are held: whatever comes, and whenever, afterwards every signal has the handler that it had."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from shardow.base import signals


class _AlarmError(Exception):
    """What a user's handler raises."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise _AlarmError


def stopped_before(line: int) -> bool:
    """A signal, whose handler raises, before a line of a block that holds signals. False where there are no more
    lines."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != signals.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == line + 1:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with signals.DeferredSignals():
            pass
    except _AlarmError:
        pass
    finally:
        sys.settrace(before)
    return lines > line


def test_a_handler_that_raises_while_signals_are_held_or_given_back_leaves_all_handlers_as_they_were() -> None:
    ours = {signal.SIGUSR1: _raise, signal.SIGINT: signal.default_int_handler, signal.SIGTERM: lambda *_: None}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}
    try:
        line = 0
        while stopped_before(line):
            assert {number: signal.getsignal(number) for number in ours} == ours, line
            line += 1
        assert line > 100
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_of_two_that_have_waited_both_are_delivered() -> None:
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise _AlarmError

    before = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        try:
            with signals.DeferredSignals():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR2)
                assert seen == []
        except _AlarmError:
            pass
        assert sorted(seen) == [signal.SIGUSR1, signal.SIGUSR2]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
