"""The averages' memory: what it takes of the machine's, read from the kernel in a process of its own; and that tensors
which show averages are that memory, in whatever block of torch's an EMA is made."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from own_averages import averages_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardow

PROGRAM = """
import sys, torch, shardow
from pathlib import Path
decays = [float(d) for d in sys.argv[1].split(",")]
model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1_000_003)) for _ in range(12)])
# by a walk over all pages: the quick count is kept for each processor, and added up now and then
lines = lambda: Path("/proc/self/smaps_rollup").read_text().splitlines()
resident = lambda: next(int(line.split()[1]) * 1024 for line in lines() if line.startswith("Rss:"))
shardow.EMA(torch.nn.Linear(2, 2), decays).update()  # loads what is loaded once
begin = resident()
ema = shardow.EMA(model, decays, threads=2)
made = resident()
ema.update()
first = resident()
for _ in range(20):
    ema.update()
print(made - begin, first - made, resident() - first)
"""


@pytest.mark.parametrize(
    "decays", ["0.9,0.99,0.999,0.9999,0.95,0.96,0.97,0.98", *(["0.9"] if os.environ.get("SHARDOW_ALL") else [])]
)
def test_averages_take_four_bytes_a_parameter_and_updates_nothing(decays: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, decays], capture_output=True, text=True, check=True, timeout=120
    )
    made, first, rest = map(int, done.stdout.split())
    averages = 4 * 12 * 1_000_003 * len(decays.split(","))
    assert abs(made - averages) < 1 << 20  # a page that was in use before may have been given back meanwhile
    assert first < 1 << 20  # threads' stacks
    assert rest < 64 << 10


def test_saving_a_state_with_torch_writes_the_averages_and_no_more() -> None:
    """Views of one large storage would all be written with the whole of it."""
    model = torch.nn.Linear(1000, 1000)
    buffer = io.BytesIO()
    torch.save(shardow.EMA(model, [0.9, 0.99]).state_dict()["averages"]["0.9"], buffer)
    assert buffer.tell() < 4 * 1_001_000 + 10_000


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


def test_full_tensors_that_were_gathered_in_inference_mode_can_be_written_outside_of_it() -> None:
    ema = shardow.EMA(nn.Linear(3, 3), 0.9)
    with torch.inference_mode():
        state = ema.full_state_dict()
    for tensor in state.values():
        tensor.add_(1)
