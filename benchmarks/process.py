"""Ranks of benchmarks, what each of them used, and the tables of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import median_and_range

CONTEXT = multiprocessing.get_context("forkserver")  # which imports everything once
CONTEXT.set_forkserver_preload(["benchmarks.preload"])
MIB = 2**20
Usage = dict[str, Any]  # seconds, and bytes: written, read, received, memory


@dataclass
class Samples:
    """What ranks used, by candidate, round and rank."""

    by_name: dict[str, list[Sequence[Usage]]] = field(default_factory=dict)

    @classmethod
    def of_ranks(cls, by_rank: list[dict[str, list[Usage]]]) -> Samples:
        """``by_rank``: what each rank used, by candidate and round."""
        return cls({name: list(zip(*(rank[name] for rank in by_rank), strict=True)) for name in by_rank[0]})

    def add(self, name: str, ranks: Sequence[Usage]) -> None:
        self.by_name.setdefault(name, []).append(ranks)

    def rounds(self, name: str, kind: str = "seconds", ranks: slice = slice(None)) -> list[float]:
        """Returns for each round the figure of the rank that has most."""
        return [max(usage[kind] for usage in by_rank[ranks]) for by_rank in self.by_name[name]]

    def most(self, name: str, kind: str, ranks: slice = slice(None)) -> float:
        return max(self.rounds(name, kind, ranks))

    def ratio(self, name: str, other: str, kind: str = "seconds") -> float:
        """Returns how many times as much as ``other``, by their medians."""
        return statistics.median(self.rounds(name, kind)) / statistics.median(self.rounds(other, kind))

    def seconds(self, name: str, kind: str = "seconds") -> str:
        return median_and_range(self.rounds(name, kind))

    def mib(self, name: str, *kinds: str) -> list[str]:
        return [f"{self.most(name, kind) / MIB:.0f}" for kind in kinds]


def by_rank(world: int, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs ``fn(*arguments)`` on ranks in fresh processes; the results by rank."""
    queue = CONTEXT.SimpleQueue()
    processes, _store = started(world, _rank, world, fn, arguments, queue)
    while queue.empty():
        if any(process.exitcode for process in processes):
            sys.exit(f"a rank of {fn.__module__} failed")
        time.sleep(0.01)
    results: list[Any] = queue.get()
    for process in processes:
        process.join()
    return results


def started(world: int, target: Callable[..., None], *arguments: Any) -> tuple[list[Any], Any]:
    """(processes, the store that ranks meet in) of ``target(rank, port, *arguments)``."""
    listener = socket.create_server(("127.0.0.1", 0))  # torch's own is of IPv6, and looks up names for seconds
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    processes = [CONTEXT.Process(target=target, args=(rank, port, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes, store


def begin(rank: int, port: int, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world)


def _rank(rank: int, port: int, world: int, fn: Callable[..., Any], arguments: tuple[Any, ...], queue: Any) -> None:
    begin(rank, port, world)
    results: list[Any] = [None] * world
    dist.all_gather_object(results, fn(*arguments))
    if rank == 0:
        queue.put(results)
    dist.barrier()
    os._exit(0)  # torch keeps a mesh's group, whose threads may meet the interpreter's end: docs/torch.md


def used(call: Callable[[], object]) -> Usage:
    """Returns what this process used: seconds until all ranks are done, bytes to and from files and connections, and
    memory at the peak above what it had. What others have left unflushed is flushed before."""
    alone = not dist.is_initialized()
    if alone or dist.get_rank() == 0:
        os.sync()
    if not alone:
        dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, received, resident = _io(), _received(), _status("VmRSS")
    began = time.perf_counter()
    call()
    if not alone:
        dist.barrier()
    seconds = time.perf_counter() - began
    after = _io()
    return {
        "seconds": seconds,
        "written": after["wchar"] - before["wchar"],
        "read": after["rchar"] - before["rchar"],
        "received": _received() - received,
        "memory": (_status("VmHWM") - resident) * 1024,
    }


def _io() -> dict[str, int]:
    return {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _received() -> int:
    """Returns the bytes that this process's TCP connections have received, by the kernel's count."""
    total = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{handle}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(handle))) as connection:
                    internet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and connection.type == socket.SOCK_STREAM:
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                        total += struct.unpack_from("Q", info, 128)[0]
    return total
