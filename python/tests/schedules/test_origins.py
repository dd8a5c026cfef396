"""Each schedule equals its origin's own code, run beside it for 10,000 steps: bit for bit in float64."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardow import schedules

STEPS = 10_000

GRID: dict[str, list[dict[str, Any]]] = {
    "timm": [
        {"decay": 0.9998}, {"decay": 0.999, "update_after_step": 7},
        {"decay": 0.999, "use_warmup": True, "min_decay": 0.1},
        {"decay": 0.99, "use_warmup": True, "gamma": 25.0, "power": 0.75, "update_after_step": 100},
    ],
    "diffusers": [
        {"decay": 0.9999}, {"decay": 0.99, "min_decay": 0.3, "update_after_step": 3},
        {"decay": 0.9999, "use_ema_warmup": True},
        {"decay": 0.999, "use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75, "update_after_step": 50},
    ],
    "inverse_gamma": [{}, {"power": 2 / 3, "max_decay": 0.999}, {"inv_gamma": 3.0, "power": 0.75, "min_decay": 0.2,
     "start": 11}],
    "dist_ema": [
        {"decay": 0.999}, {"decay": 0.999, "warmup": True},
        {"decay": 0.9, "warmup": True, "power": 0.7, "min_decay": 0.1, "inv_gamma": 2.0, "update_after_step": 9},
    ],
    "ema_pytorch": [{}, {"beta": 0.99, "update_after_step": 5, "inv_gamma": 2.0, "power": 0.75, "min_value": 0.1}],
    "warmup": [{"decay": 0.999}, {"decay": 0.5}],
    "mean": [{}],
}  # fmt: skip


def source_of(module: str, file: str) -> Path:
    """A file of an installed package whose import needs more than this machine has."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / file


def timm(**options: Any) -> Callable[[int], float]:
    spec = importlib.util.spec_from_file_location("timm_model_ema", source_of("timm", "utils/model_ema.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {"gamma": "warmup_gamma", "power": "warmup_power"}
    ema = module.ModelEmaV3(torch.nn.Linear(1, 1), **{names.get(key, key): value for key, value in options.items()})
    return lambda n: float(ema.get_decay(n))


def diffusers(**options: Any) -> Callable[[int], float]:
    from diffusers.training_utils import EMAModel

    ema = EMAModel(torch.nn.Linear(1, 1).parameters(), **options)
    return lambda n: float(ema.get_decay(n))


def inverse_gamma(
    inv_gamma: float = 1.0, power: float = 1.0, min_decay: float = 0.0, max_decay: float = 1.0, start: int = 0
) -> Callable[[int], float]:
    tree = ast.parse(source_of("k_diffusion", "utils.py").read_text())
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EMAWarmup"]
    space: dict[str, Any] = {}
    exec(compile(ast.Module([cls], []), "k_diffusion/utils.py", "exec"), space)
    ema = space["EMAWarmup"](inv_gamma=inv_gamma, power=power, min_value=min_decay, max_value=max_decay, start_at=start)

    def decay(_: int) -> float:
        value = ema.get_value()
        ema.step()
        return float(value)

    return decay


def dist_ema(
    decay: float,
    warmup: bool = False,
    power: float = 2 / 3,
    min_decay: float = 0.0,
    inv_gamma: float = 1.0,
    update_after_step: int = 0,
) -> Callable[[int], float]:
    """Not on PyPI: its rule, restated. It counts a step after using it."""

    def at(n: int) -> float:
        if not warmup:
            return decay
        step = max(0, (n - 1) - update_after_step - 1)
        return max(min_decay, min(1 - (1 + step / inv_gamma) ** -power, decay))

    return at


def ema_pytorch(**options: Any) -> Callable[[int], float]:
    from ema_pytorch import EMA

    ema = EMA(torch.nn.Linear(1, 1), **options)

    def decay(n: int) -> float:
        ema.step.fill_(n)  # update() counts before it asks
        return float(ema.get_current_decay())

    return decay


def warmup(decay: float) -> Callable[[int], float]:
    from torch_ema import ExponentialMovingAverage

    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    ema = ExponentialMovingAverage([weight], decay=decay)

    def observed(_: int) -> float:
        """It tells no decay, so it is read off what it does: an average of 0 with a weight of -1 becomes decay - 1."""
        ema.shadow_params[0].zero_()
        with torch.no_grad():
            weight.fill_(-1)
        ema.update()
        return 1 + float(ema.shadow_params[0])

    return observed


def mean() -> Callable[[int], float]:
    from torch.optim.swa_utils import get_swa_avg_fn

    average = get_swa_avg_fn()
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    return lambda n: 1 - float(average(zero, one, torch.tensor(n - 1)))


ORIGINS: dict[str, Callable[..., Callable[[int], float]]] = {
    "timm": timm, "diffusers": diffusers, "inverse_gamma": inverse_gamma, "dist_ema": dist_ema,
    "ema_pytorch": ema_pytorch, "warmup": warmup, "mean": mean,
}  # fmt: skip

#: Origins that compute in float32, or through a tensor: how far apart the decays may be.
BOUNDS = {"ema_pytorch": 2.0**-23, "warmup": 2.0**-52, "mean": 2.0**-52}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, options) for kind, grid in GRID.items() for options in grid],
    ids=lambda value: str(value),
)
def test_equals_its_origin_step_by_step(kind: str, options: dict[str, Any]) -> None:
    ours, origin = getattr(schedules, kind)(**options), ORIGINS[kind](**options)
    seen = set()
    for n in range(1, STEPS + 1):
        decay, weight = ours.factors(n, n - 1)
        expected = origin(n)
        seen.add(decay)
        assert abs(decay - expected) <= BOUNDS.get(kind, 0.0), (n, decay, expected)
        assert abs(weight - (1 - decay)) <= BOUNDS.get(kind, 0.0), n
    assert len(seen) > 1 or options.get("warmup") is None


