"""What users give to AveragedModel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

ALL = bool(os.environ.get("SHARDOW_ALL"))


def own_multi_avg_fn(averages: Any, weights: Any, num_averaged: Any) -> None:
    """A user's: the maximum of both, and a little of the count."""
    assert len({(tensor.device, tensor.dtype) for tensor in averages}) == 1
    torch._foreach_maximum_(averages, weights)
    torch._foreach_mul_(averages, 1 - 1e-3 / (float(num_averaged) + 1))


def own_avg_fn(average: torch.Tensor, weight: torch.Tensor, num_averaged: Any) -> torch.Tensor:
    return average * 0.5 + weight.abs().sqrt() / (num_averaged + 2)


#: What a user gives to AveragedModel, from functions of torch's module or of ours.
CASES: list[Callable[[Any], dict[str, Any]]] = [
    lambda f: {},
    lambda f: {"multi_avg_fn": f.get_swa_multi_avg_fn()},
    lambda f: {"avg_fn": f.get_swa_avg_fn()},
    lambda f: {"multi_avg_fn": f.get_ema_multi_avg_fn(0.99)},
    lambda f: {"multi_avg_fn": f.get_ema_multi_avg_fn(0.3), "use_buffers": True},
    lambda f: {"avg_fn": f.get_ema_avg_fn(0.99), "use_buffers": True},
    lambda f: {"multi_avg_fn": own_multi_avg_fn},
    lambda f: {"avg_fn": own_avg_fn},
]
if ALL:
    for decay in (0.0, 0.5, 1.0):
        CASES.append(lambda f, d=decay: {"multi_avg_fn": f.get_ema_multi_avg_fn(d), "use_buffers": True})  # type: ignore[misc]
        CASES.append(lambda f, d=decay: {"avg_fn": f.get_ema_avg_fn(d)})  # type: ignore[misc]
