"""``python -m benchmarks.init``: how a model of 500 M parameters gets its weights on 4 ranks of FSDP2, beside what is
used elsewhere.

Measured are seconds, memory at the peak, and bytes read and received.

Every candidate starts from the same safetensors file, in fresh processes, in an order drawn anew each round; the file
is in the page cache for all. Ranks are forked from a process that has imported everything, so that their memory is what
the start takes. Where weights are held on rank 0 first, that is counted apart, as ``source``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks import report
from benchmarks.init_ways import DRAWN, LAYERS, RARE, WAYS, WIDTH, WORLD, held_first, on_meta
from benchmarks.process import io, status

MIB = 2**20


# ---- measuring


@dataclass
class Results:
    elements: int
    largest: int  # bytes of a tensor
    samples: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)  # by candidate, round and rank

    def seconds(self, name: str) -> list[float]:
        """By round, of the slowest rank."""
        return [max(float(rank["seconds"]) for rank in one) for one in self.samples[name]]

    def most(self, name: str, kind: str, ranks: slice = slice(None)) -> float:
        """Of the rank that has most, in its worst round."""
        return max(float(rank[kind]) for one in self.samples[name] for rank in one[ranks])


def run(
    width: int = WIDTH, layers: int = LAYERS, rounds: int = 5, folder: Path | None = None, only: str = "",
    picture: Path | None = None,
) -> Results:  # fmt: skip
    """Candidates whose names have ``only`` in them. ``picture``: of memory over time, from a round of its own."""
    model = on_meta(width, layers)
    results = Results(sum(p.numel() for p in model.parameters()), max(p.nbytes for p in model.parameters()))
    names, order = [name for name in WAYS if only in name], random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.preload"])
    with tempfile.TemporaryDirectory(dir=folder) as path:
        file = Path(path) / "model.safetensors"
        _write(width, layers, file)
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                results.samples.setdefault(name, []).append(_one_start(context, name, width, layers, file))
        for name in RARE if not only else ():
            results.samples[name] = [_one_start(context, name, width, layers, file)]
        if picture is not None:
            _draw(picture, {name: _one_start(context, name, width, layers, file, sampled=True) for name in names})
    return results


def _draw(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    import shardow

    titles = {name: name.replace(", ", ",\n").removeprefix("shardow: ") for name in DRAWN if name in found}
    shardow.memory.draw({titles[name]: shardow.memory.Timeline(found[name][0]["timeline"]) for name in titles}, path)


def _write(width: int, layers: int, path: Path) -> None:
    import shardow

    torch.manual_seed(0)
    model = on_meta(width, layers).to_empty(device="cpu")
    for i, p in enumerate(model.parameters()):
        p.data.view(-1)[:] = torch.arange(p.numel(), dtype=torch.float32).mul_(1e-3).add_(i)
    shardow.save(model, path)


def _one_start(
    context: Any, name: str, width: int, layers: int, file: Path, sampled: bool = False
) -> list[dict[str, Any]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    queue = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, port, name, width, layers, file, queue, sampled))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    found = sorted((queue.get(timeout=600) for _ in processes), key=lambda one: float(one["rank"]))
    for process in processes:
        process.join()
    del store
    if name not in RARE and any(not one["right"] for one in found):
        sys.exit(f"{name}: weights are not those of the file")
    return found


def _rank_main(rank: int, port: int, name: str, width: int, layers: int, file: Path, queue: Any, sampled: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=WORLD
    )
    sample = measured(lambda: {**WAYS, **RARE}[name](width, layers, file), sampled)
    queue.put({"rank": rank, **sample})
    queue.close()
    queue.join_thread()
    dist.barrier()
    os._exit(0)  # a process group that ends takes its time


def measured(start: Callable[[], nn.Module], sampled: bool) -> dict[str, Any]:
    """Until all ranks have their weights. ``sampled``: with a timeline, which takes some of the time."""
    import shardow

    dist.all_reduce(torch.zeros(1))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    resident, read, received = status("VmRSS"), io()["rchar"], _received()
    began = time.perf_counter()
    with shardow.memory.timeline() if sampled else contextlib.nullcontext() as timeline:
        model = start()
        dist.barrier()
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "memory": (status("VmHWM") - resident) * 1024,
        "source": sum(held_first),
        "own": sum(_local(p).nbytes for p in model.parameters()),
        "read": io()["rchar"] - read,
        "received": _received() - received,
        "timeline": timeline.ranks if timeline is not None else None,
        "right": all(map(_is_right, range(10**9), model.parameters())),
    }


def _is_right(i: int, param: torch.Tensor) -> bool:
    assert isinstance(param, DTensor)
    local = param.to_local().view(-1)
    begin = dist.get_rank() * -(-param.shape[0] // WORLD) * (param.numel() // param.shape[0])
    return bool(
        torch.equal(
            local[-1000:], torch.arange(begin, begin + local.numel(), dtype=torch.float32)[-1000:].mul_(1e-3).add_(i)
        )
    )


def _local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _received() -> int:
    """Bytes that this process's TCP connections have received, by the kernel's count."""
    total = 0
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{handle}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(handle))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        total += struct.unpack_from("Q", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232), 128)[
                            0
                        ]
    return total


# ---- the tables


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    """What is asked of a start: (what, measured, bar, met)."""
    if not results.samples.keys() >= WAYS.keys() | RARE.keys():
        return []
    own = results.elements * 4 / WORLD
    file, first = "shardow: every rank reads its own", "shardow: from rank 0"
    found = [
        ("init from a file: MiB of memory beyond the own shard", (results.most(file, "memory") - own) / MIB, 64),
        ("init from a file: bytes read, of the own ones", results.most(file, "read") / own, 1.02),
        (
            "init from rank 0: MiB of memory beyond the own shard, others",
            (results.most(first, "memory", slice(1, None)) - own) / MIB,
            64,
        ),
        (
            "init from rank 0: MiB beyond own shard and source, rank 0",
            (results.most(first, "memory", slice(1)) - own - results.most(first, "source")) / MIB,
            64 + results.largest / MIB,
        ),
        ("init from rank 0: bytes received, of the own ones", results.most(first, "received") / own, 1.02),
    ]
    for name in RARE:
        beyond = (results.most(name, "memory") - own) / MIB
        found.append(("init by module: MiB of memory beyond the own shard", beyond, 64 + results.largest / MIB))
    for ours, rivals in ((file, ("every rank loads", "every rank maps")), (first, ("set_model", "accelerate"))):
        for name in results.samples:
            if name.startswith(rivals):
                ratios = [a / b for a, b in zip(results.seconds(ours), results.seconds(name), strict=True)]
                found.append((f"{ours}: times as long as {name}", statistics.median(ratios), 1.0))
    return [(f"{what} (at most)", measured, bar, measured <= bar) for what, measured, bar in found]


def lines(results: Results) -> list[str]:
    rounds = len(next(iter(results.samples.values())))
    found = [
        f"{results.elements / 1e6:.3g} M parameters on {WORLD} ranks, {rounds} rounds; "
        f"a shard is {results.elements * 4 / WORLD / MIB:.0f} MiB; "
        "of the rank that has most: memory at the peak above what it had, "
        "bytes read (by /proc/self/io) and received (by the kernel's count of its connections)",
        "",
        "| | seconds, median (range) | MiB on rank 0 | MiB on others | MiB read | MiB received |",
        "|---|---|---|---|---|---|",
    ]
    for name in results.samples:
        seconds = results.seconds(name)
        memory = [results.most(name, "memory", part) / MIB for part in (slice(1), slice(1, None))]
        amounts = [*memory, *(results.most(name, kind) / MIB for kind in ("read", "received"))]
        found.append(
            f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | "
            f"{' | '.join(f'{amount:.0f}' for amount in amounts)} |"
        )
    return found


if __name__ == "__main__":
    report.main(sys.modules[__name__])
