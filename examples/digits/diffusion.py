"""Rectified flow (Liu et al., arXiv 2209.03003): on a straight path x_t = (1 - t) image + t noise, the velocity is
learned.

On this path an Euler step of the sampling equation is a step of DDIM (Song et al., arXiv 2010.02502): deterministic,
the same noise gives the same image.
"""

from __future__ import annotations

import torch
from torch import nn

from . import data


def loss(model: nn.Module, batch: data.Batch, world: int) -> torch.Tensor:
    return error(model(*inputs(batch)), batch, world)


def inputs(batch: data.Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the model: points on the paths, their times, the labels."""
    t = batch.time[:, None, None, None]
    return (1 - t) * batch.images + t * batch.noise, batch.time, batch.labels


def error(velocity: torch.Tensor, batch: data.Batch, world: int) -> torch.Tensor:
    """Squared error per pixel. Its mean over the ranks is the mean over the global batch, also where the ranks' parts
    are uneven.
    """
    errors = (velocity - (batch.noise - batch.images)).square().mean(dim=(1, 2, 3))
    return errors.sum() * (world / batch.size)


@torch.no_grad()
def sample(model: nn.Module, noise: torch.Tensor, labels: torch.Tensor, steps: int) -> torch.Tensor:
    """Images in [-1, 1], one for each noise (n, 1, 8, 8) and label."""
    x = noise.clone()
    for i in range(steps, 0, -1):
        x -= model(x, torch.full((len(x),), i / steps), labels) / steps
    return x.clamp_(-1, 1)
