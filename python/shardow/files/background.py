"""Saves that go on while training does: one at a time for each process group, from one staging buffer that is used
again.
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardow import _core, errors
from shardow.base.checks import number
from shardow.base.signals import DeferredSignals
from shardow.distributed.rank_group import naming
from shardow.distributed.transfers import empty

CHANNEL = 1  # of the process group's store: the training thread has its own
_untold: list[SaveHandle] = []  # failed, and nobody knows


@atexit.register
def _tell() -> None:
    """Threads have ended by now. A checkpoint that is not there must not look like success: neither to a reader nor to
    a launcher.
    """
    for handle in _untold:
        print(f"shardow: {handle._path} was not saved: {handle._error}", file=sys.stderr)
    if _untold:
        _core.fail_at_exit()


def finish(save: _core.Save, path: object, committed: Callable[[], None] | None) -> dict[str, Any]:
    """Writes and publishes a save, and calls ``committed()`` then."""
    with naming(f"save() to {path}"):
        report: dict[str, Any] = save.write()
    if committed is not None:
        committed()
    return report


class SaveHandle:
    """A save that is being written. The tensors may change meanwhile."""

    def __init__(self, save: _core.Save, path: str, committed: Callable[[], None] | None) -> None:
        self._path = path
        self._report: dict[str, Any] = {}
        self._error: BaseException | None = None
        # An interrupted Thread.join() takes a thread that runs for one that has ended (CPython up to 3.12).
        self._ended = threading.Event()
        # No daemon: the interpreter waits for it at its end.
        threading.Thread(target=self._write, args=(save, committed), name=f"shardow save {path}").start()

    def _write(self, save: _core.Save, committed: Callable[[], None] | None) -> None:
        try:
            self._report = finish(save, self._path, committed)
        except BaseException as error:
            self._error = error
            _untold.append(self)
        finally:
            self._ended.set()

    def done(self) -> bool:
        """True when nothing is left to wait for."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Until the checkpoint is on disk under its name; returns what save() returns. Raises save()'s errors, the same
        on every rank; TimeoutError after ``timeout`` seconds, while the save goes on."""
        if not self._ended.wait(None if timeout is None else min(number("timeout", timeout), threading.TIMEOUT_MAX)):
            raise errors.make("timeout", f"{self._path}: not written after {timeout} s; it goes on")
        try:
            if self._error is not None:
                raise self._error
        except BaseException as raised:
            if raised is self._error and self in _untold:  # and no signal's handler has raised in its place
                _untold.remove(self)
            raise
        return self._report

    def __repr__(self) -> str:
        how = "being written" if not self.done() else "failed" if self._error else "written"
        return f"SaveHandle('{self._path}', {how})"


@dataclass
class _Slot:
    """``staging`` and the process group's channel are the handle's until it has ended."""

    handle: SaveHandle | None = None
    staging: torch.Tensor | None = None


_alone = _Slot()
_slots: weakref.WeakKeyDictionary[dist.ProcessGroup, _Slot] = weakref.WeakKeyDictionary()


def settle(process_group: dist.ProcessGroup | None) -> None:
    """Waits for the save before; raises its error, unless wait() has."""
    slot = _slot(process_group)
    if slot.handle is None:
        return
    slot.handle._ended.wait()
    handle, slot.handle = slot.handle, None
    if handle in _untold:
        handle.wait()


def start(
    process_group: dist.ProcessGroup | None, save: _core.Save, path: str, committed: Callable[[], None] | None
) -> SaveHandle:
    """Copies what this rank will write, and writes it in the background; calls ``committed()`` then."""
    slot = _slot(process_group)
    size = save.staging_bytes
    if slot.staging is None or slot.staging.numel() < size:
        slot.staging = None
        slot.staging = empty([size], torch.uint8)
    save.stage(slot.staging.data_ptr(), size)
    with DeferredSignals():  # a thread that has begun is known to its slot
        slot.handle = SaveHandle(save, path, committed)
    return slot.handle


def _slot(process_group: dist.ProcessGroup | None) -> _Slot:
    return _alone if process_group is None else _slots.setdefault(process_group, _Slot())
