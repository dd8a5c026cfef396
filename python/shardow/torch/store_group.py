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

import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardow import _core, _errors

_ALL_THERE = b"ok"

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, StoreGroup] = weakref.WeakKeyDictionary()


def store_group(process_group: dist.ProcessGroup) -> StoreGroup:
    """The one StoreGroup of a process group: all that act together count the same rounds."""
    if process_group not in _groups:
        _groups[process_group] = StoreGroup(process_group)
    return _groups[process_group]


class StoreGroup(_core.Group):
    """Ranks of ``process_group``. Collective calls happen in the same order on every rank; one thread uses a group at a time."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__()
        self._process_group = weakref.ref(process_group)
        self.ranks: list[int] = dist.get_process_group_ranks(process_group)
        self.rank = dist.get_rank(process_group)
        self.size = len(self.ranks)
        self._store = PrefixStore(f"shardow/{process_group.group_name}", dist.distributed_c10d._get_default_store())
        self._round = 0

    def all_gather(self, mine: bytes, seconds: float) -> list[bytes]:
        """Every rank's bytes, by rank. Raises TimeoutError on all ranks if one was not there in time."""
        began, this = time.monotonic(), self._round
        self._round += 1
        keys = [f"{this}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], mine)  # type: ignore[arg-type]
        try:
            self._store.wait(keys, timedelta(seconds=max(seconds, 0.001)))
            seen = _ALL_THERE
        except dist.DistStoreError:
            missing = [rank for rank in range(self.size) if not self._store.check([keys[rank]])]
            seen = _ALL_THERE if not missing else repr([self.ranks[rank] for rank in missing]).encode()
        verdict = bytes(self._store.compare_set(f"{this}/verdict", "", seen.decode()))
        if verdict != _ALL_THERE:
            raise _errors.make("timeout", f"rank(s) {verdict.decode()} did not take part within {time.monotonic() - began:.1f} s")
        gathered = [bytes(value) for value in self._store.multi_get(keys)]
        self._forget(this - 1)
        return gathered

    def all_reduce(self, values: memoryview, op: str, seconds: float) -> None:
        """Combines 64-bit words in place: op is "sum", "max" or "xor"."""
        words = values.cast("B").cast("Q")
        combinations: dict[str, Callable[[int, int], int]] = {
            "sum": lambda a, b: (a + b) & (2**64 - 1),
            "max": max,
            "xor": lambda a, b: a ^ b,
        }
        combine = combinations[op]
        result = [0] * len(words)
        for one in self.all_gather(bytes(values), seconds):
            result = [combine(a, b) for a, b in zip(result, memoryview(one).cast("Q"), strict=True)]
        for i, word in enumerate(result):
            words[i] = word

    def broadcast(self, data: memoryview, root: int, seconds: float) -> None:
        """Copies root's bytes into everybody's, through the process group."""
        _wait(dist.broadcast(_tensor(data), group_src=root, group=self._process_group(), async_op=True), seconds)

    def send(self, data: memoryview, to: int, seconds: float) -> None:
        _wait(dist.isend(_tensor(data), group_dst=to, group=self._process_group()), seconds)

    def recv(self, data: memoryview, source: int, seconds: float) -> None:
        _wait(dist.irecv(_tensor(data), group_src=source, group=self._process_group()), seconds)

    def _forget(self, past: int) -> None:
        if past < 0:
            return
        self._store.delete_key(f"{past}/{self.rank}")
        if self.rank == 0:
            self._store.delete_key(f"{past}/verdict")


def _wait(work: dist.Work | None, seconds: float) -> None:
    if work is not None:
        work.wait(timedelta(seconds=seconds))


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
