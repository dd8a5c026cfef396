"""No rank holds more than its own shards when a model starts.

That is resident memory at its peak, by the kernel's count. benchmarks/init.py has the large model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow

WIDTH, LAYERS, WORLD = 2048, 12, 3
LAYER = WIDTH * WIDTH * 4  # bytes
OWN = LAYERS * LAYER // WORLD
SLACK = 40 << 20  # messages, buffers of reading, code that is used for the first time


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def started(how: str, path: str) -> list[int]:
    """Bytes above what was there at the peak, of every rank."""
    source: Any = {"file": path, "init": None}.get(how)
    if how == "rank 0" and dist.get_rank() == 0:
        source = {name: tensor.clone() for name, tensor in load_file(path).items()}
    mesh = init_device_mesh("cpu", (WORLD,))
    shardow.materialize(fully_shard(on_meta(nn.Linear, 8, 8), mesh=mesh), None)  # loads what is loaded once
    with shardow.memory.timeline() as timeline:
        model = on_meta(build)
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        shardow.materialize(model, source)
    assert sum(p._local_tensor.nbytes for p in model.parameters()) <= OWN + LAYER  # type: ignore[operator]
    return [timeline.peaks()[f"rank{rank}/above"] for rank in range(WORLD)]


def on_meta(make: Any, *args: int) -> Any:
    with shardow.meta_init():
        return make(*args)


@pytest.mark.parametrize(("how", "beyond"), [("file", 0), ("rank 0", 0), ("init", LAYER)])
def test_the_peak_is_the_own_shards(how: str, beyond: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shardow.save(build(), tmp_path / "model.safetensors")
    uneven = LAYERS * 4 * WIDTH  # a row more on some ranks
    # Takes fresh processes: memory that earlier cases freed would serve this one, or count in its beginning.
    pool = ranks.Pool()
    try:
        peaks = pool.run(WORLD, started, how, str(tmp_path / "model.safetensors"))
    finally:
        pool.stop()
    for above in peaks:
        assert all(one <= OWN + uneven + beyond + SLACK for one in above), [one / 2**20 for one in above]
