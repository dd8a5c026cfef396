"""NeMo Automodel: weights that move, are renamed, replaced, sharded or unfrozen under a manager; evaluation; steps of
NaN.
"""

from __future__ import annotations

import copy

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from automodel_managers import BOTH, made, same, wander
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from shardow.compat.automodel import EMAManager, ShardedModelEMAManager


@pytest.mark.filterwarnings("ignore:decay")
def test_gap_1_averages_of_bfloat16_weights_are_float32_and_move() -> None:
    model = models.make(torch.bfloat16)
    manager, second = EMAManager(model, 0.9999), ShardedModelEMAManager(models.make(), model, 0.9999)
    begin, expected = manager.state_dict(), {name: p.detach().float() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)
    for _ in range(300):
        for one in (manager, second):
            one.update(model)
        for name, p in model.named_parameters():
            expected[name].mul_(0.9999).add_(p.detach(), alpha=1 - 0.9999)
    assert same(manager.state_dict(), expected)
    assert all(torch.equal(second.state_dict()[name], tensor) for name, tensor in expected.items())
    assert all(bool((manager._shadow[name] != tensor).all()) for name, tensor in begin.items())
    with pytest.warns(RuntimeWarning, match="rounded to nearest"):
        ShardedModelEMAManager(models.make(torch.bfloat16), model, 0.9999)
    assert EMAManager(models.make(torch.float64))._shadow["0.weight"].dtype == torch.float64


@pytest.mark.parametrize("kind", BOTH)
def test_gap_2_names_that_gain_a_prefix_are_still_averaged(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(expected)
    model[0] = checkpoint_wrapper(model[0])
    for step, wrapped in enumerate((model, torch.compile(model, backend="eager"))):
        wander(model, step)
        manager.update(wrapped)
        for name, p in zip(names, model.parameters(), strict=True):
            expected[name].mul_(0.5).add_(p.detach(), alpha=0.5)
    assert all(torch.equal(manager.state_dict()[name], tensor) for name, tensor in expected.items())


def test_gap_2_a_parameter_that_is_unfrozen_later_is_an_error_with_a_way_out() -> None:
    model = models.make()
    model[3].weight.requires_grad_(False)
    manager = EMAManager(model, 0.5)
    wander(model)
    manager.update(model)
    model[3].weight.requires_grad_(True)
    before = manager.state_dict()
    with pytest.raises(ValueError, match=r"'3.weight' and 0 more are trained.*strict=False"):
        manager.update(model)
    assert same(manager.state_dict(), before)
    again = EMAManager(model, 0.5)
    with pytest.warns(UserWarning, match=r"missing in the state: 3\.weight"):
        assert again.load_state_dict(before, strict=False) == (["3.weight"], [])
    again.update(model)
    second = ShardedModelEMAManager(models.make(), model, 0.5)
    model[6].bias.requires_grad_(False)
    second.update(model)
    assert "6.bias" in second  # once averaged, for good


@pytest.mark.parametrize("kind", BOTH)
def test_gap_3_replaced_parameters_are_found_again(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict({name: value.clone() + 1 for name, value in model.state_dict().items()}, assign=True)
    manager.update(model)
    for name, p in model.named_parameters():
        assert torch.equal(manager.state_dict()[name], expected[name].mul_(0.5).add_(p.detach(), alpha=0.5))
    model[6] = nn.Linear(1, 5)
    before = copy.deepcopy(dict(manager.state_dict()))
    with pytest.raises(ValueError, match=r"'6.weight'"):
        manager.update(model)
    del model[6], model[6]
    missing = r"missing in the model: 6\.weight, 6\.bias|no '6\.bias' any more"
    with pytest.raises((KeyError, RuntimeError), match=missing):
        manager.update(model)
    assert same(manager.state_dict(), before)


def _sharded_later() -> None:
    model = models.make()
    manager = EMAManager(model, 0.5)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    models.PARALLEL["fsdp2"](model, 2)
    wander(model)
    manager.update(model)
    for name, weight in models.whole_weights(model).items():
        expected[name].mul_(0.5).add_(weight, alpha=0.5)
    full = manager._ema.full_state_dict(complete=False)
    assert dist.get_rank() or same(full, expected)
    assert all(isinstance(tensor, DTensor) for tensor in manager._shadow.values())


def test_gap_3_a_model_may_be_sharded_after_its_averages_were_made() -> None:
    ranks.run(2, _sharded_later)


def test_gap_3_a_second_model_begins_as_the_first_and_its_buffers_follow() -> None:
    model = models.make(seed=1)
    model[3].weight.requires_grad_(False)
    manager = ShardedModelEMAManager(models.make(seed=2), model, 0.5)
    assert same(manager.state_dict(), model.state_dict())
    frozen = model[3].weight.detach().clone()
    for step in range(2):
        wander(model, step)
        model(torch.randn(8, models.INPUTS))
        manager.update(model)
    for name in ("7.running_mean", "7.running_var", "7.num_batches_tracked"):
        assert torch.equal(manager.state_dict()[name], model.state_dict()[name])
    assert torch.equal(manager.state_dict()["3.weight"], frozen)


@pytest.mark.parametrize("kind", BOTH)
def test_gap_8_evaluation_in_a_block(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    weights = copy.deepcopy(model.state_dict())
    wander(model)
    manager.update(model)
    live, averages = copy.deepcopy(model.state_dict()), copy.deepcopy(dict(manager.state_dict()))

    def evaluate() -> None:
        with manager.swapped() as averaged:
            assert all(torch.equal(p, averages[name]) for name, p in averaged.named_parameters())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert same(model.state_dict(), live)
    assert not torch.equal(averages["0.weight"], weights["0.weight"])
    if isinstance(manager, EMAManager):
        with manager.swapped(), pytest.raises(ValueError, match="inside swapped"):
            manager.state_dict()


@pytest.mark.parametrize("kind", BOTH)
def test_gap_8_a_step_of_nan_is_held(kind: str) -> None:
    model = models.make()
    manager = made(kind, model)
    before = copy.deepcopy(dict(manager.state_dict()))
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        manager.update(model)
    assert torch.equal(manager.state_dict()["0.weight"], before["0.weight"])
    assert manager.stats()["held_nonfinite"] == model[0].weight.numel()
