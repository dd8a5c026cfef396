"""One trajectory of weights, averaged by a C++ program and by Python on several numbers of ranks: their files are the
same bytes, and each goes on from the other's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardow
from shardow import schedules

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build" / "release" / "trajectory"
SHAPE = (37, 11)
KINDS = {
    "one": [schedules.warmup(0.999)],
    "stochastic": [0.99999],
    "several": [0.5, schedules.power(0.1), schedules.inverse_gamma(1.0, 2 / 3)],
}
WHERE = {"one": "ema.safetensors", "stochastic": "ema.safetensors", "several": "ema"}


def weights(step: int, seed: int) -> torch.Tensor:
    """As in trajectory.h."""
    element = torch.arange(SHAPE[0] * SHAPE[1])
    return (((element * 7 + step * (13 + element % 5) + seed) % 97 - 40).to(torch.float32) / 16).view(SHAPE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("rows", "columns", "whole"):
            self.register_parameter(name, nn.Parameter(torch.empty(SHAPE)))

    def at(self, step: int) -> None:
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                new = weights(step, seed)
                sharded = isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(new, parameter.device_mesh, parameter.placements) if sharded else new)


def in_python(first: int, last: int, source: str | None, target: str, kind: str) -> None:
    """As trajectory.h does it; alone, or sharded by FSDP2."""
    model = Net()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.at(first)
    ema = shardow.EMA(model, KINDS[kind])
    if source is not None:
        ema.load(source)
    for step in range(first + 1, last + 1):
        model.at(step)
        ema.update()
    ema.save(target)


def in_cpp(start: list[str], first: int, last: int, source: str | None, target: str, kind: str) -> None:
    texts = [
        shardow.schedules.constant(one).to_json() if isinstance(one, float) else one.to_json() for one in KINDS[kind]
    ]
    command = [*start, str(first), str(last), source or "-", target, *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def by(face: str, size: int, *told: object) -> None:
    if face == "cpp":
        in_cpp([str(PROGRAM), str(size)], *told)  # type: ignore[arg-type]
    elif size == 1:
        in_python(*told)  # type: ignore[arg-type]
    else:
        ranks.run(size, in_python, *told)


def files(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(path.iterdir())} if path.is_dir() else {"": path.read_bytes()}


WHO = [("python", 1), ("cpp", 1), ("python", 2), ("cpp", 2), ("cpp", 3), ("cpp", 5)]


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_the_same_bytes_whoever_wrote_them_and_each_goes_on_from_the_others(
    kind: str, tmp_path: Path
) -> None:
    halves, wholes = {}, {}
    for face, size in WHO:
        at = tmp_path / f"{face}{size}"
        at.mkdir()
        by(face, size, 0, 6, None, str(at / WHERE[kind]), kind)
        halves[face, size] = files(at / WHERE[kind])
    first = halves["python", 1]
    assert len(first) == len(KINDS[kind]) + (len(KINDS[kind]) > 1)  # with the list of their names
    assert {who: found == first for who, found in halves.items()} == dict.fromkeys(WHO, True)
    by("python", 1, 0, 9, None, str(tmp_path / f"straight-{WHERE[kind]}"), kind)
    for source, (face, size) in [
        ("python2", ("cpp", 3)),
        ("cpp3", ("python", 2)),
        ("cpp2", ("python", 1)),
        ("python1", ("cpp", 2)),
    ]:
        target = tmp_path / f"{source}-{face}-{WHERE[kind]}"
        by(face, size, 6, 9, str(tmp_path / source / WHERE[kind]), str(target), kind)
        wholes[source] = files(target)
    straight = files(tmp_path / f"straight-{WHERE[kind]}")
    assert straight != first
    assert {source: found == straight for source, found in wholes.items()} == dict.fromkeys(wholes, True)
