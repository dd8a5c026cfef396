"""``python -m benchmarks.merges``: the mean of K bfloat16 checkpoints in one process, beside reading the inputs once
and writing the output once, and a plain torch script that does the same tensor by tensor; and an average after the
fact of them as snapshots, beside the same.

Warm: the inputs are in the page cache. Cold: they are not. Each way works in a process of its own, whose memory at the
peak counts from before its first byte; an order drawn anew each round. What is written is on the disk at the end, for
all.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

import shardow
from benchmarks import report
from benchmarks.command import in_memory
from benchmarks.measure import Bar, at_most
from benchmarks.process import CONTEXT, MIB, Samples, Usage, used

TENSORS = 16
OURS, AFTER, READ, WRITE, TORCH = (
    "shardow.merge",
    "shardow.posthoc.synthesize, of the same as snapshots",
    "reading the inputs once (cat)",
    "writing the output once",
    "torch, tensor by tensor",
)
Way = Callable[[list[Path], Path], object]


@dataclass
class Results:
    mib: int
    inputs: int
    rounds: int
    warm: Samples
    cold: Samples

    def ratio(self, way: str, samples: Samples) -> float:
        """Returns how many times as long as what must be read and written, by their medians."""
        ours, read, write = (statistics.median(samples.rounds(name)) for name in (way, READ, WRITE))
        return ours / (read + write)

    def mib_of_memory(self, way: str) -> float:
        return max(samples.most(way, "memory") for samples in (self.warm, self.cold)) / MIB


def bars(results: Results) -> list[Bar]:
    names = {OURS: "merge", AFTER: "average after the fact"}
    asked = [
        at_most(
            f"{name} of {results.inputs}, {cache}: times reading and writing once", results.ratio(way, samples), 1.15
        )
        for cache, samples in (("warm", results.warm), ("cold", results.cold))
        for way, name in names.items()
    ]
    return asked + [at_most(f"{name}: MiB of memory", results.mib_of_memory(way), 64) for way, name in names.items()]


def lines(results: Results) -> list[str]:
    rows = [
        [name, results.warm.seconds(name), results.cold.seconds(name), f"{results.mib_of_memory(name):.0f}"]
        for name in WAYS
    ]
    return [
        f"The mean of {results.inputs} bfloat16 checkpoints of {results.mib} MiB each, one process, {results.rounds} "
        "rounds",
        "",
        *report.table(("", "seconds warm, median (range)", "seconds cold", "MiB of memory"), rows),
    ]


def run(mib: int = 512, inputs: int = 10, rounds: int = 5, folder: Path | None = None) -> Results:
    results = Results(mib, inputs, rounds, Samples(), Samples())
    with tempfile.TemporaryDirectory(dir=folder) as name, contextlib.ExitStack() as stack:
        paths = [Path(name) / f"step-{j + 1}.safetensors" for j in range(inputs)]
        for seed, path in enumerate(paths):
            shardow.save(weights(mib, seed), path)
        snapshots(paths, Path(name) / "snapshots")
        outputs = {way: Path(name) / f"{number}-out.safetensors" for number, way in enumerate(WAYS)}
        processes = {way: stack.enter_context(ProcessPoolExecutor(1, CONTEXT)) for way in WAYS}
        for way, process in processes.items():
            process.submit(imports, way, outputs[way]).result()
        order = random.Random(0)
        for samples, cold in (results.warm, False), (results.cold, True):
            for way in order.sample([*WAYS] * rounds, len(WAYS) * rounds):
                in_memory(paths, not cold)
                samples.add(way, [processes[way].submit(measured, way, paths, outputs[way]).result()])
    return results


def imports(way: str, out: Path) -> None:
    """Does a way's work once on little, for what is imported at its first use."""
    small = out.with_name(f"small-{out.name}")
    shardow.save({"w": torch.zeros(64).bfloat16()}, small)
    WAYS[way]([small], out)


def measured(way: str, paths: list[Path], out: Path) -> Usage:
    out.unlink(missing_ok=True)
    return used(lambda: WAYS[way](paths, out))


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
            metadata = {key: opened.metadata[key] for key in ("shardow.state", "shardow.snapshot")}
        file.unlink()
        with shardow.open(path) as opened:
            shardow.save({name: opened[name] for name in opened}, file, metadata=metadata)
        os.replace(file, path)  # the inputs of all are these
        file.symlink_to(path)


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
    means = {}
    for name in opened[0].keys():  # noqa: SIM118
        total = opened[0].get_tensor(name).double()
        for file in opened[1:]:
            total += file.get_tensor(name)
        means[name] = (total / len(opened)).bfloat16()
    save_file(means, out)
    with out.open("rb") as file:
        os.fsync(file.fileno())


def after(paths: list[Path], out: Path) -> None:
    """A width that all snapshots have a part in."""
    directory = paths[0].parent / "snapshots"
    if len(paths) > 1 and directory.is_dir():
        shardow.posthoc.synthesize(directory, sigma_rel=0.2, out=out, dtype="bfloat16")


WAYS: dict[str, Way] = {
    OURS: ours,
    AFTER: after,
    READ: read,
    WRITE: write,
    TORCH: by_torch,
}


if __name__ == "__main__":
    report.main(sys.modules[__name__])
