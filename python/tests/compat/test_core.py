"""What the surfaces share: pairs of tensors, a twin of a model, a list of tensors, a stand-in; each against the formula
in torch.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, get_args

import bagel_models
import pytest
import ranks
import torch
import walks
from fake_device import Device, on_device
from own_averages import averages_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardow import EMA
from shardow.averaging.options import Rule
from shardow.compat._impl.averaged_copy import AveragedCopy, everything
from shardow.compat._impl.given_memory import AveragedTensor, GivenMemory, flat
from shardow.compat._impl.parameter_list import ParameterList, copies
from shardow.compat._impl.swapped_model_proxy import SwappedModelProxy, proxy_for
from shardow.compat.bagel import fsdp_ema_update
from shardow.compat.torch_ema import ExponentialMovingAverage


def _two_products(e: torch.Tensor, p: torch.Tensor, d: float, w: float) -> torch.Tensor:
    return e * d + w * p


RULES: dict[str, Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]] = {
    "lerp": lambda e, p, d, w: e.lerp(p, w),
    "mul_add": lambda e, p, d, w: e.mul(d).add(p, alpha=w),
    "two_products": _two_products,
    "difference": lambda e, p, d, w: e.sub(w * (e - p)),
    "quotient": lambda e, p, d, w: e + (p - e) / {0.5: 2, 0.999: 1000}.get(d, 1 / w),
    "fused_difference": lambda e, p, d, w: e.sub(e - p, alpha=w),
}


def zoo_of_tensors() -> dict[str, torch.Tensor]:
    """Layouts and dtypes that the engine takes, and those that it leaves to torch."""
    torch.manual_seed(0)
    whole = torch.randn(6, 5, 4, 3)
    return {
        "contiguous": whole[0].clone(),
        "channels_last": whole.clone(memory_format=torch.channels_last),
        "transposed": torch.randn(7, 9).t(),
        "holes": torch.randn(8, 8)[:, ::2],
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
        "double": torch.randn(33, dtype=torch.float64),
        "bfloat16": torch.randn(33, dtype=torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex64),
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 0.999])
def test_pairs_equal_the_formula_bit_for_bit(rule: str, decay: float) -> None:
    averages = zoo_of_tensors()
    sources = {name: torch.randn_like(tensor) for name, tensor in averages.items()}
    averages["count"], sources["count"] = torch.tensor(3), torch.tensor(8)
    expected = {
        n: RULES[rule](averages[n], sources[n], decay, 1 - decay) if n != "count" else torch.tensor(8) for n in averages
    }
    GivenMemory([AveragedTensor(n, sources[n], averages[n]) for n in averages], rule).update(decay, 1 - decay)
    for name, tensor in averages.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0, atol=0, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_source_of_another_dtype_is_read_as_torch_reads_it() -> None:
    for rule in get_args(Rule):
        for source in (torch.randn(40).bfloat16(), torch.randn(40, dtype=torch.float64), torch.randn(40).half()):
            if rule == "lerp" and source.dtype == torch.float64:
                continue  # torch refuses it; we cast
            average = torch.randn(40)
            expected = RULES[rule](average, source.float() if rule == "lerp" else source, 0.9, 0.1).float()
            if rule == "mul_add":
                expected = average.clone().mul_(0.9).add_(source, alpha=0.1)
            elif rule == "fused_difference":
                expected = average.clone().sub_(average - source, alpha=0.1)
            GivenMemory([AveragedTensor("p", source, average)], rule).update(0.9, 0.1)
            assert torch.equal(average, expected), (rule, source.dtype)


def test_low_precision_averages_move_in_the_mean_when_rounded_stochastically() -> None:
    average, source = torch.ones(20000, dtype=torch.bfloat16), torch.full((20000,), 2.0, dtype=torch.bfloat16)
    pairs = GivenMemory([AveragedTensor("p", source, average)], "lerp", stochastic=True)
    for _ in range(100):
        pairs.update(0.9999, 1 - 0.9999)
    assert abs(float(average.double().mean()) - (2 - 0.9999**100)) < 1e-3


@on_device
def test_averages_on_the_host_are_whole_when_an_update_returns() -> None:
    with Device(17) as device:
        weights, average = torch.zeros(1 << 24), torch.ones(1 << 24)
        memory = average.numpy()  # torch's own operations would wait for the device
        device.hold(weights)
        averages = GivenMemory([AveragedTensor("weight", weights, average)], "lerp")
        averages.update(0.5, 0.5)
        assert (memory == 0.5).all()


def test_what_is_not_finite_is_held_and_told_once() -> None:
    average, source = torch.ones(4), torch.tensor([1.0, float("nan"), float("inf"), 3.0])
    pairs = GivenMemory([AveragedTensor("p", source, average)], "mul_add")
    with pytest.warns(RuntimeWarning, match="2 weights are NaN or Inf"):
        pairs.update(0.5, 0.5)
    pairs.update(0.5, 0.5)
    assert average.tolist() == [1, 1, 1, 2.5]
    assert pairs.held() == 4


def test_flat_is_a_view_in_the_order_of_memory_or_nothing() -> None:
    tensors = zoo_of_tensors()
    for name in ("contiguous", "channels_last", "transposed", "scalar", "empty"):
        view = flat(tensors[name])
        assert view is not None
        assert view.numel() == tensors[name].numel()
        assert view.data_ptr() == tensors[name].data_ptr()
    assert flat(tensors["holes"]) is None
    assert flat(torch.zeros(1).expand(4)) is None


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_twin_follows_weights_and_buffers_whatever_replaces_them(name: str) -> None:
    model = walks.model(name)
    averaged, twin = copy.deepcopy(model), AveragedCopy("lerp")
    expected = copy.deepcopy(model).state_dict()
    for step in walks.walk(model, name, 60):
        if step == 20:
            for module in [*model.modules(), *averaged.modules()]:  # moved and replaced tensors
                module._buffers = {key: None if b is None else b.clone() for key, b in module._buffers.items()}
                for p in module._parameters.values():
                    if p is not None:
                        p.data = p.data.clone()
        watched = nn.Sequential(model)[0] if step < 40 else torch.compile(model, backend="eager")
        twin.bind(averaged, watched).update(0.9, 1 - 0.9)
        for key, value in model.state_dict().items():
            expected[key] = expected[key].lerp(value, 1 - 0.9) if value.is_floating_point() else value.clone()
    for key, value in averaged.state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_a_twin_refuses_other_names_and_shapes_before_anything_changes() -> None:
    model = walks.model("mlp")
    averaged, twin = copy.deepcopy(model), AveragedCopy("lerp")
    before = copy.deepcopy(averaged.state_dict())
    wider = nn.Sequential(nn.Linear(6, 37), nn.BatchNorm1d(37), nn.SiLU(), nn.Linear(37, 20))
    for error in (ValueError, RuntimeError):
        with pytest.raises(error, match=r"'3.weight' has shape.*; missing in the model: 4.weight"):
            twin.bind(averaged, wider)
    with pytest.raises(RuntimeError, match=r"unexpected in the model: 6\.weight"):
        twin.bind(averaged, nn.Sequential(*model, nn.Linear(3, 2)))
    assert all(torch.equal(a, before[key]) for key, a in averaged.state_dict().items())


def test_lists_are_paired_anew_when_they_change() -> None:
    model = walks.model("blocks")
    parameters = list(model.parameters())
    shadows = copies(parameters)
    expected = copies(parameters)
    listed = ParameterList("difference")
    for step in walks.walk(model, "blocks", 30):
        if step == 10:
            shadows = copies(shadows)
        if step == 20:
            parameters[0].data = parameters[0].data.clone() + 1
        listed.update(shadows, parameters, 0.8, 1 - 0.8)
        for e, p in zip(expected, parameters, strict=True):
            e.sub_((1 - 0.8) * (e - p.detach()))
    assert all(torch.equal(a, b) for a, b in zip(shadows, expected, strict=True))
    with pytest.raises(ValueError, match="3 parameters were given; the averages were made of"):
        listed.update(shadows, parameters[:3], 0.8, 0.2)
    with pytest.raises(RuntimeError, match="parameter 0 has shape"):
        listed.update(shadows, parameters[::-1], 0.8, 0.2)


def _stands_in() -> None:
    model = walks.model("mlp")
    plain = copy.deepcopy(model)
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    assert proxy_for(model, "lerp", everything) is not None
    assert proxy_for(plain, "lerp", everything) is None
    assert proxy_for(plain, "lerp", everything, replicas="split") is not None
    ema = EMA(model, 0.5, params="all", buffers="average", stochastic=False)
    stand_in = SwappedModelProxy(ema, model).eval()
    with torch.no_grad():
        for p, whole in zip(model.parameters(), plain.parameters(), strict=True):
            p.add_(1)
            whole.add_(0.5)
    averages_of(ema).update_by(0.5, 0.5)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(stand_in(x), plain.eval()(x))
    assert model.training
    assert all(module.training for module in model.modules())
    saved = {
        name: value.clone() if not hasattr(value, "region") else copy.deepcopy(value)
        for name, value in stand_in.state_dict().items()
    }
    assert set(saved) == set(plain.state_dict())
    averages_of(ema).update_by(0.0, 1.0)
    stand_in.load_state_dict(saved)
    torch.testing.assert_close(stand_in(x), plain(x))
    with pytest.raises(RuntimeError, match="Missing key"):
        stand_in.load_state_dict({name: value for name, value in saved.items() if name != "0.weight"})
    with pytest.raises(AttributeError, match=r"with ema.swapped"):
        _ = stand_in.encode


@pytest.mark.parametrize("world", [2, 4])
def test_a_stand_in_acts_as_the_averaged_model(world: int) -> None:
    ranks.run(world, _stands_in)


def test_version_counters_move() -> None:
    averaged = walks.model("mlp")
    weight: Any = next(averaged.parameters())
    loss = (weight * weight).sum()
    AveragedCopy("lerp").bind(averaged, walks.model("mlp")).update(0.5, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _slices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:2]


@pytest.mark.parametrize("change", [_slices, torch.t], ids=["slice", "transpose"])
def test_weights_that_change_their_form_where_they_lie_are_noticed(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Pruning by ``weight.data = weight.data[:2]`` keeps the address."""
    layer = nn.Linear(4, 4, bias=False)
    averaged, twin = copy.deepcopy(layer), AveragedCopy("lerp")
    listed, ema = ParameterList("lerp"), EMA(layer, 0.5)
    shadows = copies(layer.parameters())
    before = layer.weight.detach().clone()
    updates: list[Callable[[], None]] = [
        lambda: twin.bind(averaged, layer).update(0.5, 0.5),
        lambda: listed.update(shadows, list(layer.parameters()), 0.5, 0.5),
        ema.update,
    ]
    for update in updates:
        update()
    layer.weight.data = change(layer.weight.data)
    if change is _slices:
        for update in updates:
            with pytest.raises(ValueError, match=r"[(\[]2, 4[)\]]"):
                update()
        return
    updates[0]()
    updates[1]()
    expected = torch.lerp(before, before.t(), 0.5)
    assert torch.equal(averaged.weight, expected)
    assert torch.equal(shadows[0], expected)
    updates[2]()
    assert torch.equal(ema.full_state_dict()["weight"], expected)


