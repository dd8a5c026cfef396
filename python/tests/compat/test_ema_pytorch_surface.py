"""ema-pytorch's methods, names and misuse; copies, lazy ones, models that cannot be copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import walks
from ema_pytorch_states import SOON, same
from torch import nn

from shardow.compat.ema_pytorch import EMA

origin = pytest.importorskip("ema_pytorch")


def test_methods_hooks_and_other_models() -> None:
    model: Any = walks.model("mlp")
    model.describe = None  # an attribute is no method, but is forwarded
    ours, theirs = (
        cls(model, **SOON, forward_method_names=("extra_repr", "state_dict_of_none")[:1]) for cls in (EMA, origin.EMA)
    )
    assert ours.extra_repr.__self__ is ours.ema_model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = [ema.add_to_optimizer_post_step_hook(optimizer) for ema in (ours, theirs)]
    for _ in range(12):
        model(walks.inputs("mlp")).sum().backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert int(ours.step) == 12
    assert same(ours, theirs)
    ours.update_moving_average(ours.ema_model, model, 0.5)
    theirs.update_moving_average(theirs.ema_model, model, 0.5)
    assert same(ours, theirs)
    a, b = walks.model("mlp"), walks.model("mlp")
    ours.update_moving_average(a, model, 0.25)
    theirs.update_moving_average(b, model, 0.25)
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    ours.restore_ema_model_device()


def test_subclass_with_its_own_update_is_the_origins() -> None:
    def own_update(self: Any, ma_model: nn.Module, current_model: nn.Module, current_decay: float = 0.0) -> None:
        for (_, p), (_, ma) in zip(self.get_params_iter(current_model), self.get_params_iter(ma_model), strict=True):
            self.inplace_lerp(ma.data, p.data, 0.25)
        for (_, b), (_, ma) in zip(self.get_buffers_iter(current_model), self.get_buffers_iter(ma_model), strict=True):
            self.inplace_copy(ma.data, b.data)

    model: Any = walks.model("mlp")
    ours, original = (
        type("Own", (cls,), {"update_moving_average": own_update})(model, **SOON) for cls in (EMA, origin.EMA)
    )
    for _ in walks.walk(model, "mlp", 8):
        ours.update()
        original.update()
    assert same(ours, original)


def test_wrapped_models_are_known_by_either_name() -> None:
    model = walks.model("mlp")
    wrapped = torch.compile(model, backend="eager")
    for ignored in ("_orig_mod.0.weight", "0.weight"):
        ema = EMA(wrapped, update_after_step=0, update_every=1, ignore_names={ignored})  # type: ignore[arg-type]
        first = model[0].weight.detach().clone()  # type: ignore[index, operator, union-attr]
        for _ in walks.walk(model, "mlp", 5):
            ema.update()
        assert "_orig_mod.0.weight" in ema.ema_model.state_dict()
        averaged = ema.ema_model.state_dict()["_orig_mod.0.weight"]
        assert not torch.equal(averaged, first)  # the first update copies
        held = averaged.clone()
        for _ in walks.walk(model, "mlp", 5):
            ema.update()
        assert torch.equal(averaged, held)


def test_sets_of_names_are_each_emas_own() -> None:
    """The origin's defaults are one set for all."""
    model = walks.model("mlp")
    a, b = EMA(model, update_after_step=0, update_every=1), EMA(model, update_after_step=0, update_every=1)
    assert origin.EMA(model).ignore_names is origin.EMA(model).ignore_names
    for step in walks.walk(model, "mlp", 10):
        if step == 3:
            a.ignore_names.add("0.weight")
        if step == 2:
            held = a.ema_model[0].weight.clone()
        a.update()
        b.update()
        if step == 2:
            held = a.ema_model[0].weight.clone()
    assert not b.ignore_names
    assert torch.equal(a.ema_model[0].weight, held)
    assert not torch.equal(b.ema_model[0].weight, held)


