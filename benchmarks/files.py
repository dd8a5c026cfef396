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
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks import report
from benchmarks.measure import Bar, at_least, at_most
from benchmarks.process import MIB, Samples, Usage, by_rank, used
from benchmarks.report import table

WORLD = 2
State = dict[str, torch.Tensor]
Way = Callable[[State, Path], object]


@dataclass
class Results:
    gib: float
    samples: Samples


def run(gib: float = 1.0, rounds: int = 5, folder: Path | None = None) -> Results:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        return Results(gib, Samples.of_ranks(by_rank(WORLD, all_rounds, gib, Path(path), rounds)))


def bars(results: Results) -> list[Bar]:
    """Returns what DESIGN asks of save and load."""
    samples, own = results.samples, results.gib * 2**30 / WORLD
    save, load, consolidated = "save: shardow", "load: shardow", "save: DCP, consolidated"
    faster, flushed = (samples.ratio(name, save) for name in (consolidated, f"{consolidated}, flushed"))
    return [
        at_most("save: bytes written, of the own ones", round(samples.most(save, "written") / own, 3), 1.0),
        at_most("save: MiB of memory", samples.most(save, "memory") / MIB, 64),
        at_most("save: times raw pwrite, fsync", samples.ratio(save, "save: raw pwrite, fsync"), 1.1),
        at_most("load: bytes read, of the own ones", samples.most(load, "read") / own, 1.02),
        at_most("load: MiB of memory", samples.most(load, "memory") / MIB, 64),
        at_most("load: times DCP's HF reader", samples.ratio(load, "load: DCP's HF reader"), 1.0),
        at_least("save: DCP + consolidation takes times as long", faster, 2.5),
        at_least("the same with its file flushed, as ours is", flushed, 2.5),
    ]


def lines(results: Results) -> list[str]:
    samples = results.samples
    rounds = len(samples.by_name["load: shardow"])
    rows = [[name, samples.seconds(name), *samples.mib(name, "written", "read", "memory")] for name in samples.by_name]
    return [
        f"{results.gib:g} GiB over {WORLD} ranks, {rounds} rounds; "
        "bytes (by /proc/self/io, sockets included) and peak memory of the rank that has most",
        "",
        *table(("", "seconds, median (range)", "MiB written", "MiB read", "MiB of memory"), rows),
    ]


def all_rounds(gib: float, folder: Path, rounds: int) -> dict[str, list[Usage]]:
    state = sharded(gib)
    usages: dict[str, list[Usage]] = {}
    order = random.Random(0)
    # A shared disk's speed varies most: two are compared closely.
    saves = [*SAVES, *["shardow", "raw pwrite, fsync"] * 2]
    for _ in range(rounds):
        for name in order.sample(saves, len(saves)):
            save = partial(SAVES[name], state, folder / name.replace(" ", "_"))
            usages.setdefault(f"save: {name}", []).append(used(save))
        for name in order.sample(list(LOADS), len(LOADS)):
            usages.setdefault(f"load: {name}", []).append(used(partial(LOADS[name], state, folder / "shardow")))
    return usages


def sharded(gib: float) -> State:
    mesh = init_device_mesh("cpu", (WORLD,))
    width = 4096
    rows = int(gib * 2**30 / 4 / width / 16)
    whole = (torch.full((rows, width), float(i)) for i in range(16))
    tensors = (distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for tensor in whole)
    return {f"layers.{i}.weight": tensor for i, tensor in enumerate(tensors)}


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
    at = dist.get_rank() * sum(array.nbytes for array in local)
    for array in local:
        view = memoryview(array).cast("B")
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
    flush(path.glob("*.safetensors"))


def flush(paths: Iterable[Path]) -> None:
    """On rank 0; costs nothing where it was done."""
    for path in paths if dist.get_rank() == 0 else ():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def gathered(state: State) -> State:
    """On rank 0; every rank takes part, as in get_model_state_dict(full_state_dict=True, cpu_offload=True)."""
    full: State = {}
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        whole = tensor.full_tensor()
        if dist.get_rank() == 0:
            full[name] = whole
    return full


def gather_save_file(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    if full := gathered(state):
        save_file(full, path)


def gather_torch_save(state: State, path: Path) -> None:
    if full := gathered(state):
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
        _local(tensor).copy_(whole.chunk(WORLD)[dist.get_rank()])


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
