"""Python's garbage collector, out of the way while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """For calls that make objects for every tensor: the collector would look through all of them again and again, a third of the time of
    such a call, and find nothing. It goes on afterwards where it was on before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
