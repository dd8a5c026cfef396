"""The errors of shardow, to catch by what they mean. Each is also the built-in that it resembles."""

from shardow._errors import (
    CorruptError,
    DeadlineError,
    Error,
    InternalError,
    InvalidArgumentError,
    IoError,
    NotFoundError,
    OutOfSpaceError,
    PeerFailedError,
    UnknownOptionError,
    UnsupportedError,
)

__all__ = [
    "CorruptError", "DeadlineError", "Error", "InternalError", "InvalidArgumentError", "IoError", "NotFoundError", "OutOfSpaceError",
    "PeerFailedError", "UnknownOptionError", "UnsupportedError",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
