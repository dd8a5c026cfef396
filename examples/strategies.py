"""Draws the memory of two ranks while a model starts under twinkle's two strategies, and under accelerate's own
loading.

Run: python -m examples.strategies PICTURE [MILLIONS OF PARAMETERS].

accelerate does no FSDP on CPUs by itself; here it is told that it does. Needs accelerate and matplotlib.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardow
from shardow.compat.twinkle import AccelerateStrategy, NativeFSDPStrategy

from .digits import launch

RANKS, WIDTH = 2, 2048
STARTS = ("NativeFSDPStrategy", "AccelerateStrategy", "accelerate alone")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)


def main(picture: Path, millions: int) -> None:
    blocks = max(1, millions * 1_000_000 // WIDTH**2)
    timelines = {name: shardow.memory.Timeline(launch.run(RANKS, _start, name, blocks)) for name in STARTS}
    shardow.memory.draw(timelines, picture)
    for name, timeline in timelines.items():
        above = {key: value for key, value in timeline.peaks().items() if key.endswith("above")}
        print(name, {key: f"{value / 2**20:.0f} MiB" for key, value in above.items()})


def _start(name: str, blocks: int) -> Any:
    """What all ranks' memory did."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    warnings.simplefilter("ignore")
    strategy = _strategy(name, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))
    with shardow.memory.timeline() as timeline:
        with torch.device("meta"):
            model = nn.Sequential(*[Block() for _ in range(blocks)])
        # as from_pretrained() in pretrained_load_context(): on rank 0 alone there will be something
        model.to_empty(device="cpu")
        if rank == 0:
            for parameter in model.parameters():
                nn.init.normal_(parameter)
        timeline.mark("loaded")
        optimizer = torch.optim.AdamW(model.parameters())
        wrap = strategy.accelerator.prepare if name == STARTS[2] else strategy.wrap_model
        wrap(model, optimizer)
        timeline.mark("wrapped")
    return timeline.ranks


def _strategy(name: str, mesh: Any) -> Any:
    if name == STARTS[0]:
        return NativeFSDPStrategy(mesh, "no", memory_efficient_init=True)
    from accelerate import DistributedType, PartialState

    units = {"transformer_cls_names_to_wrap": ["Block"]}
    strategy = AccelerateStrategy(mesh, "no", fsdp_config=units, memory_efficient_init=True)
    state = strategy.accelerator.state
    state.fsdp_plugin, state.distributed_type = strategy.fsdp_plugin, DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = state.distributed_type
    return strategy


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 63)
