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
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardow import _core
from shardow.distributed.store_group import StoreGroup

_STACK = 512 << 10  # bytes of a thread's


class CountedStore:
    """Passes on to ``store``, and counts operations and bytes both ways."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.operations: Counter[str] = Counter()
        self.before: Callable[..., None] = lambda *_: None  #: called with each operation before it is passed on
        self.sent = self.received = 0

    def __getattr__(self, name: str) -> Any:
        if not callable(of_store := getattr(self._store, name)):
            return of_store

        def call(*args: Any) -> Any:
            if name == "set_timeout":  # of this end
                return of_store(*args)
            self.before(name, *args)
            self.operations[name] += 1
            self.sent += _bytes_in(args)
            answer = of_store(*args)
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
    """One rank. ``store``: a connection to the one of all ranks. ``stores``: its own, which are counted."""

    def agree(self, call: str, timeout: float, fn: Callable[[], Any] = lambda: None) -> Any:
        """Returns fn() of this rank, as RankGroup.agree()."""
        done: list[Any] = []

        def prepare() -> list[Any]:
            done.append(fn())
            return []

        _core.step(self, call, timeout, prepare)
        return done[0]

    def __init__(self, rank: int, size: int, store: Any, name: str) -> None:
        self.prefix = f"shardow/{name}"
        self.stores = stores = [CountedStore(PrefixStore(self.prefix, store))]
        unused = list(stores)

        def connect() -> CountedStore:
            if not unused:
                stores.append(CountedStore(PrefixStore(f"shardow/{name}", store.clone())))
            return unused.pop() if unused else stores[-1]

        super().__init__(rank, list(range(size)), connect)

    @property
    def operations(self) -> Counter[str]:
        return sum((store.operations for store in self.stores), Counter())

    @property
    def moved(self) -> int:
        """Bytes, both ways."""
        return sum(store.sent + store.received for store in self.stores)

    def settle(self) -> None:
        """Waits until keys of the last round are erased, for which a round does not wait."""
        self.try_compare_set("settled", "", "")

    def forget(self) -> None:
        self.settle()
        for store in self.stores:
            store.forget()


@contextmanager
def emulated(size: int) -> Iterator[list[Emulated]]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    uv = {"use_libuv": True}
    host = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), **uv
    )
    stack, interval = threading.stack_size(_STACK), sys.getswitchinterval()
    # At the usual 5 ms thousands of waiting threads do nothing but look for the interpreter.
    sys.setswitchinterval(1.0)
    try:
        with ThreadPoolExecutor(
            64
        ) as pool:  # a connection is a name to look up, which takes seconds where there is nobody to ask
            stores = list(pool.map(lambda _: host.clone(), range(size)))
        groups = [Emulated(rank, size, store, "emulated") for rank, store in enumerate(stores)]
        yield groups
        for group in groups:  # torch warns of a host that is gone
            group.settle()
    finally:
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
