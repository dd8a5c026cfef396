"""``python -m benchmarks.merges``: the mean of K bfloat16 checkpoints in one process, beside reading the inputs once
and writing the output once, and a plain torch script that does the same tensor by tensor; an average after the fact of
them as snapshots, beside the same; and one tensor in eight of the mean, into memory, beside reading as many bytes.

Warm: the inputs are in the page cache. Cold: they are not. Each way works in a process of its own, whose memory at the
peak counts from before its first byte; an order drawn anew each round. What is written is on the disk at the end, for
all.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import shardow
from benchmarks import report
from benchmarks.process import status

TENSORS = 16
OURS, READ, WRITE, TORCH = (
    "shardow.merge",
    "reading the inputs once (cat)",
    "writing the output once",
    "torch, tensor by tensor",
)
AFTER, SOME, READ_SOME = (
    "shardow.posthoc.synthesize, of the same as snapshots",
    "some tensors, into memory",
    "reading these once",
)
EACH = 8  # of which SOME takes one
Way = Callable[[list[Path], Path], object]


@dataclass
class Results:
    mib: int
    inputs: int
    seconds: dict[str, dict[str, list[float]]]  # "warm" and "cold", by way and round
    memory: dict[str, float]  # MiB at the peak, of the worst round

    def ratio(self, way: str, cache: str) -> float:
        """How many times as long as what must be read and written, by their medians."""
        median = {name: statistics.median(seconds) for name, seconds in self.seconds[cache].items()}
        return median[way] / (median[READ_SOME] if way == SOME else median[READ] + median[WRITE])


def bars(results: Results) -> list[tuple[str, float, float, bool]]:
    names = {OURS: "merge", AFTER: "average after the fact"}
    found = [
        (
            f"{name} of {results.inputs}, {cache}: times reading and writing once (at most)",
            results.ratio(way, cache),
            1.15,
        )
        for cache in results.seconds
        for way, name in names.items()
    ]
    found += [(f"{name}: MiB of memory (at most)", results.memory[way], 64) for way, name in names.items()]
    return [(what, measured, bar, measured <= bar) for what, measured, bar in found]


def lines(results: Results) -> list[str]:
    rounds = len(results.seconds["warm"][OURS])
    found = [
        f"The mean of {results.inputs} bfloat16 checkpoints of {results.mib} MiB each, one process, {rounds} rounds",
        "",
        "| | seconds warm, median (range) | seconds cold | MiB of memory |",
        "|---|---|---|---|",
    ]
    for name, memory in results.memory.items():
        warm, cold = (results.seconds[cache][name] for cache in ("warm", "cold"))
        each = [f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in (warm, cold)]
        found.append(f"| {name} | {each[0]} | {each[1]} | {memory:.0f} |")
    return found


def run(mib: int = 512, inputs: int = 10, rounds: int = 5, folder: Path | None = None) -> Results:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        paths = [Path(name) / f"step-{j + 1}.safetensors" for j in range(inputs)]
        for seed, path in enumerate(paths):
            shardow.save(weights(mib, seed), path)
        snapshots(paths, Path(name) / "snapshots")
        workers = {way: Worker(way, paths, Path(name)) for way in WAYS}
        results = Results(
            mib, inputs, {cache: {way: [] for way in WAYS} for cache in ("warm", "cold")}, dict.fromkeys(WAYS, 0.0)
        )
        order = random.Random(0)
        for cache in results.seconds:
            for way in order.sample([*WAYS] * rounds, len(WAYS) * rounds):
                prepare(paths, cold=cache == "cold")
                seconds, memory = workers[way].work()
                results.seconds[cache][way].append(seconds)
                results.memory[way] = max(results.memory[way], memory)
        for worker in workers.values():
            worker.end()
    return results


def weights(mib: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(mib * 2**19 // TENSORS // 1024, 1024).bfloat16() for i in range(TENSORS)}


def snapshots(paths: list[Path], directory: Path) -> None:
    """The same bytes with the metadata of snapshots of one average, every 1000 steps."""
    model = torch.nn.Linear(1, 1)
    ema = shardow.EMA(model, decay=shardow.schedules.power(0.1))
    for _ in range(1000 * len(paths)):
        ema.update()
        ema.snapshot(directory, 1000)
    for path, at in zip(paths, sorted(directory.iterdir()), strict=True):
        (file,) = at.iterdir()
        with shardow.open(file) as opened:
            told = {key: text for key, text in opened.metadata.items() if key in ("shardow.state", "shardow.snapshot")}
        file.unlink()
        with shardow.open(path) as opened:
            shardow.save({name: opened[name] for name in opened}, file, metadata=told)
        os.replace(file, path)  # the inputs of all are these
        file.symlink_to(path)


def prepare(paths: list[Path], cold: bool) -> None:
    os.sync()  # nobody pays for what others have left unflushed
    for path in paths:
        with path.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 20):
                    pass


def ours(paths: list[Path], out: Path) -> None:
    shardow.merge(paths, out)


def read(paths: list[Path], out: Path) -> None:
    subprocess.run(["cat", *paths], check=True, stdout=subprocess.DEVNULL)


def write(paths: list[Path], out: Path) -> None:
    block, left = bytes(1 << 20), paths[0].stat().st_size
    with out.open("wb", buffering=0) as file:
        while left > 0:
            left -= file.write(block[:left])
        os.fsync(file.fileno())


def by_torch(paths: list[Path], out: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    opened = [safe_open(path, "pt") for path in paths]
    found = {}
    for name in opened[0].keys():  # noqa: SIM118
        total = opened[0].get_tensor(name).double()
        for one in opened[1:]:
            total += one.get_tensor(name)
        found[name] = (total / len(opened)).bfloat16()
    save_file(found, out)
    with out.open("rb") as file:
        os.fsync(file.fileno())


def after(paths: list[Path], out: Path) -> None:
    """A width that all snapshots have a part in."""
    directory = paths[0].parent / "snapshots"
    if len(paths) > 1 and directory.is_dir():
        shardow.posthoc.synthesize(directory, sigma_rel=0.2, out=out, dtype="bfloat16")


def some(paths: list[Path], out: Path) -> None:
    with shardow.open(paths[0]) as opened:
        target = {name: torch.empty_like(opened[name]) for name in sorted(opened)[::EACH]}
    shardow.load(target, shardow.merged(paths), strict=False)


def read_some(paths: list[Path], out: Path) -> None:
    """The first tensors in the files, as many bytes."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            left = path.stat().st_size // EACH
            while left > 0 and (data := file.read(min(left, 1 << 17))):
                left -= len(data)


