"""Ranks of benchmarks, and the kernel's counts of a process."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")  # which imports torch once
CONTEXT.set_forkserver_preload(["shardow", "torch.distributed.checkpoint.state_dict"])


@dataclass
class ByRank:
    gib: float
    everybody: list[dict[str, list[dict[str, float]]]]  # by rank, candidate and round

    def of(self, name: str, kind: str = "seconds") -> list[float]:
        """By round, of the rank that has most."""
        rounds = zip(*([sample[kind] for sample in rank[name]] for rank in self.everybody), strict=True)
        return [max(samples) for samples in rounds]

    def median(self, name: str, kind: str = "seconds") -> float:
        return statistics.median(self.of(name, kind))


def by_rank(world: int, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Runs ``fn(*arguments)`` on ranks in processes whose memory is theirs; the results by rank."""
    queue = CONTEXT.SimpleQueue()
    processes, _store = started(world, _rank, world, fn, arguments, queue)
    results: list[Any] = queue.get()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"a rank of {fn.__module__} failed")
    return results


def started(world: int, target: Callable[..., None], *arguments: Any) -> tuple[list[Any], Any]:
    """(processes, the store that ranks meet in) of ``target(rank, port, *arguments)``."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [CONTEXT.Process(target=target, args=(rank, store.port, *arguments)) for rank in range(world)]
    for process in processes:
        process.start()
    return processes, store


def begin(rank: int, port: int, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world)


def _rank(rank: int, port: int, world: int, fn: Callable[..., Any], arguments: tuple[Any, ...], queue: Any) -> None:
    begin(rank, port, world)
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, fn(*arguments))
    if rank == 0:
        queue.put(everybody)
    dist.barrier()
    os._exit(0)  # torch keeps a mesh's group, whose threads may meet the interpreter's end: docs/torch.md


def io() -> dict[str, int]:
    return {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()}


def status(name: str) -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )


def settled() -> tuple[dict[str, int], int, float]:
    """(this rank's bytes so far, its memory, the time), when nobody pays any more for what others have left
    unflushed."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    return io(), status("VmRSS"), time.perf_counter()
