"""What coordination costs against the number of ranks, and calls against the number of tensors: ``python -m
benchmarks.scale [section ...] [--sizes n ...]``.

Sections, all of them unless some are named: ``emulated`` (agree() of ranks that are threads), ``processes`` (agree()
beside torch's own, a save and a load with gloo), ``tensors`` (seconds of processors for calls in one process).
docs/scale.md is made of what they print. Operations of a rank and its bytes through the store are exact; seconds are
those of this machine's processors working for all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.elastic.utils.store as elastic
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Shard, distribute_tensor

import benchmarks.engine  # noqa: F401

# isort: split
import ranks
from emulated import CountedStore, Emulated, emulated, on_all

import shardow
from shardow import _core
from shardow.distributed import store_group
from shardow.distributed.rank_group import RankGroup

TENSORS, ROWS = 2_000, 64  # of the processes' checkpoint
TIMEOUT = 600.0
Figures = dict[str, float]


# ---- ranks


def emulated_ranks(size: int) -> dict[str, Figures]:
    """Of the worst rank."""
    with emulated(size) as groups:
        on_all(groups, lambda group: group.agree("warm", TIMEOUT, lambda: None))
        on_all(groups, Emulated.forget)
        answers, seconds = on_all(groups, lambda group: group.agree("call()", TIMEOUT, lambda: None))
        operations = [group.operations.total() for group in groups]
        moved = max(group.moved for group in groups)
    if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
        raise failed[0]
    figures = {"seconds": seconds, "operations": max(operations), "mean_operations": sum(operations) / size}
    return {"agree": figures | {"moved": moved}}


def on_rank(path: str) -> dict[str, Figures]:
    """Of this rank, whose store is counted; of calls that were made once before."""
    stores = [CountedStore(_get_default_store())]
    connected = store_group.connected

    def counted(prefix: str) -> CountedStore:
        stores.append(CountedStore(connected(prefix)))
        return stores[-1]

    store_group.connected = counted
    group, figures = RankGroup(dist.group.WORLD, TIMEOUT), {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.zeros(ROWS, 8)
    names = [f"layers.{i}.weight" for i in range(TENSORS)]
    state = {name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for name in names}
    rank, size, own, numbers = dist.get_rank(), dist.get_world_size(), stores[0], itertools.count()
    calls: dict[str, Callable[[], object]] = {
        "agree": lambda: group.agree("call()", lambda: None),
        "elastic's barrier": lambda: elastic.barrier(own, size, f"barrier {next(numbers)}"),
        "elastic's synchronize": lambda: elastic.synchronize(own, b"agree", rank, size, f"words {next(numbers)}"),
        "monitored_barrier": dist.monitored_barrier,
        "all_gather_object": lambda: dist.all_gather_object([None] * size, "agree"),
        "save": lambda: shardow.save(state, path),
        "load": lambda: shardow.load(state, path),
    }
    for what, call in calls.items():
        call()
        dist.barrier()
        for store in stores:
            store.forget()
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
        figures[what] = {"seconds": seconds, "operations": sum(sum(store.operations.values()) for store in stores)}
        figures[what] |= {fact: sum(getattr(store, fact) for store in stores) for fact in ("sent", "received")}
    store_group.connected = connected
    return figures


def processes(size: int) -> dict[str, Figures]:
    """Of the worst rank; of bytes that are received, but for one rank, which sums up the others' words."""
    with tempfile.TemporaryDirectory() as folder:
        answers = ranks.run(size, on_rank, f"{folder}/a.safetensors", timeout=TIMEOUT)

    def worst(what: str, fact: str) -> float:
        return sorted(answer[what][fact] for answer in answers)[-2 if fact == "received" else -1]

    return {what: {fact: worst(what, fact) for fact in figures} for what, figures in answers[0].items()}


# ---- tensors: CPU tensors of four elements, in modules of ten, in a process of their own


def tensors(size: int) -> dict[str, Figures]:
    figures = {}
    for function, unit in (costs_of_calls, "seconds"), (bytes_of, "bytes"):
        code = f"import json; from benchmarks import scale; print(json.dumps(scale.{function.__name__}({size})))"
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
        costs: Figures = json.loads(done.stdout)
        figures |= {what: {unit: value, f"{unit}_each": value / size} for what, value in costs.items()}
    return figures


class Ten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(10):
            self.register_parameter(f"p{i}", nn.Parameter(torch.empty(4)))


