"""Rules: each is bit-equal to the form that it is named after, and the default is accurate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small import DECAY, clone, equal, make_model, train
from torch import nn

import shardow

FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "lerp": lambda e, p: e.lerp(p, 1 - DECAY),
    "mul_add": lambda e, p: e.mul(DECAY).add_(p, alpha=1 - DECAY),
    "two_products": lambda e, p: e * DECAY + (1.0 - DECAY) * p,
}


@pytest.mark.parametrize("rule", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:averages in")
def test_a_rule_is_bit_equal_to_its_origin(rule: str, dtype: torch.dtype) -> None:
    """16-bit averages, rounded to nearest, by PyTorch's operations."""
    model = make_model(dtype=dtype)
    ema = shardow.EMA(model, DECAY, rule=rule, dtype=dtype, stochastic=False)
    assert bool(ema.stats().get("by_torch")) == (dtype.itemsize == 2)
    expected = clone(model)

    def step() -> None:
        ema.update()
        for name, p in model.named_parameters():
            expected[name] = FORMS[rule](expected[name], p.detach())

    train(model, 30, step)
    assert equal(ema.full_state_dict(complete=False), expected)


@pytest.mark.parametrize("rule", FORMS)
def test_a_rule_widens_bfloat16_weights_first(rule: str) -> None:
    model = make_model(dtype=torch.bfloat16)
    ema = shardow.EMA(model, DECAY, rule=rule)
    expected = {name: p.float() for name, p in clone(model).items()}

    def step() -> None:
        ema.update()
        for name, p in model.named_parameters():
            expected[name] = FORMS[rule](expected[name], p.detach().float())

    train(model, 10, step)
    assert equal(ema.full_state_dict(complete=False), expected)


@pytest.mark.parametrize("decay", [0.9, 0.999, 0.99999])
def test_error_against_float64_is_small(decay: float) -> None:
    """Stochastic where 1 - decay < 5e-5. Bounds: ten times what docs/numerics.md tabulates."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    ema = shardow.EMA(model, decay)
    exact = {name: p.double() for name, p in clone(model).items()}
    for _ in range(3000):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(1 + 0.1 * torch.randn_like(p))
        ema.update()
        for name, p in model.named_parameters():
            exact[name].lerp_(p.detach().double(), 1 - decay)
    worst = max(
        float((ema.full_state_dict(complete=False)[n].double() - e).square().mean().sqrt()) for n, e in exact.items()
    )
    assert worst < {0.9: 1e-6, 0.999: 6e-6, 0.99999: 8e-5}[decay]
