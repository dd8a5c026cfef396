"""The ranks that keep one EMA together: steps that all of them make or none, deadlines, what to say when one is
missing. And what ranks compare in a step: each rank's words, and on one rank what all come to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from shardow import _core, errors
from shardow.base.checks import instance
from shardow.distributed.store_group import StoreGroup, store_group
from shardow.distributed.transfers import begun, broadcast, carrier, default_timeout, empty, finish

T = TypeVar("T")
Comparison = _core.Comparison
Join = Callable[[list[bytes]], bytes]


@dataclass
class Step(Generic[T]):
    """A step of one rank: its value, and what it compares with the other ranks."""

    value: T
    compared: Sequence[Comparison] = ()


class RankGroup:
    """``process_group`` None: this process alone, where nothing waits and nothing is exchanged."""

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: float | None) -> None:
        if process_group is not None:
            instance("group", process_group, dist.ProcessGroup)
        self.process_group = process_group
        self.group: _core.Group = _core.solo() if process_group is None else store_group(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        #: Seconds; no clock holds every number.
        self.timeout = min(timeout if timeout is not None else default_timeout(process_group), 10.0 * 365 * 86400)
        self._joined: tuple[str, Combined] | None = None

    def step(self, what: str, prepare: Callable[[], Step[T]], behind: float = 0.0) -> T:
        """Runs prepare() on every rank and returns its value, when all ranks have compared what their steps say.

        Raises on every rank if it raised on any, if a comparison fails, or if a rank is not there within the timeout,
        which begins when prepare() is done. A rank whose prepare() waited for others in vain waits no second time. One
        round. ``behind``: seconds beyond the timeout for a rank that does wait.
        """
        prepared: list[Step[T]] = []

        def compared() -> list[Comparison]:
            prepared.append(prepare())
            return [*prepared[0].compared]

        _core.step(self.group, what + self.whose, self.timeout, compared, behind)
        return prepared[0].value

    def agree(self, what: str, fn: Callable[[], T], behind: float = 0.0) -> T:
        """Makes a step that compares nothing: fn() on every rank, or an error on all."""
        return self.step(what, lambda: Step(fn()), behind)

    def join(self, thing: str) -> Comparison:
        """Returns a comparison after which calls are those of one such thing ("EMA"), with a number that rank 0 gives
        to no other: calls of different ones don't meet."""
        number = 0
        if isinstance(self.group, StoreGroup):
            number = self.group.joined = self.group.joined + 1
        self._joined = thing, Combined(str(number).encode())
        return self._joined[1]

    @property
    def whose(self) -> str:
        """What comes behind the names of calls."""
        return f" of {self._joined[0]} {self._joined[1].total.decode()}" if self._joined else ""

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        """Every rank's bytes."""
        return self.verb(what, lambda: self.group.all_gather(mine, self.timeout))

    def on_first(self, what: str, step: Callable[[], bytes]) -> bytes:
        """Runs a step of rank 0 alone: its bytes, or what it raises, on every rank. Costs a rank the same however many
        there are."""

        def prepare() -> Step[Combined]:
            combined = Combined(step() if self.rank == 0 else b"")
            return Step(combined, [combined])

        return self.step(what, prepare).total

    def decide_each(self, what: str, mine: bytes, weigh: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Returns this rank's of the bytes that ``weigh()`` makes for each, on one rank, of every rank's. What it
        raises is raised on all."""
        return self.verb(what, lambda: self.group.decide(mine, lambda by_rank: (b"", weigh(by_rank)), self.timeout)[1])

    def broadcast(
        self, full: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Rank 0's ``full`` on every rank, on its ``device``. Collective."""
        there = carrier(self.process_group, device)
        moved = full.to(there) if full is not None else empty(shape, dtype, there)
        if self.process_group is None:
            return moved
        if moved.numel():
            otherwise = f"a tensor from rank 0 did not reach rank {self.rank}"
            group = self.process_group
            work = begun(lambda: broadcast(moved, 0, group, self.timeout), otherwise)
            finish(work, self.timeout, otherwise)
        return moved.to(device)

    def verb(self, what: str, run: Callable[[], T], group: _core.Group | None = None) -> T:
        """Returns ``run()``, which makes the rounds of ``what``, with the ranks of ``group``, by default its own.
        Collective."""
        (group or self.group).begin(what + self.whose, self.timeout)
        return run()

    def stopped(self, what: str) -> None:
        """This rank was interrupted before the first round of ``what``, in which the others wait for it: they learn of
        it there.
        """
        if isinstance(self.group, StoreGroup):
            self.group.refuse(what + self.whose)


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """A rank that is missing or fails within the block is reported with the call."""
    try:
        yield
    except (errors.DeadlineError, errors.PeerFailedError) as error:
        if not error.message.startswith(call):
            error.message = f"{call}: {error.message}"
        raise


def equal_facts(what: str, facts: Mapping[str, Any], ranks: RankGroup) -> Comparison:
    """Compares facts that must be equal on all ranks, and those of a dict by their names."""
    return _core.EqualFacts(what, listed(facts) if ranks.size > 1 else [])


def equal_updates(what: str, updates: int, ranks: RankGroup) -> Comparison:
    """Compares how many updates ranks have made of their parts of the averages."""
    name, way_out = _core.UPDATES
    return _core.EqualFacts(what, [(name, str(updates), way_out, "")] if ranks.size > 1 else [])


def equal_states(what: str, ranks: RankGroup, state: str, facts: Mapping[str, Any]) -> _core.EqualStates:
    """Compares states of averages, and facts. ``state``: this rank's; the comparison has it, in the end with what each
    rank counts for itself summed over the ranks."""
    return _core.EqualStates(what, state, listed(facts) if ranks.size > 1 else [])


def listed(facts: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns facts as the engine compares them: (name, value, hint, set)."""
    each: list[tuple[str, str, str, str]] = []
    for fact, value in facts.items():
        if isinstance(value, dict):
            way_out = "build one model on all ranks"
            each += [(f"{fact}: {name!r}", str(own), way_out, "") for name, own in value.items()]
        else:
            each.append((fact, repr(value), "", ""))
    return each


class Combined(Comparison):
    """Makes one text of those of all ranks: ``join()`` does, on one rank, and what it raises is raised on all. Each has
    it as ``total`` when the step is done."""

    def __init__(self, own: bytes, join: Join = itemgetter(0)) -> None:
        super().__init__()
        self.total, self._join = own, join

    def words(self) -> bytes:
        return self.total

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        return self._join(by_rank)

    def take(self, total: bytes) -> None:
        self.total = total
