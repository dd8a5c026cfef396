"""Collects a rank's part of a module or of a mapping as the file engine takes it: one LocalShard per tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow import _core
from shardow.base import plain
from shardow.base.checks import instance, invalid
from shardow.distributed.gather import LocalShard
from shardow.sharding.dtensor import region_of
from shardow.sharding.extra_state import KEY, extra_states, restore
from shardow.sharding.groups import group_of_model
from shardow.sharding.local import memory_of, refuse_odd
from shardow.sharding.partial_tensor import PartialTensor
from shardow.sharding.view import ModelView, find

Saveable = nn.Module | Mapping[str, Any]  # of tensors, and plain values
VALUES = "shardow.values"  # a header's key, for a mapping's plain values in JSON


@dataclass
class LocalState:
    """``parts`` are contiguous memory: the tensors' own, or copies where that is not contiguous. ``copied`` lists
    (tensor, copy) for put_back(). ``names`` are all names of each part."""

    parts: list[LocalShard]
    names: dict[str, tuple[str, ...]]
    process_group: dist.ProcessGroup | None
    view: ModelView | None = None
    copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)  # a module's extra states by name
    values: dict[str, Any] = field(default_factory=dict)  # a mapping's plain values
    filled: dict[str, Any] = field(default_factory=dict)  # those of both that put_back() sets
    mapping: MutableMapping[str, Any] | None = None
    others: Collection[str] = ()  # further names of the target: a source may have or lack them

    def memory(self) -> list[torch.Tensor]:
        """Returns the memory of the parts and of the tensors that some of them are copies of."""
        return [*(part.flat for part in self.parts), *(tensor for tensor, _ in self.copied)]

    def put_back(self) -> None:
        for target, filled in self.copied:
            target.copy_(filled.view(target.shape))
        if self.mapping is not None:
            self.mapping.update(self.filled)
        if self.view is not None:
            restore(self.view.model, self.filled)
            self.view.written()


def group_of(state: Saveable, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the ranks that share a module, or a mapping's tensors: all ranks where one of these is sharded."""
    if isinstance(state, nn.Module):
        return group_of_model(state, group)
    shared = isinstance(state, Mapping) and any(map(_is_shared, state.values()))
    return dist.group.WORLD if group is None and shared and dist.is_initialized() else group


def held_by(state: Saveable, group: dist.ProcessGroup | None, saving: bool) -> LocalState:
    """Returns this rank's part of ``state``. ``group``: for a mapping, the result of group_of(). ``saving``: of whole
    tensors that no group shares, only rank 0's count.
    """
    if isinstance(state, nn.Module):
        return _of_module(state, group, saving)
    if isinstance(state, Mapping):
        return _of_mapping(state, group, saving)
    raise invalid(f"{type(state).__name__} is neither a module nor a mapping of names to tensors")


def values_for_file(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns a header's metadata that has the plain ``values``."""
    return {VALUES: json.dumps(plain.encode(dict(values), "a value"), allow_nan=False)} if values else {}


def values_in_file(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Returns the plain values of a file by name."""
    values: dict[str, Any] = plain.decode(json.loads(metadata.get(VALUES, "{}")))
    return values


def _of_module(model: nn.Module, group: dist.ProcessGroup | None, saving: bool) -> LocalState:
    view = find(model, group=group)
    view.reshard(refuse_written=True)
    rank = 0 if view.process_group is None else dist.get_rank(view.process_group)
    tensors = [local for local in [*view.parameters, *view.buffers] if not saving or local.counts_on(rank)]
    held = LocalState([], {local.name: (local.name, *local.aliases) for local in tensors}, view.process_group, view)
    held.parts = [LocalShard(local.name, flat_of(local.tensor, held.copied), local.region) for local in tensors]
    held.extra = extra_states(model)
    return held


def _of_mapping(state: Mapping[str, Any], group: dist.ProcessGroup | None, saving: bool) -> LocalState:
    first = group is None or dist.get_rank(group) == 0
    held = LocalState([], {name: (name,) for name in state}, group)
    for name, tensor in state.items():
        instance("a tensor's name", name, str)
        if saving and name.endswith(KEY) and not isinstance(tensor, torch.Tensor):
            held.extra[name] = tensor
            continue
        if not isinstance(tensor, torch.Tensor):
            plain.encode(tensor, f"'{name}'")  # raises for values that no file takes
            held.values[name] = tensor
            continue
        if _is_shared(tensor) or first or not saving:
            held.parts.append(_part(name, tensor, held.copied))
    if held.values and not saving:
        if not isinstance(state, MutableMapping):
            raise invalid(f"'{next(iter(held.values))}' is a plain value, and is replaced by the file's: give a dict")
        held.mapping = state
    return held


def _is_shared(tensor: object) -> bool:
    return isinstance(tensor, PartialTensor) or hasattr(tensor, "_local_tensor")


def _part(name: str, tensor: Any, copied: list[tuple[torch.Tensor, torch.Tensor]]) -> LocalShard:
    if isinstance(tensor, PartialTensor):
        return LocalShard(name, tensor.local, tensor.region)
    local = memory_of(tensor)
    refuse_odd(name, local)
    region = region_of(name, tensor) if hasattr(tensor, "_local_tensor") else _core.Region.whole(list(tensor.shape))
    if local.is_meta:
        raise invalid(f"'{name}' is on meta: it has no memory; give it some first: model.to_empty(device=...)")
    return LocalShard(name, flat_of(local, copied), region)


def flat_of(local: torch.Tensor, copied: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Returns the elements one after another: the tensor's own memory, or a copy, which is added to ``copied``."""
    flat = local.resolve_conj().resolve_neg().contiguous().view(-1)
    if not local.is_contiguous() or local.is_conj() or local.is_neg():
        copied.append((local, flat))
    return flat
