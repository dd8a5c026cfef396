"""What coordination costs against the number of ranks, and calls against the number of tensors: ``python -m
benchmarks.scale [section ...] [--sizes n ...]``.

Sections, all of them unless some are named: ``emulated`` (agree() of ranks that are threads), ``processes`` (agree(), a
save and a load with gloo), ``tensors`` (seconds of processors, by benchmarks/scale_tensors.py), ``work`` (the same in
instructions, which valgrind counts: the same on every machine, and a hundred times as slow).
docs/scale.md is made of what it prints. Operations and bytes of a rank are exact; seconds are those of this machine's
processors working for all ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))
import ranks
from emulated import CountedStore, emulated, on_all

from shardow import _core
from shardow.ranks.store_group import StoreGroup, store_group

TENSORS, ROWS = 2_000, 64  # of the processes' checkpoint
TIMEOUT = 600.0
Figures = dict[str, float]


def emulated_ranks(size: int) -> dict[str, Figures]:
    """Of the worst rank. A second thread, to which a rank of its own leaves its waits, is left out."""
    with emulated(size, helped=False) as groups:
        on_all(groups, lambda group: _core.agree(group, "warm", TIMEOUT, lambda: None))
        for group in groups:
            group.store.forget()
        answers, seconds = on_all(groups, lambda group: _core.agree(group, "call()", TIMEOUT, lambda: None))
        stores = [group.store for group in groups]
    if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
        raise failed[0]
    operations = [sum(store.operations.values()) for store in stores]
    figures = {"seconds": seconds, "operations": max(operations), "mean_operations": sum(operations) / size}
    return {"agree": figures | {what: max(getattr(store, what) for store in stores) for what in ("sent", "received")}}


def on_rank(path: str) -> dict[str, Figures]:
    """Of this rank, whose store is counted."""
    rank, size, stores = dist.get_rank(), dist.get_world_size(), []
    connected = StoreGroup._connected

    def observed(group: StoreGroup) -> Any:
        stores.append(CountedStore(connected(group)))
        return stores[-1]

    StoreGroup._connected = observed  # type: ignore[method-assign]
    try:
        group, figures = store_group(dist.group.WORLD), {}
        region = _core.Region.grid([ROWS, 8], [[(ROWS * rank // size, ROWS * (rank + 1) // size)], [(0, 8)]])
        memory = np.full(max(region.size, 1), rank, dtype=np.float32)
        views = [_core.TensorView(f"layers.{i}.weight", "F32", region, memory.ctypes.data) for i in range(TENSORS)]

        def measured(what: str, call: Callable[[], Any], times: int = 1) -> Any:
            dist.barrier()
            for store in stores:
                store.forget()
            begin = time.perf_counter()
            for _ in range(times):
                answer = call()
            counts: Figures = {"seconds": time.perf_counter() - begin}
            counts["operations"] = sum(sum(store.operations.values()) for store in stores)
            counts |= {"sent": sum(s.sent for s in stores), "received": sum(s.received for s in stores)}
            figures[what] = {name: value / times for name, value in counts.items()}
            return answer

        def plan() -> _core.Save:
            group.begin("save()", TIMEOUT)
            return _core.Save(group, [_core.SaveFile("", views)], path, timeout=TIMEOUT)

        def load() -> None:
            group.begin("load()", TIMEOUT)
            _core.load(group, views, _core.Checkpoint.open(group, path, TIMEOUT), timeout=TIMEOUT)

        _core.agree(group, "warm", TIMEOUT, lambda: None)
        measured("agree", lambda: _core.agree(group, "call()", TIMEOUT, lambda: None), 20)
        for which in ("first", "later"):
            saving = measured(f"{which} plan", plan)
            measured(f"{which} save", saving.write)
        measured("load", load)
        return figures
    finally:
        StoreGroup._connected = connected  # type: ignore[method-assign]


def processes(size: int) -> dict[str, Figures]:
    """Of the worst rank; of bytes that are received, but for one rank, which sums up the others' words."""
    with tempfile.TemporaryDirectory() as folder:
        answers = ranks.run(size, on_rank, f"{folder}/a.safetensors", timeout=TIMEOUT)

    def worst(what: str, fact: str) -> float:
        return sorted(answer[what][fact] for answer in answers)[-2 if fact == "received" else -1]

    return {what: {fact: worst(what, fact) for fact in figures} for what, figures in answers[0].items()}


def tensors(size: int) -> dict[str, Figures]:
    """In processes whose memory is theirs."""
    with tempfile.TemporaryDirectory() as folder:
        found = {**_tensors("at", size, folder), **_tensors("bytes_of", size, folder)}
    unit = {what: "bytes" if what.startswith("bytes") else "seconds" for what in found}
    return {what: {unit[what]: value, f"{unit[what]}_each": value / size} for what, value in found.items()}


def work(size: int) -> dict[str, Figures]:
    if shutil.which("callgrind_control") is None:
        sys.exit("work needs valgrind (apt-get install valgrind)")
    with tempfile.TemporaryDirectory() as folder:
        counts = f"--callgrind-out-file={folder}/counts"
        tool = ["valgrind", "--quiet", "--tool=callgrind", "--instr-atstart=no", counts]
        found = _tensors("work", size, folder, tool)
    return {what: {"instructions": value, "instructions_each": value / size} for what, value in found.items()}


def _tensors(what: str, size: int, folder: str, tool: list[str] | None = None) -> dict[str, float]:
    command = [*(tool or []), sys.executable, "-m", "benchmarks.scale_tensors", what, str(size), folder]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


SECTIONS: dict[str, tuple[Callable[[int], dict[str, Figures]], tuple[int, ...]]] = {
    "emulated": (emulated_ranks, (2, 8, 32, 128, 512)),
    "processes": (processes, (2, 4, 8, 16, 32)),
    "tensors": (tensors, (2_000, 20_000)),
    "work": (work, (5_000, 25_000)),
}


def exponent(points: list[tuple[float, float]]) -> float:
    """Of the power law through them, by least squares of logarithms; NaN where there are fewer than two."""
    if len(points) < 2:
        return math.nan
    xs, ys = [math.log(x) for x, _ in points], [math.log(max(y, 1e-9)) for _, y in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all unless some are named")
    parser.add_argument("--sizes", nargs="+", type=int, help="of one section")
    options = parser.parse_args()
    for name in options.sections or SECTIONS:
        measure, usual = SECTIONS[name]
        found: dict[int, dict[str, Figures]] = {}
        print(f"\n{name}")
        for size in options.sizes or usual:
            found[size] = measure(size)
            for what, figures in found[size].items():
                shown = "  ".join(f"{fact} {value:.4g}" for fact, value in figures.items())
                print(f"{size:>9}  {what:<18} {shown}", flush=True)
        for what, figures in found[min(found)].items():
            powers = {fact: exponent([(size, found[size][what][fact]) for size in found]) for fact in figures}
            print(f"{what} ~ " + ", ".join(f"{f} size^{power:.2f}" for f, power in powers.items() if "_" not in f))


if __name__ == "__main__":
    main()
