"""Topology never changes the numbers.

On any ranks, however the model is shared, the averages are those of one process that saw the same weights.
"""

from __future__ import annotations

import math
import os
from typing import Any

import models
import pytest
import ranks
import torch

import shardow

STEPS = 30
DECAY = 0.9
LONG = 0.99999  # rounded stochastically under "auto"

#: EMAs that live side by side on one model.
EMAS: dict[str, dict[str, Any]] = {
    "nearest": {"decay": DECAY, "stochastic": False, "threads": 1},
    "stochastic": {"decay": DECAY, "stochastic": True, "threads": 2},
    "auto, two decays": {"decay": [DECAY, LONG], "threads": 2},
    "copied replicas": {"decay": DECAY, "replicas": "copy"},
    "every third step": {"decay": DECAY, "update_every": 3, "start_step": 4},
    "mul_add": {"decay": DECAY, "rule": "mul_add"},
}

ALL = bool(os.environ.get("SHARDOW_ALL"))
CASES = [
    ("plain", 1), ("ddp", 3), ("fsdp1", 2), ("fsdp1-flat", 2), ("fsdp1-grad-op", 2), ("fsdp1-no-shard", 2),
    ("fsdp1-hybrid", 4), ("fsdp2", 3), ("hsdp", 4), ("tp+fsdp2", 4), ("wrapped", 2),
]  # fmt: skip
if ALL:
    CASES += [("ddp", 2), ("fsdp1", 4), ("fsdp1-flat", 4), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 4)]
BFLOAT16 = CASES if ALL else [("fsdp2", 3), ("fsdp1", 2)]


def train(
    kind: str, dtype: torch.dtype
) -> tuple[list[dict[str, torch.Tensor]], dict[str, dict[str, dict[str, torch.Tensor]]], list[float]]:
    """On every rank: (weights after each step, averages of each EMA by key, bytes of each EMA); the first two on rank
    0.
    """
    world = torch.distributed.get_world_size()
    model = models.build(kind, world, dtype)
    emas = {name: shardow.EMA(model, **options) for name, options in EMAS.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank() if kind != "tp+fsdp2" else 0)
    trajectory = [models.whole_weights(model)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(models.batch(generator, dtype)).float().square().mean().backward()
        optimizer.step()
        for ema in emas.values():
            ema.update()
        trajectory.append(models.whole_weights(model))
    averages = {
        name: {key: ema.full_state_dict(key, complete=False) for key in ema.decays} for name, ema in emas.items()
    }
    if torch.distributed.get_rank() != 0:
        assert all(full == {} for by_key in averages.values() for full in by_key.values())
        trajectory = []
    return trajectory, averages, [ema.stats()["bytes"] for ema in emas.values()]


def dense(kind: str, trajectory: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> shardow.EMA:
    """One process that sees the same weights."""
    twin = models.plain_twin(kind, next(iter(trajectory[0].values())).dtype)

    def show(weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, p in twin.named_parameters():
                p.copy_(weights[name])

    show(trajectory[0])
    ema = shardow.EMA(twin, **{**options, "threads": 1, "replicas": "split"})
    for weights in trajectory[1:]:
        show(weights)
        ema.update()
    return ema


@pytest.mark.parametrize(
    ("kind", "world", "dtype"),
    [(*case, torch.float32) for case in CASES] + [(*case, torch.bfloat16) for case in BFLOAT16],
    ids=lambda value: str(value).replace("torch.", ""),
)
def test_averages_equal_those_of_one_process(kind: str, world: int, dtype: torch.dtype) -> None:
    results = ranks.run(world, train, kind, dtype)
    trajectory, averages, _ = results[0]
    assert any(not torch.equal(trajectory[0][name], trajectory[-1][name]) for name in trajectory[0]), (
        "the weights moved"
    )
    for name, options in EMAS.items():
        reference = dense(kind, trajectory, options)
        for key, full in averages[name].items():
            expected = reference.full_state_dict(key, complete=False)
            assert sorted(full) == sorted(expected)
            for tensor in expected:
                assert torch.equal(full[tensor], expected[tensor]), (name, key, tensor)
    check_by_torch(trajectory, averages["nearest"][repr(DECAY)])
    check_memory(kind, world, [bytes_[0] for _, _, bytes_ in results], averages["nearest"][repr(DECAY)])


def check_by_torch(trajectory: list[dict[str, torch.Tensor]], averages: dict[str, torch.Tensor]) -> None:
    """torch's own lerp, bit for bit, and a float64 recursion within what float32 can."""
    for name, average in averages.items():
        single, double = trajectory[0][name].float(), trajectory[0][name].double()
        for weights in trajectory[1:]:
            single = torch.lerp(single, weights[name].float(), 1 - DECAY)
            double = torch.lerp(double, weights[name].double(), 1 - DECAY)
        assert torch.equal(average, single), name
        assert (average.double() - double).abs().max() <= 4 * 2**-24 * max(
            w[name].abs().max().item() for w in trajectory
        ), name


def check_memory(kind: str, world: int, bytes_: list[float], averages: dict[str, torch.Tensor]) -> None:
    """4 P / N on each rank, plus 64 bytes a tensor, plus torch.chunk's unevenness where rows are dealt out."""
    total = 4 * sum(t.numel() for t in averages.values())
    assert sum(bytes_) == total, "every element on exactly one rank"
    row = max(math.prod(t.shape[1:]) for t in averages.values())
    uneven = len(averages) * row * 4 if kind in ("fsdp2", "wrapped", "hsdp", "tp+fsdp2") else 0
    assert max(bytes_) <= total / world + 64 * len(averages) + uneven
