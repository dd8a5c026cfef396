"""Linux's namespaces, as far as machines in miniature need them: Python 3.10 knows none of these calls."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable

NET, HOST, MOUNTS, IPC, PIDS = 0x40000000, 0x04000000, 0x00020000, 0x08000000, 0x20000000
_PRIVATE, _RECURSIVE, _BIND, _DIE_WITH_PARENT = 1 << 18, 1 << 14, 1 << 12, 1
_libc = ctypes.CDLL(None, use_errno=True)


def leave(kinds: int) -> None:
    """New ones of ``kinds`` for this process; of PIDS for its children. Mounts that follow are its own, and theirs."""
    _checked("unshare", _libc.unshare(kinds))
    if kinds & MOUNTS:
        _mount("", "/", "", _PRIVATE | _RECURSIVE)


def mount_memory(path: str, megabytes: int = 256) -> None:
    os.makedirs(path, exist_ok=True)
    _mount("memory", path, "tmpfs", 0, f"size={megabytes}m")


def mount_proc() -> None:
    _mount("proc", "/proc", "proc", 0)


def mount_over(source: str, path: str) -> None:
    _mount(source, path, "", _BIND)


def mount_fuse(path: str, device: int) -> None:
    """``device``: what is open of /dev/fuse."""
    os.makedirs(path, exist_ok=True)
    _mount("fuse", path, "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other")


def forked(child: Callable[[], None]) -> int:
    """Its pid. It dies with its parent, and ends when child() returns."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            child()
            status = 0
        finally:
            os._exit(status)
    return pid


def call(*command: str, within: int | None = None, told: str = "") -> None:
    """Runs a command, ``within`` the network of a process; it is ``told`` by its input."""
    entered = ("nsenter", "-t", str(within), "-n") if within is not None else ()
    subprocess.run([*entered, *command], input=told, text=True, check=True)


def _mount(source: str, path: str, kind: str, flags: int, options: str = "") -> None:
    _checked(
        f"mount {path}",
        _libc.mount(source.encode(), path.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()),
    )


def _checked(what: str, result: int) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
