"""Checkpoints whose every value tells the version: made on ranks, and recognised at a path."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardow

#: {name: (shape, dtype, the axis that ranks share)}; some do not divide evenly, and of one the last rank of three has
#: nothing.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "embedding": ((96, 720), torch.float32, 0),  # long enough for each rank to write its own
    "across": ((3, 70), torch.bfloat16, 1),
    "uneven": ((7, 5, 3), torch.float64, 0),
    "bias": ((4,), torch.int64, 0),
}
FILE_BYTES = 6000  # of a file in a directory: the tensors take several
INDEX = "model.safetensors.index.json"
OTHERS = {"config.json": b'{"layers": 2}', "vocabulary/words.txt": b"a b c"}  # of a directory, not ours


def whole(name: str, version: int) -> torch.Tensor:
    """No element has the same value in two versions that follow one another; every dtype has all values."""
    shape, dtype, _ = TENSORS[name]
    numbers = torch.arange(torch.Size(shape).numel()) * 7 + version * 13
    return (numbers % 251).reshape(shape).to(dtype)


def on_this_rank(version: int) -> dict[str, torch.Tensor]:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return {
        name: distribute_tensor(whole(name, version), mesh, [Shard(axis)], src_data_rank=None)
        for name, (_, _, axis) in TENSORS.items()
    }


def listed(path: Path) -> list[Path]:
    """Returns the files that a directory's index names, or the only one."""
    if not (path / INDEX).exists():
        return [path / "model.safetensors"]
    return sorted({path / name for name in json.loads((path / INDEX).read_text())["weight_map"].values()})


def strays(path: Path) -> list[str]:
    """Returns the names in a directory that are neither the checkpoint's nor others'."""
    known = {INDEX, *(file.name for file in listed(path)), *(name.split("/")[0] for name in OTHERS)}
    return sorted({entry.name for entry in path.iterdir()} - known)


def version_at(path: Path) -> int:
    """Of the checkpoint, after looking at every value, through safetensors and through ours, and at the files that are
    not ours.
    """
    files = [path] if path.is_file() else listed(path)
    found: set[str] = set()
    theirs: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            found.add(opened.metadata()["version"])
            theirs.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    assert len(found) == 1, f"{path} has files of versions {found}"
    version = int(found.pop())
    ours = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype, _) in TENSORS.items()}
    report = shardow.load(ours, path)
    assert report["metadata"]["version"] == str(version)
    for read in (theirs, ours):
        assert read.keys() == TENSORS.keys()
        wrong = [name for name in TENSORS if not torch.equal(read[name], whole(name, version))]
        assert not wrong, f"{path}: {wrong} are not of version {version}"
    if path.is_dir():
        assert len(files) > 1
        assert json.loads((path / INDEX).read_text())["weight_map"].keys() == TENSORS.keys()
        assert {name: (path / name).read_bytes() for name in OTHERS} == OTHERS
    return version
