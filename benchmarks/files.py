"""``python -m benchmarks.files``: save and load of a sharded model on 2 ranks, side by side with what is used
elsewhere.

Measured are seconds, bytes moved and memory at the peak.

Every candidate saves the same FSDP2-sharded mapping, in an order drawn anew each round; reads come from the page cache
for all. ``--gib 1`` is the size of the bars.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks import report
from benchmarks.process import ByRank, by_rank, io, settled, status

WORLD = 2
State = dict[str, torch.Tensor]
Way = Callable[[State, Path], object]


def run(gib: float = 1.0, rounds: int = 5, folder: Path | None = None) -> ByRank:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        return ByRank(gib, by_rank(WORLD, all_rounds, gib, Path(path), rounds))


def most(results: ByRank, name: str, kind: str) -> float:
    """Bytes of the rank that has most, in its worst round."""
    return max(results.of(name, kind))


def ratio(results: ByRank, name: str, other: str) -> float:
    """How many times as long as ``other``, by their medians."""
    return results.median(name) / results.median(other)


def bars(results: ByRank) -> list[tuple[str, float, float, bool]]:
    """What DESIGN asks of save and load: (what, measured, bar, met)."""
    save, load, own = "save: shardow", "load: shardow", results.gib * 2**30 / WORLD
    at_most = [
        ("save: bytes written, of the own ones", most(results, save, "written") / own, 1.0),
        ("save: MiB of memory", most(results, save, "memory") / 2**20, 64),
        ("save: times raw pwrite, fsync", ratio(results, save, "save: raw pwrite, fsync"), 1.1),
        ("load: bytes read, of the own ones", most(results, load, "read") / own, 1.02),
        ("load: MiB of memory", most(results, load, "memory") / 2**20, 64),
        ("load: times DCP's HF reader", ratio(results, load, "load: DCP's HF reader"), 1.0),
    ]
    faster = ratio(results, "save: DCP, consolidated", save)
    flushed = ratio(results, "save: DCP, consolidated, flushed", save)
    return [(f"{what} (at most)", measured, bar, measured <= bar * 1.001) for what, measured, bar in at_most] + [
        ("save: DCP + consolidation takes times as long", faster, 2.5, faster >= 2.5),
        ("the same with its file flushed, as ours is", flushed, 2.5, flushed >= 2.5),
    ]


def lines(results: ByRank) -> list[str]:
    rounds = len(results.everybody[0]["load: shardow"])
    found = [
        f"{results.gib:g} GiB over {WORLD} ranks, {rounds} rounds; "
        "bytes (by /proc/self/io, sockets included) and peak memory of the rank that has most",
        "",
        "| | seconds, median (range) | MiB written | MiB read | MiB of memory |",
        "|---|---|---|---|---|",
    ]
    for name in results.everybody[0]:
        seconds = results.of(name)
        amounts = " | ".join(f"{most(results, name, kind) / 2**20:.0f}" for kind in ("written", "read", "memory"))
        found.append(
            f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {amounts} |"
        )
    return found


def all_rounds(gib: float, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    state = sharded(gib)
    found: dict[str, list[dict[str, float]]] = {}
    order = random.Random(0)
    for _ in range(rounds):
        saves = [
            *SAVES,
            *["shardow", "raw pwrite, fsync"] * 2,
        ]  # a shared disk's speed varies most: these are compared closely
        for name in order.sample(saves, len(saves)):
            path = folder / name.replace(" ", "_")
            found.setdefault(f"save: {name}", []).append(measured(partial(SAVES[name], state, path)))
        for name in order.sample(list(LOADS), len(LOADS)):
            found.setdefault(f"load: {name}", []).append(measured(partial(LOADS[name], state, folder / "shardow")))
    return found


def sharded(gib: float) -> State:
    mesh = init_device_mesh("cpu", (WORLD,))
    width = 4096
    rows = int(gib * 2**30 / 4 / width / 16)
    return {
        f"layers.{i}.weight": distribute_tensor(
            torch.full((rows, width), float(i)), mesh, [Shard(0)], src_data_rank=None
        )
        for i in range(16)
    }


def measured(way: Callable[[], object]) -> dict[str, float]:
    """Seconds until all ranks are done; this rank's bytes to and from files, and memory above what it had."""
    before, resident, began = settled()
    way()
    dist.barrier()
    after = io()
    return {
        "seconds": time.perf_counter() - began,
        "written": after["wchar"] - before["wchar"],
        "read": after["rchar"] - before["rchar"],
        "memory": (status("VmHWM") - resident) * 1024,
    }


# ---- the candidates


def shardow_save(state: State, path: Path) -> None:
    import shardow

    shardow.save(state, path)


def raw(state: State, path: Path) -> None:
    """The disk's own limit: each rank's bytes into its half of one new file, flushed, which takes the place of the old
    one.
    """
    new = path.with_suffix(".new")
    local = [_local(tensor).numpy() for tensor in state.values()]
    handle = os.open(new, os.O_WRONLY | os.O_CREAT, 0o666)
    at = dist.get_rank() * sum(one.nbytes for one in local)
    for one in local:
        view = memoryview(one).cast("B")
        while view:
            done = os.pwrite(handle, view, at)
            view, at = view[done:], at + done
    os.fsync(handle)
    os.close(handle)
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(new, path)


def dcp_consolidated(state: State, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    dist.barrier()
    writer = HuggingFaceStorageWriter(
        str(path), fqn_to_index_mapping=dict.fromkeys(state, 1), save_distributed=True, enable_consolidation=True
    )
    dcp.save(dict(state), storage_writer=writer)


def dcp_flushed(state: State, path: Path) -> None:
    """Consolidation leaves the final file in the page cache; a crash of the machine loses it."""
    dcp_consolidated(state, path)
    dist.barrier()
    for file in path.glob("*.safetensors") if dist.get_rank() == 0 else ():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def gathered(state: State) -> State:
    """On rank 0; every rank takes part, as in get_model_state_dict(full_state_dict=True, cpu_offload=True)."""
    full: State = {}
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        one = tensor.full_tensor()
        if dist.get_rank() == 0:
            full[name] = one
    return full


def gather_save_file(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    full = gathered(state)
    if full:
        save_file(full, path)


def gather_torch_save(state: State, path: Path) -> None:
    full = gathered(state)
    if full:
        torch.save(full, path)


def shardow_load(state: State, path: Path) -> None:
    import shardow

    shardow.load(state, path)


def dcp_load(state: State, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    dcp.load(dict(state), storage_reader=HuggingFaceStorageReader(str(path)))


def broadcast_load(state: State, path: Path) -> None:
    from safetensors.torch import load_file

    full = load_file(path / "model.safetensors") if dist.get_rank() == 0 else {}
    for name, tensor in state.items():
        whole = full.get(name, torch.empty(0)) if dist.get_rank() == 0 else torch.empty(tensor.shape)
        dist.broadcast(whole, 0)
        local = _local(tensor)
        local.copy_(whole.chunk(WORLD)[dist.get_rank()])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


SAVES: dict[str, Way] = {
    "raw pwrite, fsync": raw,
    "shardow": shardow_save,
    "DCP, consolidated": dcp_consolidated,
    "DCP, consolidated, flushed": dcp_flushed,
    "gather, save_file": gather_save_file,
    "gather, torch.save": gather_torch_save,
}
LOADS: dict[str, Way] = {"shardow": shardow_load, "DCP's HF reader": dcp_load, "rank 0, broadcast": broadcast_load}


if __name__ == "__main__":
    report.main(sys.modules[__name__])
