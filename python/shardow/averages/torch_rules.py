"""Averages that the engine has no kernels for, updated by PyTorch's own operations with the engine's numbers: on any
device that PyTorch has, and 16-bit ones rounded to nearest anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardow import _core
from shardow.base.checks import unsupported
from shardow.base.signals import Held

if TYPE_CHECKING:
    from shardow.averages.tracked import Tracked

Tensors = list[torch.Tensor]

#: As the engine numbers its forms (src/kernels/step.h); the first one copies, the last one rounds stochastically.
_FORMS = ("copy", "lerp", "mul_add", "two_products", "difference", "fused_difference", "quotient", "stochastic")
_AT_ONCE = 1 << 24  # elements: what is converted and masked beside the averages


class OtherMemory:
    """Does the engine's work on tracked tensors, where their weights lie at each call: src/average/other_memory.h has
    the calls."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._rows = {row.name: row for row in tracked}
        self._kept: dict[str, torch.Tensor] = {}

    def bind(self, names: Sequence[str]) -> Updater:
        large = next((row.name for row in self._rows.values() if math.prod(row.region.shape) >= 1 << 32), None)
        if large is not None:
            raise unsupported(f"'{large}' has 2^32 elements or more, which PyTorch's operations do not draw noise for")
        return Updater([self._rows[name] for name in names])

    def keep(self, name: str) -> None:
        self._kept[name] = self._rows[name].weights().clone()

    def show(self, name: str, index: int) -> None:
        self._rows[name].weights().copy_(self._rows[name].averages[index])

    def put_back(self, name: str) -> None:
        self._rows[name].weights().copy_(self._kept[name])

    def forget(self) -> None:
        self._kept.clear()


class Updater:
    """``rows`` have averages of one dtype. Their weights are read where they lie at each call."""

    def __init__(self, rows: Sequence[Tracked]) -> None:
        self._rows = rows
        #: Places of rows of one device and dtype, and on that device how many weights of each were not finite.
        self._groups: list[tuple[list[int], torch.Tensor]] = []
        kinds: dict[object, list[int]] = {}
        for place, row in enumerate(rows):
            if row.region.size:
                kinds.setdefault((row.averages[0].device, row.source.dtype), []).append(place)
        for places in kinds.values():
            ends = itertools.accumulate(rows[place].region.size for place in places)
            for _, some in itertools.groupby(zip(places, ends, strict=True), lambda pair: pair[1] // _AT_ONCE):
                group = [place for place, _ in some]
                count = torch.zeros(len(group), dtype=torch.int64, device=rows[group[0]].averages[0].device)
                self._groups.append((group, count))

    def copy(self) -> None:
        """The averages become the weights."""
        for row in self._rows:
            for average in row.averages:
                average.copy_(row.sources())

    def update(self, forms: Sequence[tuple[int, float, float]], hold: bool, seed: int, step: int) -> None:
        """``forms``: (form, decay, weight) of each average. Waits for no device."""
        with Held(), torch.no_grad():
            for places, count in self._groups:
                rows = [self._rows[place] for place in places]
                values = [row.sources().to(row.averages[0].dtype) for row in rows]
                finite = [value.isfinite() for value in values]
                count.add_(torch.stack([(~mask).sum() for mask in finite]))
                for k, (form, decay, weight) in enumerate(forms):
                    averages = [row.averages[k] for row in rows]
                    before = [average.clone() for average in averages] if hold else []
                    if _FORMS[form] == "stochastic":
                        for row, average, value in zip(rows, averages, values, strict=True):
                            bits = _noise(row.region, _core.noise_key(seed, step, row.name, k), value.device)
                            _lerp_with_noise(average, value, weight, bits)
                    else:
                        apply(_FORMS[form], averages, values, decay, weight)
                    for average, old, mask in zip(averages, before, finite, strict=False):
                        average.copy_(torch.where(mask, average, old))

    def read_count(self) -> tuple[int, int]:
        """Returns how many weights were not finite since the last call, and the place of the first tensor with one.
        Waits for devices."""
        counts = {}
        for places, count in self._groups:
            counts.update({place: number for place, number in zip(places, count.tolist(), strict=True) if number})
            count.zero_()
        return sum(counts.values()), min(counts, default=0)


def apply(rule: str, averages: Tensors, values: Tensors, decay: float, weight: float) -> None:
    """A rule of shardow.EMA on lists of tensors. Numbers multiply one tensor at a time: _foreach_mul_() rounds them
    first."""
    pairs = list(zip(averages, values, strict=True))
    if rule == "copy":
        torch._foreach_copy_(averages, values)
    elif rule == "lerp":
        torch._foreach_lerp_(averages, [value.to(average.dtype) for average, value in pairs], weight)
    elif rule == "mul_add":
        for average in averages:
            average.mul_(decay)
        torch._foreach_add_(averages, values, alpha=weight)
    elif rule == "two_products":
        for average, value in pairs:
            average.copy_(average * decay + weight * value)
    elif rule == "difference":
        torch._foreach_sub_(averages, [difference.mul_(weight) for difference in torch._foreach_sub(averages, values)])
    elif rule == "fused_difference":
        torch._foreach_sub_(averages, torch._foreach_sub(averages, values), alpha=weight)
    else:
        whole = round(1 / weight)  # as in the engine: 1 / n is rounded, and n is meant
        divisor = whole if abs(1 / weight - whole) < 1e-9 * whole else 1 / weight
        for average, value in pairs:
            average.copy_(average + (value - average) / divisor)


def _lerp_with_noise(average: torch.Tensor, value: torch.Tensor, weight: float, noise: torch.Tensor) -> None:
    """As src/kernels/arithmetic.h has it. ``average``: float32; ``noise``: 32 bits for each element."""
    difference = value - average
    binade = (average.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = binade * ((noise >> 15 | 1).float() * 2.0**-40)
    average.add_(torch.where(difference == 0, 0.0, shift).add_(difference, alpha=weight))


def _noise(region: _core.Region, key: tuple[int, int], device: torch.device) -> torch.Tensor:
    """The bits of src/kernels/noise.h for the region's elements by their places in the global tensor, int32."""
    start, mix = map(_signed, key)
    x = _places(region, device) * _signed(0x9E3779B9) + start
    x = (x ^ (x >> 16 & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ (x >> 15 & 0x1FFFF) ^ mix) * _signed(0x846CA68B)
    return x ^ (x >> 16 & 0xFFFF)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - (1 << 32 if word & 0x80000000 else 0)


def _places(region: _core.Region, device: torch.device) -> torch.Tensor:
    """Global indices of the region's elements, int32."""
    shape = list(region.shape)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    parts = []
    for offsets, sizes, _ in region.boxes():
        place = torch.zeros((), dtype=torch.int32, device=device)
        for offset, size, stride in zip(offsets, sizes, strides, strict=False):
            place = place.unsqueeze(-1) + torch.arange(offset, offset + size, dtype=torch.int32, device=device) * stride
        parts.append(place.reshape(-1))
    return torch.cat(parts)