def test_forward_eval_evaluates() -> None:
    """The origin's calls the averages in whatever mode they are, and changes their statistics."""
    ema = EMA(walks.model("mlp"))
    ema.ema_model[1].eval()
    x = torch.randn(4, 6)
    before = copy.deepcopy(ema.ema_model.state_dict())
    out = ema.forward_eval(x)
    assert not out.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in ema.ema_model.state_dict().items())
    assert [module.training for module in ema.ema_model] == [True, False, True, True, True, True]
    assert torch.equal(out, ema.eval()(x))
    with pytest.raises(RuntimeError):
        ema.forward_eval(torch.randn(4, 5))


def test_an_ema_can_be_copied_and_pickled() -> None:
    """The origin's __new__ wants a model again."""
    model = walks.model("mlp")
    with pytest.raises(TypeError):
        copy.deepcopy(origin.EMA(model))
    ema = EMA(model, **SOON, forward_method_names=("extra_repr",))
    ema.update()
    for other in (copy.deepcopy(ema), pickle.loads(pickle.dumps(ema))):
        assert other.extra_repr.__self__ is other.ema_model
        for _ in walks.walk(other.model, "mlp", 20):
            other.update()
        assert not torch.equal(other.ema_model[0].weight, ema.ema_model[0].weight)
    assert int(ema.step) == 1


def test_a_lazy_ema_takes_a_state() -> None:
    """The origin's has no model yet that could."""
    model = walks.model("mlp")
    full = EMA(model, **SOON)
    for _ in walks.walk(model, "mlp", 20):
        full.update()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        origin.EMA(model, **SOON, lazy_init_ema=True).load_state_dict(full.state_dict())
    lazy = EMA(model, **SOON, lazy_init_ema=True)
    lazy.load_state_dict(full.state_dict())
    assert same(lazy, full)


class _Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of this")


def test_a_model_that_cannot_be_copied_does_not_end_the_process() -> None:
    """The origin prints, and calls exit()."""
    with pytest.raises(SystemExit):
        origin.EMA(_Uncopyable())
    with pytest.raises(ValueError, match=r"no copies of this.*ema_model="):
        EMA(_Uncopyable())
    ema = EMA(_Uncopyable(), _Uncopyable)
    ema.update()


def test_misuse_raises_what_the_origin_raises() -> None:
    model = walks.model("mlp")
    with pytest.raises(NotImplementedError, match=r"shardow.compat.torch_ema"):
        EMA({"a": torch.ones(2)})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="lazy_init_ema"):
        EMA(model, model, lazy_init_ema=True)
    with pytest.raises(AssertionError, match="as a set"):
        EMA(model, param_or_buffer_names_no_ema="0.weight")
    with pytest.raises(AssertionError, match="no hooks"):
        EMA(model).add_to_optimizer_post_step_hook(object())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        EMA(model, forward_method_names=("nothing",))
    with pytest.raises(ValueError, match="replicas="):
        EMA(model, replicas="half")


def test_another_model_is_refused_before_anything_changes() -> None:
    """The origin pairs parameters in their order, whatever they are called."""
    model, other = walks.model("mlp"), nn.Sequential(nn.Linear(6, 37), nn.BatchNorm1d(37))
    ema = EMA(model, other, **SOON)
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(RuntimeError, match=r"unexpected in the model: "):
        ema.update()
    assert all(torch.equal(value, before[key]) for key, value in ema.state_dict().items())


def test_what_is_ignored_keeps_its_weights_on_the_way_back_also_where_they_are_strided() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 2, 2)).to(memory_format=torch.channels_last)
    ema = EMA(model, beta=0.5, update_after_step=0, update_every=1, ignore_names={"0.weight"}, replicas="split")
    with torch.no_grad():
        for _ in range(3):
            for p in model.parameters():
                p.add_(torch.rand(p.shape))
            ema.update()
        for p in model.parameters():
            p.add_(1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    ema.update_model_with_ema(0.5)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, weights[name])]
    assert changed == ["0.bias", "1.weight", "1.bias"]
