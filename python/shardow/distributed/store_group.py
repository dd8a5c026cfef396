"""The Group of a torch process group: facts go through its store, in the engine's rounds (src/group/rounds.h), whose
waits time out without harming the process group; blocks go through the group itself.

Rounds are counted for the life of a process group, not of whoever uses it: a rank that missed a call meets the verdict
of that call next, and is then in step again.

The store is asked on threads that each have a connection of their own: its host may stand still. While a thread has the
connection nobody else does; what the engine has left ends with the one question that it was asked.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shardow import _core, errors
from shardow.base.checks import invalid
from shardow.distributed.abandonable_thread import on_a_thread
from shardow.distributed.transfers import begun, broadcast, carrier, finish

ANSWER = 5.0  # seconds that a store may take for a question that nobody has to come for
_PATIENT = timedelta(days=20)  # for the store itself: the engine waits by its own clock
_LAST_WORDS = 0.5  # seconds to tell others that something is wrong
_LAST_ANSWERS = 1.0  # seconds for a store to answer at the interpreter's end
_FIRST_TAG = 64  # smaller ones are channels
# A thread that comes back from torch when the interpreter has ended would abort the process.
atexit.register(_core.await_answers, _LAST_ANSWERS)
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, StoreGroup]] = weakref.WeakKeyDictionary()


def store_group(process_group: dist.ProcessGroup, channel: int = 0) -> StoreGroup:
    """The one StoreGroup of a process group and channel: all that act together count the same rounds. A channel is for
    one thread; channels don't know each other."""
    channels = _groups.setdefault(process_group, {})
    if channel not in channels:
        prefix = f"shardow/{process_group.group_name}/{channel}"
        ranks = dist.get_process_group_ranks(process_group)
        group = StoreGroup(dist.get_rank(process_group), ranks, lambda: connected(prefix))
        group.move_blocks_by(process_group, channel)
        channels[channel] = group
    return channels[channel]


def connected(prefix: str) -> Any:
    """A connection of its own to the job's store: a wait holds it."""
    return PrefixStore(prefix, _connection())


class StoreGroup(_core.StoreGroup):
    """``ranks``: their names in messages, of which this is number ``rank``. ``connect()`` returns a store of torch's.
    Collective calls happen in the same order on every rank; one thread uses a group at a time."""

    def __init__(self, rank: int, ranks: list[int], connect: Callable[[], Any]) -> None:
        def served(*engine: Callable[..., Any]) -> None:
            on_a_thread(lambda: _serve(connect, *engine))

        super().__init__(rank, ranks, served)
        self.ranks = ranks
        self.joined = 0  # rank 0's: how many have acted on these ranks; see RankGroup.join()
        self.moves_blocks = False
        self._process_group: Callable[[], Any] = lambda: None

    def move_blocks_by(self, process_group: dist.ProcessGroup, tag: int) -> None:
        """Where it moves tensors of the CPU."""
        self._process_group, self._tag = weakref.ref(process_group), tag
        self.moves_blocks = carrier(process_group, torch.device("cpu")).type == "cpu"

    def try_compare_set(self, key: str, expected: str, desired: str, seconds: float = ANSWER) -> str | None:
        """The store's compare_set() of a key that no round has; None where it does not answer in time, or is gone. One
        that was silent before has cost a timeout by then, and gets no other."""
        seconds = min(seconds, _LAST_WORDS) if self.is_silent else seconds
        try:
            return self.compare_set(key, expected, desired, seconds).decode()
        except (errors.DeadlineError, errors.PeerFailedError):
            return None

    def broadcast(self, data: memoryview, root: int, seconds: float) -> None:
        """Copies root's bytes to all ranks through the process group, which moves blocks."""
        if not 0 <= root < self.size:
            raise invalid(f"broadcast() from rank {root} in a group of {self.size}")
        until = time.monotonic() + seconds
        # Finds a rank that is late where it does no harm to the process group.
        self.all_gather(b"", seconds)
        left = max(until - time.monotonic(), _LAST_WORDS)
        self._move(lambda: broadcast(_tensor(data), root, self._process_group(), left), left)

    def send(self, data: memoryview, to: int, seconds: float) -> None:
        self._pass(dist.isend, data, seconds, group_dst=to)

    def recv(self, data: memoryview, source: int, seconds: float) -> None:
        self._pass(dist.irecv, data, seconds, group_src=source)

    def _pass(self, how: Callable[..., dist.Work | None], data: memoryview, seconds: float, **peer: int) -> None:
        (rank,) = peer.values()
        if rank == self.rank or not 0 <= rank < self.size:
            raise invalid(f"rank {self.rank} of {self.size} has no block for rank {rank}, and gets none from it")
        self._move(lambda: how(_tensor(data), group=self._process_group(), tag=self._tag, **peer), seconds)

    def next_tag(self) -> int:
        """For messages of one call among all that this group makes; the same on every rank."""
        return _FIRST_TAG + self.rounds

    def _move(self, begin: Callable[[], dist.Work | None], seconds: float) -> None:
        otherwise = f"a block between ranks {self.ranks} did not arrive"
        finish(begun(begin, otherwise), seconds, otherwise)


def _connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    # Raises at once where the host is gone; a new connection would be tried until torch's own timeout.
    store.check(["shardow"])
    return clone(store)


def _serve(
    connect: Callable[[], Any],
    next_question: Callable[[], tuple[Any, ...] | None],
    answer: Callable[[Any], None],
    fail: Callable[[BaseException], None],
) -> None:
    """Asks a store what the engine asks, one question at a time, until it has left."""
    try:
        store = connect()
        store.set_timeout(_PATIENT)
        while (question := next_question()) is not None:
            name, key, *values = question
            try:
                answer(getattr(store, name)([key] if name == "check" else key, *values))
            except dist.DistStoreError:
                if name != "get":
                    raise
                answer(None)  # the key is not there
    except dist.DistError as error:
        gone = "the store of the process group is gone, and with it the rank that kept it"
        fail(errors.make("peer_failed", f"{gone}: {error}"))
    except BaseException as error:
        fail(error)


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


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8, device="cpu")
