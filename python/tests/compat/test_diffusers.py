"""compat.diffusers beside diffusers: 1,000 steps bit for bit, states and saved models both ways, what went wrong there,
and shards.
"""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import walks
from diffusers_models import COUNTERS, equal
from torch import nn

from shardow.compat.diffusers import EMAModel

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:diffusers"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]
training_utils = pytest.importorskip("diffusers.training_utils")
UNet2DModel = pytest.importorskip("diffusers").UNet2DModel
OPTIONS: list[dict[str, Any]] = [
    {**some, "foreach": foreach}
    for foreach in (False, True)
    for some in (
        {},
        {"decay": 0.9},
        {"decay": 0.95, "min_decay": 0.5, "update_after_step": 7},
        {"use_ema_warmup": True},
        {"use_ema_warmup": True, "inv_gamma": 3, "power": 0.75, "decay": 0.97, "update_after_step": 40},
        {"decay": 0.0},
    )
]


def _same(ours: EMAModel, theirs: Any) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return (
        list(a) == list(b)
        and ours.cur_decay_value == theirs.cur_decay_value
        and all(a[key] == b[key] for key in COUNTERS)
        and equal(ours.shadow_params, theirs.shadow_params)
    )


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_the_origins_bit_for_bit(name: str) -> None:
    """Frozen parameters are copied; which are frozen changes on the way."""
    model = walks.model(name)
    ours = [EMAModel(model.parameters(), **options) for options in OPTIONS]
    theirs = [training_utils.EMAModel(model.parameters(), **options) for options in OPTIONS]
    changing = next(p for p in model.parameters() if p.requires_grad)
    for step in walks.walk(model, name):
        if step in (300, 600):
            changing.requires_grad_(step == 600)
        parameters = list(model.parameters())
        for ema in (*ours, *theirs):
            ema.step(parameters)
        if step in (1, 2, 9, 300, 301, 600, walks.STEPS):
            assert all(map(_same, ours, theirs)), step
    for a, b in zip(ours, theirs, strict=True):
        assert [a.get_decay(step) for step in range(-1, 60)] == [b.get_decay(step) for step in range(-1, 60)]
    ours[0].store(model.parameters())
    ours[0].copy_to(model.parameters())
    assert equal(list(model.parameters()), theirs[0].shadow_params)
    ours[0].restore(model.parameters())
    assert equal(list(model.parameters()), parameters)
    assert ours[0].temp_stored_params is None


@pytest.mark.parametrize(
    ("dtype", "foreach"), list(itertools.product((torch.float64, torch.bfloat16, torch.float16), (False, True)))
)
@pytest.mark.filterwarnings("ignore:averages in torch")
def test_other_dtypes_too(dtype: torch.dtype, foreach: bool) -> None:
    model = walks.model("mlp", dtype)
    ours, theirs = (cls(model.parameters(), 0.97, foreach=foreach) for cls in (EMAModel, training_utils.EMAModel))
    for step in walks.walk(model, "mlp", 60):
        if step == 30:
            ours.to(dtype=torch.float32)
            theirs.to(dtype=torch.float32)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    assert _same(ours, theirs)


@pytest.mark.parametrize("file", [False, True])
def test_states_go_both_ways_and_the_training_goes_on(file: bool) -> None:
    model = walks.model("blocks")
    ours, theirs = (cls(model.parameters(), 0.9, use_ema_warmup=True) for cls in (EMAModel, training_utils.EMAModel))
    for step in walks.walk(model, "blocks", 40):
        if step == 20:
            states = ours.state_dict(), theirs.state_dict()
            theirs, ours = (cls(model.parameters(), 0.5) for cls in (training_utils.EMAModel, EMAModel))
            for ema, state in zip((theirs, ours), states, strict=True):
                ema.load_state_dict(walks.through_a_file(state) if file else state)
        ours.step(model.parameters())
        theirs.step(model.parameters())
    assert _same(ours, theirs)


