"""The Group of a torch process group: facts go through its store, whose waits time out without harming the process group.

Each collective is a round with one atomic verdict, which late ranks read too, so that every rank, the late one included, sees the same outcome:

1. a rank writes its bytes under ``round/rank``
2. it waits for everybody's, at most until its deadline
3. it proposes what it saw, all there or who is missing; the first proposal is the verdict (``compare_set``)
4. all ranks return everybody's bytes, or raise the same error

A rank begins round r only when it has finished round r - 1, so a round that succeeds lets the keys of the one before it be deleted. Rounds are counted for the life of a process group, not of
whoever uses it: a rank that missed a call meets the verdict of that call next, and is then in step again.
"""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardow import _core, _errors

_ALL_THERE = b"ok"
_MOST = 4 << 20  # bytes of one value; torch's TCPStore drops a client that sends 8 MiB

_FIRST_TAG = 64  # smaller ones are channels

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, StoreGroup]] = weakref.WeakKeyDictionary()


def begun(begin: Callable[[], dist.Work | None], otherwise: str) -> dist.Work | None:
    """A transfer; that it can't even begin, on a connection that is closed, is a typed error that begins with ``otherwise``."""
    try:
        return begin()
    except RuntimeError as error:
        raise _lost(error, otherwise) from None


def finish(work: dist.Work | None, seconds: float, otherwise: str) -> None:
    """Waits for a transfer; its failure is a typed error that begins with ``otherwise``. Past its deadline gloo closes the connection of the two ranks, for good."""
    try:
        if work is not None:
            work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError as error:
        raise _lost(error, otherwise) from None


def _lost(error: RuntimeError, otherwise: str) -> Exception:
    return _errors.make("timeout" if "imed out" in str(error) else "peer_failed", f"{otherwise}: {error}")


def store_group(process_group: dist.ProcessGroup, channel: int = 0) -> StoreGroup:
    """The one StoreGroup of a process group and channel: all that act together count the same rounds. A channel is for one thread; channels don't know each other."""
    channels = _groups.setdefault(process_group, {})
    if channel not in channels:
        channels[channel] = StoreGroup(process_group, channel)
    return channels[channel]


class StoreGroup(_core.Group):
    """Ranks of ``process_group``. Collective calls happen in the same order on every rank; one thread uses a group at a time."""

    def __init__(self, process_group: dist.ProcessGroup, channel: int) -> None:
        super().__init__()
        self._process_group = weakref.ref(process_group)
        self.ranks: list[int] = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = len(self.ranks)
        self.moves_blocks = _has_cpu(process_group)
        self._tag = channel
        self._store = PrefixStore(f"shardow/{process_group.group_name}/{channel}", _connection(channel))
        self._round = 0
        self._mine: list[str] = []  # keys of the last round

    def all_gather(self, mine: bytes, seconds: float) -> list[bytes]:
        """Every rank's bytes, by rank. Raises TimeoutError on all ranks if one was not there in time, ConnectionError where the store is gone."""
        try:
            return self._all_gather(mine, seconds)
        except dist.DistError as error:
            raise _errors.make(
                "peer_failed", f"the store of the process group is gone, and with it the rank that kept it: {error}"
            ) from None

    def _all_gather(self, mine: bytes, seconds: float) -> list[bytes]:
        began, this = time.monotonic(), self._round
        self._round += 1
        keys = [f"{this}/{rank}" for rank in range(self.size)]
        written = self._set(keys[self.rank], mine)
        try:
            self._store.wait(keys, timedelta(seconds=max(seconds, 0.001)))
            seen = _ALL_THERE
        except dist.DistStoreError:
            missing = [self.ranks[rank] for rank in range(self.size) if not self._store.check([keys[rank]])]
            seen = f"rank(s) {missing} did not take part within {time.monotonic() - began:.1f} s".encode() if missing else _ALL_THERE
        verdict = bytes(self._store.compare_set(f"{this}/verdict", "", seen.decode()))
        if verdict != _ALL_THERE:
            raise _errors.make("timeout", verdict.decode())
        gathered = self._get(keys)
        self._forget(this - 1, written)
        return gathered

    def all_reduce(self, values: memoryview, op: str, seconds: float) -> None:
        """Combines 64-bit words in place: op is "sum", "max" or "xor"."""
        combine: Any = {"sum": operator.add, "max": np.maximum, "xor": operator.xor}[op]
        everybody = [np.frombuffer(one, dtype=np.uint64) for one in self.all_gather(bytes(values), seconds)]
        np.frombuffer(values, dtype=np.uint64)[:] = functools.reduce(combine, everybody)

    def broadcast(self, data: memoryview, root: int, seconds: float) -> None:
        """Copies root's bytes into everybody's: through the process group, or its store where that has no way for CPU tensors."""
        if self.moves_blocks:
            self._move(lambda: dist.broadcast(_tensor(data), group_src=root, group=self._process_group(), async_op=True), seconds)
        else:
            data[:] = self.all_gather(bytes(data) if self.rank == root else b"", seconds)[root]

    def send(self, data: memoryview, to: int, seconds: float) -> None:
        self._move(lambda: dist.isend(_tensor(data), group_dst=to, group=self._process_group(), tag=self._tag), seconds)

    def recv(self, data: memoryview, source: int, seconds: float) -> None:
        self._move(lambda: dist.irecv(_tensor(data), group_src=source, group=self._process_group(), tag=self._tag), seconds)

    def next_tag(self) -> int:
        """For messages of one call among all that this group makes; the same on every rank."""
        return _FIRST_TAG + self._round

    def _move(self, begin: Callable[[], dist.Work | None], seconds: float) -> None:
        otherwise = f"a block between ranks {self.ranks} did not arrive"
        finish(begun(begin, otherwise), seconds, otherwise)

    def _set(self, key: str, value: bytes) -> list[str]:
        """Long values take several keys; the first, which others wait for, is written last and says how long it all is. Returns the keys."""
        keys = [key, *(f"{key}/{at}" for at in range(_MOST, len(value), _MOST))]
        for i, one in reversed(list(enumerate(keys))):
            part = value[i * _MOST : (i + 1) * _MOST]
            self._store.set(one, part if i else len(value).to_bytes(8, "little") + part)  # type: ignore[arg-type]
        return keys

    def _get(self, keys: list[str]) -> list[bytes]:
        values = []
        for key, first in zip(keys, self._store.multi_get(keys), strict=True):
            length, parts = int.from_bytes(first[:8], "little"), [bytes(first[8:])]
            parts += [bytes(self._store.get(f"{key}/{at}")) for at in range(_MOST, length, _MOST)]
            values.append(b"".join(parts))
        return values

    def _forget(self, past: int, written: list[str]) -> None:
        """Everybody has ended the round before the last one."""
        for key in self._mine:
            self._store.delete_key(key)
        if past >= 0 and self.rank == 0:
            self._store.delete_key(f"{past}/verdict")
        self._mine = written


def _connection(channel: int) -> Any:
    """Channels wait at the same time, and a connection serves one wait."""
    store = dist.distributed_c10d._get_default_store()
    return store.clone() if channel else store  # type: ignore[attr-defined]


def _has_cpu(process_group: dist.ProcessGroup) -> bool:
    try:
        process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return True


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
