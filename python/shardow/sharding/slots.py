"""Slots: every place where a model keeps a tensor; the one way to walk them."""

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
    """Where a module keeps a tensor, under the tensor's clean name: ``owner[key]`` was ``recorded`` when it was found.
    ``local``: what a ModelView found there; tied slots share it, under the first one's name."""

    name: str
    key: str
    recorded: torch.Tensor
    kind: Kind
    module: nn.Module
    local: LocalTensor = field(init=False)

    @property
    def owner(self) -> dict[str, Any]:
        """The module's own dict, as it is now: attribute access is fifteen times slower than its."""
        owner: dict[str, Any] = self.module._parameters if self.kind == "parameter" else self.module._buffers
        return owner


def slots(model: nn.Module, *kinds: Kind) -> Iterator[Slot]:
    """Of all modules, in the order of named_modules(), parameters before buffers; of ``kinds``, or of all. What is tied
    comes under each of its names."""
    for name, module in walk(model):
        yield from slots_of(module, name, *kinds)


def slots_of(module: nn.Module, name: str = "", *kinds: Kind) -> Iterator[Slot]:
    """One module's own."""
    places: list[tuple[str, torch.Tensor | None, Kind]]
    places = [(key, parameter, "parameter") for key, parameter in module._parameters.items()]
    tables = module._non_persistent_buffers_set
    places += [(key, buffer, "table" if key in tables else "buffer") for key, buffer in module._buffers.items()]
    for key, tensor, kind in places:
        if tensor is not None and (not kinds or kind in kinds):
            yield Slot(join(name, key), key, tensor, kind, module)


def by_tensor(found: Iterable[Slot]) -> dict[int, list[Slot]]:
    """By the tensor's id: its slots, the first one first."""
    known: dict[int, list[Slot]] = {}
    for slot in found:
        known.setdefault(id(slot.recorded), []).append(slot)
    return known


def refuse_valueless(found: Iterable[Slot]) -> None:
    """On meta, or waiting for their first batch: there is nothing to average or to write in such models."""
    valueless = [slot for slot in found if slot.recorded.is_meta or is_lazy(slot.recorded)]
    for what, lazy in (("not initialised yet", True), ("on meta, without values", False)):
        if names := [slot.name for slot in valueless if is_lazy(slot.recorded) == lazy]:
            raise invalid(f"{what}: {first_of(names)}; give the model its weights before making an EMA")
