"""Updates averages that the engine has no kernels for, by PyTorch's own operations with the engine's numbers: on any
device that PyTorch has, and 16-bit averages rounded to nearest anywhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shardow import _core
from shardow.averaging.tracked import Tracked
from shardow.base.checks import unsupported
from shardow.base.signals import DeferredSignals

Tensors = list[torch.Tensor]

#: As the engine numbers its forms (src/kernels/step.h); the first one copies, the last one rounds stochastically.
_FORMS = ("copy", "lerp", "mul_add", "two_products", "difference", "fused_difference", "quotient", "stochastic")
_AT_ONCE = 1 << 23  # elements that are converted and masked at a time, beside the averages


class OtherMemory:
    """Does the engine's work on tracked tensors, where their weights lie at each call; src/average/other_memory.h has
    the calls."""

    def __init__(self, tracked: Sequence[Tracked]) -> None:
        self._rows = {row.name: row for row in tracked}
        self._kept: dict[str, torch.Tensor] = {}

    def bind(self, names: Sequence[str]) -> Updater:
        if large := [row.name for row in self._rows.values() if math.prod(row.region.shape) >= 1 << 32]:
            raise unsupported(f"'{large[0]}' has 2^32 elements or more, for which PyTorch's operations draw no noise")
        return Updater([self._rows[name] for name in names])

    def keep(self, name: str) -> None:
        self._kept[name] = self._rows[name].weights().clone()

    def show(self, name: str, index: int) -> None:
        self._rows[name].weights().copy_(self._rows[name].averages[index])

    def put_back(self, name: str) -> None:
        self._rows[name].weights().copy_(self._kept[name])

    def forget(self) -> None:
        self._kept.clear()


class RowRange(NamedTuple):
    """Elements [begin, end) of a row's part."""

    row: Tracked
    begin: int
    end: int

    def of(self, part: torch.Tensor) -> torch.Tensor:
        return part if self.end - self.begin == part.numel() else part[self.begin : self.end]

    def noise(self, seed: int, step: int, k: int) -> torch.Tensor:
        key = _core.noise_key(seed, step, self.row.name, k)
        return _noise(self.row.region.window(self.begin, self.end), key, self.row.averages[k].device)


class Updater:
    """Updates ``rows``, whose averages have one dtype. Their weights are read where they lie at each call."""

    def __init__(self, rows: Sequence[Tracked]) -> None:
        self._rows = rows
        #: Pieces of one device and dtype, their parts of each average, and how many of their weights were not finite.
        self._groups: list[tuple[list[RowRange], list[Tensors], torch.Tensor]] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[Tracked]] = {}
        for row in rows:
            kinds.setdefault((row.averages[0].device, row.source.dtype), []).append(row)
        for (device, _), alike in kinds.items():
            cuts = [(row, begin) for row in alike for begin in range(0, row.region.size, _AT_ONCE)]
            pieces = [RowRange(row, begin, min(begin + _AT_ONCE, row.region.size)) for row, begin in cuts]
            ends = itertools.accumulate(piece.end - piece.begin for piece in pieces)
            most = 1 if device.type == "cpu" else _AT_ONCE  # a CPU rounds 16 bits by where an element is in a tensor
            groups: dict[int, list[RowRange]] = {}
            for piece, end in zip(pieces, ends, strict=True):
                groups.setdefault(end // most, []).append(piece)
            for group in groups.values():
                parts = [[piece.of(piece.row.averages[k]) for piece in group] for k in range(len(alike[0].averages))]
                self._groups.append((group, parts, torch.zeros((), dtype=torch.int64, device=device)))

    def copy(self) -> None:
        """Copies the weights into the averages."""
        for row in self._rows:
            torch._foreach_copy_(row.averages, [row.sources()] * len(row.averages))

    def update(self, forms: Sequence[tuple[int, float, float]], hold: bool, seed: int, step: int) -> None:
        """Updates by ``forms``: (form, decay, weight) of each average. Puts a group together at a time, since a device
        takes one large operation sooner than many small ones. Waits for no device."""
        with DeferredSignals(), torch.no_grad():
            for pieces, parts, count in self._groups:
                value = torch.cat([piece.of(piece.row.sources()) for piece in pieces]).to(parts[0][0].dtype)
                finite = value.isfinite()
                count.add_((~finite).sum())
                for k, (form, decay, weight) in enumerate(forms):
                    before = torch.cat(parts[k])
                    average = before.clone() if hold else before
                    if _FORMS[form] == "stochastic":
                        bits = torch.cat([piece.noise(seed, step, k) for piece in pieces])
                        _lerp_with_noise(average, value, weight, bits)
                    else:
                        apply(_FORMS[form], [average], [value], decay, weight)
                    after = torch.where(finite, average, before) if hold else average
                    torch._foreach_copy_(parts[k], after.split([part.numel() for part in parts[k]]))

    def read_count(self) -> tuple[int, str]:
        """Returns how many weights were not finite since the last call, and the name of the first tensor with one, if
        it has one still. Waits for devices."""
        total = sum(int(count) for *_, count in self._groups)
        for *_, count in self._groups:
            count.zero_()
        names = (row.name for row in self._rows if not bool(row.sources().isfinite().all()))
        return total, next(names, "") if total else ""


def apply(rule: str, averages: Tensors, values: Tensors, decay: float, weight: float) -> None:
    """Applies a rule of shardow.EMA to lists of tensors. Numbers multiply one tensor at a time: _foreach_mul_() rounds
    them first."""
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
        whole = round(1 / weight)  # as in the engine: the weight 1 / n is rounded, n is exact
        divisor = whole if abs(1 / weight - whole) < 1e-9 * whole else 1 / weight
        for average, value in pairs:
            average.copy_(average + (value - average) / divisor)


def _lerp_with_noise(average: torch.Tensor, value: torch.Tensor, weight: float, noise: torch.Tensor) -> None:
    """Rounds as src/kernels/arithmetic.h does. ``average``: float32; ``noise``: 32 bits for each element."""
    difference = value - average
    binade = (average.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = binade * ((noise >> 15 | 1).float() * 2.0**-40)
    average.add_(torch.where(difference == 0, 0.0, shift).add_(difference, alpha=weight))


def _noise(region: _core.Region, key: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Returns the bits of src/kernels/noise.h for the region's elements by their places in the global tensor, int32."""
    start, mix = map(_signed, key)
    x = _places(region, device) * _signed(0x9E3779B9) + start
    x = (x ^ (x >> 16 & 0xFFFF)) * _signed(0x7FEB352D)
    x = (x ^ (x >> 15 & 0x1FFFF) ^ mix) * _signed(0x846CA68B)
    return x ^ (x >> 16 & 0xFFFF)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF) - (1 << 32 if word & 0x80000000 else 0)


def _places(region: _core.Region, device: torch.device) -> torch.Tensor:
    """Returns the global indices of the region's elements, int32."""
    shape = list(region.shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    parts = []
    for offsets, sizes, _ in region.boxes():
        place = torch.zeros((), dtype=torch.int32, device=device)
        for offset, size, stride in zip(offsets, sizes, strides, strict=True):
            place = place.unsqueeze(-1) + torch.arange(offset, offset + size, dtype=torch.int32, device=device) * stride
        parts.append(place.reshape(-1))
    return torch.cat(parts)
