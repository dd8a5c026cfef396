"""What a merge holds: a few chunks, whatever the size of the inputs; into a sharded model, the shard besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow

ROWS, COLUMNS, LAYERS = 3072, 4096, 4  # 96 MiB of bfloat16
MIB = 2**20


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    for step in (1, 2, 4):
        state = {f"{i}.weight": torch.full((ROWS, COLUMNS), float(step * (i + 1))).bfloat16() for i in range(LAYERS)}
        shardow.save(state, folder / f"step-{step}")
    return [str(folder / f"step-{step}") for step in (1, 2, 4)]


def kilobytes(name: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))


class Peak:
    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = kilobytes("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.mib = (kilobytes("VmHWM") - self._before) / 1024


def _merge(inputs: list[str], out: str) -> float:
    with Peak() as peak:
        shardow.merge(inputs, out, curve="linear", timeout=120)
    return peak.mib


@pytest.mark.parametrize("world", [1, 3])
def test_a_merge_holds_a_few_chunks(world: int, inputs: list[str], tmp_path: Path) -> None:
    assert max(run(world, _merge, inputs, str(tmp_path / "out.safetensors"))) <= 64
    with shardow.open(tmp_path / "out.safetensors") as found:  # 1/6, 1/2, 1/3
        assert torch.equal(found["1.weight"][::500], torch.full((ROWS, COLUMNS), 2 * (1 / 6 + 1 + 4 / 3)).bfloat16()[::500])


def _load(inputs: list[str]) -> tuple[float, float]:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
    with Peak() as peak:
        shardow.load(model, shardow.merged(inputs, lawa=2), timeout=120)
    shards = [one.to_local() for one in model.parameters()]
    assert all((shard == 3 * (i + 1)).all() for i, shard in enumerate(shards))
    return peak.mib, sum(shard.nbytes for shard in shards) / MIB


def test_a_merge_into_a_sharded_model_holds_the_shard_besides(inputs: list[str]) -> None:
    for peak, shard in run(3, _load, inputs):
        assert shard == 32
        assert peak <= shard + 64
