"""Follower: keeps a module at the averages of a model. Surfaces that promise a module need not know which it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from shardow.averages.options import Rule as EngineRule
from shardow.compat.ways.pairs import Pair, Pairs, Tensors

Kind = Literal["parameter", "buffer", "temporary"]  # temporary: a buffer that state_dict() has not
Fate = Literal["average", "copy", "leave"]
Choose = Callable[[str, torch.Tensor, Kind], Fate]
#: change(averages, weights) gets lists of tensors, of a sharded model this rank's parts in one dimension, and writes
#: the former.
Change = Callable[[Tensors, Tensors], None]
#: A rule's name, or what tells it from (dtype of the weight, dtype of its average) of everything that is averaged.
Rule = EngineRule | Callable[[list[tuple[torch.dtype, torch.dtype]]], EngineRule]


def everything(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    return "average"


def everything_saved(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    """What state_dict() has is averaged."""
    return "leave" if kind == "temporary" else "average"


class Follower(ABC):
    """``module`` may be replaced by another one of the same form."""

    module: nn.Module

    @abstractmethod
    def update(self, model: nn.Module, decay: float, weight: float) -> None:
        """One update by the rule, with the caller's factors; what is not averaged is copied. Raises ValueError and
        RuntimeError, before anything changes, where the models differ in names or shapes."""

    @abstractmethod
    def apply(self, model: nn.Module, change: Change) -> None:
        """update() by other arithmetic."""

    @abstractmethod
    def copy(self, model: nn.Module) -> None:
        """Everything that is averaged or copied becomes the model's."""


class Paired(Follower):
    """Tensors of ``module`` beside those of the model. ``rule``: as in Pairs, or a function that tells it; ``options``:
    as in Pairs. ``choose``: whether a tensor is averaged, copied at each update, or left alone; integers are copied
    where others are averaged.
    """

    _pairs: Pairs

    def __init__(self, module: nn.Module, rule: Rule, choose: Choose = everything_saved, **options: Any) -> None:
        self.module = module
        self._rule, self._choose, self._options = rule, choose, options

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or in a pickle: nothing is paired yet."""
        return {"module": self.module, "_rule": self._rule, "_choose": self._choose, "_options": self._options}

    def again(self, choose: Choose) -> Paired:
        """The same, but for what is averaged."""
        return type(self)(self.module, self._rule, choose, **self._options)

    @abstractmethod
    def _bind(self, model: nn.Module) -> None:
        """Makes ``_pairs`` anew unless everything is where it was."""

    @abstractmethod
    def _copy_rest(self) -> None:
        """What is copied, and not in ``_pairs``."""

    def _paired(self, averaged: list[Pair]) -> Pairs:
        dtypes = [(pair.source.dtype, pair.average.dtype) for pair in averaged if pair.average.is_floating_point()]
        return Pairs(averaged, self._rule if isinstance(self._rule, str) else self._rule(dtypes), **self._options)

    def update(self, model: nn.Module, decay: float, weight: float) -> None:
        self._do(model, lambda pairs: pairs.update(decay, weight))

    def apply(self, model: nn.Module, change: Change) -> None:
        self._do(model, lambda pairs: pairs.apply(change))

    def copy(self, model: nn.Module) -> None:
        self._do(model, Pairs.copy)

    @torch.no_grad()
    def _do(self, model: nn.Module, work: Callable[[Pairs], None]) -> None:
        self._bind(model)
        work(self._pairs)
        self._copy_rest()
