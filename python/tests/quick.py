"""Folders in memory, where it has room: for tests whose deadlines leave no time for a disk that others keep busy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = Path("/dev/shm")
_ROOM = 1 << 30  # bytes


@contextmanager
def folder() -> Iterator[Path]:
    """Ranks may still write there at its end."""
    memory = _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _ROOM else None
    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as name:
        yield Path(name)
