"""Real ranks for tests: processes with gloo, kept from case to case, and forked where fresh ones are needed.

``run(world, fn, *args)`` calls ``fn(*args)`` on ranks 0 .. world - 1 at once, each in a process group of that size, and
returns their results by rank. A rank's exception is raised here with its traceback. Nothing hangs: at the timeout, and
after any failure, all processes are killed and fresh ones made for the next case.
"""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug as tensor_debug

_context = multiprocessing.get_context("forkserver")
_case = itertools.count()
# Threads of a process that is kept: torch keeps groups of earlier cases, and a thread of each wakes every 10 ms.
_MOST_THREADS = 40


class RankError(AssertionError):
    """What failed on which rank."""


class Server:
    """A process that imports ``preload`` with ``environment``, has no other thread, and forks ranks: to import torch
    costs more than most cases. Other users of multiprocessing's own server preload other modules.
    """

    def __init__(self, preload: list[str], **environment: str) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(preload)
        # A warning of a timeout looks up names, for seconds; torch reads this variable at its import.
        self._environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **environment}

    def start(self, process: Any) -> None:
        ours = patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process)
        with ours, patch.dict(os.environ, self._environment):
            process.start()


# Ranks import shardow themselves, with an extension module that may be of tests (core_modules.py).
_server = Server(
    [
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.debug",
        "torch.distributed.tensor.parallel",
    ]
)


class _Worker:
    def __init__(self, server: Server, serve: Callable[..., None], port: int) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, port), daemon=True)
        server.start(self.process)
        theirs.close()


class Pool:
    """The processes, and the store that they meet in, which outlives every rank as a launcher's does. ``server``: forks
    the processes; ``serve``: what a process does, _serve() in the end."""

    def __init__(self, server: Server = _server, serve: Callable[..., None] | None = None) -> None:
        self._new = functools.partial(_Worker, server, serve or _serve)
        # Torch's own listener is of IPv6, and its store stands still while it looks up the name of ::ffff:127.0.0.1,
        # which can take seconds.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        uv = torch.__version__ >= (2, 7)  # before, libuv's store took no listener
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=uv
        )
        self._workers: list[_Worker] = []

    def run(
        self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, may_die: bool = False
    ) -> list[Any]:
        """``may_die``: a rank that ends without an answer gives None, and so does one that is still busy when all
        others have answered.
        """
        while len(self._workers) < world:
            self._workers.append(self._new(self._store.port))
        workers = self._workers[:world]
        name = f"case{next(_case)}"
        for rank, worker in enumerate(workers):
            worker.pipe.send((name, rank, world, fn, args))
        try:
            answers = _collect(workers, timeout, may_die)
        except BaseException:
            self.stop()
            raise
        if may_die or any(_threads_of(worker.process.pid) > _MOST_THREADS for worker in workers):
            self.stop()
        return answers

    def stop(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []


def _threads_of(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:  # it has ended
        return 0


def _collect(workers: list[_Worker], timeout: float, may_die: bool) -> list[Any]:
    deadline = time.monotonic() + timeout
    pending: dict[Connection, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    answers: list[Any] = [None] * len(workers)
    failed: list[str] = []
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()) if not failed else 5.0)
        if not ready:
            break
        for pipe in ready:
            rank = pending.pop(pipe)  # type: ignore[arg-type, index]
            try:
                fine, answer = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                fine, answer = may_die, None if may_die else "the process died"
            answers[rank] = answer
            if not fine:
                failed.append(f"rank {rank}: {answer}")
    if failed:
        raise RankError("\n".join(failed))
    if pending and not may_die:
        raise RankError(f"rank(s) {sorted(pending.values())} had no answer after {timeout} s")
    return answers


def _serve(pipe: Connection, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "2"
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    while True:
        try:
            name, rank, world, fn, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)  # whatever the case before drew, and on which rank
        gc.freeze()  # what is imported by now; to look through it after every case takes 0.1 s
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world)
            answer = (True, fn(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        _forget_meshes()
        try:
            dist.barrier()
            dist.destroy_process_group()
        except Exception:  # a peer has died or failed; this process is no use for another case
            pipe.send(answer)
            return
        pipe.send(answer)


def _forget_meshes() -> None:
    """Torch caches plans by a mesh's ranks, and the plans hold its groups, which end with this case."""
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.distributed")]:
        for cached in vars(module).values():
            if type(cached) is functools._lru_cache_wrapper:  # isinstance() wakes objects that warn of their age
                cached.cache_clear()
    if hasattr(tensor_debug, "_clear_sharding_prop_cache"):  # torch 2.6 has none to call
        tensor_debug._clear_sharding_prop_cache()
    gc.collect()


_pool: Pool | None = None


def run(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, may_die: bool = False) -> list[Any]:
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.stop)
    return _pool.run(world, fn, *args, timeout=timeout, may_die=may_die)
