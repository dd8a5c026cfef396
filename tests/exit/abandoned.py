"""Two ranks that end while something is left behind, for test_exit.py: ``abandoned.py TRIES FOLDER KIND...``.

Forks the ranks of each try from this process, which has imported torch and has no thread. They end with their
interpreter. Prints each try that does not end well.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group, which it would keep: docs/torch.md

import shardow

# isort: split
import shardow.distributed.gather
import shardow.files.checkpoint  # the ranks import nothing
from shardow.distributed import store_group
from shardow.distributed.rank_group import RankGroup

_LATEST = 30.0  # seconds to end in
_TIMEOUT = 0.3
State = dict[str, torch.Tensor]


@contextlib.contextmanager
def fails(error: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def destroy_group() -> None:
    gc.collect()
    dist.destroy_process_group()


def dead_rank(state: State, path: str) -> None:
    dist.barrier()  # its process group is whole
    if dist.get_rank() == 1:
        os._exit(0)
    with fails(TimeoutError):
        shardow.save(state, path, group=dist.group.WORLD, timeout=_TIMEOUT)
    destroy_group()


def stopped_store(state: State, path: str) -> None:
    dist.barrier()  # the process groups are whole
    if dist.get_rank() == 0:
        os.kill(int(os.environ["STORE"]), signal.SIGSTOP)
    with fails(TimeoutError):
        shardow.save(state, path, group=dist.group.WORLD, timeout=_TIMEOUT)
    destroy_group()


def save_under_way(state: State, path: str) -> None:
    shardow.async_save(state, path, group=dist.group.WORLD)


def dropped_call(state: State, path: str) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("dropped")

    is_first = dist.get_rank() == 0
    with fails(RuntimeError if is_first else ConnectionError):
        shardow.save(state, path, group=dist.group.WORLD, progress=fail if is_first else None)
    destroy_group()


class SlowToErase:
    def __init__(self, store: Any, folder: Path) -> None:
        self._store, self._folder = store, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def delete_key(self, key: str) -> bool:
        time.sleep(0.3)
        erased: bool = self._store.delete_key(key)
        (self._folder / key.replace("/", "-")).touch()
        return erased


def keys_to_erase(state: State, path: str) -> None:
    """Ends right after a call, while the store is still asked to erase its keys."""
    connected, folder = store_group.connected, Path(path).parent
    store_group.connected = lambda prefix: SlowToErase(connected(prefix), folder)
    for _ in range(2):
        RankGroup(dist.group.WORLD, 60).agree("call()", lambda: None)
    dist.barrier()


def fork_beside_save(state: State, path: str) -> None:
    """Ends the child without its interpreter, as multiprocessing does: a gloo group does not survive that end."""
    shardow.save(state, path, group=dist.group.WORLD)
    shardow.async_save(state, path, group=dist.group.WORLD)
    own = f"{path}-{dist.get_rank()}"
    child = multiprocessing.get_context("fork").Process(target=shardow.save, args=(state, own))
    child.start()
    child.join()
    assert (child.exitcode, os.path.exists(own)) == (0, True)


def fork_without_group(state: State, path: str) -> None:
    """Ends the child with its interpreter."""
    own = f"{path}-{dist.get_rank()}"
    shardow.save(state, path, group=dist.group.WORLD)
    destroy_group()
    assert os.waitpid(forked(shardow.save, state, own), 0)[1] == 0
    assert os.path.exists(own)


KINDS = {fn.__name__: fn for fn in (dead_rank, stopped_store, save_under_way, dropped_call, keys_to_erase)}
KINDS |= {fn.__name__: fn for fn in (fork_beside_save, fork_without_group)}


def keep_store(port: int, listener: int) -> None:
    """Keeps it for the ranks, as a launcher does, until this process is killed."""
    uv = torch.__version__ >= (2, 7)  # before, libuv's store took no listener
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener, use_libuv=uv
    )
    signal.pause()
    del store


def act(rank: int, kind: str, folder: Path, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    KINDS[kind]({"weight": torch.zeros(300, 300)}, str(folder / "model"))


def forked(work: Callable[..., object], *args: object) -> int:
    """Returns the number of a process that does this and ends with its interpreter."""
    if pid := os.fork():
        return pid
    work(*args)
    sys.exit()


def ends_well(kind: str, folder: Path) -> bool:
    folder.mkdir()
    # Torch's own listener is of IPv6, whose addresses have names to look up, for seconds.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = forked(keep_store, port, listener.fileno())
    os.environ["STORE"] = str(store)
    ranks = [forked(act, rank, kind, folder, port) for rank in range(2)]
    ended: dict[int, int] = {}
    until = time.monotonic() + _LATEST
    while len(ended) < 2 and time.monotonic() < until:
        time.sleep(0.002)
        for pid in ranks:
            if pid not in ended and (answer := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = answer[1]
    for pid in {store, *ranks} - ended.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return list(ended.values()) == [0, 0]


def main(tries: str, folder: str, *kinds: str) -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads is not whole"
    gc.collect()
    gc.freeze()  # the end of each rank looks through its own objects alone
    for kind in kinds:
        for attempt in range(int(tries)):
            if not ends_well(kind, Path(folder, f"{kind}-{attempt}")):
                print(f"{kind}: try {attempt} did not end well", flush=True)


main(*sys.argv[1:])