class _Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("change", [_slices, torch.t], ids=["slice", "transpose"])
def test_a_subclass_that_changes_its_form_where_it_lies_is_noticed(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    weight = torch.randn(4, 4).as_subclass(_Tagged)
    listed, shadows = ParameterList("lerp"), copies([weight])
    expected = shadows[0].clone()
    listed.update(shadows, [weight], 0.5, 0.5)
    weight.data = change(weight.data)
    if change is _slices:
        with pytest.raises(ValueError, match=r"[(\[]2, 4[)\]]"):
            listed.update(shadows, [weight], 0.5, 0.5)
    else:
        listed.update(shadows, [weight], 0.5, 0.5)
        assert torch.equal(shadows[0], expected.lerp(change(expected), 0.5))


def test_bagels_pairing_costs_once_and_goes_with_the_models() -> None:
    ema_model, model = bagel_models.pair("plain")
    fsdp_ema_update(ema_model, model)
    twin = ema_model.__dict__["_shardow_twin"]
    pairs = twin._pairs
    fsdp_ema_update(ema_model, model)
    assert ema_model.__dict__["_shardow_twin"]._pairs is pairs
    other, pickled = copy.deepcopy(ema_model), pickle.loads(pickle.dumps(ema_model))
    before = copy.deepcopy(ema_model.state_dict())
    with torch.no_grad():
        model.head.weight.add_(1)
    for another in (other, pickled):
        fsdp_ema_update(another, model, decay=0.5)
        assert torch.equal(another.head.weight, before["head.weight"].mul(0.5).add(model.head.weight, alpha=0.5))
    assert bagel_models.same(ema_model.state_dict(), before)
    assert ema_model.__dict__["_shardow_twin"]._pairs is pairs
    gone = weakref.ref(ema_model), weakref.ref(model)
    del ema_model, model, other, pickled, another, twin, pairs
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_a_list_of_averages_keeps_no_weights_of_a_model_that_is_gone() -> None:
    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.complex64)]
    averages = ExponentialMovingAverage(parameters, 0.5)
    averages.update()
    memory = [weakref.ref(p.untyped_storage()) for p in parameters]
    del parameters
    gc.collect()
    assert [storage() for storage in memory] == [None, None]
