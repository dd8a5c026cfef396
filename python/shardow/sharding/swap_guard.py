"""Who else would take averages for weights: other EMAs of the same model, optimizers, and what fills a model. Nothing
here is asked whether anything is swapped: the engine is. And whose weights are read in the background: an optimizer
that would change them waits.
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
    """A swap, as others need to see it."""

    @property
    def swapped(self) -> bool: ...

    def weights(self) -> Iterable[torch.Tensor]:
        """Memory that holds averages in place of weights while ``swapped``, or weights in place of averages."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters that show them."""

    def refuse_swapped(self, what: str) -> None:
        """Raises while ``swapped``."""

    def finish_reading(self) -> None:
        """Returns when the weights may change: an update in the background has read them, in the order of torch's
        current streams.
        """


# Each Swapping from before the first exchange until the weights are back: no other may have them.
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
    """Raises where ``weights()``, as ``own`` needs them, are exchanged by a swap now, of another EMA than ``own``.
    Costs nothing where no EMA is swapped in. ``instead``: what else leads to what was wanted. ``writes``: they are
    written next, and updates in the background read them first."""
    if writes and _read:
        written = _addresses(weights())
        for reader in list(_read):
            if not written.isdisjoint(_addresses(reader.weights())):
                reader.finish_reading()
    if not _entered:
        return
    needed = _addresses(weights())
    for other in _now():
        if other is not own and not needed.isdisjoint(_addresses(other.weights())):
            way_out = f"leave its swapped() first{instead and f', {instead}'}"
            raise invalid(f"{what}: an EMA has its averages in this model's memory now; {way_out}")


def _now() -> list[Swapping]:
    return [one for one in list(_entered) if one.swapped]


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {address_of(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors} - {0}


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before any optimizer's step: one on averages would be lost, and spoil them; one on weights that are read would
    tear the averages.
    """
    for swap in {*(_now() if _entered else ()), *_read} if _entered or _read else ():
        steps = [p for group in optimizer.param_groups for p in group["params"]]
        shown = set(map(id, swap.parameters()))
        if any(id(p) in shown for p in steps) or not _addresses(steps).isdisjoint(_addresses(swap.weights())):
            swap.refuse_swapped("optimizer.step()")
            swap.finish_reading()


register_optimizer_step_pre_hook(_before_step)
