"""Defines ModelView, all facts about a model that averaging needs, collected once, with cheap checks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core
from shardow.base.checks import instance, invalid, unsupported
from shardow.sharding.changes import HINT, Form, change
from shardow.sharding.dtensor import modules_of, region_of, replicas_of, reshard, unsharded
from shardow.sharding.fsdp1 import Fsdp1Adapter
from shardow.sharding.groups import group_of_tensors
from shardow.sharding.local import LocalTensor, memory_of, oddity, refuse_all_odd, replicas_by_parameter
from shardow.sharding.names import refuse_scripted, walk
from shardow.sharding.slots import Slot, refuse_valueless, slots, slots_of
from shardow.sharding.storage import MARKS, address_of, overlaps
from shardow.sharding.zero3 import Zero3Adapter


class ModelView:
    """Parameters and persistent buffers of a model on this rank, each tensor once, under its clean first name, in
    named_parameters() order. ``process_group``: the ranks that share the model; None: this process alone.
    ``watch_buffers``: unchanged() checks buffers too, for users of the view that keep their addresses."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.model = model
        self._fsdp2 = modules_of(model)
        # After a forward without backward FSDP2 shows unsharded copies, which would pass for a plain model.
        reshard(self._fsdp2)
        if shown := unsharded(self._fsdp2):
            raise invalid(f"{', '.join(shown[:8])}: unsharded; call this outside of forward and backward")
        modules = [*walk(model)]
        refuse_scripted(modules)
        places = [slot for name, module in modules for slot in slots_of(module, name)]
        refuse_valueless(places)
        self._slots = [slot for slot in places if slot.kind == "parameter"]
        self._fsdp1 = Fsdp1Adapter(model)
        #: Adapters that hide tensors of this model; the others are not called again.
        self._hiding = [adapter for adapter in (self._fsdp1, Zero3Adapter(self._slots)) if adapter.hidden]
        self._hidden = [local for adapter in self._hiding for local in adapter.hidden]
        self._replicas = replicas_by_parameter(model, group)
        self.watch_buffers = False
        self._followed: _core.Watch | None = None  # of the buffers that `buffers` returned last
        self._visible = self._collect(self._slots)  # slots of the tensors that no adapter hides
        self._buffer_slots = self._collect([slot for slot in places if slot.kind == "buffer"])
        self._tie_by_memory()
        self.parameters = _in_model_order([*_locals(self._visible), *self._hidden], modules)
        self._record()
        self.process_group = group_of_tensors(model, [slot.recorded for slot in places], group, self._fsdp1)

    @property
    def buffers(self) -> list[LocalTensor]:
        """Returns the current buffers: modules replace their buffers freely, and register others."""
        if self._followed is None or not _same(self._followed):
            self._follow_buffers()
            known = {(id(slot.owner), slot.key) for slot in self._buffer_slots}
            new = [slot for slot in slots(self.model, "buffer") if (id(slot.owner), slot.key) not in known]
            self._buffer_slots += self._collect(new, before=self._buffer_slots)
            self._buffers = _locals(self._buffer_slots)
            self._followed = self._watch_of("_buffers", self._buffer_slots)
        return self._buffers

    def _collect(self, slots: Iterable[Slot], before: Iterable[Slot] = ()) -> list[Slot]:
        """Returns the slots that no adapter owns, each tensor with one local tensor, whose aliases are its further
        names. ``before``: slots that have local tensors already."""
        known = {id(slot.recorded): slot.local for slot in before}
        owned = {key for adapter in self._hiding for key in adapter.owned}
        collected = [slot for slot in slots if id(slot.recorded) not in owned]
        for slot in collected:
            key = id(slot.recorded)
            slot.local = known[key] = known[key] if key in known else self._local(slot)
            _add_alias(slot.local, slot.name)
        return collected

    def _local(self, slot: Slot) -> LocalTensor:
        """Returns the local tensor of a slot; it is the whole tensor where that is no DTensor."""
        tensor = slot.recorded
        if isinstance(tensor, DTensor):
            region, replicas = region_of(slot.name, tensor), replicas_of(tensor)
            return LocalTensor(slot.name, memory_of(tensor), region, tensor, replicas, True)
        replicas = self._replicas.get(id(tensor), ())
        region = _core.Region.whole([] if tensor.is_nested else list(tensor.shape))
        return LocalTensor(slot.name, tensor.detach(), region, tensor, replicas, bool(replicas))

    def _tie_by_memory(self) -> None:
        """Ties different objects in the same memory (``a.data = b.data``) as one tensor, which would be lost if it were
        swapped twice."""
        recorded = [*self._visible, *self._buffer_slots]
        instead: dict[int, LocalTensor] = {}
        for first, second in overlaps(local for local in _locals(recorded) if not oddity(local.tensor)):
            if (
                first.tensor.data_ptr() != second.tensor.data_ptr()
                or first.tensor.stride() != second.tensor.stride()
                or first.tensor.dtype != second.tensor.dtype
                or first.region != second.region
            ):
                raise unsupported(
                    f"'{first.name}' and '{second.name}' share some of their memory; each average needs weights of "
                    "its own"
                )
            instead[id(second)] = first
        for slot in recorded:
            if (local := instead.get(id(slot.local))) is not None:
                slot.local = local
                _add_alias(local, slot.name)

    # ---- the model's state

    def reshard(self, refuse_written: bool = False) -> None:
        """Frees unsharded copies of the weights that the last forward may have left. ``refuse_written``: raises where
        weights were written that their shards don't have yet, and would be lost; ranks should agree on this before any
        of them writes. Local.
        """
        if self._fsdp2:
            reshard(self._fsdp2)
        for adapter in self._hiding:
            adapter.reshard(refuse_written)

    def unchanged(self) -> bool:
        """Returns whether the modules hold exactly the recorded parameters, at the recorded addresses. Takes about
        0.08 us a parameter after an optimizer's step."""
        return (
            _same(self._watch)
            and self._flat_addresses() == self._recorded_flat
            and all(adapter.in_place() for adapter in self._hiding)
            and (not self.watch_buffers or _same(self._buffer_watch) or self._buffers_same())
        )

    def unchanged_at_rest(self) -> bool:
        """Returns unchanged(); where that is False, frees unsharded copies of the weights and returns it again."""
        if self.unchanged():
            return True
        self.reshard()
        return self.unchanged()

    def follow_moves(self, bind: Callable[[], object]) -> str | None:
        """Adopts memory that moved under the same parameters. Returns a text of any other change, with advice; nothing
        is adopted then. ``bind()`` updates all users of the old addresses. The new ones are recorded after it: a bind()
        that raises is called again.
        """
        buffers = {slot.name for slot in self._buffer_slots} if self.watch_buffers else set()
        current = ModelView(self.model, self.process_group)
        if (why := change(self._forms(buffers), current._forms(buffers))) is not None:
            return why
        for local in self.parameters:
            local.tensor = local.memory()
        self._follow_buffers()
        bind()
        self._record()
        return None

    def as_it_is_now(self) -> list[LocalTensor]:
        """Returns the parameters and buffers of a new view of the model; this view does not change."""
        current = ModelView(self.model, self.process_group)
        return [*current.parameters, *current.buffers]

    def versions(self) -> dict[str, int]:
        """Returns torch's counters of writes into parameters; FSDP1's flat ones have no reliable counter."""
        return {slot.name: getattr(slot.recorded, "_local_tensor", slot.recorded)._version for slot in self._visible}

    def parameter_objects(self) -> list[torch.Tensor]:
        """Returns the parameters that the model shows, and those that were recorded."""
        return [*self.model.parameters(), *(slot.recorded for slot in self._slots)]

    def _forms(self, buffers: Set[str]) -> dict[str, Form]:
        """Returns the forms of the parameters and of ``buffers``, by all their names."""
        places: list[tuple[str, object, LocalTensor]]
        places = [(slot.name, slot.recorded, slot.local) for slot in self._visible]
        places += [(name, local.shown, local) for local in self._hidden for name in (local.name, *local.aliases)]
        places += [(slot.name, None, slot.local) for slot in self._buffer_slots if slot.name in buffers]
        return {
            name: (shown, f"'{local.name}'", local.tensor.dtype, local.tensor.device, local.region)
            for name, shown, local in places
        }

    def _follow_buffers(self) -> None:
        for slot in self._buffer_slots:
            buffer, local = slot.owner.get(slot.key), slot.local
            if buffer is None or tuple(buffer.shape) != tuple(local.region.shape):
                state = "is gone from the model" if buffer is None else f"has shape {tuple(buffer.shape)}"
                raise invalid(f"buffer '{slot.name}' {state}, it had {tuple(local.region.shape)} before; {HINT}")
            slot.recorded = buffer
            if slot.name == local.name:
                local.shown, local.tensor = buffer, memory_of(buffer)
            elif address_of(memory_of(buffer)) != address_of(local.tensor):
                raise invalid(f"buffer '{slot.name}' no longer shares the memory of '{local.name}'; {HINT}")

    # ---- identity

    def _record(self) -> None:
        """Records the state that unchanged() compares with. It has every module, since a replaced module keeps its old
        parameters, outside of the model."""
        shown = [parameter for adapter in self._hiding for parameter in adapter.shown()]
        self._watch = self._watch_of("_parameters", self._visible, shown)
        self._recorded_flat = self._flat_addresses()
        self._recorded_buffers = [(slot, slot.recorded, address_of(slot.local.tensor)) for slot in self._buffer_slots]
        self._buffer_watch = self._watch_of("_buffers", self._buffer_slots)

    def _watch_of(self, key: str, slots: Iterable[Slot], shown: Iterable[torch.Tensor] = ()) -> _core.Watch:
        """Returns a watch of the modules' dicts ``key``, and of the memory of ``slots`` and of the ``shown`` tensors,
        apart from tensors without elements in memory.
        """
        tensors = [slot.recorded for slot in slots if not oddity(slot.local.tensor)]
        sharded: list[torch.Tensor] = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        whole = [*(tensor for tensor in tensors if not isinstance(tensor, DTensor)), *shown]
        modules = [module.__dict__ for module in self.model.modules()]
        return _core.Watch(modules, [key, "_modules"], whole, sharded, MARKS, _objects_behind)

    def _flat_addresses(self) -> list[int]:
        return [shard.data_ptr() for adapter in self._hiding for shard in adapter.shards()]

    def _buffers_same(self) -> bool:
        """Returns whether the recorded buffers are in place; others (tables) may have changed."""
        return all(
            slot.owner.get(slot.key) is buffer and address_of(memory_of(buffer)) == address
            for slot, buffer, address in self._recorded_buffers
        )

    def by_parameter(self) -> dict[int, list[LocalTensor]]:
        """Returns the local tensors of each parameter that the model shows, by its id: one tensor, or all tensors that
        FSDP1 put into the flat parameter.
        """
        known = {id(slot.recorded): [slot.local] for slot in self._visible}
        for flat in self._fsdp1.hidden:
            known.setdefault(id(flat.shown), []).append(flat)
        return known

    def frozen(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, parameter that the model shows) of the tensors that do not require a gradient."""
        return [(local.name, local.shown) for local in self.parameters if not local.requires_grad]

    def written(self) -> None:
        """Notifies autograd and ZeRO-3 of writes that they did not see: a backward through the old values raises where
        autograd can detect it. Frees unsharded copies, in which old values would survive."""
        torch.autograd.graph.increment_version([slot.recorded for slot in self._visible])
        for adapter in self._hiding:
            adapter.written()
        self.reshard()


def find(model: nn.Module, group: dist.ProcessGroup | None = None, odd: bool = False) -> ModelView:
    """Returns a view of ``model`` on this rank. ``group``: ranks that hold replicas of a plain model, or the ranks of a
    model whose meshes do not name their group. ``odd``: tensors without elements in memory (sparse, nested, quantised,
    made of other tensors) are accepted, else refused."""
    instance("model", model, nn.Module)
    if group is not None:
        instance("group", group, dist.ProcessGroup)
    with _disable_current_modes():  # a user's dispatch mode must not see these operations
        view = ModelView(model, group)
        if not odd:
            refuse_all_odd([*view.parameters, *view.buffers])
        return view


def _locals(slots: Iterable[Slot]) -> list[LocalTensor]:
    """Returns each local tensor once, in the order of its first slot."""
    return [*dict.fromkeys(slot.local for slot in slots)]


def _in_model_order(locals_: list[LocalTensor], modules: list[tuple[str, nn.Module]]) -> list[LocalTensor]:
    """Sorts by module, in the order of named_parameters(): the kind of sharding must not show in the order."""
    order: dict[str, int] = {}
    for i, (name, _) in enumerate(modules):
        order.setdefault(name, i)
    return sorted(locals_, key=lambda local: order[local.name.rpartition(".")[0]])


def _objects_behind(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the private objects that data_ptr() reads, as addresses for prefetching; no code here reads them."""
    return (tensor._cdata, tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else (0, 0)


def _same(watch: _core.Watch) -> bool:
    return watch.tree_same() and watch.memory_same()


def _add_alias(local: LocalTensor, name: str) -> None:
    if name not in (local.name, *local.aliases):
        local.aliases = (*local.aliases, name)
