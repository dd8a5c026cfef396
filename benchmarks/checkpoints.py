"""``python -m benchmarks.checkpoints``: a whole training checkpoint on 2 ranks, side by side with torch's DCP and
torch_checkpointing.

Model, AdamW's two states and averages, all float32 and sharded by FSDP2, are ``--gib`` together. Measured are the
seconds that training is blocked, the seconds until the checkpoint is durable (every file and its directory flushed, by
the benchmark where a way does not), bytes written, memory at the peak; and how many of ``--kills`` kills -9 of all
ranks, while one place is saved to again and again, leave there nothing that can be read.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks import report
from benchmarks.files import dcp_consolidated, flush
from benchmarks.measure import Bar, at_most
from benchmarks.process import CONTEXT, Samples, Usage, begin, by_rank, started, used

WORLD = 2
LAYERS = 8


class Training:
    """Everything has one value, which a kill's remains are compared with."""

    def __init__(self, gib: float) -> None:
        import shardow

        width = max(8, int((gib * 2**30 / 4 / 4 / LAYERS) ** 0.5) // 8 * 8)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for p in self.model.parameters():
            moments = {"exp_avg": torch.empty_like(p), "exp_avg_sq": torch.empty_like(p)}
            self.optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
        self.ema = shardow.EMA(self.model, decay=0.5)
        self.become(0)

    @torch.no_grad()
    def become(self, value: int) -> None:
        for tensor in self.local_tensors():
            tensor.fill_(value)

    def values(self) -> set[float]:
        """Returns all values that this rank holds."""
        return {value for tensor in self.local_tensors() for value in tensor.unique().tolist()}

    def local_tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        sharded = [*self.model.parameters(), *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))]
        return [tensor.to_local() for tensor in sharded] + [average.local for average in self.averages().values()]

    def averages(self) -> dict[str, Any]:
        averages: dict[str, Any] = self.ema.state_dict()["averages"]
        return averages

    def state_dict(self) -> dict[str, Any]:
        """As torch's own ways want it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "averages": self.averages()}


# ---- how long they take


@dataclass
class Results:
    gib: float
    samples: Samples
    kills: dict[str, tuple[int, int]]  # by candidate: kills, and of these those that left nothing to read


def run(gib: float = 1.0, rounds: int = 5, kills: int = 10, folder: Path | None = None) -> Results:
    with tempfile.TemporaryDirectory(dir=folder) as path:
        lost = {name: (kills, sum(not survives(name, Path(path), seed) for seed in range(kills))) for name in WAYS}
        return Results(gib, Samples.of_ranks(by_rank(WORLD, all_rounds, gib, Path(path), rounds)), lost)


def all_rounds(gib: float, folder: Path, rounds: int) -> dict[str, list[Usage]]:
    training = Training(gib)
    usages: dict[str, list[Usage]] = {name: [] for name in WAYS}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(WAYS), len(WAYS)):
            path = folder / name.replace(" ", "_")
            if dist.get_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
            dist.barrier()
            usages[name].append(measured(WAYS[name].save, training, path))
    close_managers()
    # In the first round is made what is made once: processes, and memory that counts.
    return {
        name: [{**usage, "memory": max(usage["memory"], first["memory"])} for usage in others]
        for name, (first, *others) in usages.items()
    }


def measured(save: Save, training: Training, path: Path) -> Usage:
    """Of one save into a new place: its ``seconds`` end when it is durable."""
    blocked = 0.0

    def whole_save() -> None:
        nonlocal blocked
        began = time.perf_counter()
        wait = save(training, path)
        blocked = time.perf_counter() - began
        wait()
        dist.barrier()
        flush([path.parent, path, *path.rglob("*")])

    return {**used(whole_save), "blocked": blocked}


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
    for version in range(1, 1_000_000):
        training.become(version)
        WAYS[name].save(training, Path(place))()
        dist.barrier()
        if rank == 0:
            saved.value = version


def read_once(rank: int, port: int, name: str, place: str, good: Any) -> None:
    os.setpgrp()
    begin(rank, port, WORLD)
    training = Training(0.02)
    try:
        WAYS[name].load(training, Path(place))
        values: list[Any] = [None] * WORLD
        dist.all_gather_object(values, training.values())
        if len(set.union(*values)) == 1 and values[0] != {0.0}:
            with good.get_lock():
                good.value += 1
    except BaseException as error:  # CheckpointException is one
        print(f"{name} after a kill: {type(error).__name__}", file=sys.stderr)
    os.killpg(0, signal.SIGKILL)  # with the processes that it has started


# ---- the candidates


Save = Callable[[Training, Path], Callable[[], object]]  # gives a function that waits until everything is written


@dataclass
class Way:
    save: Save
    load: Callable[[Training, Path], object]


def done() -> None:
    pass


def shardow_save(training: Training, path: Path, asynchronous: bool) -> Callable[[], object]:
    import shardow

    checkpoints = shardow.Checkpoints(path)
    save = checkpoints.save(1, training.model, training.ema, training.optimizer, asynchronous=asynchronous)
    return save.wait if asynchronous else done


def shardow_load(training: Training, path: Path) -> None:
    import shardow

    shardow.Checkpoints(path).restore(training.model, training.ema, training.optimizer, random=False)


def dcp_save(training: Training, path: Path, asynchronous: bool) -> Callable[[], object]:
    import torch.distributed.checkpoint as dcp

    if asynchronous:
        return dcp.async_save(training.state_dict(), checkpoint_id=path).result  # type: ignore[return-value]
    dcp.save(training.state_dict(), checkpoint_id=path)
    return done


def dcp_load(training: Training, path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = training.state_dict()
    dcp.load(state, checkpoint_id=path)
    model, optimizer = state["model"], state["optimizer"]
    set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def flat(training: Training) -> dict[str, torch.Tensor]:
    """Tensors alone: safetensors have no place for what is no tensor."""
    state = training.state_dict()
    moments = {
        f"{name}.{key}": value
        for name, values in state["optimizer"]["state"].items()
        for key, value in values.items()
        if value.ndim
    }
    parts = {"model": state["model"], "optimizer": moments, "averages": state["averages"]}
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def dcp_consolidated_save(training: Training, path: Path) -> Callable[[], object]:
    """Files that other tools read, as ours are: safetensors in global layout."""
    dcp_consolidated(flat(training), path)
    return done


def dcp_consolidated_load(training: Training, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(flat(training), storage_reader=dcp.HuggingFaceStorageReader(str(path)))


@functools.cache
def manager(asynchronous: bool) -> Any:
    """torch_checkpointing's, as its page on machines without CUDA says; 0.1's direct writes fail on ext4."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    save = AsyncCheckpointSaverConfig(staging_config=staging) if asynchronous else SyncCheckpointSaverConfig()
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager.Config(save=save, storage_config=storage).build()


