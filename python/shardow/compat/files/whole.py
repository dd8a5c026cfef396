"""Whole models on rank 0, as most origins save them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardow.model.parts import held_by
from shardow.model.swap_guard import refuse_foreign
from shardow.ranks.gather import Gatherer
from shardow.ranks.team import Team


def whole_state_dict(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """CPU tensors of parameters and persistent buffers, under all clean names, on rank 0; {} elsewhere. Collective. ``wanted``: names."""
    held = held_by(model, None, saving=False)
    refuse_foreign("a state of the whole model", held.memory, instead="for the weights")
    held.parts = [part for part in held.parts if wanted(part.name)]
    return Gatherer("state_dict()", held.parts, Team(held.process_group, None)).whole(held.names)
