"""``python -m benchmarks.checkpoints``: a whole training checkpoint on 2 ranks, side by side with torch's DCP and
torch_checkpointing.

Model, AdamW's two states and averages, all float32 and sharded by FSDP2, are ``--gib`` together. Measured are the
seconds that training is blocked, the seconds until the checkpoint is durable (every file and its directory flushed, by
the benchmark where a way does not), bytes written, memory at the peak; and how many of ``--kills`` kills -9 of all
ranks, while one place is saved to again and again, leave there nothing that can be read.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks import report
from benchmarks.checkpoint_ways import WAYS, WORLD, Training, Way
from benchmarks.process import CONTEXT, ByRank, begin, by_rank, io, settled, started, status

# ---- how long they take


@dataclass
class Results(ByRank):
    kills: dict[str, tuple[int, int]]  # by candidate: kills, and of these those that left nothing to read


def run(gib: float = 1.0, rounds: int = 5, kills: int = 10, folder: Path | None = None) -> Results:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        lost = {name: (kills, sum(not survives(name, Path(path), seed) for seed in range(kills))) for name in WAYS}
        return Results(gib, by_rank(WORLD, all_rounds, gib, Path(path), rounds), lost)


def all_rounds(gib: float, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    training = Training(gib)
    found: dict[str, list[dict[str, float]]] = {}
    first: dict[str, float] = {}
    order = random.Random(0)
    ways = {name: way(training, folder / name.replace(" ", "_")) for name, way in WAYS.items()}
    for round_ in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            if dist.get_rank() == 0:
                shutil.rmtree(ways[name].path, ignore_errors=True)
            ways[name].make_room()
            one = measured(ways[name])
            if not round_:  # in which what is made once is made: processes, and memory that counts
                first[name] = one["memory"]
                continue
            found.setdefault(name, []).append({**one, "memory": max(one["memory"], first[name])})
    for way in ways.values():
        way.close()
    return found


def measured(way: Way) -> dict[str, float]:
    """Of one save into a new place."""
    before, resident, began = settled()
    wait = way.save()
    blocked = time.perf_counter() - began
    wait()
    dist.barrier()
    flush(way.path)
    dist.barrier()
    return {
        "blocked": blocked,
        "durable": time.perf_counter() - began,
        "written": io()["wchar"] - before["wchar"],
        "memory": (status("VmHWM") - resident) * 1024,
    }


def flush(path: Path) -> None:
    """On rank 0; costs nothing where it was done."""
    for one in [path.parent, path, *path.rglob("*")] if dist.get_rank() == 0 else ():
        handle = os.open(one, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# ---- what a kill leaves


def survives(name: str, folder: Path, seed: int) -> bool:
    """Whether one version can be read after all ranks were killed, at a random instant of saves that replace one
    another.
    """
    place = folder / f"killed-{name.replace(' ', '_')}-{seed}"
    saved = CONTEXT.Value("q", 0, lock=False)
    processes, _store = started(WORLD, save_for_ever, name, str(place), saved)
    while saved.value < 2:
        if not all(process.is_alive() for process in processes):
            sys.exit(f"{name}: a rank ended by itself")
        time.sleep(0.001)
    time.sleep(random.Random(seed).uniform(0, 0.1))
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
    good = CONTEXT.Value("q", 0)
    processes, _store = started(WORLD, read_once, name, str(place), good)
    for process in processes:
        process.join()
    shutil.rmtree(place, ignore_errors=True)
    return bool(good.value == WORLD)


def save_for_ever(rank: int, port: int, name: str, place: str, saved: Any) -> None:
    os.setpgrp()  # with the processes that it starts, which are killed as a machine that dies kills them
    begin(rank, port, WORLD)
    training = Training(0.02)
    way = WAYS[name](training, Path(place))
    for version in range(1, 1_000_000):
        training.become(version)
        way.make_room()
        way.save()()
        dist.barrier()
        if rank == 0:
            saved.value = version


def read_once(rank: int, port: int, name: str, place: str, good: Any) -> None:
    begin(rank, port, WORLD)
    training = Training(0.02)
    try:
        WAYS[name](training, Path(place)).load()
        everybody: list[Any] = [None] * WORLD
        dist.all_gather_object(everybody, training.values())
        if len(set.union(*everybody)) == 1 and everybody[0] != {0.0}:
            with good.get_lock():
                good.value += 1
    except BaseException as error:  # CheckpointException is one
        print(f"{name} after a kill: {type(error).__name__}", file=sys.stderr)
    os._exit(0)


# ---- what is shown


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    """What is asked of whole checkpoints: (what, measured, bar, met)."""
    rivals = [name for name in WAYS if "asynchronous" in name and "shardow" not in name]
    ours = "shardow, asynchronous"
    blocked = max(results.median(ours, "blocked") / results.median(name, "blocked") for name in rivals)
    durable, readable = (
        results.median("shardow", "durable") / results.median(name, "durable") for name in ("DCP", "DCP, consolidated")
    )
    lost = results.kills["shardow"][1] + results.kills[ours][1]
    return [
        ("checkpoint: blocked, times the best asynchronous rival (at most)", blocked, 1.0, blocked <= 1.0),
        ("checkpoint: durable, times DCP (at most)", durable, 1 / 3, durable <= 1 / 3),
        ("checkpoint: durable, times DCP, consolidated (at most)", readable, 1 / 3, readable <= 1 / 3),
        ("checkpoint: kills that left nothing (at most)", lost, 0, lost == 0),
    ]


def lines(results: Results) -> list[str]:
    rounds = len(next(iter(results.everybody[0].values())))
    found = [
        f"Whole checkpoints: model, AdamW and averages, {results.gib:g} GiB over {WORLD} ranks, {rounds} rounds; "
        "bytes and peak memory "
        "of the rank that has most; kills -9 of all ranks while one place is saved to again and again",
        "",
        "| | seconds blocked, median (range) | seconds to durable | MiB written | MiB of memory | kills that left "
        "nothing to read |",
        "|---|---|---|---|---|---|",
    ]
    for name in results.everybody[0]:
        blocked, durable = results.of(name, "blocked"), results.of(name, "durable")
        amounts = " | ".join(f"{max(results.of(name, kind)) / 2**20:.0f}" for kind in ("written", "memory"))
        kills, lost = results.kills[name]
        found.append(f"| {name} | {spread(blocked)} | {spread(durable)} | {amounts} | {lost} of {kills} |")
    return found


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    report.main(sys.modules[__name__])
