"""What an EMA was asked for, checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch

from shardow import _core, _errors, _warnings
from shardow.schedules import as_schedules

#: Dtypes of averages, by torch's names for them.
DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}

Params = Literal["trainable", "all"] | Callable[[str, torch.Tensor], bool]
Replicas = Literal["split", "copy"]
Buffers = Literal["copy", "average", "ignore"]
Rule = Literal["lerp", "mul_add", "two_products", "difference", "fused_difference", "quotient"]
Stochastic = bool | Literal["auto"]
NonFinite = Literal["hold", "propagate", "raise"]


def invalid(message: str) -> Exception:
    return _errors.make("invalid_argument", message)


def unsupported(message: str) -> Exception:
    return _errors.make("unsupported", message)


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    for candidate in allowed:
        if value is candidate or (isinstance(value, str) and value == candidate):
            return value
    raise invalid(f"{name}={value!r}; it must be one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True)
class Options:
    """Options of an EMA, with the engine's words for them. Meaning and defaults: see EMA."""

    schedules: list[_core.Schedule]
    dtype: torch.dtype
    device: torch.device | None
    replicas: Replicas
    params: Params
    buffers: Buffers
    rule: Rule
    rounding: str
    nonfinite: NonFinite
    update_every: int
    start_step: int
    seed: int
    threads: int

    def engine(self, alone: bool) -> _core.AverageOptions:
        """``alone``: no other rank would wait for one that raises in an update."""
        waits = self.nonfinite == "raise" and not alone
        return _core.AverageOptions(
            schedules=self.schedules,
            dtype=DTYPES[self.dtype],
            rule=getattr(_core.Rule, self.rule),
            rounding=getattr(_core.Rounding, self.rounding),
            non_finite=getattr(
                _core.NonFinite, "hold" if waits else "raise_" if self.nonfinite == "raise" else self.nonfinite
            ),  # a keyword
            update_every=self.update_every,
            start_step=self.start_step,
            seed=self.seed,
            num_threads=self.threads,
        )


def make_options(
    *,
    decay: Any,
    dtype: torch.dtype,
    device: Any,
    replicas: Replicas,
    params: Params,
    buffers: Buffers,
    rule: Rule,
    stochastic: Stochastic,
    nonfinite: NonFinite,
    update_every: int,
    start_step: int,
    seed: int,
    threads: int,
    overlap: bool,
) -> Options:
    if overlap:
        raise unsupported("overlap=True (averaging in the background) is not built yet; leave it out")
    if dtype not in DTYPES:
        raise invalid(f"dtype={dtype}; averages can be {', '.join(map(str, DTYPES))}; torch.float32 is right for weights of any dtype")
    if dtype in (torch.bfloat16, torch.float16):
        _warnings.warn(
            f"averages in {dtype} carry 0.5 to 1.6 % of noise, stochastically rounded; torch.float32 is the default for a reason"
        )
    if not callable(params):
        one_of("params", params, ("trainable", "all"))
    return Options(
        schedules=as_schedules(decay),
        dtype=dtype,
        device=None if device is None else torch.device(device),
        replicas=one_of("replicas", replicas, ("split", "copy")),
        params=params,
        buffers=one_of("buffers", buffers, ("copy", "average", "ignore")),
        rule=one_of("rule", rule, ("lerp", "mul_add", "two_products", "difference", "fused_difference", "quotient")),
        rounding={"auto": "auto", True: "stochastic", False: "nearest"}[one_of("stochastic", stochastic, ("auto", True, False))],
        nonfinite=one_of("nonfinite", nonfinite, ("hold", "propagate", "raise")),
        update_every=whole("update_every", update_every, 1),
        start_step=whole("start_step", start_step, 0),
        seed=whole("seed", seed, 0),
        threads=whole("threads", threads, 0),
    )


def seconds(timeout: float | timedelta | None) -> float | None:
    """A deadline as seconds; None: the process group's own."""
    if timeout is None:
        return None
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value > 0:
        raise invalid(f"timeout={timeout}; it must be more than 0 seconds")
    return value


def whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise invalid(f"{name}={value!r}; it must be a whole number of at least {least}")
    return value
