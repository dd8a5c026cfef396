"""A model shared among ranks in several ways, that takes the same steps as a plain one beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import models
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

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
        if isinstance(p, DTensor):
            p.copy_(_like(whole, p))
        else:
            p.copy_(whole)
    for whole, buffer in zip(plain.buffers(), shared.buffers(), strict=True):
        buffer.copy_(whole)


def _like(whole: torch.Tensor, p: DTensor) -> DTensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.detach(), p.device_mesh, p.placements)