def test_deprecated_forms_warn_and_work() -> None:
    model = walks.model("mlp")
    options = {"max_value": 0.9, "min_value": 0.1, "device": "cpu"}
    with pytest.warns(FutureWarning):
        ours, theirs = EMAModel(model, **options), training_utils.EMAModel(model, **options)  # type: ignore[arg-type]
    for _ in walks.walk(model, "mlp", 20):
        with pytest.warns(FutureWarning, match="model.parameters()"):
            ours.step(model)
        theirs.step(model)
    assert _same(ours, theirs)
    assert ours.use_ema_warmup


def test_an_unknown_option_is_not_ignored_silently() -> None:
    with pytest.warns(UserWarning, match="no option 'deacy'"):
        EMAModel(walks.model("mlp").parameters(), deacy=0.9)


def test_lists_that_do_not_fit_are_refused() -> None:
    """The origin stops at the end of the shorter list, without a word."""
    model = walks.model("mlp")
    ema = EMAModel(model.parameters(), 0.9)
    before = copy.deepcopy(ema.state_dict())
    for call in (ema.step, ema.copy_to, ema.restore):
        ema.store(model.parameters())
        with pytest.raises(ValueError, match="2 parameters were given; the averages were made of"):
            call(list(model.parameters())[:2])
        with pytest.raises(RuntimeError, match="parameter 0 has shape"):
            call(list(model.parameters())[::-1])
    assert ema.optimization_step == before["optimization_step"]
    assert equal(ema.shadow_params, before["shadow_params"])
    assert ema.temp_stored_params is not None
    ema.temp_stored_params = None
    with pytest.raises(RuntimeError, match="nothing was stored"):
        ema.restore(model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": 1.5}, "between 0 and 1"),
        ({"min_decay": "low"}, "min_decay='low'"),
        ({"optimization_step": 1.0}, "optimization_step=1.0"),
        ({"update_after_step": None}, "update_after_step=None"),
        ({"use_ema_warmup": 1}, "use_ema_warmup=1"),
        ({"inv_gamma": "1"}, "inv_gamma='1'"),
        ({"power": None}, "power=None"),
        ({"shadow_params": ()}, "must be a list of tensors"),
        ({"shadow_params": [1.0]}, "must be a list of tensors"),
        ({"shadow_params": [torch.zeros(3)]}, "the averages were made of"),
    ],
)
def test_a_state_that_does_not_fit_is_a_value_error_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    """The origin has taken what it read before."""
    model = walks.model("mlp")
    ema = EMAModel(model.parameters(), 0.9)
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(ValueError, match=message):
        ema.load_state_dict({"decay": 0.5, "optimization_step": 9, **change})
    assert {key: ema.state_dict()[key] for key in COUNTERS} == {key: before[key] for key in COUNTERS}


def test_a_whole_min_decay_can_be_loaded_again() -> None:
    """The origin takes min_decay=0, and then refuses its own state."""
    model = walks.model("mlp")
    with pytest.raises(ValueError, match="Invalid min_decay"):
        training_utils.EMAModel(model.parameters(), min_decay=0).load_state_dict({"min_decay": 0})
    ema = EMAModel(model.parameters(), min_decay=0)
    ema.load_state_dict(ema.state_dict())


def test_decays_out_of_range_are_refused_at_once() -> None:
    for options in ({"decay": 1.5}, {"decay": float("nan")}, {"min_decay": -1.0}):
        with pytest.raises(ValueError, match="between 0 and 1"):
            EMAModel(walks.model("mlp").parameters(), **options)


def test_what_is_not_finite_is_held() -> None:
    """The origin's average of it is NaN for ever."""
    model = nn.Linear(3, 2)
    ema = EMAModel(model.parameters(), 0.5, update_after_step=-5)
    before = ema.shadow_params[1].clone()
    with torch.no_grad():
        model.bias[1] = float("nan")
    with pytest.warns(RuntimeWarning, match="1 weights are NaN or Inf"):
        ema.step(model.parameters())
    assert torch.equal(ema.shadow_params[1], before)


def test_deepspeeds_partitions_are_refused() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    parameters[0].ds_tensor = None  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        EMAModel(parameters)


def test_it_needs_no_diffusers() -> None:
    code = (
        "import sys; sys.modules['diffusers'] = None\n"
        "import shardow.compat.diffusers as d, torch; ones = [torch.ones(2)]; d.EMAModel(ones).step(ones)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
