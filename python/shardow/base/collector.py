"""Python's garbage collector, out of the way while many objects are made that stay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """For calls that make objects for every tensor: the collector would look through all of them again and again, a
    third of the time of such a call, and find nothing. It goes on afterwards where it was on before, and takes what was
    made meanwhile for old, as it would have after looking through it twice; what was young before is looked through
    first."""
    if not gc.isenabled():
        yield
        return
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else somebody's own frozen objects would thaw
            gc.freeze()
            gc.unfreeze()  # to the oldest generation: both move whole lists, and look at nothing
        gc.enable()
