"""The same between processes of their own, with gloo: agree(), the first and a later plan of a save, the save, the
load.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks import scale_report

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))
import ranks
from emulated import CountedStore

from shardow import _core
from shardow.ranks.store_group import StoreGroup, store_group

SIZES = (2, 4, 8, 16, 32)
TENSORS, ROWS = 2_000, 64
TIMEOUT = 600.0
Figures = dict[str, float]


def on_rank(path: str, rounds: int) -> dict[str, Figures]:
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
            seconds = (time.perf_counter() - begin) / times
            counted = {"operations": [sum(store.operations.values()) for store in stores]}
            counted |= {"sent": [store.sent for store in stores], "received": [store.received for store in stores]}
            figures[what] = {"seconds": seconds, **{name: sum(values) / times for name, values in counted.items()}}
            return answer

        def plan() -> _core.Save:
            group.begin("save()", TIMEOUT)
            return _core.Save(group, [_core.SaveFile("", views)], path, timeout=TIMEOUT)

        def load() -> None:
            group.begin("load()", TIMEOUT)
            _core.load(group, views, _core.Checkpoint.open(group, path, TIMEOUT), timeout=TIMEOUT)

        _core.agree(group, "warm", TIMEOUT, lambda: None)
        measured("agree", lambda: _core.agree(group, "call()", TIMEOUT, lambda: None), 20 * rounds)
        saving = measured("first plan", plan)
        measured("save", saving.write)
        saving = measured("later plan", plan)
        measured("later save", saving.write)
        measured("load", load)
        return figures
    finally:
        StoreGroup._connected = connected  # type: ignore[method-assign]


def run(sizes: list[int], rounds: int = 1) -> dict[int, dict[str, Figures]]:
    """Of the worst rank; of bytes that are received, but for one rank, which sums up what all tell."""
    found = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            answers = ranks.run(size, on_rank, f"{folder}/a.safetensors", rounds, timeout=TIMEOUT)
        worst: dict[str, Figures] = {}
        for what in answers[0]:
            of_all = {name: sorted(one[what][name] for one in answers) for name in answers[0][what]}
            worst[what] = {name: values[-2 if name == "received" else -1] for name, values in of_all.items()}
        found[size] = worst
        scale_report.row(f"{size} processes", worst)
    return found


def lines(found: dict[int, dict[str, Figures]]) -> Iterator[str]:
    for what in next(iter(found.values())):
        for fact in ("seconds", "operations", "sent", "received"):
            yield (
                f"{what}: {fact} ~ "
                f"processes^{scale_report.exponent([(size, found[size][what][fact]) for size in found]):.2f}"
            )
