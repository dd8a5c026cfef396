"""An EMA, or a model, that nobody has any more gives its memory back at once: Python's collector, which may come much
later, finds nothing left of it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from own_averages import averages_of
from torch import nn

import shardow


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture
def left() -> Iterator[list[object]]:
    """What the collector finds from here on."""
    gc.collect()
    gc.disable()
    gc.garbage.clear()
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def test_a_dropped_ema_is_gone(left: list[object]) -> None:
    model = _model()
    ema = shardow.EMA(model, 0.9)
    ema.update()
    parts = [weakref.ref(one) for one in (ema, averages_of(ema), averages_of(ema).view, averages_of(ema).swap, model)]
    del ema
    assert [one() is None for one in parts] == [True, True, True, True, False]
    del model
    assert parts[-1]() is None


def test_dropped_ema_that_was_attached_is_gone(left: list[object]) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ema = shardow.EMA(model, 0.9, optimizer=optimizer)
    core = weakref.ref(averages_of(ema))
    optimizer.step()
    assert ema.step == 1
    del ema
    assert core() is None
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks


def _attached(model: nn.Module, path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ema = shardow.EMA(model, 0.9)
    with ema.attach(optimizer):
        optimizer.step()
    ema.attach(optimizer)


def _swapped(model: nn.Module, path: Path) -> None:
    with shardow.EMA(model, 0.9).swapped():
        pass


def _its_state(model: nn.Module, path: Path) -> None:
    ema = shardow.EMA(model, 0.9)
    ema.load_state_dict(ema.state_dict())
    copy.deepcopy(ema)


def _its_file(model: nn.Module, path: Path) -> None:
    ema = shardow.EMA(model, 0.9)
    ema.save(path)
    ema.load(path)
    with shardow.open(path) as file:
        assert [file[name] for name in file]


def _a_models_file(model: nn.Module, path: Path) -> None:
    shardow.save(model, path)
    shardow.load(model, path)
    with shardow.meta_init():
        empty = _model()
    shardow.materialize(empty, path)


@pytest.mark.parametrize("use", [_attached, _swapped, _its_state, _its_file, _a_models_file])
def test_no_use_leaves_anything_for_the_collector(
    use: Callable[[nn.Module, Path], None], left: list[object], tmp_path: Path
) -> None:
    use(_model(), tmp_path / "warm.safetensors")  # what is imported, and kept, at the first call
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    use(_model(), tmp_path / "some.safetensors")
    gc.collect()
    assert [type(one) for one in left] == []


def test_the_collector_finds_a_model_that_holds_its_ema() -> None:
    model = torch.nn.Linear(2, 2)
    model.ema = shardow.EMA(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
