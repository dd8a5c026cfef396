"""A small training program as users write it, with every verb, for test_exit.py.

Its arguments are how the model is shared and a folder; ranks come from torchrun's variables.
"""

from __future__ import annotations

import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardow


def use_every_verb(model: nn.Module, ema: shardow.EMA, optimizer: torch.optim.Optimizer, folder: str) -> None:
    shardow.save(model, f"{folder}/model")
    shardow.async_save(model, f"{folder}/again").wait()
    shardow.load(model, f"{folder}/model")
    shardow.full_state_dict(model)
    shardow.merge([f"{folder}/model", f"{folder}/again"], f"{folder}/mean")
    ema.save(f"{folder}/averages")
    ema.async_save(f"{folder}/averages").wait()
    ema.load(f"{folder}/averages")
    ema.export(f"{folder}/export", decay=0.9)
    ema.detach()
    for _ in range(2):
        ema.snapshot(f"{folder}/snapshots", every=1)
        ema.update()
    ema.load_state_dict(ema.state_dict())
    ema.full_state_dict(0.9)
    ema.copy_to(model, 0.9)
    ema.feed_back(0.9)
    ema.stats()
    checkpoints = shardow.Checkpoints(f"{folder}/run", keep=1)
    for step in range(3):
        checkpoints.save(step, model, ema, optimizer, state={"step": step})
    checkpoints.save(3, model, ema, optimizer, asynchronous=True)
    assert checkpoints.latest() == 3
    checkpoints.restore(model, ema, optimizer)
    ema.reset()


def come_late(model: nn.Module, ema: shardow.EMA, folder: str) -> None:
    """Calls each verb; the last rank comes some seconds after the others."""
    checkpoints = shardow.Checkpoints(f"{folder}/run")

    def swap() -> None:
        with ema.swapped(0.9):
            pass

    for verb in (
        lambda: shardow.save(model, f"{folder}/model"),
        lambda: shardow.async_save(model, f"{folder}/again").wait(),
        lambda: shardow.load(model, f"{folder}/model"),
        lambda: shardow.materialize(model, f"{folder}/model"),
        lambda: shardow.merge([f"{folder}/model", f"{folder}/again"], f"{folder}/mean"),
        lambda: shardow.full_state_dict(model),
        lambda: ema.save(f"{folder}/averages"),
        lambda: ema.load(f"{folder}/averages"),
        swap,
        lambda: checkpoints.save(1, model, ema),
        lambda: checkpoints.restore(model, ema),
    ):
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(float(os.environ["LATE"]))
        verb()


def main(kind: str, folder: str) -> None:
    if kind != "plain":
        dist.init_process_group("gloo")
    # Large enough for the engine to start threads.
    model: nn.Module = nn.Sequential(nn.Linear(1100, 1000), nn.Linear(1000, 8))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model)
    ema = shardow.EMA(model, [0.9, 0.999], threads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema.attach(optimizer)
    for _ in range(3):
        model(torch.randn(4, 1100)).sum().backward()
        optimizer.step()
    with ema.swapped(0.9):
        model(torch.randn(4, 1100))
    if "LATE" in os.environ:
        come_late(model, ema, folder)
    else:
        use_every_verb(model, ema, optimizer, folder)
    if kind != "plain":
        # Torch's own threads abort some interpreters at exit while a sharded model is alive: docs/torch.md.
        del ema, model, optimizer
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    print("done")


main(*sys.argv[1:])