def test_tensorflow_warmup_is_the_documented_formula() -> None:
    ours = schedules.tf_warmup(0.999)
    assert [ours.factors(n, n - 1)[0] for n in range(1, STEPS + 1)] == [
        min(0.999, (1 + g) / (10 + g)) for g in range(STEPS)
    ]


def test_edm2_profiles() -> None:
    """phema.py's formulas: sigma_rel to gamma, beta = (1 - delta/t)^(gamma + 1)."""
    for sigma, gamma in [(0.05, 16.97), (0.10, 6.94), (0.15, 3.56), (0.25, 0.72)]:
        ours = schedules.power(sigma)
        for t in (1, 2, 10, 1000, STEPS):
            decay, weight = ours.factors(t, t - 1)
            assert decay == pytest.approx((1 - 1 / t) ** (gamma + 1), rel=1e-2)
            assert decay + weight == pytest.approx(1, abs=1e-15)
    decay, _ = schedules.half_life_fraction(0.09, 5000).factors(1000, 0)
    assert decay == pytest.approx(0.5 ** (1 / 90), rel=1e-14)
    assert schedules.half_life_fraction(0.09, 5000).factors(10**6, 0)[0] == pytest.approx(0.5 ** (1 / 5000), rel=1e-14)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_ramps_begin_and_end_where_they_say(shape: str) -> None:
    ours = getattr(schedules, shape)(0.9, 0.999, 101)
    decays = [ours.factors(n, n - 1)[0] for n in range(1, 200)]
    assert decays[0] == pytest.approx(0.9)
    assert decays[50] == pytest.approx(0.9495)
    assert decays[100] == decays[-1] == pytest.approx(0.999)
    assert decays == sorted(decays)


def test_debiased_is_adams_mean() -> None:
    ours, d = schedules.debiased(0.99), 0.99
    moment, average = 0.0, 123.0
    for n in range(1, 500):
        p = math.sin(n)
        moment = d * moment + (1 - d) * p
        _, weight = ours.factors(n, n - 1)
        average += weight * (p - average)
        assert average == pytest.approx(moment / (1 - d**n), rel=1e-12)


def test_half_life_in_samples_ignores_the_batch_size() -> None:
    ours, kept, samples = schedules.half_life_in_samples(1000), 1.0, 0
    for batch in (1, 10, 489, 500):
        samples += batch
        kept *= ours.factors(1, 0, 1, samples, batch)[0]
    assert kept == pytest.approx(0.5, rel=1e-14)
    with pytest.raises(ValueError, match="samples="):
        ours.factors(1, 0)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in schedules.__all__ if kind not in ("as_schedules", "mean", "window", "half_life_in_samples")],
)
def test_every_kth_step_multiplies_the_decays(kind: str) -> None:
    numbers = {
        "half_life": (50,),
        "half_life_fraction": (0.1,),
        "inverse_gamma": (),
        "linear": (0.5, 0.9, 40),
        "cosine": (0.5, 0.9, 40),
        "power": (0.1,),
    }
    ours = getattr(schedules, kind)(*numbers.get(kind, (0.9,)))
    for last in (120, 130, 400):
        delta = 7
        product = math.prod(ours.factors(n, n - 1)[0] for n in range(last - delta + 1, last + 1))
        decay, weight = ours.factors(last, last - delta, delta)
        if kind not in ("half_life_fraction", "debiased"):
            assert decay == pytest.approx(product, rel=1e-12)
        assert weight == pytest.approx(1 - decay, rel=1e-9)


@pytest.mark.parametrize("kind", schedules.__all__[1:])
def test_json_and_back(kind: str) -> None:
    numbers = {
        "half_life": (50,),
        "half_life_in_samples": (1e6,),
        "half_life_fraction": (0.1,),
        "inverse_gamma": (),
        "linear": (0.5, 0.9, 40),
        "cosine": (0.5, 0.9, 40),
        "power": (0.1,),
        "mean": (),
        "window": (3, 9),
    }
    ours = getattr(schedules, kind)(*numbers.get(kind, (0.1 + 0.2,)))
    assert type(ours).from_json(ours.to_json()) == ours
    assert getattr(schedules, kind).__doc__


@pytest.mark.parametrize(
    "call",
    [
        lambda: schedules.constant(1.0000001), lambda: schedules.constant(math.nan), lambda: schedules.half_life(0),
        lambda: schedules.half_life(math.inf),
        lambda: schedules.power(0.5), lambda: schedules.power(0), lambda: schedules.linear(0.1, 0.9, 0),
        lambda: schedules.inverse_gamma(power=-1),
        lambda: schedules.timm(0.9, update_after_step=0.5), lambda: schedules.constant(0.9).factors(0, 0),
        lambda: schedules.as_schedules([0.9] * 9),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        call()
