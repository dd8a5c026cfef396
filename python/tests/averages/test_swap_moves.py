"""Weights come back to where the model has them, whatever was done to its memory inside of swapped()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moves import CHANGES, assigned, data, to_and_back
from small import equal
from test_swap import bits, trained
from torch import nn

import shardow


def replaced(model: nn.Sequential) -> None:
    model[2] = copy.deepcopy(model[2])
    model[0].weight = nn.Parameter(torch.zeros(7, 6))


@pytest.mark.parametrize("move", [data, to_and_back, assigned, replaced, CHANGES["share_memory()"]])
def test_weights_come_back_to_where_the_model_has_them(move: Callable[[nn.Module], object]) -> None:
    model, ema = trained()
    weights, averages = bits(model.named_parameters()), bits(ema.full_state_dict(complete=False))
    with ema.swapped():
        move(model)
    assert equal(bits(model.named_parameters()), weights)
    assert equal(bits(ema.full_state_dict(complete=False)), averages)


def test_tied_weights_that_are_untied_inside_come_back_under_both_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    ema = shardow.EMA(model, 0.5)
    with torch.no_grad():
        model[0].weight.add_(1)
    ema.update()
    weights = bits(model.state_dict().items())
    with ema.swapped():
        for layer in model:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert equal(bits(model.state_dict().items()), weights)


@pytest.mark.parametrize(
    ("move", "when"), [(data, "before"), (data, "inside"), (data, "both"), (to_and_back, "both"), (assigned, "inside")]
)
def test_averages_pass_for_no_weights_where_the_model_was_moved(
    move: Callable[[nn.Module], object], when: str, tmp_path: Path
) -> None:
    """Neither for another EMA, which has not seen the move yet, nor for a file."""
    model, ema = trained()
    other = shardow.EMA(model, 0.9)
    weights, averages = bits(model.named_parameters()), bits(other.full_state_dict(complete=False))
    if when != "inside":
        move(model)
    with ema.swapped():
        if when != "before":
            move(model)
        takers: list[Callable[[], object]] = [
            other.update,
            other.swap_in,
            other.reset,
            other.full_state_dict,
            lambda: other.copy_to(model),
            lambda: shardow.EMA(model),
            lambda: shardow.save(model, tmp_path / "model.safetensors"),
            lambda: shardow.full_state_dict(model),
            torch.optim.SGD(model.parameters(), lr=0.1).step,
        ]
        for take in takers:
            with pytest.raises(ValueError, match=r"an EMA has its averages in this model|inside swapped\(\)"):
                take()
    assert equal(bits(model.named_parameters()), weights)
    assert equal(bits(other.full_state_dict(complete=False)), averages)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_a_model_that_was_cast_come_back_cast_with_a_warning(dtype: torch.dtype) -> None:
    model, ema = trained()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    averages = bits(ema.full_state_dict(complete=False))
    with pytest.warns(RuntimeWarning, match="was cast inside swapped"), ema.swapped():
        model.to(dtype)
    assert equal(bits(model.named_parameters()), bits({name: p.to(dtype) for name, p in weights.items()}))
    assert equal(bits(ema.full_state_dict(complete=False)), averages)
    with pytest.raises(ValueError, match=r"it was torch\.float32"):
        ema.update()


def test_weights_that_the_model_has_no_place_for_are_kept_until_it_has() -> None:
    model, ema = trained()
    weights, averages = bits(model.named_parameters()), bits(ema.full_state_dict(complete=False))
    gone = model[2]
    with pytest.raises(ValueError, match=r"'2\.weight' is gone.*restore\(strict=False\)"), ema.swapped():
        model[2] = nn.Identity()
    with pytest.raises(ValueError, match=r"2\.weight"):
        ema.update()
    with pytest.raises(ValueError, match=r"2\.weight"):
        ema.restore()
    model[2] = gone
    ema.restore()
    assert equal(bits(model.named_parameters()), weights)
    assert equal(bits(ema.full_state_dict(complete=False)), averages)
    with pytest.raises(ValueError, match="of another shape"), ema.swapped():
        model[2] = nn.Linear(7, 5)
    ema.restore(strict=False)
    assert equal(
        bits(model[0].named_parameters()), {name[2:]: p for name, p in weights.items() if name.startswith("0.")}
    )
    assert equal(bits(ema.full_state_dict(complete=False)), averages)


def test_parametrizations_removed_inside_are_refused_with_nothing_lost() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    ema = shardow.EMA(model, 0.5)
    with torch.no_grad():
        model.bias.add_(1)
    ema.update()
    averages = bits(ema.full_state_dict(complete=False))
    with pytest.raises(ValueError, match="no place for its weights"), ema.swapped():
        nn.utils.parametrize.remove_parametrizations(model, "weight")
    ema.restore(strict=False)
    assert equal(bits(ema.full_state_dict(complete=False)), averages)
