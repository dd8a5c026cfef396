"""What a merge holds: a few chunks, whatever the size of the inputs; into a sharded model, the shard besides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardow

ROWS, COLUMNS, LAYERS = 3072, 4096, 4  # 96 MiB of bfloat16
MIB = 2**20


def _trained(folder: str, dcp_too: bool) -> None:
    """Checkpoints of a model that is sharded over all ranks."""
    model = nn.Sequential(*(nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for step in (1, 2, 4):
        for i, weight in enumerate(model.parameters()):
            weight.data.fill_(step * (i + 1))
        shardow.save(model, f"{folder}/step-{step}")
    if dcp_too:
        dcp.save({"large": torch.distributed.tensor.empty(4 * ROWS, COLUMNS, device_mesh=weight.device_mesh,
         placements=weight.placements)},
                 checkpoint_id=f"{folder}/dcp")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    run(4, _trained, str(folder), True)
    return folder


@pytest.fixture(scope="module")
def inputs(folder: Path) -> list[str]:
    return [str(folder / f"step-{step}") for step in (1, 2, 4)]


def kilobytes(name: str) -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )


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
        assert torch.equal(
            found["1.weight"][::500], torch.full((ROWS, COLUMNS), 2 * (1 / 6 + 1 + 4 / 3)).bfloat16()[::500]
        )


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


def _merge_dcp(path: str, out: str) -> float:
    with Peak() as peak:
        shardow.merge([path], out)
    return peak.mib


def test_of_torchs_own_directories_a_band_of_stored_pieces_is_held(folder: Path, tmp_path: Path) -> None:
    (peak,) = run(1, _merge_dcp, str(folder / "dcp"), str(tmp_path / "out.safetensors"))
    assert peak <= 2 * 48 + 64  # of 192 MiB in four pieces: a piece as torch reads it, and as it is handed on


def _many_threads(inputs: list[str], out: str) -> float:
    from shardow import _core

    opened = [_core.MergeInput(path, _core.Checkpoint.open(Path(path)), 1 / 3) for path in inputs]
    with Peak() as peak:
        _core.merge(_core.solo(), opened, Path(out), threads=64)
    return peak.mib


def test_many_threads_hold_no_more(inputs: list[str], tmp_path: Path) -> None:
    assert max(run(1, _many_threads, inputs, str(tmp_path / "out.safetensors"))) <= 64
