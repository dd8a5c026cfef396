"""Keeps averages in memory that others own: a list's, a second model's, or a rank's share of these. Each average
follows a source, a tensor of the same shape. The engine averages in one pass what it can reach,
averages on the host of tensors on a device too. The rest (low-precision averages rounded to nearest, complex numbers,
other devices, tensors with holes) goes through torch by the same formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch

from shardow import _core
from shardow.averaging import torch_rules
from shardow.averaging.cuda_streams import Streams
from shardow.averaging.options import DTYPES
from shardow.base.checks import warn
from shardow.sharding import storage

Tensors = list[torch.Tensor]
Kind = Literal["parameter", "buffer", "table"]  # a table is a buffer that state_dict() leaves out
#: The effect of an update on a tensor. A held tensor changes by copy() alone; a tensor to leave is not kept at all.
Fate = Literal["average", "copy", "hold", "leave"]
Choose = Callable[[str, torch.Tensor, Kind], Fate]
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


@dataclass(eq=False)
class AveragedTensor:
    """Two tensors of one shape: the average and its source; parts of the same global tensor where they are DTensors.
    ``region``: their part of a global tensor; None: they are whole. Stochastic rounding draws its noise for the
    elements of the global tensor, so that it is the same under any division."""

    name: str
    source: torch.Tensor
    average: torch.Tensor
    region: _core.Region | None = None
    fate: Fate = "average"


class GivenMemory:
    """Averages ``rows`` by ``rule``, as in shardow.EMA. ``stochastic``: bfloat16 and float16 averages follow "lerp",
    rounded by ``seed``; else as torch rounds. Averages that are not floating are copies. NaN and Inf in a source are
    held by the engine: the average keeps its value. Addresses are those of construction."""

    def __init__(self, rows: Iterable[AveragedTensor], rule: str, stochastic: bool = False, seed: int = 0) -> None:
        self._rule, self._stochastic, self._seed = rule, stochastic, seed
        self._warned = False
        #: The sources in the order of ``rows``, without those to leave. A caller may remove them between calls, and
        #: put them back at the same addresses, which are all that the engine knows.
        self.sources: Tensors = []
        self._averages: Tensors = []
        self._copied: list[int] = []  # places of rows
        self._averaged: list[int] = []
        self._staged: dict[int, torch.Tensor] = {}  # copies of sources, which the engine reads
        self._others: dict[object, list[int]] = {}  # torch takes each list at once
        engine: dict[torch.dtype, list[AveragedTensor]] = {}
        for place, entry in enumerate(row for row in rows if row.fate != "leave"):
            row = replace(entry, source=_memory(entry.source), average=_memory(entry.average))
            source, average = row.source, row.average
            self.sources.append(source)
            self._averages.append(average)
            if row.fate == "hold":
                continue
            if row.fate == "copy" or not (average.is_floating_point() or average.is_complex()):
                self._copied.append(place)
                continue
            self._averaged.append(place)
            if stochastic and average.dtype.itemsize == 2 and not self._engine_takes(row):
                # Torch has no such rounding.
                staged = replace(row, source=torch.empty_like(average))
                if self._engine_takes(staged):
                    self._staged[place], row = staged.source, staged
            if self._engine_takes(row):
                engine.setdefault(average.dtype, []).append(row)
                continue
            kind: object = (average.device, average.dtype, source.dtype)
            if source.device != average.device:
                kind = place  # alone, since together they would be another copy of the model
            self._others.setdefault(kind, []).append(place)
        self._written = [row.average for row in chain.from_iterable(engine.values())]  # by the engine
        self._engines = [
            (self._engine(dtype, group), Streams((row.source for row in group), (row.average for row in group)))
            for dtype, group in engine.items()
        ]

    @torch.no_grad()
    def update(self, decay: float, weight: float, step: int | None = None) -> None:
        """Makes one update by ``rule`` with float(decay) and float(weight), each rounded once to the dtype of the
        average. ``step``, more than at the last update, draws the noise; None: one more. Averages on the host are whole
        when it returns, since other code may read them."""
        copy_all([*self._staged.values()], [_memory(self.sources[place]) for place in self._staged])
        held = 0
        for engine, streams in self._engines:
            streams.follow(engine)
            held += engine.update_by([(decay, weight)], step)
        for engine, _ in self._engines:
            engine.wait()
        torch.autograd.graph.increment_version(self._written)
        for places in self._others.values():
            torch_rules.apply(self._rule, *self._on_one_device(places), decay, weight)
        self._copy(self._copied)
        if held and not self._warned:
            self._warned = True
            warn(f"{held} weights are NaN or Inf; their averages keep their values (one warning)", RuntimeWarning)

    @torch.no_grad()
    def apply(self, change: Callable[[Tensors, Tensors], None]) -> None:
        """Calls change(averages, sources) in the rule's place: lists of the averaged tensors, in their order, each
        source on its average's device.
        """
        if self._averaged:
            change(*self._on_one_device(self._averaged))
        self._copy(self._copied)

    @torch.no_grad()
    def copy(self) -> None:
        """Makes the averages equal to their sources."""
        self._copy(range(len(self._averages)))

    def held(self) -> int:
        """Returns how many elements were kept because their source was NaN or Inf, since construction."""
        return sum(engine.stats()["held_nonfinite"] for engine, _ in self._engines)

    def _copy(self, places: Sequence[int]) -> None:
        copy_all([self._averages[place] for place in places], [_memory(self.sources[place]) for place in places])

    def _on_one_device(self, places: Sequence[int]) -> tuple[Tensors, Tensors]:
        averages = [self._averages[place] for place in places]
        sources = (_memory(self.sources[place]) for place in places)
        return averages, [source.to(average.device) for average, source in zip(averages, sources, strict=True)]

    def _engine_takes(self, row: AveragedTensor) -> bool:
        source, average = row.source, row.average
        home, device = storage.device_of(average), storage.device_of(source)
        same_device = home == device and device.type in ("cpu", "cuda") and not storage.why_not(device)
        on_host = home.type == "cpu" and device.type == "cuda" and _core.cuda_available()
        if not (same_device or on_host) or not {source.dtype, average.dtype} <= DTYPES.keys():
            return False
        if flat(source) is None or (average.numel() and source.squeeze().stride() != average.squeeze().stride()):
            return False
        if average.dtype.itemsize == 2:
            return self._stochastic
        if source.dtype.itemsize > average.dtype.itemsize:
            return False
        return self._rule != "two_products" or source.dtype == average.dtype  # torch rounds w * p to the source's dtype

    def _engine(self, dtype: torch.dtype, rows: Sequence[AveragedTensor]) -> _core.Average:
        narrow = dtype.itemsize == 2
        options = _core.AverageOptions(
            schedules=[_core.Schedule.make("constant", {"decay": 1.0})],  # unused: update_by() brings its own
            dtype=DTYPES[dtype], rule=_core.Rule.lerp if narrow else getattr(_core.Rule, self._rule),
            rounding=_core.Rounding.stochastic if narrow else _core.Rounding.nearest,
            non_finite=_core.NonFinite.hold, update_every=1, start_step=0, seed=self._seed, num_threads=0,
            keep_values=True,
        )  # fmt: skip
        return _core.Average(
            [_view(row, row.source) for row in rows], [[_view(row, row.average) for row in rows]], options
        )


def copy_all(targets: Tensors, values: Tensors) -> None:
    if targets:
        torch._foreach_copy_(targets, values)


def warn_of_rounding(averages: Iterable[torch.Tensor], way_out: str) -> None:
    """Warns that 16-bit averages, rounded to nearest, stand still where weights move little."""
    narrow = (tensor.dtype for tensor in averages if tensor.is_floating_point() and tensor.dtype.itemsize < 4)
    if dtype := next(narrow, None):
        lost = "as in the library that this stands for: with a decay near 1 most increments are lost"
        warn(f"averages in {dtype} are rounded to nearest, {lost}. {way_out}", RuntimeWarning)


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the elements in the order of memory, 1-D, a view; None where they have holes between them, or overlap."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or not _is_dense(tensor):
        return None
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this rank holds."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _view(row: AveragedTensor, tensor: torch.Tensor) -> _core.TensorView:
    memory = flat(tensor)
    assert memory is not None
    region = row.region or _core.Region.whole([memory.numel()])
    return storage.engine_view(row.name, DTYPES[tensor.dtype], memory, region)
