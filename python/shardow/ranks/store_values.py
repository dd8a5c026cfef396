"""Connections to a store; its values of any length: long ones take several keys."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, TCPStore

MOST = 4 << 20  # bytes of one key's; torch's TCPStore drops a client that sends 8 MiB
PATIENT = 1800.0  # seconds, for the store itself: whoever waits for its thread goes by a clock of his own


class Abandoned(Exception):
    """Whoever asked has left: nothing more is asked of the store in its name."""


class Connection:
    """Of one thread at a time, made by ``connect()`` on the first that asks something. Nothing is asked once ``left``
    is true: whoever it asked for has gone."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None
        self._told: float | None = None  # seconds that the store was told to wait at most
        self.left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._asked(), name)

    def get(self, key: str, seconds: float = PATIENT) -> bytes:
        self._wait_at_most(seconds)
        return bytes(self._asked().get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._wait_at_most(PATIENT)
        return list(self._asked().multi_get(keys))

    def _asked(self) -> Any:
        if self.left:
            raise Abandoned
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _wait_at_most(self, seconds: float) -> None:
        """To tell it costs as much as a part of a question, and few answers are waited for otherwise than the last."""
        if seconds != self._told:
            self._asked().set_timeout(timedelta(seconds=seconds))
            self._told = seconds


def clone(store: Any) -> Any:
    """Another connection to the same keys, for another thread."""
    if hasattr(store, "clone"):
        return store.clone()
    # Torch 2.6 tells neither how to, nor under which prefix this store's keys lie: those who share it agree on another
    # one.
    agreed = store.compare_set("shardow", "", uuid4().hex).decode()
    base = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(base, TCPStore):
        base = TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    return PrefixStore(agreed, base)


def put(store: Any, key: str, value: bytes, written: list[str]) -> None:
    """The first key, which others wait for, is written last and says how long it all is. ``written`` gains the keys
    beforehand.
    """
    keys = [key, *(f"{key}/{at}" for at in range(MOST, len(value), MOST))]
    written += keys
    for i, one in reversed(list(enumerate(keys))):
        part = value[i * MOST : (i + 1) * MOST]
        store.set(one, part if i else len(value).to_bytes(8, "little") + part)


def get(store: Any, keys: list[str]) -> list[bytes]:
    values = []
    for key, first in zip(keys, store.multi_get(keys) if keys else (), strict=True):
        length, parts = int.from_bytes(first[:8], "little"), [bytes(first[8:])]
        parts += [bytes(store.get(f"{key}/{at}")) for at in range(MOST, length, MOST)]
        values.append(b"".join(parts))
    return values
