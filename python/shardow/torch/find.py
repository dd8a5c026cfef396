"""ModelView: everything about a model that averaging needs, found once, and cheap checks that it still holds."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardow import _errors
from shardow.torch.dtensors import DTensorAdapter
from shardow.torch.fsdp1 import Fsdp1Adapter
from shardow.torch.local import Adapter, LocalTensor, Slot, persistent_buffers, slots_of
from shardow.torch.names import walk
from shardow.torch.plain import PlainAdapter

_local_tensor = operator.attrgetter("_local_tensor")


class ModelView:
    """Parameters and persistent buffers of a model on this rank, each tensor once, under its clean first name, in named_parameters() order (FSDP1's flat ones last).

    ``process_group``: the ranks that share the model; None: this process alone.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._dtensors, self._fsdp1, self._plain = DTensorAdapter(model), Fsdp1Adapter(model), PlainAdapter(model, group)
        self._adapters: tuple[Adapter, ...] = (self._dtensors, self._fsdp1, self._plain)
        self._found: list[tuple[Slot, LocalTensor, Adapter]] = []
        _refuse_meta(model)
        modules = list(walk(model))
        self.parameters = self._collect(slot for name, module in modules for slot in slots_of(name, module._parameters))
        self._found_parameters = self._found
        self._found = []
        self.buffers = self._collect(
            slot for name, module in modules for slot in slots_of(name, module._buffers) if slot.key in persistent_buffers(module)
        )
        self.parameters += self._fsdp1.others()
        self._record()
        self.process_group = group if group is not None else self._choose_group()

    def _collect(self, slots: Iterable[Slot]) -> list[LocalTensor]:
        """Each tensor once; further names of it are aliases."""
        known: dict[int, LocalTensor] = {}
        for slot in slots:
            tied = known.get(id(slot.recorded))
            if tied is not None:
                if slot.name not in (tied.name, *tied.aliases):
                    tied.aliases = (*tied.aliases, slot.name)
                continue
            adapter = next(adapter for adapter in self._adapters if adapter.claims(slot))
            local = adapter.local(slot)
            if local is not None:
                known[id(slot.recorded)] = local
                self._found.append((slot, local, adapter))
        return list(known.values())

    # ---- the model's state

    def reshard(self) -> None:
        """Frees unsharded copies of the weights, whatever the last forward left behind. Local."""
        for adapter in self._adapters:
            adapter.reshard()
        if not self._objects_same() and any(isinstance(slot.recorded, DTensor) for slot, _, _ in self._found_parameters):
            self._dtensors.reset()

    def unchanged(self) -> bool:
        """Every parameter is the recorded object at the recorded address. About 0.1 us a parameter."""
        return self._objects_same() and self._addresses() == self._recorded_addresses

    def follow_moves(self) -> bool:
        """Takes over memory that moved under the same parameters. False where more than addresses has changed; nothing is taken over then."""
        if not self._objects_same() or any(self._difference(*found) for found in self._found_parameters):
            return False
        for slot, local, adapter in self._found_parameters:
            local.tensor = adapter.memory(slot)
        for flat in self._fsdp1.others():
            flat.tensor = flat.memory()
        self._record()
        return True

    def explain_change(self) -> str:
        """Which tensor is not what it was when this view was made, and the way out."""
        way_out = "make the EMA after the model has its final form, or make a new EMA and load the old one's state_dict() into it"
        for slot, local, adapter in self._found_parameters:
            now = slot.owner.get(slot.key)
            if now is None:
                return f"parameter '{slot.name}' is gone from the model; {way_out}"
            if now is not slot.recorded and isinstance(slot.recorded, DTensor) and not isinstance(now, DTensor):
                return f"parameter '{slot.name}' stays unsharded after reshard(); call this outside of forward and backward"
            if now is not slot.recorded:
                return f"parameter '{slot.name}' has been replaced by another object since this EMA was made; {way_out}"
            if difference := self._difference(slot, local, adapter):
                return f"{difference}; {way_out}"
        return f"the model's parameters are not those that this EMA was made with; {way_out}"

    def _difference(self, slot: Slot, local: LocalTensor, adapter: Adapter) -> str | None:
        if tuple(slot.recorded.shape) != tuple(local.region.shape):
            return f"parameter '{slot.name}' has shape {tuple(slot.recorded.shape)}, it was {tuple(local.region.shape)} when this EMA was made"
        memory = adapter.memory(slot)
        for what, now, was in (("is", memory.dtype, local.tensor.dtype), ("is on", memory.device, local.tensor.device)):
            if now != was:
                return f"parameter '{slot.name}' {what} {now}, it was {was} when this EMA was made"
        if memory.numel() != local.region.size:
            return f"parameter '{slot.name}' has {memory.numel()} elements on this rank, it had {local.region.size} when this EMA was made"
        return None

    # ---- identity

    def _record(self) -> None:
        slots = [slot for slot, _, _ in self._found_parameters]
        self._owners, self._keys = [slot.owner for slot in slots], [slot.key for slot in slots]
        self._objects = [slot.recorded for slot in slots]
        self._sharded = [tensor for tensor in self._objects if isinstance(tensor, DTensor)]
        self._whole = [tensor for tensor in self._objects if not isinstance(tensor, DTensor)]
        self._recorded_addresses = self._addresses()

    def _objects_same(self) -> bool:
        return all(map(operator.is_, map(dict.get, self._owners, self._keys), self._objects))

    def _addresses(self) -> list[int]:
        pointers = list(map(torch.Tensor.data_ptr, self._whole))
        pointers += map(torch.Tensor.data_ptr, map(_local_tensor, self._sharded))  # DTensor.data_ptr() would return 0
        pointers += map(torch.Tensor.data_ptr, self._fsdp1.shards())
        return pointers

    def bump_versions(self) -> None:
        """Tells autograd that weights were written behind its back: a backward through the old values raises, where autograd can see it."""
        torch.autograd.graph.increment_version([*self._objects, *self._fsdp1.flat_parameters()])

    # ---- the ranks

    def _choose_group(self) -> dist.ProcessGroup | None:
        """The known group of exactly the ranks that share the model."""
        groups = self._fsdp1.groups() + [group for local in self.parameters for group, _, _ in local.replicas]
        if self._plain.group is not None:
            groups.append(self._plain.group)
        meshes = list({id(tensor.device_mesh): tensor.device_mesh for tensor in self._sharded}.values())
        ranks = {rank for group in {id(g): g for g in groups}.values() for rank in dist.get_process_group_ranks(group)}
        ranks |= {int(rank) for mesh in meshes for rank in mesh.mesh.flatten()}
        if len(ranks) < 2:
            return None
        if self._fsdp1.spans_world() or ranks == set(range(dist.get_world_size())):
            return dist.group.WORLD
        groups += [mesh.get_group(0) for mesh in meshes if mesh.ndim == 1]
        for group in groups:
            if set(dist.get_process_group_ranks(group)) == ranks:
                return group
        raise _errors.make("invalid_argument", f"the model is shared by ranks {sorted(ranks)}, for which no process group is known; pass it as group=")


def find(model: nn.Module, group: dist.ProcessGroup | None = None) -> ModelView:
    """What this rank holds of ``model``. ``group``: ranks that hold replicas of a plain model, or the ranks of one whose meshes do not tell their group."""
    if not isinstance(model, nn.Module):
        raise _errors.make("invalid_argument", f"model is a {type(model).__name__}; an nn.Module is needed")
    return ModelView(model, group)


def _refuse_meta(model: nn.Module) -> None:
    tensors: Sequence[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        raise _errors.make("invalid_argument", f"on meta, without values: {', '.join(meta)}; give the model its weights before making an EMA")
