"""Defines Slot, a place where a model keeps a tensor, and walks all slots; no other code does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardow.base.checks import first_of, invalid
from shardow.sharding.local import LocalTensor
from shardow.sharding.names import join, walk

Kind = Literal["parameter", "buffer", "table"]  # a table is a buffer that is not persistent: no file has it


@dataclass(eq=False, slots=True)
class Slot:
    """The place where a module keeps a tensor of clean name ``name``: ``owner[key]`` was ``recorded`` at the walk.
    ``local``: the local tensor that a ModelView made of it; tied slots share it, under the first slot's name."""

    name: str
    key: str
    recorded: torch.Tensor
    kind: Kind
    module: nn.Module
    local: LocalTensor = field(init=False)

    @property
    def owner(self) -> dict[str, Any]:
        """Returns the module's own current dict; attribute access would be fifteen times slower."""
        owner: dict[str, Any] = self.module._parameters if self.kind == "parameter" else self.module._buffers
        return owner


def slots(model: nn.Module, *kinds: Kind) -> Iterator[Slot]:
    """Yields the slots of all modules, of ``kinds`` or of all kinds, in the order of named_modules(), parameters before
    buffers. A tied tensor comes under each of its names."""
    for name, module in walk(model):
        yield from slots_of(module, name, *kinds)


def slots_of(module: nn.Module, name: str = "", *kinds: Kind) -> Iterator[Slot]:
    """Yields the slots of one module, without those of its children."""
    places: list[tuple[str, torch.Tensor | None, Kind]]
    places = [(key, parameter, "parameter") for key, parameter in module._parameters.items()]
    tables = module._non_persistent_buffers_set
    places += [(key, buffer, "table" if key in tables else "buffer") for key, buffer in module._buffers.items()]
    for key, tensor, kind in places:
        if tensor is not None and (not kinds or kind in kinds):
            yield Slot(join(name, key), key, tensor, kind, module)


def by_tensor(slots: Iterable[Slot]) -> dict[int, list[Slot]]:
    """Returns the slots of each tensor by its id, in the order of the walk."""
    known: dict[int, list[Slot]] = {}
    for slot in slots:
        known.setdefault(id(slot.recorded), []).append(slot)
    return known


def refuse_valueless(slots: Iterable[Slot]) -> None:
    """Raises where tensors have no values to average or to write: they are on meta, or wait for their first batch."""
    valueless = [slot for slot in slots if slot.recorded.is_meta or is_lazy(slot.recorded)]
    for what, lazy in (("not initialised yet", True), ("on meta, without values", False)):
        if names := [slot.name for slot in valueless if is_lazy(slot.recorded) == lazy]:
            raise invalid(f"{what}: {first_of(names)}; give the model its weights before making an EMA")
