"""Warnings that point at the user's line, however deep inside they are found."""

from __future__ import annotations

import sys
import warnings

_NOT_THE_USERS = {"shardow", "torch", "contextlib"}  # packages whose frames are passed over


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """warnings.warn() at the first frame that belongs to none of those packages."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
