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
    assert {name: (found.get_slice(name).dtype, found.get_slice(name).shape) for name in found} == {
        "w": ("F32", (5, 7, 3)), "half": ("BF16", (4, 4)), "flag": ("BOOL", (2,)), "scalar": ("F32", ()),
        "tiny": ("F8_E5M2", (3,)),
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
    found = shardow.open(tmp_path / "a.safetensors", framework="numpy").get_slice("w")[index]
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


def test_values_are_torchs_tensors(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / "a.safetensors")
    found = shardow.open(tmp_path / "a.safetensors")
    for name, expected in state.items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    part = found.get_slice("w")
    assert (part.get_shape(), part.get_dtype()) == ([5, 7, 3], "F32")
    assert torch.equal(part[1:4, ..., 0], state["w"][1:4, ..., 0])


def test_values_and_what_numpy_lacks(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / "a.safetensors")
    found = shardow.open(tmp_path / "a.safetensors", framework="numpy")
    assert np.array_equal(found["half"], state["half"].float().numpy())
    assert found["flag"][0]
    assert found["scalar"] == 3.5
    assert "tiny" in found
    with pytest.raises(NotImplementedError, match="'tiny' is F8_E5M2"):
        found["tiny"]
    with pytest.raises(IndexError):
        found.get_slice("w")[5]
    with pytest.raises(IndexError):
        found.get_slice("w")[0, 0, 0, 0]
    with pytest.raises(KeyError, match="has no tensor 'nothing'"):
        found["nothing"]
    with pytest.raises(FileNotFoundError):
        shardow.open(tmp_path / "nothing")
    with pytest.raises(ValueError, match="framework='jax'"):
        shardow.open(tmp_path / "a.safetensors", framework="jax")  # type: ignore[arg-type]


def test_torch_is_not_imported(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    shardow.save(state, tmp_path / "a.safetensors")
    opened = f"shardow.open({str(tmp_path / 'a.safetensors')!r}, 'numpy')"
    code = f"import sys, shardow; print({opened}.get_slice('w')[1, 1, 1], 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "25.0",
        "False",
    ]


def test_a_checkpoint_is_saved_again_in_another_dtype_and_other_shards(tmp_path: Path) -> None:
    state = {f"layers.{i}.weight": torch.randn(40, 10 + i) for i in range(4)} | {"steps": torch.arange(5)}
    shardow.save(state, tmp_path / "a.safetensors")
    shardow.save(shardow.open(tmp_path / "a.safetensors"), tmp_path / "b", dtype="bfloat16", max_shard_size=2000)
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 1
    found = dict(shardow.open(tmp_path / "b").items())
    assert set(found) == set(state)
    assert torch.equal(found["steps"], state["steps"])
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in state.items() if name != "steps")
