"""Follower: keeps a module at the averages of a model. Surfaces that promise a module need not know which it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from shardow.averages.options import Rule as EngineRule
from shardow.compat.ways.pairs import Tensors

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
