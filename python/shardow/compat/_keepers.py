"""Keepers: the averages that belong to one model, as ema-pytorch deals with them: in a second module, or in pieces behind a stand-in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from shardow.averages.options import Replicas
from shardow.averages.replicas import Exchange
from shardow.averages.tracked import Tracked, gather, scatter
from shardow.base.checks import invalid
from shardow.compat._pairs import copy_all, warn_of_rounding
from shardow.compat._stand_in import StandIn
from shardow.compat._twin import Choose, Fate, Kind, Twin
from shardow.ema import EMA


class Keeper(Protocol):
    """One way to hold averages. A protocol, since a model that can be copied and one that cannot have nothing in common but these verbs."""

    def update(self, decay: float) -> None:
        """Averages what is to be averaged, copies what is to be copied."""

    def copy(self) -> None:
        """All averages become the weights, whatever is to be left alone else."""

    def give(self, decay: float | None) -> None:
        """The weights become decay * weight + (1 - decay) * average, or copies; None: all of them become the averages."""


class Second(Keeper):
    """``module`` is a model of its own. What is not floating follows ``model``, and is never given back. ``choose``: as in Twin."""

    def __init__(self, module: nn.Module, model: nn.Module, choose: Choose) -> None:
        def back(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
            return choose(name, tensor, kind) if _floating(tensor) else "leave"

        self.module, self.model = module, model
        self._forth, self._forth_whole = Twin(module, "lerp", choose), Twin(module, "lerp", lambda *_: "average")
        self._back, self._back_whole = (
            Twin(model, "lerp", back),
            Twin(model, "lerp", lambda _, t, kind: "average" if _floating(t) else "leave"),
        )
        warn_of_rounding(module.parameters(), "Give ema_model= a copy in float32")

    def update(self, decay: float) -> None:
        self._forth.update(self.model, decay, 1.0 - decay)

    def copy(self) -> None:
        self._forth_whole.copy(self.model)

    def give(self, decay: float | None) -> None:
        if decay is None:
            self._back_whole.copy(self.module)
        else:
            self._back.update(self.module, decay, 1.0 - decay)


class Shared(Keeper):
    """The averages are float32 pieces, or float64 ones, of an EMA that ``stand_in`` stands for."""

    def __init__(self, stand_in: StandIn, model: nn.Module, choose: Choose) -> None:
        self.module, self.model = stand_in, model
        self._ema: EMA = stand_in._ema
        buffers = {one.name for one in self._ema._core.view.buffers}
        fates = [
            (one, choose(one.name, one.local.tensor, "buffer" if one.name in buffers else "parameter")) for one in self._ema._core.tracked
        ]
        self._averaged, self._copied, self._left = ([one for one, its in fates if its == fate] for fate in ("average", "copy", "leave"))

    @torch.no_grad()
    def update(self, decay: float) -> None:
        left = [one.averages[0].clone() for one in self._left]  # the engine averages all, in one pass
        self._ema._core.update_by(decay, 1.0 - decay)
        copy_all(_averages(self._left), left)
        copy_all(_averages(self._copied), [one.sources() for one in self._copied])

    def copy(self) -> None:
        self._ema._core.update_by(0.0, 1.0)

    @torch.no_grad()
    def give(self, decay: float | None) -> None:
        """Collective where replicas divide the averages."""
        ema = self._ema
        ema._core.together("update_model_with_ema()", lambda: ema._core.swap.ready("update_model_with_ema()"))
        ema._core.view.reshard()
        gather(ema._core.swap.strided)
        copied = self._copied if decay is not None else ema._core.tracked
        copy_all([one.weights() for one in copied], _averages(copied))
        for one in self._averaged if decay is not None else ():
            weights = one.weights()
            weights.copy_(torch.lerp(weights.to(one.averages[0].dtype), one.averages[0], 1.0 - (decay or 0.0)))
        scatter(ema._core.swap.strided)
        if ema._core.splits:
            Exchange(ema._core.tracked).run(ema._core.team.timeout)
        ema._core.view.bump_versions()
        ema._core.view.reshard()


def stand_in_for(model: nn.Module, replicas: Replicas) -> StandIn:
    """Collective over the ranks that share the model."""
    floats = [p for p in model.parameters() if _floating(p)]
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in floats) else torch.float32
    ema = EMA(model, dtype=dtype, params=lambda _, p: _floating(p), buffers="average", stochastic=False, replicas=replicas)
    return StandIn(ema, model)


def keeper_of(module: nn.Module, model: nn.Module, choose: Choose) -> Keeper:
    if isinstance(module, StandIn):
        if module._model is not model:
            raise invalid("these averages are of another model: a sharded model's are kept with it, and cannot be given to a second one")
        return Shared(module, model, choose)
    return Second(module, model, choose)


def _floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _averages(tracked: list[Tracked]) -> list[torch.Tensor]:
    return [one.averages[0] for one in tracked]
