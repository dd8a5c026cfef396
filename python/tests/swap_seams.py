"""What tests of stopped swaps know of the inside of shardow. The tests themselves are frozen; this file changes with
shardow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core_modules import HOOKS

run = HOOKS.run
run_in_new_processes = HOOKS.run_in_new_processes

#: Lines of shardow's that a call runs before signals are deferred.
LINES_BEFORE_DEFERRAL = {"block": 6, "swap_in": 4, "end of block": 5, "swap_out": 4, "restore": 4}


@contextmanager
def failing_engine(steps: int, failures: int) -> Iterator[Callable[[], bool]]:
    """The engine's swaps have no memory for ``failures`` steps, after ``steps`` steps that succeed. After the block the
    function returns whether one has failed."""
    from shardow._core import hooks  # type: ignore[attr-defined]

    failed: list[bool] = []
    hooks.fail_swaps(steps, failures)
    try:
        yield lambda: failed[0]
    finally:
        failed.append(hooks.fail_swaps(0, 0))
