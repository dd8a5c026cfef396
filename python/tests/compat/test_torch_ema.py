"""compat.torch_ema beside torch-ema: 1,000 steps bit for bit, states both ways, what went wrong there, and shards."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import walks
from torch import nn

from shardow.compat.torch_ema import ExponentialMovingAverage

origin = pytest.importorskip("torch_ema")
OPTIONS = [
    {"decay": decay, "use_num_updates": counts} for decay in (0.0, 0.4, 0.95, 0.9999, 1.0) for counts in (True, False)
]


def _same(ours: ExponentialMovingAverage, theirs: Any) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)


def _equal(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b)) and len(a) == len(b) if isinstance(a, list) else a == b


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_the_origins_bit_for_bit(name: str) -> None:
    model = walks.model(name)
    ours = [ExponentialMovingAverage(model.parameters(), **options) for options in OPTIONS]
    theirs = [origin.ExponentialMovingAverage(model.parameters(), **options) for options in OPTIONS]
    for step in walks.walk(model, name):
        for ema in (*ours, *theirs):
            ema.update(model.parameters() if step % 2 else None)
        if step in (1, 11, walks.STEPS):
            assert all(map(_same, ours, theirs)), step
    before = copy.deepcopy(model.state_dict())
    for a, b in zip(ours, theirs, strict=True):
        with a.average_parameters():
            mine = [p.clone() for p in model.parameters()]
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        with b.average_parameters():
            assert _equal(mine, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:averages in torch")
def test_other_dtypes_too(dtype: torch.dtype) -> None:
    model = walks.model("mlp", dtype)
    ours, theirs = (
        cls(model.parameters(), 0.97) for cls in (ExponentialMovingAverage, origin.ExponentialMovingAverage)
    )
    for step in walks.walk(model, "mlp", 60):
        if step == 30:
            ours.to(dtype=torch.float32)
            theirs.to(dtype=torch.float32)
        ours.update()
        theirs.update()
    assert _same(ours, theirs)


def test_sixteen_bit_averages_are_rounded_to_nearest_with_a_warning() -> None:
    model = walks.model("mlp", torch.bfloat16)
    ema = ExponentialMovingAverage(model.parameters(), 0.9999)
    with pytest.warns(RuntimeWarning, match=r"rounded to nearest.*to\(dtype=torch.float32\)"):
        ema.update()


@pytest.mark.parametrize("file", [False, True])
def test_states_go_both_ways_and_the_training_goes_on(file: bool) -> None:
    model = walks.model("blocks")
    ours, theirs = (cls(model.parameters(), 0.9) for cls in (ExponentialMovingAverage, origin.ExponentialMovingAverage))
    for step in walks.walk(model, "blocks", 40):
        if step == 20:
            ours.store()
            state_of_ours, state_of_theirs = ours.state_dict(), theirs.state_dict()
            fresh = [
                cls(model.parameters(), 0.5, False)
                for cls in (origin.ExponentialMovingAverage, ExponentialMovingAverage)
            ]
            for ema, state in zip(fresh, (state_of_ours, state_of_theirs), strict=True):
                ema.load_state_dict(walks.through_a_file(state) if file else state)
            theirs, ours = fresh
            assert theirs.collected_params is not None
            assert ours.collected_params is None
            theirs.collected_params = None
        ours.update()
        theirs.update()
    assert _same(ours, theirs)


def test_blocks_nest_and_free_their_copy() -> None:
    """The origin's inner block overwrites what the outer one stored: the weights are lost. Its state keeps a whole
    model after the first block."""
    model = walks.model("mlp")
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    weights = copy.deepcopy(list(model.parameters()))
    seen = []

    def evaluate() -> None:
        with ema.average_parameters():
            with ema.average_parameters():
                seen.append(copy.deepcopy(list(model.parameters())))
            seen.append(copy.deepcopy(list(model.parameters())))
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert all(_equal(one, ema.shadow_params) for one in seen)
    assert _equal(list(model.parameters()), weights)
    assert ema.state_dict()["collected_params"] is None


def test_a_state_with_stored_parameters_can_be_loaded_and_copied() -> None:
    """The origin stores parameters with their graph, which cannot be deep-copied."""
    model = walks.model("mlp")
    theirs = origin.ExponentialMovingAverage(model.parameters(), 0.5)
    theirs.store()
    with pytest.raises(RuntimeError, match="deepcopy"):
        theirs.load_state_dict(theirs.state_dict())
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    ema.load_state_dict(theirs.state_dict())
    ema.load_state_dict(ema.state_dict())
    copied = copy.deepcopy(ema)
    ema.update()
    copied.restore()
    assert copied.num_updates == 0


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    """The origin has taken decay and counter, and sometimes the tensors, by the time it raises."""
    model = walks.model("mlp")
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    good = copy.deepcopy(ema.state_dict())
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"decay": 1.5}, ValueError, "between 0 and 1"),
        ({"num_updates": "many"}, AssertionError, "num_updates is 'many'"),
        ({"shadow_params": None}, AssertionError, "must be a list of tensors"),
        ({"shadow_params": [1.0]}, AssertionError, "must be a list of tensors"),
        ({"shadow_params": good["shadow_params"][:2]}, ValueError, "the averages were made of"),
        ({"shadow_params": good["shadow_params"][::-1]}, RuntimeError, "has shape"),
        ({"collected_params": good["shadow_params"][:2]}, AssertionError, "2 collected_params"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            ema.load_state_dict({**good, "decay": 0.25, "num_updates": 7, **change})
        assert (ema.decay, ema.num_updates) == (0.5, 0)
    with pytest.raises(KeyError):
        ema.load_state_dict({})


def test_what_is_not_finite_is_held() -> None:
    """The origin's average of it is NaN for ever."""
    model = nn.Linear(3, 2)
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    before = ema.shadow_params[1].clone()
    with torch.no_grad():
        model.bias[1] = float("nan")
    with pytest.warns(RuntimeWarning, match="1 weights are NaN or Inf"):
        ema.update()
    assert torch.equal(ema.shadow_params[1], before)


