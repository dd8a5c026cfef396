"""How a larger model of the same kind gets its weights: whole on every rank and then sharded, or without memory, each
rank reading its own.

Each way runs in fresh processes, whose memory is sampled.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import shardow

from . import launch, shard
from .model import DiT
from .options import Options


def compare(options: Options) -> dict[str, Any]:
    """Timelines of both starts, and the model's size."""
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        path = Path(folder) / "large.safetensors"
        model = _large(options)
        parameters = sum(p.numel() for p in model.parameters())
        shardow.save(model, path)
        del model
        ways = {"every rank loads the whole": whole, "every rank reads its own": own}
        timelines = {name: launch.run(options.ranks, start, options, path) for name, start in ways.items()}
    return {"parameters": parameters, "timelines": timelines}


def _large(options: Options) -> DiT:
    return DiT(64, 2) if options.quick else DiT(1024, 6)


def whole(options: Options, path: Path) -> Any:
    from safetensors.torch import load_file

    _first_use()
    with shardow.memory.timeline() as timeline:
        model: torch.nn.Module = _large(options)
        timeline.mark("built")
        model.load_state_dict(load_file(path))
        model = shard.wrap(model, "fsdp2")
    del model
    return timeline.ranks


def own(options: Options, path: Path) -> Any:
    _first_use()
    with shardow.memory.timeline() as timeline:
        with shardow.meta_init():
            model: torch.nn.Module = _large(options)
        model = shard.wrap(model, "fsdp2")
        timeline.mark("sharded, on meta")
        shardow.load(model, path)
    del model
    return timeline.ranks


def _first_use() -> None:
    """What both ways import when they first need it, before memory is looked at."""
    from torch.distributed.fsdp import fully_shard

    with shardow.meta_init():
        fully_shard(torch.nn.Linear(1, 1))
