"""Any schedule, start_step, update_every, skipped steps and resumes: the averages are those of the formulas, within
what rounding costs.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Numbers, Oracle
from own_averages import averages_of
from torch import nn

import shardow

EXAMPLES = 5000 if os.environ.get("SHARDOW_ALL") else 150

decays = st.one_of(st.floats(0, 1), st.floats(0, 9).map(lambda digits: 1 - 10**-digits))
positive = st.floats(-3, 6).map(lambda digits: float(10**digits))
counts = st.integers(0, 40).map(float)
flags = st.sampled_from([0.0, 1.0])
powers = st.floats(0.1, 2)

KINDS: dict[str, dict[str, st.SearchStrategy[float]]] = {
    "constant": {"decay": decays},
    "settable": {"decay": decays},
    "half_life": {"steps": positive},
    "half_life_in_samples": {"samples": positive},
    "half_life_fraction": {"fraction": positive, "max_steps": positive},
    "inverse_gamma": {"inv_gamma": positive, "power": powers, "min_decay": decays, "max_decay": decays,
     "start": counts},
    "warmup": {"decay": decays},
    "tf_warmup": {"decay": decays},
    "timm": {"decay": decays, "min_decay": decays, "update_after_step": counts, "use_warmup": flags, "gamma": positive,
     "power": powers},
    "dist_ema": {
        "decay": decays, "warmup": flags, "power": powers, "min_decay": decays, "inv_gamma": positive,
        "update_after_step": counts,
    },
    "diffusers": {
        "decay": decays, "min_decay": decays, "update_after_step": counts, "use_ema_warmup": flags,
        "inv_gamma": positive, "power": powers,
    },
    "ema_pytorch": {"beta": decays, "update_after_step": counts, "inv_gamma": positive, "power": powers,
     "min_value": decays},
    "linear": {"from": decays, "to": decays, "steps": st.integers(1, 200).map(float)},
    "cosine": {"from": decays, "to": decays, "steps": st.integers(1, 200).map(float)},
    "mean": {},
    "power": {"sigma_rel": st.floats(0.01, 0.28)},
    "debiased": {"decay": decays},
    "window": {"first": st.integers(1, 40).map(float), "last": st.integers(40, 80).map(float)},
}  # fmt: skip

schedules = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.fixed_dictionaries(KINDS[kind]))
)
#: (steps since the last call, is the run killed and resumed after it?)
calls = st.tuples(st.one_of(st.just(1), st.integers(1, 5), st.integers(1, 300)), st.booleans())


def make(model: nn.Module, chosen: list[tuple[str, Numbers]], **options: Any) -> shardow.EMA:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shardow.EMA(model, [shardow.Schedule.make(kind, numbers) for kind, numbers in chosen], **options)


def of(ema: shardow.EMA, k: int) -> float:
    return float(averages_of(ema).tracked[0].averages[k][0])


def test_every_kind_is_here_in_the_docs_and_public() -> None:
    made = {
        name
        for name, one in vars(shardow.schedules).items()
        if inspect.isfunction(one) and one.__module__ == "shardow.schedules"
    }
    page = Path(__file__).parents[3].joinpath("docs", "schedules.md").read_text()
    assert {name for name in made if name[0] != "_"} == set(shardow.schedules.__all__)
    assert (
        set(re.findall(r"^\| `(\w+)\(", page, re.M)) == set(shardow.schedules.__all__) - {"as_schedules"} == set(KINDS)
    )


@given(
    st.lists(schedules, min_size=1, max_size=3, unique_by=lambda one: shardow.Schedule.make(*one).key()),
    st.integers(0, 30),
    st.integers(1, 7),
    st.lists(calls, min_size=1, max_size=12),
    st.sampled_from([(torch.float64, "auto"), (torch.float32, "auto"), (torch.float32, True), (torch.float32, False)]),
    st.integers(0, 2**32),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not os.environ.get("SHARDOW_ALL"),
    suppress_health_check=list(HealthCheck),
)
def test_averages_are_those_of_the_formulas(
    chosen: list[tuple[str, Numbers]],
    start_step: int,
    update_every: int,
    program: list[tuple[int, bool]],
    rounding: tuple[torch.dtype, bool | str],
    seed: int,
) -> None:
    dtype, stochastic = rounding
    random = torch.Generator().manual_seed(seed)
    model = nn.Linear(1, 1, bias=False).to(dtype)
    model.weight.data.normal_(generator=random)
    options: dict[str, Any] = {
        "dtype": dtype,
        "start_step": start_step,
        "update_every": update_every,
        "seed": seed,
        "stochastic": stochastic,
    }
    ema, straight = make(model, chosen, **options), make(model_of_straight := copy.deepcopy(model), chosen, **options)
    oracles = [Oracle(kind, numbers, model.weight.item(), start_step, update_every) for kind, numbers in chosen]
    step, samples, largest = 0, 0.0, abs(model.weight.item())
    for calls_made, (gap, killed) in enumerate(program, 1):
        step, samples = step + gap, samples + gap * 32
        model.weight.data.normal_(generator=random)
        largest = max(largest, abs(model.weight.item()))
        model_of_straight.weight.data.copy_(model.weight.data)
        ema.update(step=step, samples=samples)
        straight.update(step=step, samples=samples)
        # docs/numerics.md; the schedules' float64 costs one part in 1e9 where a decay is near 1
        bound = largest * calls_made * (2.0**-22 if dtype == torch.float32 else 1e-9)
        for k, oracle in enumerate(oracles):
            oracle.update(step, model.weight.item(), samples)
            assert math.isclose(of(ema, k), oracle.value, rel_tol=0, abs_tol=bound), (chosen[k], step, calls_made)
            assert of(ema, k) == of(straight, k), (chosen[k], step, calls_made)  # a resume goes on bit-identically
        assert ema.stats()["updates"] == oracles[0].updates
        if killed:
            state = {**ema.state_dict()}
            other = nn.Linear(1, 1, bias=False).to(dtype)
            other.weight.data.copy_(model.weight.data)
            resumed = make(other, [("constant", {"decay": 0.5 + 0.1 * k}) for k in range(len(chosen))], dtype=dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of decays that differ
                resumed.load_state_dict(state)
            ema, model = resumed, other