def test_misuse_raises_what_the_origin_raises() -> None:
    model = walks.model("mlp")
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            ExponentialMovingAverage(model.parameters(), decay)
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    for call in (ema.update, ema.copy_to, ema.restore):
        ema.store()
        with pytest.raises(ValueError, match="2 parameters were given"):
            call(list(model.parameters())[:2])
    assert ema.num_updates == 0
    ema.collected_params = None
    with pytest.raises(RuntimeError, match="nothing was stored"):
        ema.restore()


def test_parameters_are_held_weakly() -> None:
    model = walks.model("mlp")
    ema = ExponentialMovingAverage(model.parameters(), 0.5)
    ema.update()
    watched = weakref.ref(model[0].weight)  # type: ignore[index]
    del model
    gc.collect()
    assert watched() is None
    with pytest.raises(ValueError, match="parameters are gone with their model"):
        ema.update()
    other = walks.model("mlp")
    ema.load_state_dict(ema.state_dict())
    ema.update(other.parameters())
    assert _equal(ema.shadow_params, list(other.parameters()))


def test_a_backward_through_replaced_weights_raises() -> None:
    model = nn.Linear(3, 3)
    loss = model(model(torch.ones(1, 3))).sum()
    ExponentialMovingAverage(model.parameters(), 0.5).copy_to()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_state_of_another_model_is_called_so() -> None:
    ema = ExponentialMovingAverage(nn.Linear(3, 2).parameters(), 0.9)
    for other, says in (
        (nn.Linear(2, 3), "another model's, or its parameters were in another order"),
        (nn.Linear(3, 2, bias=False), "the state has 1 averages; the averages were made of 2"),
    ):
        with pytest.raises(ValueError, match=says):
            ema.load_state_dict(ExponentialMovingAverage(other.parameters(), 0.9).state_dict())
    with pytest.raises(ValueError, match="in the order of construction"):
        ema.update(nn.Linear(2, 3).parameters())
