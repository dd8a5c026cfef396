"""Whatever is wrong with a file of torch's is an error of Shardow's that names its path, or the file is read."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardow

STATE = {"w": torch.arange(600.0).view(20, 30), "b": torch.arange(7).bfloat16(), "n": torch.tensor(3)}


def write_zip(path: Path) -> Path:
    torch.save(STATE, path)
    return path


def write_legacy(path: Path) -> Path:
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    return path


def write_dcp(path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=path.with_suffix(""), no_dist=True)
    return path.with_suffix("")


def damage(data: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(data)), draw.choice([1, 1, 4, 64])
    kind = draw.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[at + length :]
    middle = bytes(length) if kind == 2 else draw.randbytes(length)
    return data[:at] + middle + data[at + length :]


def read(path: Path) -> None:
    target = {name: torch.empty_like(tensor) for name, tensor in STATE.items()}
    shardow.load(target, shardow.merged([path]), strict=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_zip, write_legacy, write_dcp], ids=["zip", "legacy", "dcp"])
def test_damaged_files_of_torch_are_errors_that_name_the_path(write: Callable[[Path], Path], tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.pt")
    read(whole)
    draw = random.Random(write.__name__)
    damaged = tmp_path / f"damaged{whole.suffix}"
    outcomes = set()
    for _ in range(120):
        if whole.is_dir():
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(whole, damaged)
            victim = draw.choice(sorted(path for path in damaged.iterdir()))
        else:
            shutil.copy(whole, victim := damaged)
        victim.write_bytes(damage(victim.read_bytes(), draw))
        try:
            read(damaged)
            outcomes.add("read")
        except shardow.Error as error:
            assert "damaged" in str(error), repr(error)
            outcomes.add(type(error).__name__)
    assert "CorruptError" in outcomes


@pytest.mark.filterwarnings("ignore")
def test_chunks_that_leave_a_hole_are_refused(tmp_path: Path) -> None:
    path = write_dcp(tmp_path / "holes.pt")
    metadata = dcp.FileSystemReader(path).read_metadata()
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks[0] = type(chunks[0])(offsets=torch.Size([1, 0]), sizes=torch.Size([19, 30]))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(shardow.errors.CorruptError, match=r"holes.*'w'"):
        read(path)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(20, 30, device="meta"), torch.eye(20).to_sparse()],
    ids=["meta", "sparse"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_values_in_memory_are_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"w": tensor}, tmp_path / "a.pt")
    with pytest.raises(shardow.Error, match=r"a\.pt.*'w'"):
        shardow.merge([tmp_path / "a.pt"], tmp_path / "out.safetensors")


def test_foreign_paths_that_are_no_files_are_typed_errors(tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "empty.pt").touch()
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    for name in ("folder.pt", "empty.pt", "dcp"):
        with pytest.raises(shardow.Error, match=name):
            shardow.merge([tmp_path / name], tmp_path / "out.safetensors")
