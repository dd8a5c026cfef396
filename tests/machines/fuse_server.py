"""A file system of a program's, of which a test says what is wrong with it. It speaks the kernel's protocol (fuse(4),
linux/fuse.h) itself: what a library in between would do with a call that is never answered is its own affair.

Files lie in another folder, which several mounts may have in common. One process, one thread, a call at a time.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import namespaces as ns
from weather import Shared

_ROOT, _HEAD, _MOST = 1, 40, 1 << 20
_NAMES = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 13: "link",
    14: "open", 15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init",
    27: "opendir", 28: "readdir", 29: "release", 30: "fsync", 35: "create", 45: "rename2",
}  # fmt: skip
_SILENT = (2, 36, 42)  # forget, interrupt, and many of them: nobody waits for an answer


@dataclass(frozen=True)
class Faults:
    """``anywhere``: writes elsewhere than at a file's end. ``fails``: how often a call that changes something fails,
    from ``seed``. ``hangs``: the call that is never answered, as "write". ``merges``: writes of several machines into
    one file come together; else each machine has a copy of what it writes, and the one that closes last stays, as in
    mounts of object stores."""

    renames: bool = True
    anywhere: bool = True
    fails: float = 0.0
    seed: int = 0
    hangs: str = ""
    merges: bool = True


def mount(path: Path, files: Path, faults: Shared[Faults], not_mine: Callable[[], None]) -> None:
    """In this process's namespace of mounts, until that or this process ends. ``not_mine()``: what the server's process
    does first.
    """
    files.mkdir(exist_ok=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    ns.mount_fuse(str(path), device)

    def serve() -> None:
        not_mine()
        _Server(device, files, faults).serve()

    ns.forked(serve)
    os.close(device)


class _Refused(Exception):
    def __init__(self, error: int) -> None:
        super().__init__(os.strerror(error))
        self.error = error


class _Server:
    def __init__(self, device: int, files: Path, faults: Shared[Faults]) -> None:
        self._device, self._faults = device, faults
        self._paths = {_ROOT: str(files)}
        self._numbers = itertools.count(_ROOT + 1)
        self._copies: dict[int, tuple[str, int]] = {}  # by handle: where a file's copy is, and its node
        self._random = random.Random(faults.now().seed)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MOST + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # it was unmounted
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            if code in _SILENT:
                continue
            name, faults = _NAMES.get(code, ""), self._faults.now()
            if faults.hangs and name == faults.hangs:
                continue
            error, answer = 0, b""
            try:
                call: Callable[[int, bytes], bytes] | None = getattr(self, f"_{name}", None) if name else None
                if call is None:
                    raise _Refused(errno.ENOSYS)
                if (
                    name in ("write", "create", "mkdir", "fsync", "rename", "rename2")
                    and self._random.random() < faults.fails
                ):
                    raise _Refused(errno.EIO)
                answer = call(node, request[_HEAD:])
            except _Refused as refused:
                error = refused.error
            except OSError as failed:
                error = failed.errno or errno.EIO
            try:
                os.write(self._device, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)
            except OSError:
                continue  # whoever asked was killed meanwhile

    def _init(self, _: int, body: bytes) -> bytes:
        _, minor, readahead, _ = struct.unpack_from("<IIII", body)
        long_writes = 1 << 5 | 1 << 22
        return struct.pack(
            "<IIIIHHIIHHII24x", 7, min(minor, 31), readahead, long_writes, 16, 12, _MOST, 1, _MOST >> 12, 0, 0, 0
        )

    def _at(self, node: int, name: bytes) -> str:
        return os.path.join(self._paths[node], name.split(b"\0", 1)[0].decode())

    def _entry(self, path: str) -> bytes:
        found = os.lstat(path)
        node = next((one for one, there in self._paths.items() if there == path), 0) or next(self._numbers)
        self._paths[node] = path
        copy = self._copy_of(node)
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + _attributes(
            node, found, os.stat(copy).st_size if copy else found.st_size
        )

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._at(node, body))

    def _getattr(self, node: int, _: bytes) -> bytes:
        copy, found = self._copy_of(node), os.lstat(self._paths[node])
        return struct.pack("<QII", 0, 0, 0) + _attributes(node, found, os.stat(copy).st_size if copy else found.st_size)

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        path = self._paths[node]
        if valid & 1:
            os.chmod(path, struct.unpack_from("<I", body, 68)[0] & 0o7777)
        if valid & 8:
            if size and not self._faults.now().anywhere:
                raise _Refused(errno.EOPNOTSUPP)
            os.truncate(self._copy_of(node) or path, size)
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        path = self._at(node, body[8:])
        os.mkdir(path)
        return self._entry(path)

    def _unlink(self, node: int, body: bytes) -> bytes:
        path = self._at(node, body)
        os.unlink(path)
        self._forget(path)
        return b""

    def _forget(self, path: str) -> None:
        """What comes to be there later is another file."""
        for one in [one for one, there in self._paths.items() if there == path]:
            self._paths[one] = f"{path} (removed)"

    def _rmdir(self, node: int, body: bytes) -> bytes:
        path = self._at(node, body)
        os.rmdir(path)
        self._forget(path)
        return b""

    def _rename(self, node: int, body: bytes) -> bytes:
        return self._moved(node, struct.unpack_from("<Q", body)[0], body[8:])

    def _rename2(self, node: int, body: bytes) -> bytes:
        to, flags = struct.unpack_from("<QI", body)
        if flags:
            raise _Refused(errno.EINVAL)
        return self._moved(node, to, body[16:])

    def _moved(self, node: int, to: int, names: bytes) -> bytes:
        if not self._faults.now().renames:
            raise _Refused(errno.ENOSYS)
        old, new = names.split(b"\0")[:2]
        source, target = self._at(node, old), self._at(to, new)
        os.rename(source, target)
        self._forget(target)
        for one, path in self._paths.items():
            if path == source or path.startswith(source + "/"):
                self._paths[one] = target + path[len(source) :]
        return b""

    def _link(self, node: int, body: bytes) -> bytes:
        raise _Refused(errno.EPERM)

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_CREAT | os.O_EXCL | os.O_NOCTTY)
        return struct.pack("<QIi", self._opened(node, flags), 1 if flags & 3 else 0, 0)  # 1: past the page cache

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._at(node, body[16:])
        os.close(os.open(path, flags | os.O_CREAT, mode))
        entry = self._entry(path)
        return entry + struct.pack("<QIi", self._opened(struct.unpack_from("<Q", entry)[0], flags & ~os.O_EXCL), 1, 0)

    def _opened(self, node: int, flags: int) -> int:
        path = self._paths[node]
        if self._faults.now().merges or not flags & 3:
            return os.open(path, flags)
        copy = f"{self._paths[_ROOT]}.copy{node}.{os.getpid()}.{len(self._copies)}"
        shutil.copy(path, copy)
        handle = os.open(copy, flags)
        self._copies[handle] = copy, node
        return handle

    def _copy_of(self, node: int) -> str | None:
        return next((copy for copy, of in self._copies.values() if of == node), None)

    def _read(self, _: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def _write(self, _: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        if not self._faults.now().anywhere and offset != os.fstat(handle).st_size:
            raise _Refused(errno.EOPNOTSUPP)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self._paths[node])
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<QQQQQIII28x", *counts, found.f_bsize, 255, found.f_frsize)

    def _release(self, _: int, body: bytes) -> bytes:
        if handle := struct.unpack_from("<Q", body)[0]:
            os.close(handle)
            if handle in self._copies:
                copy, node = self._copies.pop(handle)
                os.replace(copy, self._paths[node])
        return b""

    def _fsync(self, _: int, body: bytes) -> bytes:
        return b""

    def _flush(self, _: int, body: bytes) -> bytes:
        return b""

    def _opendir(self, _: int, body: bytes) -> bytes:
        return struct.pack("<QIi", 0, 0, 0)

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        out = b""
        for at, name in enumerate(sorted(os.listdir(self._paths[node]))[offset:], offset + 1):
            text = name.encode()
            entry = struct.pack("<QQII", 1, at, len(text), 0) + text
            entry += bytes(-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


def _attributes(node: int, found: os.stat_result, size: int) -> bytes:
    times = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    seconds, rest = [one // 10**9 for one in times], [one % 10**9 for one in times]
    whose = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, found.st_blocks, *seconds, *rest, *whose)
