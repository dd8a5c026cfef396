"""Schedules: how much of the old average survives each update. Every function returns a Schedule, a value that is saved
with the averages.

n is the optimizer step since averaging began, 1 at the first update; d the decay of that update. Where several steps
lie between two updates, their decays are multiplied. Parameters are the kind's numbers, which the engine knows by the
same names and checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardow import errors
from shardow._core import Schedule
from shardow.base.checks import invalid, number, warn


def _made(kind: str, numbers: Mapping[str, Any]) -> Schedule:
    return Schedule.make(
        kind, {key: value if type(value) is bool else number(key, value) for key, value in numbers.items()}
    )


def constant(decay: float) -> Schedule:
    """d = decay, in [0, 1]."""
    return _made("constant", locals())


def settable(decay: float) -> Schedule:
    """d = decay until ``ema.set_decay()`` gives another: for a decay that is only known while training runs."""
    return _made("settable", locals())


def half_life(steps: float) -> Schedule:
    """The old average halves in ``steps`` optimizer steps: d = 2^(-1 / steps)."""
    return _made("half_life", locals())


def half_life_in_samples(samples: float) -> Schedule:
    """The old average halves in ``samples`` training samples; ``update(samples=)`` must tell how many have been seen.
    Independent of the batch size."""
    return _made("half_life_in_samples", locals())


def half_life_fraction(fraction: float, max_steps: float = math.inf) -> Schedule:
    """A half-life of min(max_steps, fraction * n) steps: EDM2's traditional EMA, with 0.09 there (Karras et al., arXiv
    2312.02696).
    """
    return _made("half_life_fraction", locals())


def inverse_gamma(
    inv_gamma: float = 1.0, power: float = 1.0, *, min_decay: float = 0.0, max_decay: float = 1.0, start: int = 0
) -> Schedule:
    """k-diffusion's EMAWarmup (K. Crowson): m = max(0, n - 1 - start), d = 1 - (1 + m / inv_gamma)^-power, into
    [min_decay, max_decay].

    power 2/3 reaches 0.999 at 31.6 thousand steps, 3/4 at 10 thousand; (1, 1) is the running mean.
    """
    return _made("inverse_gamma", locals())


def warmup(decay: float) -> Schedule:
    """d = min(decay, (1 + n) / (10 + n)): torch-ema with use_num_updates, which counts before it uses."""
    return _made("warmup", locals())


def tf_warmup(decay: float) -> Schedule:
    """d = min(decay, n / (9 + n)): tf.train.ExponentialMovingAverage with num_updates = n - 1, a global step that is
    not yet increased.
    """
    return _made("tf_warmup", locals())


def timm(
    decay: float, min_decay: float = 0.0, update_after_step: int = 0, *, use_warmup: bool = False, gamma: float = 1.0,
    power: float = 2 / 3,
) -> Schedule:  # fmt: skip
    """timm's ModelEmaV3.get_decay(n), with m = n - update_after_step - 1.

    0 for m <= 0; with use_warmup 1 - (1 + m / gamma)^-power into [min_decay, decay]; else decay.
    """
    return _made("timm", locals())


def dist_ema(
    decay: float, warmup: bool = False, power: float = 2 / 3, *, min_decay: float = 0.0, inv_gamma: float = 1.0,
    update_after_step: int = 0,
) -> Schedule:  # fmt: skip
    """DistEMA, with m = max(0, n - 1 - update_after_step - 1), since it counts after it uses.

    d = max(min_decay, min(1 - (1 + m / inv_gamma)^-power, decay)). The first two updates copy.
    """
    return _made("dist_ema", locals())


def diffusers(
    decay: float = 0.9999, *, min_decay: float = 0.0, update_after_step: int = 0, use_ema_warmup: bool = False,
    inv_gamma: float = 1.0, power: float = 2 / 3,
) -> Schedule:  # fmt: skip
    """diffusers' EMAModel.get_decay(n), with m = n - update_after_step - 1.

    0 for m <= 0; 1 - (1 + m / inv_gamma)^-power, or (1 + m) / (10 + m), into [min_decay, decay].
    """
    return _made("diffusers", locals())


def ema_pytorch(
    beta: float = 0.9999, update_after_step: int = 100, *, inv_gamma: float = 1.0, power: float = 2 / 3,
    min_value: float = 0.0,
) -> Schedule:  # fmt: skip
    """ema-pytorch's get_current_decay() at its n-th update, with m = n - update_after_step - 1.

    0 for m <= 0, else 1 - (1 + m / inv_gamma)^-power in [min_value, beta].

    Upstream computes in float32; this is within one rounding of it.
    """
    return _made("ema_pytorch", locals())


def linear(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` at step 1 in a straight line to ``end`` at step ``steps``, and there on."""
    return _made("linear", {"from": start, "to": end, "steps": steps})


def cosine(start: float, end: float, steps: int) -> Schedule:
    """From ``start`` to ``end`` on half a cosine: end - (end - start) (cos(pi m) + 1) / 2 (BYOL, DINO)."""
    return _made("cosine", {"from": start, "to": end, "steps": steps})


def mean() -> Schedule:
    """Equal weights, 1 / (updates + 1): SWA (torch.optim.swa_utils.get_swa_avg_fn). Counts updates, not steps."""
    return _made("mean", {})


def power(sigma_rel: float) -> Schedule:
    """Power-function profile of relative width sigma_rel in (0, 0.28]: d = (1 - 1/n)^(gamma + 1). From EDM2, Karras et
    al., arXiv 2312.02696, eq. 121 ff."""
    return _made("power", locals())


def debiased(decay: float) -> Schedule:
    """Adam's debiased mean as one lerp: 1 - d_n = (1 - decay) / (1 - decay^n); the first update copies."""
    return _made("debiased", locals())


def window(first: int, last: int) -> Schedule:
    """The plain mean of the weights at the updates of steps ``first`` to ``last``, held afterwards; before ``first`` it
    copies them.

    1 <= first <= last. A mean of the end of a constant learning rate (PMA, arXiv 2505.12082; LAWA, arXiv 2209.14981).
    Pass several for windows that overlap.
    """
    return _made("window", locals())


def as_schedules(decay: float | Schedule | Sequence[float | Schedule]) -> list[Schedule]:
    """One schedule or several, from numbers, schedules or a mixture of both.

    Raises:
        ValueError: a decay outside [0, 1], or no decay at all.
        TypeError: something that is neither.
    """
    given = list(decay) if isinstance(decay, Sequence) and not isinstance(decay, str) else [decay]
    if not 1 <= len(given) <= 8:
        raise invalid(f"{len(given)} decays; 1 to 8 averages are kept in one pass")
    return [_as_schedule(one) for one in given]


def _as_schedule(decay: object) -> Schedule:
    if isinstance(decay, Schedule):
        return decay
    try:
        decay = number("decay", decay)
    except errors.Error:
        raise errors.UnknownOptionError(f"decay={decay!r}; give a number in [0, 1], or a schedule") from None
    if not 0 <= decay <= 1:
        raise invalid(f"decay={decay}; it must be in [0, 1]: the weight kept on the old average per step, e.g. 0.9999")
    if 0 < decay < 0.5:
        warn(f"decay={decay} keeps less than half at each step; a lerp weight? its decay is {1 - decay}")
    return constant(decay)


__all__ = [
    "as_schedules", "constant", "cosine", "debiased", "diffusers", "dist_ema", "ema_pytorch", "half_life",
    "half_life_fraction",
    "half_life_in_samples", "inverse_gamma", "linear", "mean", "power", "settable",
    "tf_warmup", "timm", "warmup", "window",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
