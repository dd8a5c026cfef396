"""Connections to a store; its values of any length: long ones take several keys."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, TCPStore

MOST = 4 << 20  # bytes of one key's; torch's TCPStore drops a client that sends 8 MiB


def clone(store: Any) -> Any:
    """Another connection to the same keys, for another thread."""
    if hasattr(store, "clone"):
        return store.clone()
    # Torch 2.6 tells neither how to, nor under which prefix this store's keys lie: those who share it agree on another one.
    agreed = store.compare_set("shardow", "", uuid4().hex).decode()
    base = getattr(store, "_underlying_non_prefix_store", store)
    if isinstance(base, TCPStore):
        base = TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    return PrefixStore(agreed, base)


def put(store: Any, key: str, value: bytes) -> list[str]:
    """The first key, which others wait for, is written last and says how long it all is. Returns the keys."""
    keys = [key, *(f"{key}/{at}" for at in range(MOST, len(value), MOST))]
    for i, one in reversed(list(enumerate(keys))):
        part = value[i * MOST : (i + 1) * MOST]
        store.set(one, part if i else len(value).to_bytes(8, "little") + part)
    return keys


def get(store: Any, keys: list[str]) -> list[bytes]:
    values = []
    for key, first in zip(keys, store.multi_get(keys) if keys else (), strict=True):
        length, parts = int.from_bytes(first[:8], "little"), [bytes(first[8:])]
        parts += [bytes(store.get(f"{key}/{at}")) for at in range(MOST, length, MOST)]
        values.append(b"".join(parts))
    return values
