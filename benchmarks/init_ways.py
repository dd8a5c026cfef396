"""The ways in which a model gets its weights on several ranks, ours and others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORLD = 4


WIDTH, LAYERS, WORDS = 2048, 8, 32768  # 537 M parameters; the largest tensor is the embedding, 256 MiB


Way = Callable[[int, int, Path], nn.Module]  # (width, layers, file)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        a, b, c = self.mix(self.norm(hidden)).chunk(3, -1)
        hidden = hidden + self.out(a * b.sigmoid() + c)
        mixed: torch.Tensor = hidden + self.down(self.up(hidden).relu())
        return mixed


def build(width: int, layers: int) -> nn.Sequential:
    words = WORDS * width // WIDTH
    return nn.Sequential(
        nn.Embedding(words, width), *(Block(width) for _ in range(layers)), nn.Linear(width, words, bias=False)
    )


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for unit in model.children():
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shardow_file(width: int, layers: int, path: Path) -> nn.Module:
    import shardow

    with shardow.meta_init():
        model = build(width, layers)
    shard(model)
    shardow.materialize(model, path)
    return model


def shardow_first_rank(width: int, layers: int, path: Path) -> nn.Module:
    import shardow

    with shardow.meta_init():
        model = build(width, layers)
    shard(model)
    shardow.materialize(model, first_rank_loads(path))
    return model


def shardow_per_module(width: int, layers: int, path: Path) -> nn.Module:
    """From no file: each module's reset_parameters(), whole, on every rank."""
    import shardow

    with shardow.meta_init():
        model = build(width, layers)
    shard(model)
    shardow.materialize(model)
    return model


def set_model_state_dict(width: int, layers: int, path: Path) -> nn.Module:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = on_meta(width, layers)
    shard(model)
    model.to_empty(device="cpu")
    set_model_state_dict(
        model,
        first_rank_loads(path) or {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True),
    )
    return model


def accelerate(width: int, layers: int, path: Path) -> nn.Module:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    class Accelerator:  # all that it asks of one
        is_main_process = dist.get_rank() == 0

    model = on_meta(width, layers)
    shard(model)
    fsdp2_load_full_state_dict(Accelerator(), model, first_rank_loads(path) or {})
    return model


def everybody_loads(width: int, layers: int, path: Path) -> nn.Module:
    from safetensors.torch import load_file

    model = on_meta(width, layers).to_empty(device="cpu")
    model.load_state_dict(load_file(path))
    return shard(model)


def everybody_maps(width: int, layers: int, path: Path) -> nn.Module:
    """The whole model mapped into each rank, whose own part alone is touched; the file's tensors become the
    parameters."""
    from safetensors.torch import load_file

    model = on_meta(width, layers)
    model.load_state_dict(load_file(path), assign=True)
    return shard(model)


def on_meta(width: int, layers: int) -> nn.Module:
    with torch.device("meta"):
        return build(width, layers)


def first_rank_loads(path: Path) -> dict[str, torch.Tensor] | None:
    """Mapped, as load_file() gives it: pages count where they are touched."""
    from safetensors.torch import load_file

    if dist.get_rank() != 0:
        return None
    source = load_file(path)
    held_first.append(sum(tensor.nbytes for tensor in source.values()))
    return source


held_first: list[int] = []
WAYS: dict[str, Way] = {
    "shardow: every rank reads its own": shardow_file,
    "every rank loads the whole": everybody_loads,
    "every rank maps the whole": everybody_maps,
    "shardow: from rank 0": shardow_first_rank,
    "set_model_state_dict, broadcast_from_rank0": set_model_state_dict,
    "accelerate, fsdp2_load_full_state_dict": accelerate,
}


RARE: dict[str, Way] = {
    "shardow: by initialisation, module by module": shardow_per_module
}  # nobody to compare with: once is enough
DRAWN = [*list(WAYS)[1::-1], *list(WAYS)[4:2:-1]]
