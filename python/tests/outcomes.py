"""How a call on one rank ended: the error's type, what it says, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable

import shardow

Outcome = tuple[str, str, float]  # (exception's type, message, seconds)


def outcome(call: Callable[[], object]) -> Outcome:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        assert isinstance(error, shardow.Error), repr(error)
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", time.monotonic() - began
