"""How far float32 averages are from the exact recursion, by rule and rounding: the table of docs/numerics.md.

Two weights' lives: "noisy" is 1 + 0.1 times fresh noise at every step, "quiet" moves from 1 to 1.01 in a straight line.
The exact recursion is the same one in float64. Errors are root mean squares over 4096 weights after ten time constants
of the decay, relative to the weights. Run: python -m benchmarks.numerics
"""

from __future__ import annotations

import math

import torch

import shardow

WEIGHTS = 4096
DECAYS = (0.99, 0.999, 0.9999, 0.99999)
MOST_STEPS = 300_000
FORMS = {
    "lerp, to nearest": {"rule": "lerp", "stochastic": False},
    "lerp, stochastic": {"rule": "lerp", "stochastic": True},
    "mul_add": {"rule": "mul_add"},
    "two_products": {"rule": "two_products"},
    "difference": {"rule": "difference"},
}


def errors(decay: float, life: str) -> tuple[dict[str, float], int]:
    """Relative error of every form side by side on one trajectory, and its steps."""
    steps = min(MOST_STEPS, round(10 / (1 - decay)))
    weights = torch.nn.Parameter(torch.ones(WEIGHTS))
    model = torch.nn.ParameterList([weights])
    emas = {form: shardow.EMA(model, decay, **options) for form, options in FORMS.items()}  # type: ignore[arg-type]
    exact = torch.ones(WEIGHTS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        with torch.no_grad():
            if life == "noisy":
                weights.normal_(1, 0.1, generator=generator)
            else:
                weights.fill_(1 + 0.01 * step / steps)
        for ema in emas.values():
            ema.update()
        exact.lerp_(weights.detach().double(), 1 - decay)
    found = {form: next(iter(ema.full_state_dict().values())).double() for form, ema in emas.items()}
    return {
        form: math.sqrt(float(((average - exact) / exact).square().mean())) for form, average in found.items()
    }, steps


def main() -> None:
    print(f"| weights | decay | steps | {' | '.join(FORMS)} |")
    print(f"|---|---|---|{'---|' * len(FORMS)}")
    for life in ("noisy", "quiet"):
        for decay in DECAYS:
            found, steps = errors(decay, life)
            print(
                f"| {life} | {decay} | {steps:,} | {' | '.join(f'{found[form]:.1e}' for form in FORMS)} |", flush=True
            )


if __name__ == "__main__":
    main()
