"""Models shared among ranks in several ways, that take the same steps as a plain one: of tests/models.py by torch's own
means, of walks into their memory, which is quicker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import models
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardow.distributed.gather import extract_region
from shardow.sharding.view import find

KINDS = ("fsdp2", "hsdp", "fsdp1", "ddp")


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """(plain, shared), equal. Of tests/models.py; the plain one has all of it on every rank."""
    plain = models.plain_twin(kind, dtype)
    return plain, models.PARALLEL[kind](copy.deepcopy(plain), dist.get_world_size())


def walk(plain: nn.Module, shared: nn.Module, steps: int) -> Iterator[int]:
    """walks.walk() of the plain model, and after it in the shared one."""
    for step in walks.walk(plain, "mlp", steps):
        mirror(plain, shared)
        yield step


def train(
    plain: nn.Module, shared: nn.Module, steps: int, made: Sequence[tuple[Any, Any]], update: str = "update"
) -> None:
    """Of each pair of averages the first sees the steps of the plain model, the second those of the shared one."""
    for _ in walk(plain, shared, steps):
        for theirs, mine in made:
            getattr(theirs, update)(plain)
            getattr(mine, update)(shared)


@torch.no_grad()
def mirror(plain: nn.Module, shared: nn.Module) -> None:
    """The shared model gets the plain one's weights and buffers, by torch's own means."""
    if isinstance(shared, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(shared):
            _copy(plain, shared)
    else:
        for module in shared.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        _copy(plain, shared)


def _copy(plain: nn.Module, shared: nn.Module) -> None:
    for whole, p in zip(plain.parameters(), shared.parameters(), strict=True):
        p.copy_(distribute_tensor(whole.detach(), p.device_mesh, p.placements) if isinstance(p, DTensor) else whole)
    for whole, buffer in zip(plain.buffers(), shared.buffers(), strict=True):
        buffer.copy_(whole)


def whole(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Of walks. FSDP takes no numbers and no channels_last."""
    model = walks.model(name, dtype).to(memory_format=torch.contiguous_format)
    if name == "blocks":
        model.scale = nn.Parameter(torch.full((1,), 1.5, dtype=dtype))
    return model


def kinds(world: int) -> tuple[str, ...]:
    """All that make sense: with one rank in each shard group torch turns hybrid FSDP1 into ranks that know nothing of
    each other.
    """
    return ("plain", *KINDS, "fsdp1-flat", *(("fsdp1-hybrid",) if world > 2 else ()))


def copied(kind: str, model: nn.Module, world: int) -> nn.Module:
    """A copy of ``model``, shared."""
    twin = copy.deepcopy(model)
    if kind == "fsdp1-flat":
        twin.requires_grad_(True)  # flat parameters are trained whole or not at all
    return models.PARALLEL[kind](twin, world)


def setter(model: nn.Module, wholes: nn.Module) -> Callable[[], None]:
    """A function that gives the shared model the weights that the whole one has then. Local."""
    values = dict(wholes.named_parameters())
    pairs = [(one.tensor.view(-1), one.region, values[one.name].detach()) for one in find(model).parameters]

    def follow() -> None:
        for memory, region, value in pairs:
            extract_region(value, region, memory)

    return follow


def by_layers(kind: str, model: Any) -> Any:
    """The mlp of walks, shared by torch's own means; "fsdp1" has its original parameters, "fsdp1-flat" not."""
    if kind == "fsdp2":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        return fully_shard(model)
    if kind.startswith("ddp"):
        return DistributedDataParallel(model)
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=kind == "fsdp1")
