"""Options of an EMA, checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from shardow import _core, errors
from shardow.base.checks import invalid, one_of, warn, whole
from shardow.schedules import as_schedules
from shardow.sharding.dtypes import NAMES, device_of
from shardow.sharding.local import LocalTensor
from shardow.sharding.view import ModelView

#: Dtypes of averages, with their names.
DTYPES = {dtype: NAMES[dtype] for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}

Params = Literal["trainable", "all"] | Callable[[str, torch.Tensor], bool]
Replicas = Literal["split", "copy"]
Buffers = Literal["copy", "average", "ignore"] | Callable[[str, torch.Tensor], bool]
Rule = Literal["lerp", "mul_add", "two_products", "difference", "fused_difference", "quotient"]
Stochastic = bool | Literal["auto"]
NonFinite = Literal["hold", "propagate", "raise"]


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
    overlap: bool
    ring_bytes: int

    def wants(self, weight: LocalTensor) -> bool:
        if callable(self.params):
            return bool(self.params(weight.name, weight.tensor))
        return self.params == "all" or weight.requires_grad

    @property
    def averages_buffers(self) -> bool:
        return callable(self.buffers) or self.buffers == "average"

    @property
    def to_nearest(self) -> bool:
        """Whether averages have 16 bits and are rounded as PyTorch rounds; the engine has no kernels for these."""
        return self.dtype.itemsize == 2 and self.rounding == "nearest"

    def chosen(self, view: ModelView) -> list[LocalTensor]:
        """Returns the parameters that are averaged, and buffers where they are too, in the model's order."""
        chosen = [weight for weight in view.parameters if self.wants(weight)]
        if not chosen:
            raise invalid(f"no parameter is averaged: params={self.params!r} chose none of {len(view.parameters)}")
        if self.averages_buffers:
            view.watch_buffers = True
            buffers = [buffer for buffer in view.buffers if buffer.tensor.is_floating_point()]
            if callable(self.buffers):
                buffers = [buffer for buffer in buffers if self.buffers(buffer.name, buffer.tensor)]
            if buffers and self.overlap:
                why = f"nothing would keep the next forward from writing '{buffers[0].name}' while it is averaged"
                raise invalid(f"overlap=True with buffers='average': {why}; take buffers='copy', or leave overlap out")
            chosen += buffers
        return chosen

    def engine(self, alone: bool, offloaded: bool, keep_values: bool) -> _core.AverageOptions:
        """Returns the engine's options. ``alone``: no other rank would wait for one that raises in an update.
        ``offloaded``: the engine keeps all averages in the background anyway; a step would wait for the whole of an
        overlapped update."""
        holds = self.nonfinite == "raise" and not alone
        # `raise` is a keyword of Python.
        non_finite = "hold" if holds else self.nonfinite.replace("raise", "raise_")
        return _core.AverageOptions(
            schedules=self.schedules, dtype=DTYPES[self.dtype], rule=getattr(_core.Rule, self.rule),
            rounding=getattr(_core.Rounding, self.rounding), non_finite=getattr(_core.NonFinite, non_finite),
            update_every=self.update_every, start_step=self.start_step, seed=self.seed, num_threads=self.threads,
            overlap=self.overlap and not offloaded, ring_bytes=self.ring_bytes, keep_values=keep_values,
        )  # fmt: skip


_WORDS = {
    "params": ("trainable", "all"), "buffers": ("copy", "average", "ignore"), "replicas": get_args(Replicas),
    "rule": get_args(Rule), "nonfinite": get_args(NonFinite),
}  # fmt: skip
_PREDICATES = {"params", "buffers"}
_BOUNDS = {
    "update_every": (1, 2**62), "start_step": (0, 2**62), "seed": (0, 2**64 - 1), "threads": (0, 2**31 - 1),
    "ring_bytes": (1, 2**62),
}  # fmt: skip
_ROUNDING: dict[Stochastic, str] = {"auto": "auto", True: "stochastic", False: "nearest"}


def make_options(*, decay: Any, momentum: Any, stochastic: Stochastic, device: Any, **fields: Any) -> Options:
    """Returns checked options. ``fields``: those of Options that are taken as they are. Raises ValueError for what is
    out of range, which is a TypeError too for momentum=."""
    if momentum is not None:
        hint = ""
        if isinstance(momentum, float):
            hint = f" (momentum={momentum} as a weight of the new value is decay={1 - momentum})"
        raise errors.UnknownOptionError(f"EMA() takes decay=, the weight kept on the old average, not momentum={hint}")
    dtype = fields["dtype"]
    fields["dtype"] = dtype = getattr(torch, dtype, None) if type(dtype) is str else dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise invalid(f"dtype={dtype}; give one of {', '.join(map(str, DTYPES))}; torch.float32 fits all weights")
    if dtype.itemsize == 2:
        lost = "lose most increments with a decay near 1, rounded to nearest"
        noise = "carry 0.5 to 1.6 % of noise, stochastically rounded"
        warn(f"averages in {dtype} {noise if stochastic else lost}; torch.float32 is the default for a reason")
    for name, words in _WORDS.items():
        if name not in _PREDICATES or not callable(fields[name]):
            one_of(name, fields[name], words)
    for name, (least, most) in _BOUNDS.items():
        fields[name] = whole(name, fields[name], least, most)
    return Options(
        schedules=as_schedules(decay),
        device=None if device is None else device_of(device),
        rounding=_ROUNDING[one_of("stochastic", stochastic, tuple(_ROUNDING))],
        **fields,
    )
