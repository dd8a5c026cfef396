"""Small models with awkward sizes, every way to share them among ranks, and a way to look at the whole weights that is
not ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shardow

INPUTS = 6
#: Where models are shared; a process of ranks may name another device.
DEVICE = "cpu"


def make(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Rows 7, 5, 1 and 4: uneven on 2 to 4 ranks, and empty on some."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(INPUTS, 7),
        nn.LayerNorm(7),
        nn.ReLU(),
        nn.Linear(7, 5),
        nn.ReLU(),
        nn.Linear(5, 1),
        nn.Linear(1, 4),
        nn.BatchNorm1d(4),
    )
    return model.to(dtype)


def make_even(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Sizes that tensor parallelism divides."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4)).to(dtype)


def _units(model: nn.Module) -> list[str]:
    """The children that are wrapped on their own: of models that are like those above two, else all but the first that
    has weights.
    """
    named = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    return ["0", "3"] if {"0", "3"} <= set(named) else named[1:]


Units = Callable[[nn.Module], list[str]]


def fsdp1(
    strategy: ShardingStrategy, use_orig_params: bool, units: Units = _units
) -> Callable[[nn.Module, int], nn.Module]:
    def apply(model: nn.Module, world: int) -> nn.Module:
        options = {
            "device_id": torch.device(DEVICE), "use_orig_params": use_orig_params, "sharding_strategy": strategy,
            "param_init_fn": shardow.to_empty
        }  # fmt: skip
        if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2):
            options["device_mesh"] = init_device_mesh(DEVICE, (2, world // 2))
        for name in units(model):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        return FullyShardedDataParallel(model, **options)

    return apply


def fsdp2(model: nn.Module, world: int, units: Units = _units, **options: Any) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (world,))
    for name in units(model):
        fully_shard(getattr(model, name), mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hsdp(model: nn.Module, world: int, units: Units = _units) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for name in units(model)[:1]:
        fully_shard(getattr(model, name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp_fsdp2(model: nn.Sequential, world: int) -> nn.Module:
    mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(
        model,
        mesh["tp"],
        {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())},
    )
    return fully_shard(model, mesh=mesh["dp"])


def _wrapped(model: nn.Sequential, world: int) -> nn.Module:
    """What a name goes through in practice: checkpoint wrappers, FSDP2, torch.compile (not run: its wrapper
    renames)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model[0] = checkpoint_wrapper(model[0])
    model[3] = checkpoint_wrapper(model[3])
    fsdp2(model, world)
    return torch.compile(model, backend="eager")


PARALLEL: dict[str, Callable[[Any, int], nn.Module]] = {
    "plain": lambda model, world: model,
    "ddp": lambda model, world: DistributedDataParallel(model),
    "fsdp1": fsdp1(ShardingStrategy.FULL_SHARD, True),
    "fsdp1-flat": fsdp1(ShardingStrategy.FULL_SHARD, False),
    "fsdp1-grad-op": fsdp1(ShardingStrategy.SHARD_GRAD_OP, True),
    "fsdp1-no-shard": fsdp1(ShardingStrategy.NO_SHARD, True),
    "fsdp1-hybrid": fsdp1(ShardingStrategy.HYBRID_SHARD, True),
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp+fsdp2": _tp_fsdp2,
    "wrapped": _wrapped,
}

_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def build(kind: str, world: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    model = make_even(dtype, seed) if kind == "tp+fsdp2" else make(dtype, seed)
    return PARALLEL[kind](model if DEVICE == "cpu" else model.to(DEVICE), world)


def plain_twin(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_even(dtype) if kind == "tp+fsdp2" else make(dtype)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Fresh full tensors by clean name, through torch's own gathering. Collective; leaves FSDP2 resharded."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {_clean(name): p.detach().clone() for name, p in model.named_parameters()}
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {
        _clean(name): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def _clean(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name.removeprefix("module.")


def batch(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, INPUTS, generator=generator).to(dtype)
