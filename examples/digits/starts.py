"""How a larger model of the same kind gets its weights: whole on every rank and then sharded, or without memory, each rank reading its own.

Each way runs in fresh processes, whose memory is sampled.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from . import launch
from .options import Options

WHOLE, OWN = "every rank loads the whole", "every rank reads its own"


def compare(options: Options) -> dict[str, Any]:
    """Timelines of both starts, and the model's size."""
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        path = Path(folder) / "large.safetensors"
        parameters = _write(options, path)
        timelines = {name: launch.run(options.ranks, start, options, path) for name, start in ((WHOLE, whole), (OWN, own))}
    return {"parameters": parameters, "timelines": timelines}


def _large(options: Options) -> Any:
    from .model import DiT

    return DiT(64, 2) if options.quick else DiT(1024, 6)


def _write(options: Options, path: Path) -> int:
    import shardow

    model = _large(options)
    shardow.save(model, path)
    return sum(p.numel() for p in model.parameters())


def _imported() -> None:
    """What both will need, before memory is looked at."""
    import torch
    from torch.distributed.fsdp import fully_shard

    import shardow

    with shardow.meta_init():
        fully_shard(torch.nn.Linear(1, 1))


def whole(options: Options, path: Path) -> Any:
    from safetensors.torch import load_file

    import shardow

    from . import shard

    _imported()
    with shardow.memory.timeline() as timeline:
        model = _large(options)
        timeline.mark("built")
        model.load_state_dict(load_file(path))
        model = shard.wrap(model, "fsdp2")
    del model
    return timeline.ranks


def own(options: Options, path: Path) -> Any:
    import shardow

    from . import shard

    _imported()
    with shardow.memory.timeline() as timeline:
        with shardow.meta_init():
            model = _large(options)
        model = shard.wrap(model, "fsdp2")
        timeline.mark("sharded, on meta")
        shardow.load(model, path)
    del model
    return timeline.ranks
