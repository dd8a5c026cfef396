"""The errors of shardow, to catch by what they mean: one class per code of the engine's, each also the built-in that it
resembles.
"""

from __future__ import annotations

__all__ = [
    "CorruptError", "DeadlineError", "Error", "InternalError", "InvalidArgumentError", "IoError", "NotFoundError",
    "OutOfSpaceError", "PeerFailedError", "UnknownOptionError", "UnsupportedError",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


_CLASSES: dict[str, type[Error]] = {}  # by the engine's codes


class Error(Exception):
    """Base of everything that shardow raises on purpose. ``code`` is one of a closed set; ``errno`` is 0 unless the
    operating system refused."""

    code = "internal"

    def __init_subclass__(cls, code: str | None = None) -> None:
        if code is not None:
            cls.code = code
            _CLASSES[code] = cls

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.os_errno = errno

    def __str__(self) -> str:  # KeyError would quote it, OSError would add to it
        return self.message


class InvalidArgumentError(Error, ValueError, code="invalid_argument"):
    """The call is wrong: another shape, dtype, name, decay, or not now."""


class UnknownOptionError(InvalidArgumentError, TypeError):
    """An option that does not exist."""


class NotFoundError(Error, FileNotFoundError, KeyError, code="not_found"):
    """No such file or tensor."""


class CorruptError(Error, ValueError, code="corrupt"):
    """A file or state contradicts its format or its checksums."""


class UnsupportedError(Error, NotImplementedError, code="unsupported"):
    """Valid, but not possible in this build, on this device or storage."""


class IoError(Error, OSError, code="io"):
    """The operating system refused; errno says why."""


class OutOfSpaceError(IoError, code="out_of_space"):
    """Disk or quota is full; nothing was published."""


class OutOfMemoryError(Error, MemoryError, code="out_of_memory"):
    """A device, or pinned host memory, has none left."""


class DeadlineError(Error, TimeoutError, code="timeout"):
    """A deadline passed."""


class PeerFailedError(Error, ConnectionError, code="peer_failed"):
    """Another rank failed or is gone; the message names it and its own message."""


class InternalError(Error, RuntimeError, code="internal"):
    """A bug in shardow."""


def make(code: str, message: str, errno: int = 0) -> Error:
    """The exception of an error code; called by the engine's one bridge to Python."""
    error = _CLASSES[code](message, errno)
    if errno and isinstance(error, OSError):
        error.errno = errno
    return error


def make_also(kind: type[Exception], message: str, code: str = "invalid_argument") -> Error:
    """make(), of an exception that is ``kind`` too: what another library raises there, whose users may be catching
    it."""
    base = _CLASSES[code]
    cls: type[Error] = (
        base
        if issubclass(base, kind)
        else type(base.__name__, (base, kind), {"__doc__": base.__doc__, "__module__": base.__module__})
    )
    return cls(message)
