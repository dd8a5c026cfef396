"""The Group of a torch process group: facts go through its store, whose waits time out without harming the process
group; blocks, and numbers by the thousand, through the group itself.

Each collective is a round (rounds.py) with one verdict, which late ranks read too, so that every rank, the late one
included, sees the same outcome: also where ranks made different calls.

Rounds are counted for the life of a process group, not of whoever uses it: a rank that missed a call meets the verdict
of that call next, and is then in step again. A rank that is interrupted while it waits proposes that as the verdict.
Where the others had all they need by then, it goes on where its signals are held (base/signals.py), and ends the next
round too where not, for those who would wait for it there. In both cases it is in step then. So is one that left a
round without a verdict, since its store did not answer: where that was good for the others, its next one is ended for
all.

A round is left to a thread with a connection of its own (waiting.py): the store's host may stand still. While a thread
has the connection nobody else does, and it comes back only when the thread is done: what somebody has left goes on with
its own, asks nothing more, and its answer is read by nobody.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardow import _core, errors
from shardow.base.checks import invalid
from shardow.base.signals import put_off
from shardow.ranks.rounds import Rounds, Turn, Words, as_given, failure, is_good, raise_for
from shardow.ranks.store_values import Connection, clone
from shardow.ranks.transfers import begun, broadcast, carrier, finish
from shardow.ranks.waiting import Left, Overdue, beyond, wait_for

T = TypeVar("T")

# Maps every rank's words to an answer for all, and one for each or none.
Weigh = Callable[[list[bytes]], tuple[bytes, Sequence[bytes]]]
ANSWER = 5.0  # seconds that a store may take for a question that nobody has to come for
_LAST_WORDS = 0.5  # seconds that an interrupted rank takes to tell the others
_FIRST_TAG = 64  # smaller ones are channels
_MANY = 512  # words that go along a tree of ranks
_LATER = "a later step of "
_NO_BLOCK = "a block between ranks"
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, StoreGroup]] = weakref.WeakKeyDictionary()


def store_group(process_group: dist.ProcessGroup, channel: int = 0) -> StoreGroup:
    """The one StoreGroup of a process group and channel: all that act together count the same rounds. A channel is for
    one thread; channels don't know each other."""
    channels = _groups.setdefault(process_group, {})
    if channel not in channels:
        channels[channel] = StoreGroup(process_group, channel)
    return channels[channel]


