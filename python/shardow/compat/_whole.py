"""A whole model on rank 0, as most origins save one."""

from __future__ import annotations

import torch
from torch import nn

from shardow._gather import Gatherer
from shardow._held import held_by


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """CPU tensors of parameters and persistent buffers, under all their clean names, on rank 0; {} elsewhere. Collective; one tensor at a time travels."""
    held = held_by(model, None, saving=False)
    full: dict[str, torch.Tensor] = {}
    for name, tensor in Gatherer(held.parts, held.process_group).stream():
        if tensor is not None:
            full.update(dict.fromkeys(held.names[name], tensor))
    return full


__all__ = ["whole_state_dict"]