def made(tensors: int) -> nn.Module:
    return nn.ModuleList(Ten() for _ in range(tensors // 10))


def on_meta(tensors: int) -> nn.Module:
    with shardow.meta_init():
        return made(tensors)


def cost(call: Callable[[], Any], once: bool = False) -> float:
    """Returns seconds of processors, whichever thread's: other programs and the disk are not in it. The quickest of up
    to five calls, two of slow ones, one of those that can't be repeated."""
    taken: list[float] = []
    while not taken or (not once and len(taken) < (5 if min(taken) < 0.5 else 2)):
        begin = time.process_time()
        kept = call()
        taken.append(time.process_time() - begin)
        del kept
    return min(taken)


def costs_of_calls(tensors: int) -> Figures:
    """Returns the cost by call, when everything has been called once for a few tensors."""
    with tempfile.TemporaryDirectory() as folder:
        costs_in(100, Path(folder))
        return costs_in(tensors, Path(folder))


def costs_in(tensors: int, folder: Path) -> Figures:
    model, path, averages = made(tensors), folder / "model.safetensors", folder / "averages.safetensors"
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    costs = {"torch.empty": cost(lambda: [torch.empty(4) for _ in range(tensors)])}
    costs["EMA()"] = cost(lambda: shardow.EMA(model, 0.99))
    ema = shardow.EMA(model, 0.99)
    ema.update()
    costs["update()"] = cost(ema.update)
    costs["state_dict()"] = cost(ema.state_dict)
    state = ema.state_dict()
    costs["load_state_dict()"] = cost(lambda: ema.load_state_dict(state))
    costs["swap and back"] = cost(lambda: swap_and_back(ema))
    costs["EMA.save()"] = cost(lambda: ema.save(averages))
    costs["EMA.load()"] = cost(lambda: ema.load(averages))
    costs["open()"] = cost(lambda: shardow.open(averages).close())
    costs["save()"] = cost(lambda: shardow.save(model, path))
    costs["load()"] = cost(lambda: shardow.load(model, path))
    costs |= costs_of_header(path)
    costs["constructing it"] = cost(lambda: made(tensors))
    costs["meta_init()"] = cost(lambda: on_meta(tensors))
    empty = on_meta(tensors)
    costs["materialize()"] = cost(lambda: shardow.materialize(empty, path), once=True)
    return costs


def swap_and_back(ema: shardow.EMA) -> None:
    with ema.swapped():
        pass


def costs_of_header(path: Path) -> Figures:
    """Of a file: written, and read strictly, beside Python's own parser of JSON."""
    with path.open("rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
    data = path.stat().st_size - 8 - len(text)
    entries, metadata = _core.hooks.parse_header(text, data)
    tensors = [(name, dtype, shape) for name, dtype, shape, _, _ in entries]
    return {
        "json.loads": cost(lambda: json.loads(text)),
        "header read": cost(lambda: _core.hooks.parse_header(text, data)),
        "header written": cost(lambda: _core.hooks.header_of(tensors, metadata)),
    }


def bytes_of(tensors: int) -> Figures:
    """Of the later half of a few averages: the first ones come with libraries that are loaded."""
    model, few = made(tensors), max(2, 100_000 // tensors)
    kept = [shardow.EMA(model, 0.99) for _ in range(few)]
    before = resident()
    kept += [shardow.EMA(model, 0.99) for _ in range(few)]
    return {"bytes of an EMA": (resident() - before) / few}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---- the tables


SECTIONS: dict[str, tuple[Callable[[int], dict[str, Figures]], tuple[int, ...]]] = {
    "emulated": (emulated_ranks, (2, 8, 32, 128, 512)),
    "processes": (processes, (2, 8, 32, 64)),
    "tensors": (tensors, (2_000, 20_000)),
}


def exponent(sizes: list[int], values: list[float]) -> float:
    """Of the power law through them, by least squares of logarithms; NaN where there are fewer than two."""
    if len(sizes) < 2:
        return math.nan
    slope, _ = np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-9)), 1)
    return float(slope)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all unless some are named")
    parser.add_argument("--sizes", nargs="+", type=int, help="of one section")
    options = parser.parse_args()
    for name in options.sections or SECTIONS:
        measure, usual = SECTIONS[name]
        by_size: dict[int, dict[str, Figures]] = {}
        print(f"\n{name}")
        for size in options.sizes or usual:
            by_size[size] = measure(size)
            for what, figures in by_size[size].items():
                shown = "  ".join(f"{fact} {value:.4g}" for fact, value in figures.items())
                print(f"{size:>9}  {what:<18} {shown}", flush=True)
        for what, figures in by_size[min(by_size)].items():
            facts = [fact for fact in figures if "_" not in fact]
            powers = (exponent(list(by_size), [by_size[size][what][fact] for size in by_size]) for fact in facts)
            print(
                f"{what} ~ " + ", ".join(f"{fact} size^{power:.2f}" for fact, power in zip(facts, powers, strict=True))
            )


if __name__ == "__main__":
    main()
