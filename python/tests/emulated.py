"""Many ranks of one process, on threads, each with a connection of its own to one real store: what their rounds
cost."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardow.ranks import waiting
from shardow.ranks.store_group import StoreGroup
from shardow.ranks.store_values import Connection

T = TypeVar("T")

_STACK = 512 << 10  # bytes of a thread's


class CountedStore:
    """Passes on to ``store``, and counts operations and bytes both ways."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.operations: Counter[str] = Counter()
        self.sent = self.received = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == "set_timeout":  # of this end
                return getattr(self._store, name)(*args)
            self.operations[name] += 1
            self.sent += _bytes_in(args)
            answer = getattr(self._store, name)(*args)
            self.received += _bytes_in(answer)
            return answer

        return call

    def forget(self) -> None:
        self.operations.clear()
        self.sent = self.received = 0


def _bytes_in(value: Any) -> int:
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes_in, value))
    return 0 if value is None else 8


class Emulated(StoreGroup):
    """One rank. ``store``: a CountedStore. ``helped``: its waits are left to another thread, as those of a process
    are."""

    def __init__(self, rank: int, size: int, store: Any, name: str, helped: bool = True) -> None:
        self._helped = helped
        self._act_as(rank, list(range(size)), name)
        self.moves_blocks = False
        self._first = store
        self.store = CountedStore(PrefixStore(self._prefix, store))
        self._store = Connection(lambda: self.store)

    def _on_connection(self, fn: Callable[[Connection], T], seconds: float) -> T:
        if self._helped or self._store is None:
            return super()._on_connection(fn, seconds)
        return fn(self._store)

    def _connected(self) -> Any:
        """Another one, in place of one that was left."""
        self.store = CountedStore(PrefixStore(self._prefix, self._first.clone()))
        return self.store


@contextmanager
def emulated(size: int, helped: bool = True) -> Iterator[list[Emulated]]:
    """``helped``: each rank has a second thread for its waits. Of thousands, which would have processors of their own,
    those threads take most of the time on a few."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    uv = {"use_libuv": True}
    host = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **uv
    )
    idle, stack, interval = waiting._MOST_IDLE, threading.stack_size(_STACK), sys.getswitchinterval()
    waiting._MOST_IDLE = size  # as many processes would have
    # At the usual 5 ms thousands of waiting threads do nothing but look for the interpreter.
    sys.setswitchinterval(1.0)
    try:
        with ThreadPoolExecutor(
            64
        ) as pool:  # a connection is a name to look up, which takes seconds where there is nobody to ask
            stores = list(pool.map(lambda _: host.clone(), range(size)))
        yield [Emulated(rank, size, store, "emulated", helped) for rank, store in enumerate(stores)]
    finally:
        waiting._MOST_IDLE = idle
        while waiting._idle:
            waiting._idle.pop().put(None)
        threading.stack_size(stack)
        sys.setswitchinterval(interval)


def on_all(
    groups: list[Emulated], fn: Callable[[Emulated], Any], late: Callable[[int], float] = lambda _: 0.0
) -> tuple[list[Any], float]:
    """What fn() gave for each, or raised; and the seconds from when all were ready until all were done. ``late``:
    seconds, by rank.
    """
    answers: list[Any] = [None] * len(groups)
    ready = threading.Barrier(len(groups) + 1)

    def run(rank: int) -> None:
        ready.wait()
        time.sleep(late(rank))
        try:
            answers[rank] = fn(groups[rank])
        except BaseException as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    ready.wait()
    begin = time.monotonic()
    for thread in threads:
        thread.join()
    return answers, time.monotonic() - begin
