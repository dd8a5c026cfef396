"""A small training program as users write it, for test_exit.py.

Its argument is how the model is shared; ranks come from torchrun's variables.
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardow


def main(kind: str) -> None:
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
    ema.full_state_dict(0.9)
    if kind != "plain":
        # Torch's own threads abort some interpreters at exit while a sharded model is alive: docs/torch.md.
        del ema, model, optimizer
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()
    print("done")


main(sys.argv[1])
