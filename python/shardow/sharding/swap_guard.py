"""Keeps other EMAs of the same model, optimizers and loads from taking averages for weights while a swap is active.
The engine knows whether weights are swapped. The guard also makes an optimizer wait that would change weights which are
read in the background.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardow.base.checks import invalid
from shardow.sharding.storage import address_of


class Swapping(Protocol):
    """The interface of a swap that this guard needs."""

    @property
    def swapped(self) -> bool: ...

    def weights(self) -> Iterable[torch.Tensor]:
        """Returns the memory that holds averages for weights while ``swapped``, or weights for averages."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """Returns the parameters that show these weights."""

    def refuse_swapped(self, what: str) -> None:
        """Raises while ``swapped``."""

    def finish_reading(self) -> None:
        """Returns when the weights may change: an update in the background has read them, in the order of torch's
        current streams.
        """


# Each Swapping from before its first exchange until the weights are back: no other may use these weights.
_entered: set[Any] = set()
_read: weakref.WeakSet[Any] = weakref.WeakSet()  # Swapping, from its first update in the background on

enter = _entered.add
settle = _entered.discard
read = _read.add


def refuse_foreign(
    what: str,
    weights: Callable[[], Iterable[torch.Tensor]],
    own: Swapping | None = None,
    instead: str = "",
    writes: bool = False,
) -> None:
    """Raises where some of ``weights()``, which ``own`` needs, are exchanged by an active swap of another EMA. Costs
    nothing where no EMA is swapped in. ``instead``: advice on another way. ``writes``: the weights are written next, so
    updates in the background read them first."""
    if writes and _read:
        written = _addresses(weights())
        for reader in list(_read):
            if not written.isdisjoint(_addresses(reader.weights())):
                reader.finish_reading()
    if not _entered:
        return
    needed = _addresses(weights())
    for other in _active():
        if other is not own and not needed.isdisjoint(_addresses(other.weights())):
            hint = f"leave its swapped() first{instead and f', {instead}'}"
            raise invalid(f"{what}: an EMA has its averages in this model's memory now; {hint}")


def _active() -> list[Swapping]:
    return [swap for swap in list(_entered) if swap.swapped]


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {address_of(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors} - {0}


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Runs before any optimizer's step. It refuses a step on averages, which would be lost and spoil them, and delays a
    step on weights that are being read, which would tear the averages.
    """
    for swap in {*(_active() if _entered else ()), *_read} if _entered or _read else ():
        steps = [p for group in optimizer.param_groups for p in group["params"]]
        shown = set(map(id, swap.parameters()))
        if any(id(p) in shown for p in steps) or not _addresses(steps).isdisjoint(_addresses(swap.weights())):
            swap.refuse_swapped("optimizer.step()")
            swap.finish_reading()


register_optimizer_step_pre_hook(_before_step)
