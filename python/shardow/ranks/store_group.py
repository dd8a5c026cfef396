"""The Group of a torch process group: facts go through its store, whose waits time out without harming the process group.

Each collective is a round with one atomic verdict, which late ranks read too, so that every rank, the late one included, sees the same
outcome:

1. a rank writes its call and its bytes under ``round/rank``
2. it waits for everybody's, at most until its deadline
3. it proposes what it saw, all there or who is missing; the first proposal is the verdict (``compare_set``). Who proposes that somebody is
   missing writes for them, so that nobody else waits
4. all ranks return everybody's bytes, or raise the same error: also where ranks made different calls

A rank begins round r only when it has finished round r - 1, so a round that succeeds lets the keys of the one before it be deleted. Rounds
are counted for the life of a process group, not of whoever uses it: a rank that missed a call meets the verdict of that call next, and is
then in step again. A rank that is interrupted while it waits proposes that as the verdict. Where the others had all they need by then, it
goes on where its signals are held (base/signals.py), and ends the next round too where not, for those who would wait for it there. In both
cases it is in step then.

A round is left to a thread with a connection of its own (waiting.py): the store's host may stand still. A connection on which something was
left is not used again.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardow import _core, errors
from shardow.base.checks import invalid
from shardow.base.signals import put_off
from shardow.ranks.store_values import clone, get, put
from shardow.ranks.transfers import begun, finish, has_cpu
from shardow.ranks.waiting import Left, Overdue, beyond, wait_for

T = TypeVar("T")

_ALL_THERE = "ok"
ANSWER = 5.0  # seconds that a store may take for a question that nobody has to come for
_LAST_WORDS = 0.5  # seconds that an interrupted rank takes to tell the others
_FIRST_TAG = 64  # smaller ones are channels
MISSING = "did not take part"
_LATER = "a later step of "
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, StoreGroup]] = weakref.WeakKeyDictionary()


def store_group(process_group: dist.ProcessGroup, channel: int = 0) -> StoreGroup:
    """The one StoreGroup of a process group and channel: all that act together count the same rounds. A channel is for one thread; channels
    don't know each other."""
    channels = _groups.setdefault(process_group, {})
    if channel not in channels:
        channels[channel] = StoreGroup(process_group, channel)
    return channels[channel]


