"""timm's names, signatures and attributes; copies, pickles, wrappers, scripted models."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import walks
from timm_averages import averaged, origin, same, state_of
from torch import nn

from shardow.compat import timm as ours


@pytest.mark.parametrize("cls", ["ModelEma", "ModelEmaV2", "ModelEmaV3"])
def test_signatures_and_attributes_are_the_origin_s(cls: str) -> None:
    theirs, mine = (list(inspect.signature(getattr(module, cls)).parameters.values()) for module in (origin, ours))
    assert [(p.name, p.default, p.kind) for p in mine[:-1]] == [(p.name, p.default, p.kind) for p in theirs]
    assert (mine[-1].name, mine[-1].default, mine[-1].kind) == ("replicas", "copy", inspect.Parameter.KEYWORD_ONLY)
    model = walks.model("mlp")
    a, b = getattr(origin, cls)(model), getattr(ours, cls)(model)
    for name in vars(a):
        if not name.startswith("_"):
            assert getattr(a, name) == getattr(b, name) or name == "ema"
    assert not b.module.training
    assert cls != "ModelEma" or not any(p.requires_grad for p in b.ema.parameters())


def test_get_decay_is_the_origin_s() -> None:
    model = nn.Linear(2, 2)
    for options in (
        {},
        {"update_after_step": 5},
        {"use_warmup": True},
        {
            "use_warmup": True,
            "warmup_gamma": 25.0,
            "warmup_power": 1.0,
            "min_decay": 0.3,
            "update_after_step": 3,
            "decay": 0.9,
        },
    ):
        theirs, mine = origin.ModelEmaV3(model, **options), ours.ModelEmaV3(model, **options)  # type: ignore[arg-type]
        for step in (None, -1, 0, 1, 2, 5, 6, 7, 100, 10**6):
            assert theirs.get_decay(step) == mine.get_decay(step)


def test_a_decay_that_is_changed_counts() -> None:
    model = walks.model("blocks")
    made = [
        (getattr(origin, cls)(model), getattr(ours, cls)(model)) for cls in ("ModelEma", "ModelEmaV2", "ModelEmaV3")
    ]
    for step in walks.walk(model, "blocks", 10):
        for pair in made:
            for average in pair:
                average.decay = step / 20
                average.update(model)
    for theirs, mine in made:
        same(theirs, mine, model)


def test_tied_weights_are_averaged_once() -> None:
    """state_dict() has them twice, and the origin averages them twice at each update."""
    model = walks.Tied()
    made = [
        getattr(module, cls)(model, 0.9)
        for module in (origin, ours)
        for cls in ("ModelEma", "ModelEmaV2", "ModelEmaV3")
    ]
    before = model.embed.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    for average in made:
        average.update(model)
    moved = [
        float((state_of(average)[name] - before).mean())
        for average in made
        for name in state_of(average)
        if "head" in name
    ]
    assert moved == pytest.approx([0.19] * 3 + [0.1] * 3, abs=1e-5)


def test_other_models_are_refused_before_anything_changes() -> None:
    model = walks.model("mlp")
    for cls in ("ModelEma", "ModelEmaV2", "ModelEmaV3"):
        average = getattr(ours, cls)(model, 0.5)
        before = copy.deepcopy(state_of(average))
        wider = nn.Sequential(*list(model)[:-1], nn.Linear(19, 4, bias=False))
        fewer = nn.Sequential(*list(model)[:-1])
        for kind, other in (
            (RuntimeError, wider),
            (ValueError, wider),
            (KeyError, fewer),
            (RuntimeError, nn.Sequential(*model, nn.Linear(3, 3))),
        ):
            with pytest.raises(kind, match=r"\b5\.weight|\b6\.weight"):
                average.update(other)
        assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(average).items())
        with pytest.raises(ValueError, match="replicas='both'"):
            getattr(ours, cls)(model, replicas="both")


class Engine(nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_are_looked_through_by_their_module() -> None:
    model = walks.model("mlp")
    theirs, mine = origin.ModelEmaV2(model, 0.5), ours.ModelEmaV2(model, 0.5)
    for step in walks.walk(model, "mlp", 6):
        theirs.update(Engine(model))
        mine.update([Engine(Engine(model)), nn.DataParallel(model), model][step % 3])
    same(theirs, mine, model)


def test_a_copy_and_a_pickle_go_on_by_themselves() -> None:
    model = walks.model("blocks")
    first = ours.ModelEmaV3(model, 0.9)
    theirs = origin.ModelEmaV3(model, 0.9)
    for step in walks.walk(model, "blocks", 20):
        if step == 7:
            first = copy.deepcopy(first)
        if step == 14:
            first = pickle.loads(pickle.dumps(first))
        if step == 18:
            first.module = copy.deepcopy(first.module)
        first.update(model)
        theirs.update(model)
    same(theirs, first, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("cls", ["ModelEmaV2", "ModelEmaV3"])
def test_scripted_models_are_refused(cls: str) -> None:
    with pytest.raises(NotImplementedError, match=r"the model is a \w+ of torch.jit.*nn.Module that it was made from"):
        getattr(ours, cls)(torch.jit.script(walks.model("mlp")), 0.9)


def test_timm_finds_the_average_to_save() -> None:
    """timm.utils.unwrap_model() asks what is no ModelEma of its own for `module`."""
    model, ema = averaged()
    assert ema.module is ema.ema
    assert not hasattr(model, "module")


def test_what_is_not_finite_is_held() -> None:
    model = nn.Linear(2, 1, bias=False)
    ema = ours.ModelEmaV3(model, 0.5)
    before = ema.module.weight.detach().clone()  # type: ignore[union-attr, operator]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), 3.0]]))
    with pytest.warns(RuntimeWarning, match="1 weights are NaN or Inf"):
        ema.update(model)
    weight: Any = ema.module.weight
    assert weight[0, 0] == before[0, 0]
    assert weight[0, 1] == before[0, 1].lerp(torch.tensor(3.0), 0.5)


@pytest.mark.parametrize("exclude", [False, True])
def test_updates_by_name_average_or_copy_buffers(exclude: bool) -> None:
    model = walks.model("mlp")
    averages = [module.ModelEmaV3(model, 0.9, exclude_buffers=exclude) for module in (ours, origin)]
    for step in walks.walk(model, "mlp", 4):
        for average in averages:
            with torch.no_grad():  # timm's update() sees to it
                (average.apply_update_ if step % 2 else average.apply_update_no_buffers_)(model, 0.7)
        mine, theirs = (dict(average.module.state_dict()) for average in averages)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    split = ours.ModelEmaV3(model, 0.9, exclude_buffers=exclude, replicas="split")
    (split.apply_update_no_buffers_ if exclude else split.apply_update_)(model, 0.7)
    with pytest.raises(NotImplementedError, match=f"exclude_buffers={exclude}"):
        (split.apply_update_ if exclude else split.apply_update_no_buffers_)(model, 0.7)


def test_stochastic_averages_follow_weights_that_the_engine_cannot_read_in_place() -> None:
    model = nn.Linear(8, 8)
    averages = ours.ModelEmaV3(model, 0.5, dtype=torch.bfloat16)
    model.weight.data = model.weight.data.t().contiguous().t()  # not in the order of its average
    for value in (1.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        for _ in range(12):
            averages.update(model)
        assert (averages.module.weight - value).abs().max() < 0.05
