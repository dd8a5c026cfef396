"""What memory.plan() says of the demo's model is what its ranks then hold. Every sharding with SHARDOW_ALL."""

from __future__ import annotations

import os
from typing import Any

import plans
import pytest
import torch
from torch import nn

from examples.digits.model import DiT, ema_group, wrap

CASES = [("plain", 1), ("ddp", 2), ("fsdp2", 2)]
if os.environ.get("SHARDOW_ALL"):
    CASES += [
        ("plain", 2),
        ("fsdp2", 1),
        ("fsdp2", 3),
        ("fsdp2", 4),
        ("ddp", 4),
        ("hsdp", 4),
        ("fsdp1", 2),
        ("fsdp1", 4),
    ]


def make(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    batch = (torch.randn(16, 1, 8, 8), torch.rand(16), torch.randint(10, (16,)))
    return wrap(DiT(32, 2), kind), batch, ema_group(kind) if kind == "plain" else None


@pytest.mark.parametrize(("kind", "world"), CASES)
def test_the_plan_is_what_the_demo_holds(kind: str, world: int) -> None:
    with torch.device("meta"):
        model = DiT(32, 2)
    plans.check(model, ((16, 1, 8, 8), (16,), ((16,), "int64")), make, kind, world)
