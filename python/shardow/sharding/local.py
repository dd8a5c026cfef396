"""Defines LocalTensor, a parameter or buffer of a model as this rank holds it, and Adapter, which finds hidden ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow import _core
from shardow.base.checks import unsupported

#: Groups of ranks that hold the same elements: (process group, this rank's index in it, its size), to be divided in
#: order.
Replicas = tuple[tuple[dist.ProcessGroup, int, int], ...]


def replicas_in(group: dist.ProcessGroup | None) -> Replicas:
    """Returns the replicas of what all ranks of ``group`` hold."""
    if group is None or dist.get_world_size(group) == 1:
        return ()
    return ((group, dist.get_rank(group), dist.get_world_size(group)),)


def replicas_by_parameter(model: nn.Module, group: dist.ProcessGroup | None) -> dict[int, Replicas]:
    """Returns the replicas of whole parameters by their ids: those of ``group``, or in a DDP module those of its group.
    Only parameters have replicas. Buffers differ between DDP's ranks, since batch statistics are each rank's own:
    dividing them, or handing out another rank's, would mix ranks."""
    known = dict.fromkeys(map(id, model.parameters()), replicas_in(group))
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ignored = module.parameters_to_ignore
            equal = (parameter for name, parameter in module.module.named_parameters() if name not in ignored)
            known |= dict.fromkeys(map(id, equal), replicas_in(module.process_group))
    return known


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain local tensor; to_local() makes a new view, with a grad_fn, each time."""
    memory: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return memory


@dataclass(eq=False, slots=True)
class LocalTensor:
    """``tensor`` has region.size elements, in the region's order, without grad, and shares the model's memory; it may
    be strided, and odd where find() allows that. Other names of the same tensor are ``aliases``. ``sharded`` is False
    for a tensor that every rank holds whole though no group says so: a plain parameter beside sharded ones. ``shown``
    has the gradient: a slot's tensor, or a parameter that is shown instead, whose elements ``within`` these are.
    ``hidden`` returns the current memory of a tensor that no slot shows."""

    name: str
    tensor: torch.Tensor
    region: _core.Region
    shown: Any
    replicas: Replicas = ()
    sharded: bool = False
    aliases: tuple[str, ...] = ()
    hidden: Callable[[], torch.Tensor] | None = None
    within: slice = field(default_factory=lambda: slice(None))

    @property
    def requires_grad(self) -> bool:
        return bool(self.shown.requires_grad)

    def memory(self) -> torch.Tensor:
        """Returns the tensor in the memory that it has now."""
        return memory_of(self.shown) if self.hidden is None else self.hidden()

    def is_in_order(self) -> bool:
        """Returns whether the memory holds the elements one after another."""
        return self.tensor.is_contiguous() and not self.tensor.is_neg()

    def flat(self) -> torch.Tensor:
        """Returns the elements in order, 1-D: the tensor's own memory, or a copy where it has another order."""
        return self.tensor.resolve_conj().resolve_neg().reshape(-1)

    def put(self, flat: torch.Tensor) -> None:
        """Writes the result of flat(), changed since, into the model where it was a copy."""
        if (flat.numel() and flat.data_ptr() != self.tensor.data_ptr()) or not self.tensor.is_contiguous():
            self.tensor.copy_(flat.view(self.tensor.shape))

    def counts_on(self, rank: int) -> bool:
        """Returns whether files take the tensor from this rank. Of whole tensors that no group shares, which are each
        rank's own (batch statistics), they take rank 0's."""
        return self.sharded or bool(self.replicas) or rank == 0


class Adapter:
    """Base class of what finds parameters that a wrapper keeps where no slot shows them; no other code depends on how a
    model keeps its weights. ``hidden``: the local tensors; ``owned``: ids of the parameters that are shown instead."""

    hidden: Sequence[LocalTensor] = ()
    owned: Set[int] = frozenset()

    def shards(self) -> Iterable[torch.Tensor]:
        """Returns tensors whose addresses show whether anything hidden moved."""
        return ()

    def shown(self) -> Sequence[torch.Tensor]:
        """Returns the original parameters whose addresses show whether they were put elsewhere."""
        return ()

    def in_place(self) -> bool:
        """Returns whether the weights are in the memory that the wrapper returns to."""
        return True

    def reshard(self, refuse_written: bool = False) -> None:
        """Frees every unsharded copy of the weights, whose next use would show old values. ``refuse_written``: raises
        where a copy was written whose values have not reached the weights yet. Local.
        """

    def written(self) -> None:
        """Tells autograd that hidden weights were written, and frees copies of the old ones. Local."""


def oddity(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor's elements can't be read in its own memory; None: they can."""
    if tensor.is_nested:
        return "is nested"
    if tensor.layout is not torch.strided:
        return f"of shape {tuple(tensor.shape)} is {tensor.layout}"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype})"
    if type(tensor) not in (torch.Tensor, nn.Parameter) and tensor.numel() and not tensor.data_ptr():
        return f"is a {type(tensor).__name__}, which has no memory of its own"
    return None


def refuse_odd(name: str, tensor: torch.Tensor) -> None:
    if odd := oddity(tensor):
        raise unsupported(f"'{name}' {odd}; leave it out, or give its to_dense(), or its parts as dense tensors")


def refuse_all_odd(locals_: Iterable[LocalTensor]) -> None:
    for local in locals_:
        refuse_odd(local.name, local.tensor)


def refuse_unaverageable(local: LocalTensor) -> None:
    """Raises where no average can follow the memory: strides are fine, but no two weights may share an element."""
    if odd := oddity(local.tensor):
        hint = "leave it out: params= takes a predicate of (name, parameter), buffers='copy' averages no buffer"
        raise unsupported(f"'{local.name}' {odd}, and can't be averaged; {hint}")
    refuse_expanded(local.name, local.tensor)


def refuse_expanded(name: str, tensor: torch.Tensor) -> None:
    """Raises where a write to the tensor would write over itself."""
    if tensor.is_contiguous():
        return
    reach = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride < reach and tensor.numel():
            why = f"has strides {tensor.stride()}: some of its elements share memory"
            hint = "give it memory of its own first: p.data = p.data.contiguous()"
            raise unsupported(f"'{name}' of shape {tuple(tensor.shape)} {why}; {hint}")
        reach = stride * (size - 1) + reach
