"""What the origins that no package installs do at an update, in a few lines of torch: the formula of each, on copies of
the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Step = Callable[[], object]


def ema_fsdp(model: nn.Module, decay: float) -> Step:
    """Causal-Forcing's EMA_FSDP: float32 on the host, one tensor at a time, found by name."""
    shadow = {name: p.detach().clone().float().cpu() for name, p in model.named_parameters()}

    @torch.no_grad()
    def step() -> None:
        for name, p in model.named_parameters():
            shadow[name].mul_(decay).add_(p.detach().float().cpu(), alpha=1 - decay)

    return step


def dist_ema(model: nn.Module, decay: float) -> Step:
    """DistEMA on one rank: flat slices, one tensor at a time."""
    slices = [(name, 0, p.numel()) for name, p in model.named_parameters()]
    averages = [p.detach().view(-1).clone().float() for p in model.parameters()]

    @torch.no_grad()
    def step() -> None:
        named = dict(model.named_parameters())
        for (name, begin, end), average in zip(slices, averages, strict=True):
            average.mul_(decay).add_(named[name].detach().view(-1)[begin:end], alpha=1 - decay)

    return step


def ema_manager(model: nn.Module, decay: float) -> Step:
    """Automodel's EMAManager: by name, in the weights' dtype."""
    shadow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def step() -> None:
        for name, p in model.named_parameters():
            if name in shadow:
                shadow[name].mul_(decay).add_(p.detach(), alpha=1 - decay)

    return step


def sharded_model_ema(model: nn.Module, decay: float) -> Step:
    """Automodel's ShardedModelEMAManager: pairs of tensors, one after the other."""
    pairs = [(p.detach().clone(), p.detach()) for p in model.parameters()]

    @torch.no_grad()
    def step() -> None:
        for average, p in pairs:
            average.mul_(decay).add_(p, alpha=1 - decay)

    return step


def fsdp_ema_update(model: nn.Module, decay: float) -> Step:
    """Bagel's fsdp_ema_update(): two foreach calls."""
    weights = [p.detach() for p in model.parameters()]
    averages = [p.clone() for p in weights]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, weights, alpha=1 - decay)

    return step
