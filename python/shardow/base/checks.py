"""Refuses a caller's values in one sentence: an option among some, a whole number, a deadline. Warns at the caller's
line.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shardow import errors

SHOWN = 8  # names of each kind that a message has
_NOT_THE_USERS = {"shardow", "torch", "contextlib"}  # packages whose frames are passed over


def invalid(message: str, also: type[Exception] | None = None, code: str = "invalid_argument") -> Exception:
    """``also``: what another library raises there, whose users may be catching it."""
    return errors.make(code, message) if also is None else errors.make_also(also, message, code)


def unsupported(message: str, also: type[Exception] | None = None) -> Exception:
    return invalid(message, also, "unsupported")


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    for candidate in allowed:
        if value is candidate or (isinstance(value, str) and value == candidate):
            return value
    raise invalid(f"{name}={value!r}; it must be one of {', '.join(map(repr, allowed))}")


def whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise invalid(f"{name}={value!r}; it must be a whole number of at least {least}")
    return value


def fraction(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise invalid(f"{name}={value!r}; it must be between 0 and 1")
    return value


def seconds(timeout: float | timedelta | None) -> float | None:
    """A deadline as seconds; None: the process group's own."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value > 0:
        raise invalid(f"timeout={timeout}; it must be more than 0 seconds")
    return value


def first_of(names: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost frame that is in none of _NOT_THE_USERS."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
