"""Slots: every place where a model keeps a tensor; the one way to walk them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardow import _core
from shardow.base.checks import invalid
from shardow.model.names import join, walk

Kind = Literal["parameter", "buffer", "table"]  # a table is a buffer that is not persistent: no file has it


@dataclass(eq=False, slots=True)
class Slot:
    """Where a module keeps a tensor, under the tensor's clean name: ``owner[key]`` was ``recorded`` when it was found.
    ``owner`` is the module's own dict: attribute access is fifteen times slower, and this is read at every update."""

    name: str
    owner: dict[str, Any]
    key: str
    recorded: torch.Tensor
    kind: Kind
    module: nn.Module
    # not 0: it was found to be one of torch's own tensors, in memory that can be read: there is nothing to look at
    plain: int = 0


def slots(model: nn.Module, *kinds: Kind) -> Iterator[Slot]:
    """Of all modules, in the order of named_modules(), parameters before buffers; of ``kinds``, or of all. What is tied
    comes under each of its names."""
    for name, module in walk(model):
        yield from slots_of(module, name, *kinds)


def slots_of(module: nn.Module, name: str = "", *kinds: Kind) -> Iterator[Slot]:
    """One module's own."""
    parameters, buffers = module._parameters, module._buffers
    if parameters and (not kinds or "parameter" in kinds):
        for key, parameter in list(parameters.items()):
            if parameter is not None:
                yield Slot(join(name, key), parameters, key, parameter, "parameter", module)
    for key, buffer in list(buffers.items()):
        kind: Kind = "table" if key in module._non_persistent_buffers_set else "buffer"
        if buffer is not None and (not kinds or kind in kinds):
            yield Slot(join(name, key), buffers, key, buffer, kind, module)


#: What Slot.plain is of a tensor there.
IN_HOST_MEMORY = 1


@dataclass(frozen=True)
class Surveyed:
    """Slots found by the thousand, instances of some kind of Slot; what each is called and holds, and what that is."""

    slots: list[Any]
    names: list[str]
    recorded: list[torch.Tensor]
    looked: _core.Looked
    # plain tensors of the host, none of them twice or on another one's memory: there is nothing to look at one by one
    alone: bool


def parameter_slots(modules: Iterable[tuple[str, nn.Module]], survey: _core.Survey, kind: _core.Rows) -> Surveyed:
    """slots() of modules that walk() found, their parameters alone, as instances of a ``kind`` of Slot."""
    names, owners, keys, recorded, homes = _core.places(
        [(join(name, ""), module) for name, module in modules], "_parameters"
    )
    looked = survey.look(recorded)
    alone = looked.alone()
    columns = {
        "name": names,
        "owner": owners,
        "key": keys,
        "recorded": recorded,
        "module": homes,
        "kind": ("parameter",),
    }
    plain = (IN_HOST_MEMORY,) if alone else list(looked.plain())
    return Surveyed(kind.of(len(names), {**columns, "plain": plain}), names, recorded, looked, alone)


def buffer_slots(modules: Iterable[tuple[str, nn.Module]], survey: _core.Survey) -> list[Slot]:
    """The same of their buffers, of which there are fewer."""
    found = [slot for name, module in modules if module._buffers for slot in slots_of(module, name, "buffer", "table")]
    for slot, plain in zip(found, survey.look([slot.recorded for slot in found]).plain(), strict=True):
        slot.plain = plain
    return found


def by_tensor(found: Iterable[Slot]) -> dict[int, list[Slot]]:
    """By the tensor's id: its slots, the first one first."""
    known: dict[int, list[Slot]] = {}
    for slot in found:
        known.setdefault(id(slot.recorded), []).append(slot)
    return known


def refuse_valueless(found: Iterable[Slot]) -> None:
    """On meta, or waiting for their first batch: there is nothing to average or to write in such models."""
    valueless = [
        (slot.name, is_lazy(slot.recorded)) for slot in found if slot.recorded.is_meta or is_lazy(slot.recorded)
    ]
    for what, names in (
        ("not initialised yet", [name for name, lazy in valueless if lazy]),
        ("on meta, without values", [name for name, lazy in valueless if not lazy]),
    ):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise invalid(f"{what}: {', '.join(names[:8])}{more}; give the model its weights before making an EMA")
