"""What a rank holds of a module or of a mapping, as the file engine takes it: one Part per tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow import _core
from shardow._gather import Part
from shardow._options import invalid
from shardow.torch.find import ModelView, find
from shardow.torch.piece import Piece
from shardow.torch.regions import region_of

Saveable = nn.Module | Mapping[str, torch.Tensor]


@dataclass
class Held:
    """``parts`` are contiguous memory: the tensors' own, or a copy where theirs is not, which ``copied`` tells how to put back. ``names`` are all names of each part."""

    parts: list[Part]
    names: dict[str, tuple[str, ...]]
    process_group: dist.ProcessGroup | None
    view: ModelView | None = None
    copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def put_back(self) -> None:
        for target, filled in self.copied:
            target.copy_(filled.view(target.shape))
        if self.view is not None:
            self.view.bump_versions()
            self.view.reshard()


def held_by(state: Saveable, group: dist.ProcessGroup | None, saving: bool) -> Held:
    """``saving``: of whole tensors that no group shares, only rank 0's count."""
    if isinstance(state, nn.Module):
        return _of_module(state, group, saving)
    if isinstance(state, Mapping):
        return _of_mapping(state, group, saving)
    raise invalid(f"{type(state).__name__} is neither a module nor a mapping of names to tensors")


def _of_module(model: nn.Module, group: dist.ProcessGroup | None, saving: bool) -> Held:
    view = find(model, group=group)
    view.reshard()
    rank = 0 if view.process_group is None else dist.get_rank(view.process_group)
    found = [one for one in [*view.parameters, *view.buffers] if not saving or one.counts_on(rank)]
    parts = [Part(one.name, one.tensor.detach().reshape(-1), one.region) for one in found]
    return Held(parts, {one.name: (one.name, *one.aliases) for one in found}, view.process_group, view)


def _of_mapping(state: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, saving: bool) -> Held:
    if group is None and dist.is_initialized() and any(_is_shared(tensor) for tensor in state.values()):
        group = dist.group.WORLD
    first = group is None or dist.get_rank(group) == 0
    held = Held([], {name: (name,) for name in state}, group)
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise invalid(f"'{name}' is a {type(tensor).__name__}, not a tensor")
        if _is_shared(tensor) or first or not saving:
            held.parts.append(_part(name, tensor, held.copied))
    return held


def _is_shared(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, Piece) or hasattr(tensor, "_local_tensor")


def _part(name: str, tensor: Any, copied: list[tuple[torch.Tensor, torch.Tensor]]) -> Part:
    if isinstance(tensor, Piece):
        return Part(name, tensor.local, tensor.region)
    region = region_of(name, tensor) if hasattr(tensor, "_local_tensor") else _core.Region.whole(list(tensor.shape))
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if local.is_meta:
        raise invalid(f"'{name}' is on meta: it has no memory; give it some first: model.to_empty(device=...)")
    if local.is_contiguous() and not local.is_conj() and not local.is_neg():
        return Part(name, local.view(-1), region)
    copy = local.resolve_conj().resolve_neg().contiguous()
    copied.append((local, copy))
    return Part(name, copy.view(-1), region)
