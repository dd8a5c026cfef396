"""The ranks that keep one EMA together: agreement, deadlines, and what to say when somebody is missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_timeout

from shardow import _core, _errors
from shardow.torch.store_group import store_group

T = TypeVar("T")


class Team:
    """``process_group`` None: this process alone, where nothing waits and nothing is exchanged."""

    def __init__(self, process_group: dist.ProcessGroup | None, timeout: float | None) -> None:
        self.process_group = process_group
        self.group: _core.Group = _core.solo() if process_group is None else store_group(process_group)
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)
        self.timeout = timeout if timeout is not None else _default_timeout(process_group)

    def agree(self, what: str, fn: Callable[[], T]) -> T:
        """fn() on every rank; raises on every rank if it raised on any, or if a rank is not there within the timeout, which begins when fn() is done."""
        result: list[T] = []
        failed: list[Exception] = []
        try:
            result.append(fn())
        except Exception as error:
            failed.append(error)
        try:
            _core.agree(self.group, self.timeout, lambda: _raise(failed))
        except TimeoutError as error:
            if result and self.size > 1:
                raise _errors.make(
                    "timeout",
                    f"{what} is collective, every rank must call it: {error}. Call it on all ranks (not under `if rank == 0`), or look for the rank that died",
                ) from None
            raise
        return result[0]

    def same(self, what: str, facts: dict[str, Any]) -> None:
        """Raises on every rank where ranks differ in ``facts`` (JSON values), naming the first fact that differs and what each has."""
        if self.size == 1:
            return
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
        if len(set(self.gather(what, digest))) == 1:
            return
        everybody = [json.loads(text) for text in self.gather(what, json.dumps(facts).encode())]
        raise _errors.make("invalid_argument", f"{what}: ranks disagree. {_difference(everybody)}")

    def same_updates(self, what: str, updates: int) -> None:
        """Raises on every rank where averages of different ages would come together."""
        counts = {int(one) for one in self.gather(what, b"%d" % updates)} if self.size > 1 else {updates}
        if len(counts) > 1:
            raise _errors.make(
                "invalid_argument",
                f"{what}: some ranks have made {min(counts)} updates of their parts of the averages, others {max(counts)}; "
                "call update() on every rank after each step (not under `if rank == 0`), or load the last state on all of them",
            )

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        gathered: list[bytes] = []
        try:
            gathered = _core.group_all_gather(self.group, mine, self.timeout)
        except TimeoutError as error:
            raise _errors.make("timeout", f"{what} is collective, every rank must call it: {error}") from None
        return gathered


def _raise(failed: list[Exception]) -> None:
    for error in failed:
        raise error


def _difference(everybody: list[dict[str, Any]]) -> str:
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for fact in first:
            if other.get(fact) == first[fact]:
                continue
            if isinstance(first[fact], dict) and isinstance(other.get(fact), dict):
                return _difference_of_names(fact, first[fact], other[fact], rank)
            return f"{fact} is {first[fact]!r} on rank 0 and {other.get(fact)!r} on rank {rank}"
    return "no fact differs in plain text"


def _difference_of_names(fact: str, zero: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    for name in [*zero, *other]:
        if zero.get(name) != other.get(name):
            return f"{fact}: '{name}' is {zero.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}; build the same model on every rank"
    return f"{fact} come in another order on rank {rank}; build the same model on every rank"


def _default_timeout(process_group: dist.ProcessGroup | None) -> float:
    if process_group is None:
        return 1800.0
    try:
        options = process_group._get_backend(
            next(iter(process_group._device_types))
        ).options  # no public reader of a group's timeout exists
        return float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return float(_get_default_timeout(dist.get_backend(process_group)).total_seconds())
