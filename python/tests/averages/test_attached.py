"""attach(): updates follow the steps of one optimizer, of several, of wrapped ones, and of those that a GradScaler
skips.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from small import equal
from torch import nn

import shardow


def make(*decays: Any) -> tuple[nn.Module, shardow.EMA]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return model, shardow.EMA(model, *(decays or (0.5,)))


def ready(model: nn.Module, value: float = 1.0) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def same(a: shardow.EMA, b: shardow.EMA) -> bool:
    return equal(a.full_state_dict(complete=False), b.full_state_dict(complete=False))


def test_accelerates_optimizer_attaches() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ema = make()
    prepared = accelerate.Accelerator(cpu=True).prepare_optimizer(sgd(model))
    handle = ema.attach(prepared)
    for _ in range(3):
        ready(model)
        prepared.step()
    assert ema.stats()["step"] == 3
    handle.remove()
    prepared.step()
    assert ema.stats()["step"] == 3


def test_what_is_no_optimizer_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"attach\(\) takes.*not a Linear; call update\(\)"):
        make()[1].attach(nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", [64, "seen"])
def test_a_half_life_in_samples_follows_an_optimizer(samples: Any) -> None:
    model, ema = make(shardow.schedules.half_life_in_samples(1000))
    twin, expected = make(shardow.schedules.half_life_in_samples(1000))
    seen = 0.0
    optimizer, other = sgd(model), sgd(twin)
    ema.attach(optimizer, samples=(lambda: seen) if samples == "seen" else samples)
    for _ in range(5):
        seen += 64
        for one, by in ((model, optimizer), (twin, other)):
            ready(one)
            by.step()
        expected.update(samples=seen)
    assert same(ema, expected)
    resumed = shardow.EMA(model, shardow.schedules.half_life_in_samples(1000))
    resumed.load_state_dict(ema.state_dict())
    ema.attach(sgd(nn.Linear(1, 1)))  # another one of the model's: its samples are the first's
    resumed.attach(another := sgd(model), samples=64 if samples != "seen" else lambda: seen)
    seen += 64
    another.step()
    twin.load_state_dict(model.state_dict())
    expected.update(samples=seen)
    assert same(resumed, expected)


def test_samples_of_nothing_are_refused() -> None:
    model, ema = make()
    with pytest.raises(ValueError, match="samples=0"):
        ema.attach(sgd(model), samples=0)


def test_a_step_that_a_scaler_skips_inside_a_fused_optimizer_is_not_counted() -> None:
    model, ema = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    ema.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for value in (1.0, float("inf"), 2.0):
        loss = scaler.scale(sum(p.sum() for p in model.parameters()) * value)
        optimizer.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert value != float("inf") or all(map(torch.equal, before, model.parameters()))
    assert ema.stats()["step"] == 2


def test_an_optimizer_that_averages_by_itself_is_warned_of() -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="pip install -r tools/requirements-peers.txt")
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match=r"AdamWScheduleFree averages by itself .* lags further behind"):
        shardow.EMA(model, optimizer=schedulefree.AdamWScheduleFree(model.parameters()))


def test_two_optimizers_of_one_model_make_one_update_a_step() -> None:
    model, ema = make()
    twin, expected = make()
    first, second = sgd(model[0]), sgd(model[1])
    ema.attach(first)
    ema.attach(second)
    whole = sgd(twin)
    for _ in range(4):
        ready(model)
        ready(twin)
        first.step()
        second.step()
        whole.step()
        expected.update()
    assert same(ema, expected)
    assert ema.stats()["step"] == 4


def test_a_round_in_which_one_of_two_is_skipped_counts_once() -> None:
    model, ema = make()
    first, second = sgd(model[0]), sgd(model[1])
    ema.attach(first)
    ema.attach(second)
    for steps in ([first], [first, second], [second], []):
        ready(model)
        for one in steps:
            one.step()
    first.step()
    second.step()
    assert ema.stats()["step"] == 4


def test_a_handle_ends_its_own_attachment_however_often_it_is_removed() -> None:
    model, ema = make()
    first, second = sgd(model[0]), sgd(model[1])
    one, _ = ema.attach(first), ema.attach(second)
    one.remove()
    one.remove()
    ready(model)
    first.step()
    second.step()
    assert ema.stats()["step"] == 1
    with pytest.raises(ValueError, match="twice"):
        ema.update()
    with pytest.raises(ValueError, match="twice"):
        ema.attach(second)


def test_an_update_that_raises_is_counted_once() -> None:
    model, _ = make()
    optimizer = sgd(model)
    ema = shardow.EMA(model, 0.5, nonfinite="raise", optimizer=optimizer)
    ready(model, float("nan"))
    with pytest.raises(ValueError, match="NaN or Inf"):
        optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
    ready(model)
    optimizer.step()
    assert ema.stats()["step"] == 2


def test_an_optimizer_that_is_detached_before_its_round_has_ended_is_not_kept() -> None:
    model, ema = make()
    first, second = sgd(model[0]), sgd(model[1])
    handle = ema.attach(first)
    ema.attach(second)
    ready(model)
    first.step()
    handle.remove()
    gone = weakref.ref(first)
    del first, handle
    gc.collect()
    assert gone() is None


def test_a_step_inside_swapped_is_refused_before_it_is_lost() -> None:
    model, ema = make()
    optimizer = sgd(model)
    ema.attach(optimizer)
    ready(model)
    before, averages = [p.detach().clone() for p in model.parameters()], ema.full_state_dict(complete=False)
    with ema.swapped(), pytest.raises(ValueError, match="inside swapped"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    after = ema.full_state_dict(complete=False)
    assert all(torch.equal(after[name], average) for name, average in averages.items()), (
        "the step would have been made on them"
    )


def test_nothing_of_the_old_average_is_kept_by_decay_0_and_that_is_no_mistake(recwarn: pytest.WarningsRecorder) -> None:
    shardow.EMA(nn.Linear(2, 2), 0.0)
    assert not recwarn.list


@pytest.mark.parametrize("options", [{"decay": 0.001}, {"dtype": torch.bfloat16}])
def test_warnings_point_at_the_users_line(options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="lerp|noise") as caught:
        shardow.EMA(nn.Linear(2, 2), **options)
    assert [one.filename for one in caught] == [__file__]


def test_detach_ends_every_attachment() -> None:
    model, ema = make()
    optimizers = [sgd(model), sgd(model)]
    handles = [ema.attach(optimizer) for optimizer in optimizers]
    model[0].weight = nn.Parameter(torch.zeros(3, 4))
    optimizers[0].step()
    with pytest.raises(ValueError, match=r"detach\(\)"):
        optimizers[1].step()
    ema.detach()
    ema.detach()
    for optimizer, handle in zip(optimizers, handles, strict=True):
        optimizer.step()
        handle.remove()


def test_second_ema_on_an_optimizer_is_reported() -> None:
    model, first = make()
    optimizer = sgd(model)
    first.attach(optimizer)
    with pytest.warns(UserWarning, match=r"another EMA is attached to this SGD.*detach\(\)"):
        second = shardow.EMA(model, 0.9, optimizer=optimizer)
    ready(model)
    optimizer.step()
    assert (first.step, second.step) == (1, 1)


def test_averages_that_fit_are_taken_after_a_head_was_replaced() -> None:
    model, old = make()
    ready(model)
    sgd(model).step()
    old.update()
    before = old.state_dict()["averages"]["0.weight"].clone()
    model[1] = nn.Linear(3, 5)
    new = shardow.EMA(model, 0.5)
    report = new.load_state_dict(old.state_dict(), strict=False)
    assert report == {"missing": ["1.weight", "1.bias"], "unexpected": ["1.weight", "1.bias"]}
    averages = new.full_state_dict(complete=False)
    assert torch.equal(averages["0.weight"], before)
    assert torch.equal(averages["1.weight"], model[1].weight.detach())
    assert new.step == 1
