"""A reduction along a binary tree of ranks, up and back down: what a rank sends and receives does not grow with their
number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Blocks(Protocol):
    """Who moves them: a Group that can."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, data: memoryview, to: int, seconds: float) -> None: ...
    def recv(self, data: memoryview, source: int, seconds: float) -> None: ...


def reduced(
    group: Blocks, values: np.ndarray[Any, Any], combine: Callable[[Any, Any], Any], left: Callable[[], float]
) -> Any:
    """``values`` of all ranks combined, on each. Rank r hears from 2r + 1 and 2r + 2. ``left``: seconds until the
    deadline. Raises as send() and recv() do; the values are as they were."""
    total: Any = values.copy()
    children = [child for child in (2 * group.rank + 1, 2 * group.rank + 2) if child < group.size]
    for child in children:
        theirs: Any = np.empty_like(values)
        group.recv(memoryview(theirs).cast("B"), child, left())
        total = combine(total, theirs)
    if group.rank > 0:
        parent = (group.rank - 1) // 2
        group.send(memoryview(total).cast("B"), parent, left())
        group.recv(memoryview(total).cast("B"), parent, left())
    for child in children:
        group.send(memoryview(total).cast("B"), child, left())
    return total
