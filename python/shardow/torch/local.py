"""LocalTensor: one parameter or buffer of a model as this rank holds it; Adapter: who finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardow import _core, _errors

#: Groups of ranks that hold the same elements: (process group, this rank's index in it, its size), to be divided in order.
Replicas = tuple[tuple[dist.ProcessGroup, int, int], ...]


@dataclass(eq=False)
class LocalTensor:
    """``tensor`` is plain, contiguous, region.size elements, without grad, and shares the model's memory; other names of the same tensor are ``aliases``.

    ``sharded`` is False for a tensor that every rank holds whole without any group saying so: a plain parameter beside sharded ones.
    """

    name: str
    tensor: torch.Tensor
    region: _core.Region
    requires_grad: bool
    replicas: Replicas = ()
    sharded: bool = False
    aliases: tuple[str, ...] = ()

    def counts_on(self, rank: int) -> bool:
        """True where files take it from this rank: of whole tensors that no group shares, each rank's its own (batch statistics), they take rank 0's."""
        return self.sharded or bool(self.replicas) or rank == 0


@dataclass(eq=False)
class Slot:
    """Where a module keeps a tensor: ``owner[key]`` was ``recorded`` when it was found.

    ``owner`` is the module's own dict: attribute access is fifteen times slower, and this is read at every update.
    """

    name: str
    owner: dict[str, torch.Tensor | None]
    key: str
    recorded: torch.Tensor


class Adapter(Protocol):
    """One way to hold parameters. A protocol, so that a new sharding is one class beside the others, and nothing else asks what kind a model is.

    A model may mix kinds: every slot belongs to the first adapter that claims it.
    """

    def claims(self, slot: Slot) -> bool:
        """True if this adapter knows what the slot's tensor is."""

    def local(self, slot: Slot) -> LocalTensor | None:
        """The local tensor in a claimed slot; None if it is found elsewhere (FSDP1's flat handles)."""

    def memory(self, slot: Slot) -> torch.Tensor:
        """The plain local tensor in a claimed slot as it is now."""

    def others(self) -> Sequence[LocalTensor]:
        """Local tensors that no slot shows."""

    def reshard(self) -> None:
        """Frees every unsharded copy of the weights, whose next use would show old values. Local."""


def slots_of(name: str, tensors: dict[str, Any]) -> list[Slot]:
    """The slots of one module's parameters or buffers."""
    return [Slot(f"{name}.{key}" if name else key, tensors, key, tensor) for key, tensor in tensors.items() if tensor is not None]


def persistent_buffers(module: nn.Module) -> set[str]:
    return set(module._buffers) - module._non_persistent_buffers_set


def plain_memory(name: str, tensor: torch.Tensor, strided: bool = False) -> torch.Tensor:
    """``tensor``, detached; raises where its elements don't lie in memory that it owns, and one after another unless ``strided``. ``name`` is for messages."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or not (strided or tensor.is_contiguous()):
        how = f"strides {tensor.stride()}" if tensor.layout is torch.strided else str(tensor.layout)
        raise _errors.make(
            "unsupported",
            f"'{name}' of shape {tuple(tensor.shape)} is not contiguous ({how}); make it so first: p.data = p.data.contiguous() for such a parameter p",
        )
    if tensor.numel() and not tensor.data_ptr():
        raise _errors.make(
            "unsupported",
            f"'{name}' is a {type(tensor).__name__}, which has no memory of its own; leave it out of the model, or average its parts",
        )
    return tensor