def close_managers() -> None:
    for asynchronous in (True, False) if manager.cache_info().currsize else ():
        manager(asynchronous).close()


def payload(training: Training) -> dict[str, Any]:
    """Averages as plain tensors, which load at the same number of ranks alone."""
    averages = {name: average.local for name, average in training.averages().items()}
    return {**training.state_dict(), "averages": averages}


def torch_checkpointing_save(training: Training, path: Path, asynchronous: bool) -> Callable[[], object]:
    """Into an empty place, since it refuses to write over files: "Delete it explicitly if it is meant to be replaced".
    Training may change weights when the lock can be had."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    future = manager(asynchronous).save(str(path), payload(training))
    with manager(asynchronous).lock():
        return done if future is None else future.result


def torch_checkpointing_load(training: Training, path: Path, asynchronous: bool) -> None:
    manager(asynchronous).load(str(path), into=payload(training))


WAYS: dict[str, Way] = {
    "shardow, asynchronous": Way(partial(shardow_save, asynchronous=True), shardow_load),
    "shardow": Way(partial(shardow_save, asynchronous=False), shardow_load),
    "DCP, asynchronous": Way(partial(dcp_save, asynchronous=True), dcp_load),
    "DCP": Way(partial(dcp_save, asynchronous=False), dcp_load),
    "DCP, consolidated": Way(dcp_consolidated_save, dcp_consolidated_load),
}
if importlib.util.find_spec("torch_checkpointing"):
    for suffix, asynchronous in (", asynchronous", True), ("", False):
        WAYS[f"torch_checkpointing{suffix}"] = Way(
            partial(torch_checkpointing_save, asynchronous=asynchronous),
            partial(torch_checkpointing_load, asynchronous=asynchronous),
        )


# ---- the tables


def bars(results: Results) -> list[Bar]:
    """Returns what is asked of whole checkpoints."""
    samples, ours = results.samples, "shardow, asynchronous"
    rivals = [name for name in WAYS if "asynchronous" in name and "shardow" not in name]
    blocked = max(samples.ratio(ours, name, "blocked") for name in rivals)
    lost = results.kills["shardow"][1] + results.kills[ours][1]
    return [
        at_most("checkpoint: blocked, times the best asynchronous rival", blocked, 1.0),
        at_most("checkpoint: durable, times DCP", samples.ratio("shardow", "DCP"), 1 / 3),
        at_most("checkpoint: durable, times DCP, consolidated", samples.ratio("shardow", "DCP, consolidated"), 1 / 3),
        at_most("checkpoint: kills that left nothing", lost, 0),
    ]


def lines(results: Results) -> list[str]:
    samples = results.samples
    rows = []
    for name, (kills, lost) in results.kills.items():
        seconds = (samples.seconds(name, "blocked"), samples.seconds(name))
        rows.append([name, *seconds, *samples.mib(name, "written", "memory"), f"{lost} of {kills}"])
    head = ("", "seconds blocked, median (range)", "seconds to durable", "MiB written", "MiB of memory")
    return [
        f"Whole checkpoints: model, AdamW and averages, {results.gib:g} GiB over {WORLD} ranks, "
        f"{len(samples.by_name['shardow'])} rounds; bytes and peak memory of the rank that has most; kills -9 of all "
        "ranks while one place is saved to again and again",
        "",
        *report.table([*head, "kills that left nothing to read"], rows),
    ]


if __name__ == "__main__":
    report.main(sys.modules[__name__])
