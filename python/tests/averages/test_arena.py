"""Tensors that show averages are real memory, in whatever block of torch's an EMA is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from own_averages import averages_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardow


def _ema(around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> tuple[nn.Module, shardow.EMA]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    with around():
        ema = shardow.EMA(model, [0.5, 0.75])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    ema.update()
    return model, ema


@pytest.mark.parametrize(
    "around",
    [torch.inference_mode, FakeTensorMode, lambda: torch.device("meta")],
    ids=["inference", "fake", "default device"],
)
def test_they_are_the_averages_memory(around: Any) -> None:
    _, other = _ema()
    expected = [[average.clone() for average in one.averages] for one in averages_of(other).tracked]
    _, ema = _ema(around)
    with around():
        found = [one.averages for one in averages_of(ema).tracked]
    for averages, values in zip(found, expected, strict=True):
        assert all(torch.equal(average, value) for average, value in zip(averages, values, strict=True))
        averages[0].mul_(2.0)  # not of inference mode, and of real memory
    assert torch.equal(ema.state_dict()["averages"]["0.5"]["0.weight"].view(-1), expected[0][0] * 2.0)


def test_they_are_the_same_each_time_and_outlive_the_ema() -> None:
    _, ema = _ema()
    one = averages_of(ema).tracked[1]
    assert one.averages[1] is one.averages[1]
    kept, values = one.averages[1], one.averages[1].clone()
    del one, ema
    assert torch.equal(kept, values)
    assert kept.untyped_storage().nbytes() == kept.nbytes  # so that torch.save() writes no more than it