class StoreGroup(_core.Group):
    """Ranks of ``process_group``. Collective calls happen in the same order on every rank; one thread uses a group at a time."""

    def __init__(self, process_group: dist.ProcessGroup, channel: int) -> None:
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._process_group = weakref.ref(process_group)
        self.ranks: list[int] = dist.get_process_group_ranks(process_group)
        self.moves_blocks = has_cpu(process_group)
        self.joined = 0  # the highest number of those who act on these ranks; see Team.same()
        self._tag = channel
        self._prefix = f"shardow/{process_group.group_name}/{channel}"
        self._store: Any = None  # made by the thread that uses it first
        self._call, self._timeout = "", 0.0
        self._round = 0
        self._mine: list[str] = []  # keys of the last round

    def begin(self, call: str, timeout: float) -> None:
        """The next round is ``call``'s first; rounds after it are its later steps. ``timeout``: what was asked for, for messages."""
        self._call, self._timeout = call, timeout

    def all_gather(self, mine: bytes, seconds: float) -> list[bytes]:
        """Every rank's bytes, by rank. Raises TimeoutError on all ranks if one was not there in time, ValueError on all if they make
        different calls, ConnectionError where the store is gone, TimeoutError where it does not answer."""
        return self._meet(mine, seconds, {}, ())[0]

    def mail(self, letters: Mapping[int, bytes], sources: Sequence[int], seconds: float) -> list[bytes]:
        """Bytes for single ranks: ``letters`` by their readers, and those of ``sources`` to this rank. A round as all_gather()'s, with its
        errors; who reads what is known to all beforehand."""
        return self._meet(b"", seconds, letters, sources)[1]

    def _meet(self, mine: bytes, seconds: float, letters: Mapping[int, bytes], sources: Sequence[int]) -> tuple[list[bytes], list[bytes]]:
        this, call, seconds = self._round, self._call, max(seconds, 0.001)
        self._round += 1
        self._call = call if call.startswith(_LATER) else _LATER + call
        timeout = self._timeout or seconds
        left = threading.Event()
        try:
            return wait_for(
                lambda: self._turn(this, call.encode(errors="replace"), mine, seconds, timeout, left, letters, sources), beyond(seconds)
            )
        except Overdue:
            left.set()
            self._store = None
            silent = f"the store of the process group did not answer within {timeout:g} s"
            raise errors.make("timeout", f"{silent}: its host stands still, or cannot be reached") from None
        except dist.DistError as error:
            self._store = None
            gone = "the store of the process group is gone, and with it the rank that kept it"
            raise errors.make("peer_failed", f"{gone}: {error}") from None
        except Left as interrupt:
            left.set()
            ended, waited = self._interrupted(this, call, sources)
            if ended is not None and put_off(interrupt.cause):
                return ended
            if ended is not None:
                self.skip(call)
            if isinstance(interrupt.cause, KeyboardInterrupt):
                raise KeyboardInterrupt(waited) from None
            raise interrupt.cause from None

    def _turn(
        self, this: int, call: bytes, mine: bytes, seconds: float, timeout: float, left: threading.Event, letters: Mapping[int, bytes],
        sources: Sequence[int],
    ) -> tuple[list[bytes], list[bytes]]:  # fmt: skip
        """(1) to (4), on a thread that the caller may have ``left`` meanwhile. Letters are written before what others wait for."""
        store = self._store or self._connected()
        if left.is_set():
            return [], []
        self._store = store
        keys = self._keys(this)
        written = [key for to, letter in letters.items() for key in put(store, f"{this}/{self.rank}/to/{to}", letter)]
        written += put(store, keys[self.rank], len(call).to_bytes(4, "little") + call + mine)
        seen = _ALL_THERE
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [rank for rank in range(self.size) if not store.check([keys[rank]])]
            if missing:
                seen = f"timeout rank(s) {[self.ranks[rank] for rank in missing]} {MISSING} within {timeout:g} s"
        if left.is_set():
            return [], []
        self._decide(store, this, seen)
        answers = self._answers(store, this, sources)
        self._forget(store, this - 1, written)
        return answers

    def _answers(self, store: Any, this: int, sources: Sequence[int]) -> tuple[list[bytes], list[bytes]]:
        """(4), of a good round."""
        everybody = self._bytes_of(get(store, self._keys(this)))
        return everybody, get(store, [f"{this}/{source}/to/{self.rank}" for source in sources])

    def _keys(self, this: int) -> list[str]:
        return [f"{this}/{rank}" for rank in range(self.size)]

    def _decide(self, store: Any, this: int, seen: str) -> None:
        """(3): raises a verdict that is not good."""
        verdict = bytes(store.compare_set(f"{this}/verdict", "", seen)).decode()
        if verdict == _ALL_THERE:
            return
        if verdict == seen:
            for rank in range(self.size):
                store.compare_set(f"{this}/{rank}", "", "missing")
        code, _, message = verdict.partition(" ")
        raise errors.make(code, message)

    def _bytes_of(self, everybody: list[bytes]) -> list[bytes]:
        calls = [one[4 : 4 + int.from_bytes(one[:4], "little")].decode() for one in everybody]
        for rank, call in enumerate(calls):
            if call != calls[0]:
                differ = f"rank {self.ranks[rank]} calls {call} where rank {self.ranks[0]} calls {calls[0]}"
                raise invalid(f"{differ}; every rank must make the same collective calls in the same order")
        return [one[4 + len(call.encode()) :] for one, call in zip(everybody, calls, strict=True)]

    def _interrupted(self, this: int, call: str, sources: Sequence[int]) -> tuple[tuple[list[bytes], list[bytes]] | None, str]:
        """The others learn of it at once, if the store answers. Returns what a round gave that was good all the same, and for whom this
        rank waited."""

        def tell() -> tuple[tuple[list[bytes], list[bytes]] | None, list[int]]:
            store = self._store = self._connected()
            missing = [self.ranks[rank] for rank, key in enumerate(self._keys(this)) if not store.check([key])]
            try:
                self._decide(store, this, self._interruption(call))
                return self._answers(store, this, sources), missing
            except errors.Error:
                return None, missing

        self._store = None
        try:
            ended, missing = wait_for(tell, _LAST_WORDS)
        except (Overdue, Left, dist.DistError):
            self._store = None
            return None, f"{call}: the store of the process group does not answer"
        return ended, f"{call}: waited for rank(s) {missing}" if missing else call

    def skip(self, call: str) -> None:
        """This rank was interrupted, and won't come to the next round: who waits there for it learns of it."""
        this = self._round
        self._round += 1
        with contextlib.suppress(Overdue, Left, dist.DistError, errors.Error):
            wait_for(lambda: self._decide(self._connected(), this, self._interruption(call)), _LAST_WORDS)

    def _interruption(self, call: str) -> str:
        return f"peer_failed rank {self.ranks[self.rank]} was interrupted in {call}"

    def _connected(self) -> Any:
        """Channels wait at the same time, and so does torch: a connection serves one wait."""
        return PrefixStore(self._prefix, _connection())

    def ask(self, question: Callable[[Any], T], seconds: float = ANSWER) -> T | None:
        """question(store), of keys that no round has; None where the store does not answer in time, or is gone."""
        try:
            return wait_for(lambda: question(self._now_connected()), seconds)
        except (Overdue, dist.DistError):
            self._store = None
            return None
        except Left as interrupt:
            self._store = None
            raise interrupt.cause from None

    def _now_connected(self) -> Any:
        self._store = self._store or self._connected()
        return self._store

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

    def _forget(self, store: Any, past: int, written: list[str]) -> None:
        """Everybody has ended the round before the last one."""
        for key in self._mine:
            store.delete_key(key)
        if past >= 0 and self.rank == 0:
            store.delete_key(f"{past}/verdict")
        self._mine = written


def _connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    store.check(["shardow"])  # raises at once where the host is gone; a new connection would be tried until torch's own timeout
    return clone(store)


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)
