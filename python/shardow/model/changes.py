"""What has become of a model's tensors since its view was made, in words, and the way out. Weights may lie elsewhere
when they come back from a swap, after casts, moves to devices, replaced parameters, load_state_dict(assign=True)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardow.base.checks import invalid, warn
from shardow.model.local import LocalTensor, memory_of, oddity
from shardow.model.slots import Slot, slots

WAY_OUT = (
    "make the EMA after the model has its final form, "
    "or make a new EMA and load the old one's state into it: new.load_state_dict(old.state_dict(), strict=False); "
    "old.detach() ends its updates"
)


def change(
    model: nn.Module, made: Iterable[Slot], found: Iterable[Slot], hidden: Iterable[LocalTensor],
    buffers: Iterable[Slot],
) -> str | None:  # fmt: skip
    """The first; None where nothing but addresses has changed. ``made``: all parameters that there were; ``found``:
    those that are not hidden."""
    named = {slot.name: slot.recorded for slot in made}
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
    text = next(_changes(found, hidden, buffers), None)
    return None if text is None else f"{text}; {WAY_OUT}"


def _changes(found: Iterable[Slot], hidden: Iterable[LocalTensor], buffers: Iterable[Slot]) -> Iterator[str]:
    for slot in found:
        local, memory = slot.local, memory_of(slot.recorded)
        if odd := oddity(local.tensor):
            if oddity(memory) != odd:
                yield f"parameter '{slot.name}' {odd}; it is not any more"
            continue
        now, was = tuple(slot.recorded.shape), tuple(local.region.shape)
        if now != was:
            yield f"parameter '{slot.name}' has shape {now}, it was {was} when this EMA was made"
        if text := _difference(local, memory):
            yield f"parameter '{slot.name}' {text}"
        if memory.data_ptr() != local.memory().data_ptr():
            yield f"parameter '{slot.name}' no longer shares the memory of '{local.name}'"
    for local in hidden:
        if text := _difference(local, local.memory()):
            yield f"parameter '{local.name}' {text}"
    for slot in buffers:
        buffer = slot.owner.get(slot.key)
        if buffer is not None and (text := _difference(slot.local, memory_of(buffer))):
            yield f"buffer '{slot.name}' {text}"


def _difference(local: LocalTensor, memory: torch.Tensor) -> str | None:
    for what, now, was in (("is", memory.dtype, local.tensor.dtype), ("is on", memory.device, local.tensor.device)):
        if now != was:
            return f"{what} {now}, it was {was} when this EMA was made"
    if memory.numel() != local.region.size:
        return f"has {memory.numel()} elements on this rank, it had {local.region.size} when this EMA was made"
    return None


class Move(NamedTuple):
    """``weights`` belong into the memory ``target``."""

    name: str
    weights: torch.Tensor
    target: torch.Tensor


def find_moves(model: Iterable[LocalTensor], weights: Iterable[LocalTensor], strict: bool) -> list[Move]:
    """Returns where ``weights`` lie in ``model``, as that is now, under every name that a tied weight has, if not where
    they were. Raises ValueError where it has no place of the same region for a weight any more; not so ``strict``, such
    are left out."""
    places = {name: local for local in model for name in (local.name, *local.aliases)}
    moves, lost = [], []
    for local in weights:
        for name in (local.name, *local.aliases):
            place = places.get(name)
            if place is None or place.region != local.region:
                lost.append(f"'{name}' is gone" if place is None else f"'{name}' is of another shape or sharding")
            elif place.tensor.data_ptr() != local.tensor.data_ptr() or place.tensor.dtype != local.tensor.dtype:
                moves.append(Move(name, local.tensor, place.tensor))
    if lost and strict:
        raise invalid(
            f"the model has no place for its weights any more: {lost[0]} ({len(lost)} in all). Nothing was lost: undo "
            "what was done to the "
            "model inside swapped() and call restore(), or restore(strict=False) to leave such parameters as they are"
        )
    return moves


def warn_of_casts(moves: Sequence[Move]) -> None:
    if cast := [move for move in moves if move.target.dtype != move.weights.dtype]:
        dtype, target = cast[0].weights.dtype, cast[0].target.dtype
        casts = f"'{cast[0].name}' and {len(cast) - 1} more were {dtype} and are {target} now"
        warn(f"the model was cast inside swapped(): {casts}, so its weights came back rounded to that", RuntimeWarning)