class StoreGroup(_core.Group):
    """Ranks of ``process_group``. Collective calls happen in the same order on every rank; one thread uses a group at a
    time.
    """

    def __init__(self, process_group: dist.ProcessGroup, channel: int) -> None:
        self._process_group = weakref.ref(process_group)
        self._act_as(
            dist.get_rank(process_group),
            dist.get_process_group_ranks(process_group),
            f"{process_group.group_name}/{channel}",
        )
        self.moves_blocks = carrier(process_group, torch.device("cpu")).type == "cpu"  # it moves tensors of the CPU
        self._tag = channel

    def _act_as(self, rank: int, ranks: list[int], name: str) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = ranks
        self.joined = 0  # the highest number of those who act on these ranks; see Team.same()
        self._prefix = f"shardow/{name}"
        self._store: Connection | None = None  # None while a thread has it
        self._silent = False  # it did not answer the last time
        self._call, self._timeout = "", 0.0
        self._round = 0
        self._rounds = Rounds(rank, ranks)
        self._before: bytes | None = b""  # the last round's verdict; None: it was left
        self._old: list[str] = []  # keys to delete when a round was good

    def begin(self, call: str, timeout: float) -> None:
        """The next round is ``call``'s first; rounds after it are its later steps. ``timeout``: what was asked for, for
        messages.
        """
        self._call, self._timeout = call, timeout

    def all_gather(self, mine: bytes, seconds: float) -> list[bytes]:
        """Every rank's bytes, by rank. Raises TimeoutError on all ranks if one was not there in time, ValueError on all
        if they make different calls, ConnectionError where the store is gone, TimeoutError where it does not answer."""
        return self._meet(Words("", mine), seconds, None).everybody or [mine] * self.size

    def decide(self, mine: bytes, weigh: Weigh, seconds: float) -> tuple[bytes, bytes]:
        """What one of the ranks makes of everybody's bytes: an answer for all, and one for this rank. Both are empty,
        and nobody is asked, where nobody has any bytes. Errors as all_gather()'s; what ``weigh()`` raises is raised on
        all ranks."""
        turn = self._meet(Words("", mine), seconds, weigh)
        return turn.answer, turn.letter

    def _meet(self, words: Words, seconds: float, weigh: Weigh | None) -> Turn:
        call, seconds = self._call, max(seconds, 0.001)
        self._call = call if call.startswith(_LATER) else _LATER + call
        turn = self._next_turn(replace(words, call=call))
        try:
            self._take_turn(turn, weigh, seconds)
        except Overdue:
            silent = f"the store of the process group did not answer within {self._timeout or seconds:g} s"
            raise errors.make("timeout", f"{silent}: its host stands still, or cannot be reached") from None
        except dist.DistError as error:
            gone = "the store of the process group is gone, and with it the rank that kept it"
            raise errors.make("peer_failed", f"{gone}: {error}") from None
        except Left as interrupt:
            turn, waited = self._interrupted(turn)
            good = turn.said is not None and is_good(turn.said)
            if not good or not put_off(interrupt.cause):
                self._leave(turn)
                if good:
                    self.skip(call)
                if isinstance(interrupt.cause, KeyboardInterrupt):
                    raise KeyboardInterrupt(waited) from None
                raise interrupt.cause from None
        finally:
            self._leave(turn)
        assert turn.said is not None
        raise_for(turn.said)
        return turn

    def _next_turn(self, words: Words) -> Turn:
        """Of the next round, which counts as left until _leave()."""
        turn = Turn(self._round, words, self._before, self._old)
        self._round += 1
        self._before, self._old = None, self._rounds.left_by(turn)
        return turn

    def _leave(self, turn: Turn) -> None:
        if turn.number == self._round - 1:
            self._before, self._old = as_given(turn.said) if turn.said else None, self._rounds.left_by(turn)

    def _take_turn(self, turn: Turn, weigh: Weigh | None, seconds: float) -> None:
        """What is made of everybody's words is made on this thread."""
        until = time.monotonic() + beyond(seconds)

        def come(store: Connection) -> None:
            self._rounds.come(store, turn, seconds, self._timeout or seconds, weigh is not None)
            self._rounds.end(store, turn)

        self._on_connection(come, beyond(seconds))
        if turn.said is not None or weigh is None or turn.everybody is None:
            return
        letters: Sequence[bytes] = ()
        try:
            common, letters = weigh(turn.everybody)
            body = b"+" + common
        except BaseException as error:
            if isinstance(error, errors.Error):
                body = failure(error.code, str(error))
            else:
                body = failure("peer_failed", f"rank {self.ranks[self.rank]}: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise Left(error) from None

        def tell(store: Connection) -> None:
            self._rounds.tell_all(store, turn, body, letters)
            self._rounds.end(store, turn)

        self._on_connection(tell, max(until - time.monotonic(), _LAST_WORDS))

    def _interrupted(self, turn: Turn) -> tuple[Turn, str]:
        """The others learn of it at once, if the store answers. Returns the turn, with a verdict where there is one,
        which may be good all the same; and for whom this rank waited."""
        turn, call = replace(turn, said=None, answer=b"", letter=b""), turn.words.call

        def tell(store: Connection) -> list[int]:
            turn.said = self._rounds.decide(store, turn.number, self._interruption(call))
            self._rounds.end(store, turn)
            missing = [] if is_good(turn.said) else self._rounds.missing(store, turn.number)
            return [self.ranks[rank] for rank in missing if rank != self.rank]

        try:
            missing = self._on_connection(tell, _LAST_WORDS)
        except (Overdue, Left, dist.DistError):
            turn.said = None
            return turn, f"{call}: the store of the process group does not answer"
        return turn, f"{call}: waited for rank(s) {missing}" if missing else call

    def skip(self, call: str) -> None:
        """This rank was interrupted, and won't come to the next round: who waits there for it learns of it."""
        turn = self._next_turn(Words("", b""))
        with contextlib.suppress(Overdue, Left, dist.DistError, errors.Error):
            self._on_connection(
                lambda store: self._rounds.decide(store, turn.number, self._interruption(call)), _LAST_WORDS
            )

    def _interruption(self, call: str) -> bytes:
        return failure("peer_failed", f"rank {self.ranks[self.rank]} was interrupted in {call}")

    def _connected(self) -> Any:
        """Channels wait at the same time, and so does torch: a connection serves one wait."""
        return PrefixStore(self._prefix, _connection())

    def _on_connection(self, fn: Callable[[Connection], T], seconds: float) -> T:
        """fn(store), on a thread. The connection is used again only where fn() has ended by itself."""
        connection, self._store = self._store or Connection(self._connected), None
        try:
            answer = wait_for(lambda: fn(connection), seconds)
        except errors.Error:
            self._store = connection
            raise
        except BaseException as error:
            connection.left = True
            self._silent = isinstance(error, Overdue)
            raise
        self._store, self._silent = connection, False
        return answer

    def ask(self, question: Callable[[Connection], T], seconds: float = ANSWER) -> T | None:
        """question(store), of keys that no round has; None where the store does not answer in time, or is gone. One
        that was silent before has cost a timeout by then, and gets no other."""
        try:
            return self._on_connection(question, min(seconds, _LAST_WORDS) if self._silent else seconds)
        except (Overdue, dist.DistError):
            return None
        except Left as interrupt:
            raise interrupt.cause from None

    def all_reduce(self, values: memoryview, op: str, seconds: float) -> None:
        """Combines 64-bit words in place: op is "sum", "max" or "xor". Not a collective call of torch's, even of many
        words: in the background training's own would be taken for it, since torch pairs them in the order of the calls.
        Many words go along a tree of ranks, through the process group where it moves blocks; else one rank reads those
        of all."""
        if not len(values):
            self.all_gather(b"", seconds)
            return
        combine: Any = {"sum": operator.add, "max": np.maximum, "xor": operator.xor}[op]
        mine = np.frombuffer(values, dtype=np.uint64)
        if len(mine) >= _MANY and self.moves_blocks:
            mine[:] = self._along_a_tree(mine, op, combine, seconds)
        else:

            def total(words: list[bytes]) -> tuple[bytes, Sequence[bytes]]:
                return functools.reduce(combine, (np.frombuffer(one, dtype=np.uint64) for one in words)).tobytes(), ()

            mine[:] = np.frombuffer(self.decide(bytes(values), total, seconds)[0], dtype=np.uint64)

    def _along_a_tree(self, mine: np.ndarray[Any, Any], op: str, combine: Any, seconds: float) -> np.ndarray[Any, Any]:
        """Begins with a round, in which a rank that is late does no harm to the process group, and ends with one: who
        got no block, or could not send one, ends it for all."""
        until = time.monotonic() + seconds

        def left() -> float:
            return max(until - time.monotonic(), _LAST_WORDS)

        what = b"%s of %d words" % (op.encode(), len(mine))
        if any(theirs != what for theirs in self.all_gather(what, seconds)):
            raise invalid(f"all_reduce({op}, {len(mine)} words), and other ranks have others")
        total, wrong = mine, b""
        try:
            total = self._reduced(mine, combine, left)
        except errors.Error as error:
            wrong = f"{error.code} {error}".encode(errors="backslashreplace")
        except BaseException:
            self.skip(f"all_reduce({op})")
            raise
        self.decide(wrong, _refuse, left() + 2 * _LAST_WORDS)  # who waits for a block comes at the deadline
        return total

    def _reduced(self, values: np.ndarray[Any, Any], combine: Any, left: Callable[[], float]) -> Any:
        """Combines the numbers of all ranks along a binary tree, up and back down: what a rank sends and receives does
        not grow with their number. Rank r hears from 2r + 1 and 2r + 2. ``left``: seconds until the deadline. Raises as
        send() and recv() do; ``values`` stay."""
        total: Any = values.copy()
        children = [child for child in (2 * self.rank + 1, 2 * self.rank + 2) if child < self.size]
        for child in children:
            received: Any = np.empty_like(values)
            self.recv(memoryview(received).cast("B"), child, left())
            total = combine(total, received)
        if self.rank > 0:
            parent = (self.rank - 1) // 2
            self.send(memoryview(total).cast("B"), parent, left())
            self.recv(memoryview(total).cast("B"), parent, left())
        for child in children:
            self.send(memoryview(total).cast("B"), child, left())
        return total

    def broadcast(self, data: memoryview, root: int, seconds: float) -> None:
        """Copies root's bytes into everybody's: through the process group, or its store where that has no way for CPU
        tensors.
        """
        if not 0 <= root < self.size:
            raise invalid(f"broadcast() from rank {root} in a group of {self.size}")
        if self.moves_blocks:
            until = time.monotonic() + seconds
            # Finds a rank that is late where it does no harm to the process group.
            self.all_gather(b"", seconds)
            left = max(until - time.monotonic(), _LAST_WORDS)
            group = self._process_group()
            assert group is not None
            self._move(lambda: broadcast(_tensor(data), root, group, left), left)
        else:
            data[:] = self.decide(
                bytes(data) if self.rank == root else b"", lambda everybody: (everybody[root], ()), seconds
            )[0]

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
        return _FIRST_TAG + self._round

    def _move(self, begin: Callable[[], dist.Work | None], seconds: float) -> None:
        otherwise = f"{_NO_BLOCK} {self.ranks} did not arrive"
        finish(begun(begin, otherwise), seconds, otherwise)


def _connection() -> Any:
    store: Any = dist.distributed_c10d._get_default_store()
    # Raises at once where the host is gone; a new connection would be tried until torch's own timeout.
    store.check(["shardow"])
    return clone(store)


def _refuse(words: list[bytes]) -> tuple[bytes, Sequence[bytes]]:
    """Raises what the first one says with whom something is wrong; those to whom another one's block did not come say
    the least.
    """
    said = sorted((one for one in words if one), key=lambda one: _NO_BLOCK.encode() in one)
    code, _, message = said[0].decode(errors="backslashreplace").partition(" ")
    raise errors.make(code, message)


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8, device="cpu")
