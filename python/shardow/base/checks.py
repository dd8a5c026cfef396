"""Refuses a caller's values in one sentence: an option among some, a whole number, a deadline. Warns at the caller's
line.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Iterator, Sequence
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


def whole(name: str, value: Any, least: int = 0, most: int = 2**63 - 2) -> int:
    """Returns a whole number of Python's, numpy's or torch's as Python's."""
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and least <= (index := operator.index(value)) <= most:
            return index
    bounds = f"of at least {least}" if not isinstance(value, int) or value < least else f"of at most {most}"
    raise invalid(f"{name}={_shown(value)}; it must be a whole number {bounds}")


def number(name: str, value: Any) -> float:
    """Returns a number of Python's, numpy's or torch's as Python's; a text is none."""
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if not isinstance(value, (bool, str, bytes)):
            return float(value)
    raise invalid(f"{name}={_shown(value)}; it must be a number", TypeError)


def fraction(name: str, value: Any) -> float:
    if not 0.0 <= (part := number(name, value)) <= 1.0:
        raise invalid(f"{name}={value!r}; it must be between 0 and 1")
    return part


def instance(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise invalid(f"{name} is a {type(value).__name__}; it must be of class {kind.__name__}", TypeError)
    return value


def several(name: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise invalid(f"{name}={_shown(values)}; give a list", TypeError) from None


def utf8(value: str, where: str, what: str = "files") -> str:
    """The text itself. Raises ValueError where ``what`` can't hold it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"{where} has {value[error.start]!r} in it, which is no character: {what} are UTF-8") from None
    return value


def _shown(value: Any) -> str:
    if hasattr(value, "named_parameters"):
        return f"a {type(value).__name__}: that is a model, and the EMA knows its own"
    return repr(value)


def seconds(timeout: float | timedelta | None) -> float | None:
    """A deadline as seconds; None: the process group's own."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else number("timeout", timeout)
    if not value > 0:
        raise invalid(f"timeout={timeout}; it must be more than 0 seconds")
    return value


@contextlib.contextmanager
def with_torch(what: str) -> Iterator[None]:
    """Says that ``what`` needs PyTorch, where the block imports it and it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ImportError(f"{what} needs PyTorch: pip install torch (2.6 or later)") from None


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
