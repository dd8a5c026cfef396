"""compat.timm: ModelEma, ModelEmaV2 and ModelEmaV3 beside timm's own, bit for bit; sharded; and what timm and its users
got wrong.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import walks
from timm_averages import ALL, origin, same, state_of
from torch import nn

from shardow.compat import timm as ours

#: (class, its options, whether update() is given the step)
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("ModelEma", {}, False),
    ("ModelEma", {"decay": 0.3, "device": "cpu"}, False),
    ("ModelEmaV2", {"decay": 0.99}, False),
    ("ModelEmaV3", {}, False),
    ("ModelEmaV3", {"decay": 0.99, "foreach": False}, True),
    ("ModelEmaV3", {"exclude_buffers": True, "update_after_step": 20}, True),
    ("ModelEmaV3", {"use_warmup": True, "min_decay": 0.1, "dtype": torch.float64}, True),
    (
        "ModelEmaV3",
        {"use_warmup": True, "warmup_gamma": 10.0, "warmup_power": 0.75, "exclude_buffers": True, "device": "cpu"},
        True,
    ),
]
if ALL:
    CASES += [("ModelEmaV2", {"decay": d, "device": torch.device("cpu")}, False) for d in (0.0, 0.5, 1.0)]
    CASES += [
        ("ModelEmaV3", {"decay": d, "foreach": f, "exclude_buffers": e, "use_warmup": w, "dtype": t,
         "stochastic_rounding": False}, True)
        for d in (0.4, 0.999) for f in (True, False) for e in (True, False) for w in (True, False) for t in (None,
         torch.float64)
    ]  # fmt: skip


def exchange(theirs: Any, mine: Any, path: Path) -> None:
    """Each takes the other's state, out of a file."""
    states = [copy.deepcopy(state_of(theirs)), copy.deepcopy(state_of(mine))]
    for average, state in ((mine, states[0]), (theirs, states[1])):
        torch.save(state, path)
        for tensor in state_of(average).values():
            tensor.zero_()
        (average.ema if hasattr(average, "ema") else average).load_state_dict(torch.load(path))


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_bit_equal_and_states_cross(name: str, tmp_path: Path) -> None:
    model = walks.model(name)
    pairs = [
        (getattr(origin, cls)(model, **options), getattr(ours, cls)(model, **options), steps)
        for cls, options, steps in CASES
    ]
    for step in walks.walk(model, name):
        for theirs, mine, steps in pairs:
            for average in (theirs, mine):
                average.update(model, step) if steps else average.update(model)
        if step in (1, 300, walks.STEPS):
            for theirs, mine, _ in pairs:
                same(theirs, mine, model)
        if step == 300:
            for theirs, mine, _ in pairs:
                exchange(theirs, mine, tmp_path / "state.pt")
    x = walks.inputs(name)
    for theirs, mine, _ in pairs:
        if theirs.__class__.__name__ == "ModelEma" or getattr(theirs, "dtype", None) is not None:
            continue
        assert torch.equal(mine(x), theirs(x))
        mine.set(model)
        theirs.set(model)
        same(theirs, mine, model)


def test_low_precision_models_are_bit_equal_too_where_nothing_is_random() -> None:
    model = walks.model("mlp", torch.bfloat16)
    options: list[tuple[str, dict[str, Any]]] = [
        ("ModelEma", {"decay": 0.9}),
        ("ModelEmaV2", {"decay": 0.99}),
        ("ModelEmaV3", {"decay": 0.9, "stochastic_rounding": False}),
        ("ModelEmaV3", {"decay": 0.999, "dtype": torch.float32}),
        ("ModelEmaV3", {"decay": 0.999, "dtype": torch.float32, "foreach": False}),
    ]
    made = []
    for cls, given in options:
        if given.get("dtype") is None:
            with pytest.warns(RuntimeWarning, match="rounded to nearest"):
                made.append((getattr(origin, cls)(model, **given), getattr(ours, cls)(model, **given)))
        else:
            made.append((getattr(origin, cls)(model, **given), getattr(ours, cls)(model, **given)))
    for _ in walks.walk(model, "mlp", walks.STEPS if ALL else 300):
        for theirs, mine in made:
            theirs.update(model)
            mine.update(model)
    for theirs, mine in made:
        same(theirs, mine, model)


def test_a_model_that_changes_its_dtype_is_averaged_by_the_rule_for_that() -> None:
    model = walks.model("blocks")
    theirs, mine = origin.ModelEmaV3(model, 0.9), ours.ModelEmaV3(model, 0.9)
    for step in walks.walk(model, "blocks", 30):
        if step == 15:
            model.bfloat16()
        theirs.update(model)
        mine.update(model)
    same(theirs, mine, model)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_to_the_exact_average(source: torch.dtype, dtype: torch.dtype) -> None:
    """timm's noise is another, and float16 is rounded to nearest there. Each step stays within one unit in the last
    place, and the mean within its bound."""
    model = nn.Linear(200, 100).to(source)
    nn.init.ones_(model.weight)
    ema = ours.ModelEmaV3(model, 0.999, dtype=dtype, stochastic_rounding_seed=5)
    nn.init.constant_(model.weight, 1.75)
    weight: Any = ema.module.weight
    for _ in range(200):
        before = weight.detach().double()
        ema.update(model)
        exact = before + 0.001 * (1.75 - before)
        assert float((weight.detach().double() - exact).abs().max()) <= torch.finfo(dtype).eps
    expected = 1.75 - 0.75 * 0.999**200
    assert (
        abs(float(weight.detach().double().mean()) - expected)
        < 4 * torch.finfo(dtype).eps * (200 / weight.numel()) ** 0.5
    )


def test_the_seed_tells_the_noise() -> None:
    model = nn.Linear(200, 100).bfloat16()
    made = [ours.ModelEmaV3(model, 0.999, stochastic_rounding_seed=seed) for seed in (5, 6, 5)]
    nn.init.constant_(model.weight, 1.75)
    for ema in made:
        ema.update(model)
    weights: list[Any] = [ema.module.weight for ema in made]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_stochastic_rounding_works_where_tensors_lie_otherwise_than_the_model_s() -> None:
    model = nn.Linear(100, 50).bfloat16()
    nn.init.ones_(model.weight)
    ema = ours.ModelEmaV3(model, 0.999)
    model.weight = nn.Parameter(torch.full((100, 50), 1.75, dtype=torch.bfloat16).t())
    for _ in range(200):
        ema.update(model)
    assert abs(float(ema.module.weight.detach().double().mean()) - (1.75 - 0.75 * 0.999**200)) < 5e-3  # type: ignore[union-attr, operator]
