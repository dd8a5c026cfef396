"""Pairs: averages beside the tensors that they follow, both of somebody else's making. What twins and lists are made
of. The engine averages what it can reach in one pass, on the host also of tensors on a device; the rest (low-precision
averages rounded to nearest, complex numbers, tensors on other devices than that, or with holes) goes through torch by
the same formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardow import _core
from shardow.averages import torch_rules
from shardow.averages.cuda_streams import Streams
from shardow.averages.options import DTYPES
from shardow.base.checks import warn
from shardow.model import storage

Tensors = list[torch.Tensor]
_NOTHING = torch.empty(0, device="cpu")


@dataclass(eq=False)
class Pair:
    """Two tensors of one shape: the average and what it follows; parts of the same global tensor where they are
    DTensors. ``region``: what they are of a global tensor, by whose elements stochastic rounding draws, so that it is
    the same however they are shared out; None: all of one. ``copied``: each update copies it, though it is floating."""

    name: str
    source: torch.Tensor
    average: torch.Tensor
    region: _core.Region | None = None
    copied: bool = False


class Pairs:
    """``rule``: as in shardow.EMA. ``stochastic``: bfloat16 and float16 averages follow "lerp", rounded by ``seed``;
    else as torch rounds. Averages that are not floating are copies. What is NaN or Inf in a source is held: the average
    keeps its value, in the engine. Addresses are those of construction."""

    def __init__(self, pairs: Iterable[Pair], rule: str, stochastic: bool = False, seed: int = 0) -> None:
        self._rule, self._stochastic, self._seed = rule, stochastic, seed
        self._warned = False
        engine: dict[torch.dtype, list[Pair]] = {}
        self._copies: list[Pair] = []
        self._others: dict[object, list[Pair]] = {}  # torch takes each list at once
        self._averages: list[torch.Tensor] = []  # that the engine writes
        self._averaged: list[Pair] = []
        self._staged: list[Pair] = []
        self._in_torch: list[tuple[int, Pair]] = []  # (place among all, pair) of what torch reads
        for at, entry in enumerate(pairs):
            pair = replace(entry, source=_memory(entry.source), average=_memory(entry.average))
            if pair.copied or not (pair.average.is_floating_point() or pair.average.is_complex()):
                self._copies.append(pair)
                self._in_torch.append((at, pair))
                continue
            self._averaged.append(pair)
            if stochastic and pair.average.dtype.itemsize == 2 and not self._engine_takes(pair):
                staged = replace(pair, source=torch.empty_like(pair.average))
                if self._engine_takes(staged):  # torch has no such rounding: beside the average the engine can do it
                    self._staged.append(replace(pair, average=staged.source))
                    self._in_torch.append((at, self._staged[-1]))
                    pair = staged
            if self._engine_takes(pair):
                engine.setdefault(pair.average.dtype, []).append(pair)
                self._averages.append(pair.average)
                continue
            self._in_torch.append((at, pair))
            kind: object = (pair.average.device, pair.average.dtype, pair.source.dtype)
            if pair.source.device != pair.average.device:
                kind = at  # one by one: together they would be another copy of the model
            self._others.setdefault(kind, []).append(pair)
        self._engines = [(self._engine(dtype, some), Streams(*_sides(some)[::-1])) for dtype, some in engine.items()]

    def let_go(self) -> None:
        """Keeps no source alive; take() brings them again before each update(), which is all that can be called
        then."""
        self._averaged = []
        for _, pair in self._in_torch:
            pair.source = _NOTHING

    def take(self, sources: Sequence[torch.Tensor]) -> None:
        """Those of construction, all of them, in its order and where they were then: the engine reads addresses
        alone."""
        for at, pair in self._in_torch:
            pair.source = _memory(sources[at])

    def update(self, decay: float, weight: float, step: int | None = None) -> None:
        """One update by ``rule`` with float(decay) and float(weight), each rounded once to the dtype of the average.
        ``step``, more than at the last update, draws the noise; None: one more. Averages on the host are whole when it
        returns, since anybody may look at them.
        """
        copy_all(*_sides(self._staged))
        held = sum(engine.update_by([(decay, weight)], step) for engine in self._followed())
        for engine, _ in self._engines:
            engine.wait()
        torch.autograd.graph.increment_version(self._averages)
        for pairs in self._others.values():
            torch_rules.apply(self._rule, *_on_one_device(pairs), decay, weight)
        copy_all(*_sides(self._copies))
        if held and not self._warned:
            self._warned = True
            warn(f"{held} weights are NaN or Inf; their averages keep their values (one warning)", RuntimeWarning)

    def apply(self, change: Callable[[Tensors, Tensors], None]) -> None:
        """change(averages, sources) in the rule's place: lists of what is averaged, in their order, each source on its
        average's device.
        """
        if self._averaged:
            change(*_on_one_device(self._averaged))
        copy_all(*_sides(self._copies))

    def copy(self) -> None:
        """The averages become what they follow."""
        copy_all(*_sides(self._staged))
        for engine in self._followed():
            engine.reset()
        torch.autograd.graph.increment_version(self._averages)
        copy_all(*_sides([*self._copies, *(pair for pairs in self._others.values() for pair in pairs)]))

    def held(self) -> int:
        """Elements kept because what they follow was NaN or Inf, since construction."""
        return sum(engine.stats()["held_nonfinite"] for engine, _ in self._engines)

    def _followed(self) -> Iterator[_core.Average]:
        """On torch's current streams."""
        for engine, streams in self._engines:
            streams.follow(engine)
            yield engine

    def _engine_takes(self, pair: Pair) -> bool:
        source, average = pair.source, pair.average
        here, there = storage.device_of(average), storage.device_of(source)
        beside = here == there and there.type in ("cpu", "cuda") and not storage.why_not(there)
        on_host = here.type == "cpu" and there.type == "cuda" and _core.cuda_available()
        if not (beside or on_host) or not {source.dtype, average.dtype} <= DTYPES.keys():
            return False
        if flat(source) is None or _strides(source) != _strides(average):
            return False
        if average.dtype.itemsize == 2:
            return self._stochastic
        if source.dtype.itemsize > average.dtype.itemsize:
            return False
        return self._rule != "two_products" or source.dtype == average.dtype  # torch rounds w * p to the source's dtype

    def _engine(self, dtype: torch.dtype, pairs: Sequence[Pair]) -> _core.Average:
        narrow = dtype.itemsize == 2
        options = _core.AverageOptions(
            schedules=[_core.Schedule.make("constant", {"decay": 1.0})],  # never asked: update_by() brings its own
            dtype=DTYPES[dtype], rule=_core.Rule.lerp if narrow else getattr(_core.Rule, self._rule),
            rounding=_core.Rounding.stochastic if narrow else _core.Rounding.nearest,
            non_finite=_core.NonFinite.hold, update_every=1, start_step=0, seed=self._seed, num_threads=0,
            keep_values=True,
        )  # fmt: skip
        return _core.Average(
            [_view(pair, pair.source) for pair in pairs], [[_view(pair, pair.average) for pair in pairs]], options
        )


