"""compat.ema_pytorch beside ema-pytorch: 1,000 steps bit for bit under every option, states both ways, what went wrong
there, and shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import walks
from ema_pytorch_states import SOON, same

from shardow.compat.ema_pytorch import EMA

origin = pytest.importorskip("ema_pytorch")
NAMES: dict[str, tuple[str, str, str]] = {  # a parameter, a buffer or another parameter, a prefix
    "mlp": ("0.weight", "1.running_mean", "4"),
    "conv": ("0.bias", "1.running_var", "6"),
    "blocks": ("scale", "positions", "block.self_attn"),
}


def options(name: str) -> list[dict[str, Any]]:
    one, other, prefix = NAMES[name]
    return [
        {},
        {**SOON},
        {**SOON, "update_every": 1, "beta": 0.9, "inv_gamma": 2.0, "power": 0.75},
        {**SOON, "min_value": 0.9, "use_foreach": True, "include_online_model": False},
        {**SOON, "param_or_buffer_names_no_ema": {one, other}},
        {**SOON, "ignore_names": {one, other}, "ignore_startswith_names": {prefix}},
        {**SOON, "beta": 1.0},
        {
            **SOON,
            "lazy_init_ema": True,
            "allow_different_devices": True,
            "coerce_dtype": True,
            "move_ema_to_online_device": True,
        },
        {"update_after_step": 0, "update_every": 1, "power": 1.0},
    ]


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_the_origins_bit_for_bit(name: str) -> None:
    model = walks.model(name)
    ours = [EMA(model, **some) for some in options(name)]
    theirs = [origin.EMA(model, **some) for some in options(name)]
    for step in walks.walk(model, name):
        for a, b in zip(ours, theirs, strict=True):
            a.update()
            b.update()
            assert a.get_current_decay() == b.get_current_decay()
        if step in (1, 2, 6, 7, 10, 101, 111, 112, walks.STEPS):
            assert all(map(same, ours, theirs)), step
    x = walks.inputs(name)
    for a, b in zip(ours, theirs, strict=True):
        assert list(a.state_dict()) == list(b.state_dict())
        assert torch.equal(a.eval()(x), b.eval()(x))
        assert (a.parameter_names, a.buffer_names) == (b.parameter_names, b.buffer_names)
        assert [n for n, _ in a.get_params_iter(a.ema_model)] == [n for n, _ in b.get_params_iter(b.ema_model)]
        assert [n for n, _ in a.get_buffers_iter(a.ema_model)] == [n for n, _ in b.get_buffers_iter(b.ema_model)]
        assert not any(p.requires_grad for p in a.ema_model.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("name", walks.NAMES)
def test_the_model_goes_on_from_its_averages_as_in_the_origin(name: str, beta: float) -> None:
    """From hare to tortoise, where the weights depend on the averages."""
    one, other, _ = NAMES[name]
    some = {
        **SOON,
        "update_model_with_ema_every": 10,
        "update_model_with_ema_beta": beta,
        "ignore_names": {one},
        "param_or_buffer_names_no_ema": {other},
    }
    models = [walks.model(name) for _ in range(2)]
    emas = [cls(model, **some) for cls, model in zip((EMA, origin.EMA), models, strict=True)]
    for step in zip(*(walks.walk(model, name, 200) for model in models), strict=True):
        for ema in emas:
            ema.update()
        if step[0] % 25 == 0:
            assert same(*emas)
            floats = [{k: v for k, v in model.state_dict().items() if v.is_floating_point()} for model in models]
            assert all(torch.equal(value, floats[1][key]) for key, value in floats[0].items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:averages in torch")
def test_other_dtypes_too(dtype: torch.dtype) -> None:
    model = walks.model("mlp", dtype)
    some: list[dict[str, Any]] = [{**SOON}]
    if dtype == torch.bfloat16:
        some.append({**SOON, "coerce_dtype": True, "ema_model": lambda: copy.deepcopy(model).float()})
    ours, theirs = ([cls(model, **one) for one in some] for cls in (EMA, origin.EMA))
    for _ in walks.walk(model, "mlp", 100):
        for ema in (*ours, *theirs):
            ema.update()
    assert all(map(same, ours, theirs))


def test_sixteen_bit_averages_are_rounded_to_nearest_with_a_warning() -> None:
    ema = EMA(walks.model("mlp", torch.bfloat16))
    with pytest.warns(RuntimeWarning, match="rounded to nearest.*ema_model="):
        ema.update()


@pytest.mark.parametrize("file", [False, True])
def test_states_go_both_ways_and_the_training_goes_on(file: bool) -> None:
    model = walks.model("blocks")
    ours, theirs = EMA(model, **SOON), origin.EMA(model, **SOON)
    for step in walks.walk(model, "blocks", 60):
        if step == 30:
            states = [copy.deepcopy(ema.state_dict()) for ema in (ours, theirs)]
            theirs, ours = (cls(model, **SOON) for cls in (origin.EMA, EMA))
            for ema, state in zip((theirs, ours), states, strict=True):
                ema.load_state_dict(walks.through_a_file(state) if file else state)
        ours.update()
        theirs.update()
    assert same(ours, theirs)


def test_integer_buffers_follow_the_model() -> None:
    """In the origin a count of batches stays what it was at the start."""
    model = walks.model("mlp")
    ours, theirs = (cls(model, update_after_step=0, update_every=1) for cls in (EMA, origin.EMA))
    for _ in walks.walk(model, "mlp", 5):
        ours.update()
        theirs.update()
    assert int(theirs.ema_model[1].num_batches_tracked) == 0
    assert int(ours.ema_model[1].num_batches_tracked) == 5
    ours.ema_model[1].num_batches_tracked.fill_(99)
    ours.copy_params_from_ema_to_model()
    assert int(model[1].num_batches_tracked) == 5  # type: ignore[index, arg-type, union-attr]


def test_what_is_not_finite_is_held() -> None:
    """The origin's average of it is NaN for ever."""
    model = walks.model("mlp")
    ema = EMA(model, update_after_step=0, update_every=1)
    ema.update()
    before = ema.ema_model[0].bias.clone()
    with torch.no_grad():
        model[0].bias[3] = float("nan")  # type: ignore[index, operator, union-attr]
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        ema.update()
    assert torch.equal(ema.ema_model[0].bias, before)
