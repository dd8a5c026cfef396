"""The context manager of swapped()."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType


class Block(contextlib.AbstractContextManager[None], contextlib.ContextDecorator):
    """``with``; no generator, since one that is interrupted ends when it is collected, at any time."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[BaseException | None], None]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(error)
