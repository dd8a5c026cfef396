"""open(): headers without data, slices without the rest, and no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardow


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(5 * 7 * 3).view(5, 7, 3).float(),
        "half": torch.randn(4, 4).bfloat16(),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5),
        "tiny": torch.ones(3).to(torch.float8_e5m2),
    }


@pytest.mark.parametrize("where", ["a.safetensors", "hub"])
def test_shows_names_dtypes_shapes_and_metadata(where: str, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / where, metadata={"who": "me"}, max_shard_size=200 if where == "hub" else None)
    found = shardow.open(tmp_path / where)
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {
        "w": ("F32", (5, 7, 3)), "half": ("BF16", (4, 4)), "flag": ("BOOL", (2,)), "scalar": ("F32", ()), "tiny": ("F8_E5M2", (3,)),
    }  # fmt: skip
    assert found.metadata["who"] == "me"
    assert len(found) == 5


@pytest.mark.parametrize(
    "index",
    [
        ...,
        0,
        -1,
        slice(1, 3),
        (slice(None), 2),
        (..., 1),
        (slice(0, 5, 2), slice(3, 1), 0),
        (1, 2, 2),
        (slice(1, 5, 3), ..., slice(None, None, 2)),
        (),
    ],
)
def test_slices_are_numpys(index: Any, state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / "a.safetensors")
    expected = state["w"].numpy()[index]
    found = shardow.open(tmp_path / "a.safetensors")["w"][index]
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_values_and_what_numpy_lacks(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / "a.safetensors")
    found = shardow.open(tmp_path / "a.safetensors")
    assert np.array_equal(found["half"][...], state["half"].float().numpy())
    assert found["flag"][0]
    assert found["scalar"][...] == 3.5
    with pytest.raises(NotImplementedError, match="'tiny' is F8_E5M2"):
        found["tiny"][...]
    with pytest.raises(IndexError):
        found["w"][5]
    with pytest.raises(IndexError):
        found["w"][0, 0, 0, 0]
    with pytest.raises(KeyError):
        found["nothing"]
    with pytest.raises(FileNotFoundError):
        shardow.open(tmp_path / "nothing")


def test_torch_is_not_imported(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / "a.safetensors")
    code = f"import sys, shardow; print(shardow.open({str(tmp_path / 'a.safetensors')!r})['w'][1, 1, 1], 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["25.0", "False"]
