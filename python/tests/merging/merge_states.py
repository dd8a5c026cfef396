"""Checkpoints of every format, drawn by a seed, and what their sums should be."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import shardow

State = dict[str, torch.Tensor]


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    torch.manual_seed(seed)
    return {
        "w": torch.randn(37, 129).to(dtype),
        "deep.b": (torch.randn(700) * 1e-3).to(dtype),
        "scalar": torch.tensor(seed / 3).to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "steps": torch.arange(5) + seed,
        "mask": torch.arange(9) % (seed + 2) == 0,
    }


def write(directory: Path, seed: int, form: str, dtype: torch.dtype = torch.float32) -> str:
    path = directory / f"step-{1000 * (seed + 1)}"
    if form == "dcp":
        dcp.save({"model": state(seed, dtype), "optim": {"lr": torch.ones(2)}}, checkpoint_id=path, no_dist=True)
    elif form == "pt":
        path = path.with_suffix(".pt")
        torch.save({"model": state(seed, dtype), "epoch": 3}, path)
    else:
        path = path.with_suffix(".safetensors") if form == "file" else path
        shardow.save(state(seed, dtype), path, max_shard_size=9000 if form == "directory" else None)
    return str(path)


def exactly(coefficients: list[Fraction], name: str, dtype: torch.dtype) -> list[Fraction]:
    terms = [state(seed, dtype)[name].double().flatten().tolist() for seed in range(len(coefficients))]
    return [
        sum((c * Fraction(x) for c, x in zip(coefficients, column, strict=True)), Fraction(0))
        for column in zip(*terms, strict=True)
    ]


def expect(
    found: State, coefficients: list[Fraction], dtype: torch.dtype = torch.float32, out: torch.dtype | None = None
) -> None:
    """Within half an ulp and a part in 1e12 of the largest term."""
    newest = state(len(coefficients) - 1, dtype)
    assert found.keys() == newest.keys()
    for name, tensor in found.items():
        if not newest[name].is_floating_point():
            assert torch.equal(tensor, newest[name])
            continue
        assert (tensor.dtype, tensor.shape) == (out or dtype, newest[name].shape)
        for is_, should in zip(tensor.double().flatten().tolist(), exactly(coefficients, name, dtype), strict=True):
            one = torch.tensor(float(should)).to(tensor.dtype)
            ulp = float((torch.nextafter(one.abs(), torch.tensor(torch.inf).to(one)) - one.abs()).double())
            assert abs(Fraction(is_) - should) <= Fraction(ulp) / 2 * (1 + Fraction(1, 10**6)) + Fraction(1, 10**12) * 4