WAYS: dict[str, Way] = {
    OURS: ours, AFTER: after, SOME: some, READ: read, READ_SOME: read_some, WRITE: write, TORCH: by_torch
}  # fmt: skip


class Worker:
    """A process that does one way's work when it is told to."""

    def __init__(self, way: str, paths: list[Path], folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(way, paths, folder / f"{list(WAYS).index(way)}-out.safetensors", theirs)
        )
        self._process.start()
        theirs.close()

    def work(self) -> tuple[float, float]:
        """(seconds, MiB of memory at the peak)."""
        self._pipe.send(True)
        seconds, memory = self._pipe.recv()
        return seconds, memory

    def end(self) -> None:
        self._pipe.send(False)
        self._process.join()


def serve(way: str, paths: list[Path], out: Path, pipe: Connection) -> None:
    do = WAYS[way]
    small = out.with_name(f"small-{out.name}")
    shardow.save({"w": torch.zeros(64).bfloat16()}, small)
    do([small], out)  # what is imported at its first use
    while pipe.recv():
        out.unlink(missing_ok=True)
        pipe.send(measured(do, paths, out))


def measured(do: Way, paths: list[Path], out: Path) -> Any:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    began = time.perf_counter()
    do(paths, out)
    return time.perf_counter() - began, (status("VmHWM") - before) / 1024


if __name__ == "__main__":
    report.main(sys.modules[__name__])
