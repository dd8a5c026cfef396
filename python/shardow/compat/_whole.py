"""Whole models on rank 0, as most origins save them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardow.compat._stand_in import StandIn
from shardow.model.parts import held_by
from shardow.model.swap_guard import refuse_foreign
from shardow.ranks.gather import Gatherer
from shardow.ranks.team import Team


def whole_state_dict(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """CPU tensors of parameters and persistent buffers, under all their clean names, on rank 0; {} elsewhere. Collective; one tensor at a time travels. ``wanted``: of first names."""
    held = held_by(model, None, saving=False)
    refuse_foreign("a state of the whole model", held.memory, instead="for the weights")
    held.parts = [part for part in held.parts if wanted(part.name)]
    return Gatherer("state_dict()", held.parts, Team(held.process_group, None)).whole(held.names)


def whole_averages(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state_dict() of a follower's module in fresh CPU tensors; of a stand-in on rank 0, {} elsewhere. Collective then."""
    if isinstance(module, StandIn):
        return module.ema.full_state_dict(complete=True)
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


__all__ = ["whole_averages", "whole_state_dict"]
