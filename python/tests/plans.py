"""Plans beside measures.

A step of training on real ranks with every set of switches, and what memory.measure() then counts on the fullest of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ranks
import torch
from torch import nn

import shardow

OFF: dict[str, Any] = {"bf16": False, "activation_checkpointing": False, "attention_weights": True}
#: Each switch by itself, none, and all.
SWITCHES: list[dict[str, Any]] = [
    OFF, {**OFF, "bf16": True}, {**OFF, "activation_checkpointing": True}, {**OFF, "attention_weights": False}, {},
]  # fmt: skip
KEYS = ("weights", "gradients", "optimizer", "averages", "activations", "total")

# Returns (model, batch, group of the averages) of a kind of sharding.
Make = Callable[[str], tuple[nn.Module, tuple[torch.Tensor, ...], Any]]


def measured(make: Make, kind: str) -> list[dict[str, int]]:
    """On this rank, one for each set of switches."""
    found = []
    for switches in SWITCHES:
        model, batch, group = make(kind)
        optimizer = torch.optim.AdamW(model.parameters())
        ema = shardow.EMA(model, [0.9, 0.99], group=group)
        with shardow.memory.apply(model, **switches):
            model(*batch).square().mean().backward()
            optimizer.step()
            ema.update()
            found.append(dict(shardow.memory.measure(model, optimizer, batch, ema=ema)))
    return found


def check(model: nn.Module, batch: Any, make: Make, kind: str, world: int) -> None:
    """Key by key within 10 %; what hangs on shapes alone, to the byte."""
    everywhere = ranks.run(world, measured, make, kind)
    for i, switches in enumerate(SWITCHES):
        shards = world // 2 if kind == "hsdp" else None
        plan = shardow.memory.plan(
            model, world, kind, optimizer="adamw", batch=batch, switches=switches, averages=2, shards=shards
        )
        most = {key: max(found[i][key] for found in everywhere) for key in KEYS}
        assert {key: plan[key] for key in KEYS} == {key: _near(most[key], plan[key]) for key in KEYS}, (
            kind,
            world,
            switches,
        )
        if kind != "fsdp1":  # whose parts begin anywhere
            assert [plan[key] for key in KEYS[:4]] == [most[key] for key in KEYS[:4]], (kind, world)


def _near(value: int, other: int) -> int:
    return other if abs(other - value) <= 0.1 * value else value