def _sides(pairs: Sequence[Pair]) -> tuple[Tensors, Tensors]:
    return [pair.average for pair in pairs], [pair.source for pair in pairs]


def _on_one_device(pairs: Sequence[Pair]) -> tuple[Tensors, Tensors]:
    return [pair.average for pair in pairs], [pair.source.to(pair.average.device) for pair in pairs]


def copy_all(targets: Tensors, values: Tensors) -> None:
    if targets:
        torch._foreach_copy_(targets, values)


def warn_of_rounding(averages: Iterable[torch.Tensor], way_out: str) -> bool:
    """That 16-bit averages which are rounded to nearest stand still where weights move little. Tells whether there are
    any.
    """
    narrow = next(
        (tensor.dtype for tensor in averages if tensor.is_floating_point() and tensor.dtype.itemsize < 4), None
    )
    if narrow is not None:
        lost = "as in the library that this stands for: with a decay near 1 most increments are lost"
        warn(f"averages in {narrow} are rounded to nearest, {lost}. {way_out}", RuntimeWarning)
    return narrow is not None


def flat(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements in the order of memory, 1-D, a view; None where they have holes between them, or overlap."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(_strides(tensor), (size for size in tensor.shape if size != 1), strict=True)):
        if stride != expected:
            return None
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of the dimensions that have any."""
    if not tensor.numel():
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _view(pair: Pair, tensor: torch.Tensor) -> _core.TensorView:
    memory = flat(tensor)
    assert memory is not None
    region = pair.region or _core.Region.whole([memory.numel()])
    return storage.engine_view(pair.name, DTYPES[tensor.dtype], memory, region)
