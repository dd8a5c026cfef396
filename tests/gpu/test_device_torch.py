"""Averages on a CUDA device by PyTorch's operations, where the engine's kernels can't run: within one rounding of the
kernels' own, and through swaps, files and graphs' refusal as elsewhere.

Skipped, with the reason, where no device answers; `make gpu` runs it where one does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_device import KINDS, STEPS, model_of, pytestmark, same, train

import shardow
from shardow.sharding import storage

__all__ = ["pytestmark"]

#: Rules whose PyTorch operations the device may round once more, or once less, than the engine.
RULES = {name: options for name, options in KINDS.items() if name not in ("bfloat16", "float64")}


def averages(options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, shardow.EMA]:
    model = model_of(dtype).cuda()
    return model, shardow.EMA(model, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", RULES)
def test_operations_round_as_kernels_do_but_for_one_rounding(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by_kernels = averages(RULES[kind], dtype)
    monkeypatch.setattr(storage, "why_not", lambda device: "this test says so")
    by_torch = averages(RULES[kind], dtype)
    for step in range(STEPS):
        for model, ema in (by_kernels, by_torch):
            train(model, step)
            ema.update()
    asked = RULES[kind]["decay"]
    first, *others = asked if isinstance(asked, list) else [None]
    for decay in (first, *others):
        expected, computed = (ema.full_state_dict(decay) for _, ema in (by_kernels, by_torch))
        for name, tensor in expected.items():
            torch.testing.assert_close(computed[name], tensor, rtol=STEPS * 2.0**-23, atol=1e-7)
    model, ema = by_torch
    assert ema.stats()["by_torch"] == len(list(model.parameters()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with ema.swapped(first):
        assert not torch.equal(model[0].weight, before["0.weight"])
    same(model.state_dict(), before)
    ema.save(tmp_path / "averages.safetensors")
    state = ema.full_state_dict(first)
    ema.reset()
    ema.load(tmp_path / "averages.safetensors")
    same(ema.full_state_dict(first), state)


def test_no_graph_captures_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "why_not", lambda device: "this test says so")
    _, ema = averages({"decay": 0.9}, torch.float32)
    ema.update()
    with pytest.raises(shardow.Error, match="in a capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ema.update()
    ema.update()
    assert ema.step == 2


def test_without_nvrtc_a_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "why_not", lambda device: "no NVRTC was found")
    monkeypatch.setattr("shardow.averaging.tracked._warned", set())
    with pytest.warns(UserWarning, match="updated by PyTorch's own operations: no NVRTC was found"):
        averages({"decay": 0.9}, torch.float32)
