"""A bar on the terminal for what takes more than a second, where nobody asked for another report."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shardow.base.checks import invalid

Progress = Callable[[int, int], None]


def shown(progress: Progress | None, what: str, rank: int) -> Progress | None:
    """``progress`` itself, or a bar of bytes on rank 0's terminal. Needs tqdm; without it, and in logs, nothing is
    shown.
    """
    if progress is not None and not callable(progress):
        raise invalid(f"progress={progress!r}; it must be a function of (bytes done, bytes in all)", TypeError)
    if progress is not None or rank != 0 or not sys.stderr.isatty():
        return progress
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    bar = tqdm(desc=what, unit="B", unit_scale=True, delay=1.0, leave=False)

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return update
