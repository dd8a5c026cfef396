"""What has become of a model's tensors since its view was made, in words, and the way out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardow.model.local import Adapter, HiddenTensor, LocalTensor, oddity
from shardow.model.slots import Slot, slots

WAY_OUT = (
    "make the EMA after the model has its final form, "
    "or make a new EMA and load the old one's state into it: new.load_state_dict(old.state_dict(), strict=False); "
    "old.detach() ends its updates"
)


@dataclass(eq=False, slots=True, kw_only=True)
class Found(Slot):
    """A slot, and what lies there. ``tied``: it is the tensor of a slot that was found before, or lies on the same
    memory, and ``local`` bears that slot's name."""

    local: LocalTensor
    adapter: Adapter
    tied: bool

    def memory(self, now: torch.Tensor | None = None) -> torch.Tensor:
        """The plain local tensor as it is now; ``now``: with that one in the slot."""
        return self.adapter.memory(self if now is None else replace(self, recorded=now))


def change(
    model: nn.Module,
    named: Mapping[str, torch.Tensor],
    found: Iterable[Found],
    hidden: Iterable[HiddenTensor],
    buffers: Iterable[Found],
) -> str | None:
    """The first; None where nothing but addresses has changed. ``named``: the parameters that there were."""
    now = {slot.name: slot.recorded for slot in slots(model, "parameter")}
    for name, was in named.items():
        if name not in now:
            return f"parameter '{name}' is gone from the model; {WAY_OUT}"
        if now[name] is not was and isinstance(was, DTensor) and not isinstance(now[name], DTensor):
            return f"parameter '{name}' stays unsharded after reshard(); call this outside of forward and backward"
        if now[name] is not was:
            return f"parameter '{name}' has been replaced by another object since this EMA was made; {WAY_OUT}"
    known = set(map(id, named.values()))
    for name, tensor in now.items():
        if id(tensor) not in known:
            return f"parameter '{name}' has been added since this EMA was made, and has no average; {WAY_OUT}"
    text = next(itertools.chain(_of_parameters(list(found)), _of_hidden(hidden), _of_buffers(buffers)), None)
    return None if text is None else f"{text}; {WAY_OUT}"


def _of_parameters(found: list[Found]) -> Iterator[str]:
    first = {one.local: one for one in reversed(found) if not one.tied}
    for one in found:
        if odd := oddity(one.local.tensor):
            if oddity(one.memory()) != odd:
                yield f"parameter '{one.name}' {odd}; it is not any more"
            continue
        if tuple(one.recorded.shape) != tuple(one.local.region.shape):
            now, made = tuple(one.recorded.shape), tuple(one.local.region.shape)
            yield f"parameter '{one.name}' has shape {now}, it was {made} when this EMA was made"
        memory = one.memory()
        if text := _difference(one.local, memory):
            yield f"parameter '{one.name}' {text}"
        if one.tied and memory.data_ptr() != first[one.local].memory().data_ptr():
            yield f"parameter '{one.name}' no longer shares the memory of '{one.local.name}'"


def _of_hidden(hidden: Iterable[HiddenTensor]) -> Iterator[str]:
    for one in hidden:
        if text := _difference(one, one.memory()):
            yield f"parameter '{one.name}' {text}"


def _of_buffers(buffers: Iterable[Found]) -> Iterator[str]:
    for one in buffers:
        buffer = one.owner.get(one.key)
        if buffer is not None and (text := _difference(one.local, one.memory(buffer))):
            yield f"buffer '{one.name}' {text}"


def _difference(local: LocalTensor, memory: torch.Tensor) -> str | None:
    for what, now, was in (("is", memory.dtype, local.tensor.dtype), ("is on", memory.device, local.tensor.device)):
        if now != was:
            return f"{what} {now}, it was {was} when this EMA was made"
    if memory.numel() != local.region.size:
        return f"has {memory.numel()} elements on this rank, it had {local.region.size} when this EMA was made"
    return None
