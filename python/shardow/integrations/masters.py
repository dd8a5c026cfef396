"""An EMA of masters that somebody else's optimizer keeps, which may put them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from shardow.averages.tracked import Source
from shardow.base.checks import invalid, unsupported
from shardow.ema import EMA


class MastersEMA(EMA):
    """``masters()``: what ``source=`` takes, as it is now; ``addresses()``: where it lies, cheap enough to be asked
    before every update.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: Any,
        masters: Callable[[], Mapping[str, Source]],
        addresses: Callable[[], list[int]],
        options: Mapping[str, Any],
    ) -> None:
        for name in ("source", "optimizer", "overlap"):
            if options.get(name):
                raise invalid(f"ema(..., {name}=...): masters are averaged after the optimizer's steps; leave it out")
        self._masters, self._addresses = masters, addresses
        self._seen = addresses()
        super().__init__(model, decay, source=masters(), **options)

    def update(self, step: int | None = None, samples: float = 0.0) -> None:
        self._follow()
        super().update(step, samples)

    def reset(self) -> None:
        self._follow()
        super().reset()

    def distance(self, decay: Any = None) -> float:
        self._follow()
        return super().distance(decay)

    def attach(self, optimizer: Any, **_: Any) -> NoReturn:
        raise unsupported("attach(): this optimizer steps another one inside; call update() after its steps")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise unsupported(
            "an EMA of an optimizer's masters can't be copied or pickled: save() it, or take its state_dict()"
        )

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})

    def _follow(self) -> None:
        if self._addresses() != self._seen:
            self._averages.follow_sources(self._masters())
            self._seen = self._addresses()
