"""What the averages take of the machine's memory, read from the kernel, in a process of its own."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

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


@pytest.mark.parametrize("decays", ["0.9", "0.9,0.99,0.999", "0.9,0.99,0.999,0.9999,0.95,0.96,0.97,0.98"])
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
