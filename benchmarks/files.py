"""``python -m benchmarks.files``: save and load of a sharded model on 2 ranks, side by side with what is used elsewhere: seconds, bytes moved and memory at the peak.

Every candidate saves the same FSDP2-sharded mapping, in an order drawn anew each round; reads come from the page cache for all. ``--gib 1`` is the size of the bars.
"""

from __future__ import annotations

import argparse
import multiprocessing
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
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

WORLD = 2
State = dict[str, torch.Tensor]
Way = Callable[[State, Path], object]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.files", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the files go; by default a temporary directory")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        processes = [
            context.Process(target=rank_main, args=(rank, store.port, folder, options.gib, options.rounds, results))
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        show(results.get(), options)
        for process in processes:
            process.join()
        sys.exit(max(process.exitcode or 0 for process in processes))


def rank_main(rank: int, port: int, folder: str, gib: float, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=WORLD)
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, all_rounds(sharded(gib), Path(folder), rounds))
    if rank == 0:
        results.put(everybody)
    dist.barrier()
    dist.destroy_process_group()


def all_rounds(state: State, folder: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(SAVES), len(SAVES)):
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
        f"layers.{i}.weight": distribute_tensor(torch.full((rows, width), float(i)), mesh, [Shard(0)], src_data_rank=None)
        for i in range(16)
    }


def measured(way: Callable[[], object]) -> dict[str, float]:
    """Seconds until all ranks are done; this rank's bytes to and from files, and memory above what it had."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, resident = _io(), _status("VmRSS")
    began = time.perf_counter()
    way()
    dist.barrier()
    after = _io()
    return {
        "seconds": time.perf_counter() - began,
        "written": after["wchar"] - before["wchar"],
        "read": after["rchar"] - before["rchar"],
        "memory": (_status("VmHWM") - resident) * 1024,
    }


def _io() -> dict[str, int]:
    return {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()}


def _status(name: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))


# ---- the candidates


def shardow_save(state: State, path: Path) -> None:
    import shardow

    shardow.save(state, path)


def raw(state: State, path: Path) -> None:
    """The disk's own limit: each rank's bytes into its half of one new file, flushed, which takes the place of the old one."""
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
    "gather, save_file": gather_save_file,
    "gather, torch.save": gather_torch_save,
}
LOADS: dict[str, Way] = {"shardow": shardow_load, "DCP's HF reader": dcp_load, "rank 0, broadcast": broadcast_load}


def show(everybody: list[dict[str, list[dict[str, float]]]], options: argparse.Namespace) -> None:
    print(f"{options.gib} GiB over {WORLD} ranks, {options.rounds} rounds; bytes and memory of the rank that has most")
    print(f"{'':28} {'seconds, median (range)':>26} {'MiB written':>12} {'MiB read':>10} {'MiB of memory':>14}")
    for name in everybody[0]:
        seconds = [max(one[name][i]["seconds"] for one in everybody) for i in range(options.rounds)]
        most = {kind: max(sample[kind] for one in everybody for sample in one[name]) / 2**20 for kind in ("written", "read", "memory")}
        shown = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"{name:28} {shown:>26} {most['written']:12.0f} {most['read']:10.0f} {most['memory']:14.0f}")


if __name__ == "__main__":
    main()
