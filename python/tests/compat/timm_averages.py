"""timm itself, where it is installed, and what states of averages have in common."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import walks
from torch import nn

from shardow.compat import timm as ours


def _origin() -> Any:
    """timm's file by itself: the package wants torchvision."""
    package = importlib.util.find_spec("timm")
    assert package is not None
    assert package.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location(
        "timm_model_ema", Path(package.submodule_search_locations[0]) / "utils" / "model_ema.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


origin = _origin()
ALL = bool(os.environ.get("SHARDOW_ALL"))


def state_of(average: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = (average.ema if hasattr(average, "ema") else average).state_dict()
    return state


def same(theirs: Any, mine: Any, model: nn.Module) -> None:
    """All floating tensors are equal, in the same order; counters are the model's, which V1 and V2 truncate."""
    expected, found, now = state_of(theirs), state_of(mine), model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(
            tensor, expected[name] if tensor.is_floating_point() else now[name.removeprefix("module.")]
        ), name


def averaged(decay: float = 0.5) -> tuple[nn.Module, Any]:
    model = walks.model("mlp")
    ema = ours.ModelEma(model, decay)
    for _ in walks.walk(model, "mlp", 5):
        ema.update(model)
    return model, ema
