"""Plain tensors are found by the thousand, and their views made when somebody asks: all must be as if each were looked
at.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from own_averages import averages_of
from torch import nn

import shardow
from shardow import _core
from shardow.model import swap_guard
from shardow.model import view as view_module
from shardow.model.storage import SURVEY
from shardow.model.view import ModelView, find


class _Blind:
    """Finds nothing usual."""

    def look(self, tensors: list[Any]) -> _core.Looked:
        return SURVEY.look([None for _ in tensors])


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 0), nn.Embedding(5, 2, dtype=torch.bfloat16))


def _tied() -> nn.Module:
    model = _plain()
    model.append(nn.Linear(3, 4))
    model[4].weight = model[0].weight
    return model.append(model[0])


def _odd() -> nn.Module:
    model = _plain()
    model[0].weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
    model[3].weight.requires_grad_(False)
    return model


def _on_one_memory() -> nn.Module:
    model = _plain()
    model.append(nn.Linear(3, 4))
    model[4].bias.data = model[0].bias.data
    return model


def _facts(view: ModelView) -> list[Any]:
    rows = [*view.parameters, *view.buffers]
    return [
        (one.name, one.aliases, one.tensor.data_ptr(), one.tensor.shape, one.tensor.stride(), one.tensor.dtype,
         one.region.encode(),
         one.requires_grad, one.replicas, one.sharded, one.tensor.requires_grad)
        for one in rows
    ]  # fmt: skip


@pytest.mark.parametrize("make", [_plain, _tied, _odd, _on_one_memory, nn.Module])
def test_what_is_found_by_the_thousand_is_what_is_found_one_by_one(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    usual = find(model, odd=True)
    monkeypatch.setattr(view_module, "SURVEY", _Blind())
    slow = find(model, odd=True)
    assert all(one.batch is None for one in slow.parameters)
    if make in (_plain, _tied):
        assert all(one.batch is not None for one in usual.parameters)
    assert usual.unchanged()
    assert slow.unchanged()
    assert _facts(usual) == _facts(slow)
    assert usual.versions() == slow.versions()


def test_views_show_the_memory_that_there_was_whatever_the_parameters_show_by_then() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    first, then = model[0].weight.detach(), model[0].weight.detach().clone()
    alive = weakref.ref(model[1].bias.untyped_storage())
    address = model[1].bias.data_ptr()
    whole = torch.arange(40.0)
    model[1].weight.data = whole[8:24].view(4, 4)
    view = find(model)
    model[0].weight.data = torch.zeros(4, 3, dtype=torch.float64)
    model[1].weight.data = torch.zeros(2, 8)
    model[1].bias.data = torch.zeros(4)
    gc.collect()
    there = {one.name: one.tensor for one in view.parameters}
    assert there["0.weight"].data_ptr() == first.data_ptr()
    assert torch.equal(there["0.weight"], then)
    assert there["1.weight"].data_ptr() == whole[8:].data_ptr()
    assert torch.equal(there["1.weight"], whole[8:24].view(4, 4))
    assert there["1.bias"].data_ptr() == address
    assert alive() is not None
    assert not view.unchanged()


def test_averages_follow_weights_that_moved_before_anybody_asked_for_a_view() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ema = shardow.EMA(model, 0.5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = p.data.clone() + 1
    ema.update()
    for name, average in ema.state_dict()["averages"].items():
        assert torch.equal(average, torch.lerp(expected[name], expected[name] + 1, 0.5)), name
    with ema.swapped():
        for name, p in model.named_parameters():
            assert torch.equal(p, torch.lerp(expected[name], expected[name] + 1, 0.5)), name
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name] + 1), name


def test_a_view_that_is_made_later_is_in_memory_that_a_storage_has_moved_to() -> None:
    model = nn.Linear(3, 4)
    whole = torch.arange(40.0)
    model.weight.data = whole[8:20].view(4, 3)
    view = find(model)
    model.share_memory()
    there = {one.name: one.tensor for one in view.parameters}
    assert all(there[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())
    assert torch.equal(there["weight"], torch.arange(8.0, 20.0).view(4, 3))


def test_an_ema_that_only_updates_makes_no_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        swap_guard, "_entered", set()
    )  # others' views are compared with those of swaps that tests before left open
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ema = shardow.EMA(model, 0.5)
    ema.update()
    assert all(one.local.batch is not None for one in averages_of(ema).tracked)
    with ema.swapped():
        pass
    assert all(one.local.batch is None for one in averages_of(ema).tracked)


@dataclass(slots=True)
class _Row:
    name: str
    number: int = 0


def test_rows_take_a_list_for_each_or_one_value_for_all() -> None:
    rows: list[_Row] = _core.Rows(_Row).of(2, {"name": ["a", "b"], "number": (7,)})
    assert rows == [_Row("a", 7), _Row("b", 7)]
    _core.Rows(_Row).put(rows, {"number": [1, 2]})
    assert rows == [_Row("a", 1), _Row("b", 2)]
    for columns in ({"name": ["a"]}, {"number": (1, 2)}, {"__doc__": ["a", "b"]}):
        with pytest.raises(ValueError, match="is no slot"):
            _core.Rows(_Row).of(2, columns)
