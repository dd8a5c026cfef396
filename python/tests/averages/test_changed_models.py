"""A model that changes under its EMA: moved memory is followed, anything else is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small import DECAY, clone, equal, make_model
from torch import nn

import shardow


def _replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _narrow(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def _reshape(model: nn.Module) -> None:
    model[0].weight.data = torch.zeros(5, 5)


def _restore_state(model: nn.Module) -> None:
    """As copies and unpickling do: the module has another dict of parameters."""
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in model[0]._parameters.items()}
    model[0].__setstate__({**model[0].__dict__, "_parameters": parameters})


@pytest.mark.parametrize(
    ("change", "says"),
    [(_restore_state, r"0\.weight"), (_replace, r"0\.weight"), (_narrow, "bfloat16"), (_reshape, r"0\.weight")],
)
@pytest.mark.parametrize("call", ["update", "swapped"])
def test_a_changed_model_is_an_error_before_anything_changes(
    change: Callable[[nn.Module], None], says: str, call: str
) -> None:
    model = make_model()
    ema = shardow.EMA(model, DECAY)
    before = ema.full_state_dict(complete=False)
    change(model)
    with pytest.raises(ValueError, match=says):
        ema.update() if call == "update" else ema.swapped().__enter__()
    assert equal(ema.full_state_dict(complete=False), before)
    assert ema.stats()["step"] == 0


def test_weights_that_are_tied_by_their_memory_and_no_longer_so_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    ema = shardow.EMA(model, DECAY)
    before = ema.full_state_dict(complete=False)
    model[1].weight.data = model[1].weight.data.clone()
    with pytest.raises(ValueError, match=r"'1\.weight' lies in the memory of '1\.weight', it was '0\.weight'"):
        ema.update()
    assert equal(ema.full_state_dict(complete=False), before)


def test_weights_that_are_tied_by_their_memory_since_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ema = shardow.EMA(model, DECAY)
    before = ema.full_state_dict(complete=False)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'1\.weight' lies in the memory of '0\.weight', it was '1\.weight'"):
        ema.update()
    assert equal(ema.full_state_dict(complete=False), before)


def test_memory_that_moved_under_the_same_parameters_is_followed() -> None:
    model = make_model()
    ema = shardow.EMA(model, DECAY)
    expected = {n: torch.lerp(p, p * 2, 1 - DECAY) for n, p in clone(model).items()}
    for p in model.parameters():
        p.data = p.data * 2
    ema.update()
    assert equal(ema.full_state_dict(complete=False), expected)
    weights = clone(model)
    with ema.swapped():
        assert equal(clone(model), expected)
    assert equal(clone(model), weights)
