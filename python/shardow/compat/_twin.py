"""Twin: a second model whose weights are the averages of the first one's, for surfaces that promise a module to call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shardow import errors
from shardow.averages.options import Rule as EngineRule
from shardow.compat._pairs import Pair, Pairs, Tensors, copy_all
from shardow.model.local import LocalTensor
from shardow.model.names import walk
from shardow.model.view import ModelView, find

Kind = Literal["parameter", "buffer", "temporary"]  # temporary: a buffer that state_dict() has not
Fate = Literal["average", "copy", "leave"]
Choose = Callable[[str, torch.Tensor, Kind], Fate]
#: A rule's name, or what tells it from (dtype of the weight, dtype of its average) of everything that is averaged.
Rule = EngineRule | Callable[[list[tuple[torch.dtype, torch.dtype]]], EngineRule]


class _MissingError(RuntimeError, KeyError):
    """What torch and timm raise where a name is missing."""


def everything_saved(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    """What state_dict() has is averaged."""
    return "leave" if kind == "temporary" else "average"


@dataclass(eq=False)
class _Buffer:
    """The same buffer's place in both modules, and what was there when pairs were made."""

    name: str
    theirs: dict[str, torch.Tensor | None]
    ours: dict[str, torch.Tensor | None]
    key: str
    fate: Fate
    was: tuple[Any, ...] = ()

    def now(self) -> tuple[Any, ...]:
        a, b = self.theirs.get(self.key), self.ours.get(self.key)
        return () if a is None or b is None else (a, a.data_ptr(), b, b.data_ptr())

    def unchanged(self) -> bool:
        return len(now := self.now()) == len(self.was) and all(
            x is y or (isinstance(x, int) and x == y) for x, y in zip(now, self.was, strict=True)
        )


class Twin:
    """Keeps ``module``, of the model's structure and sharding, at the averages. ``rule``: as in Pairs, or a function that tells it. ``options``: as in Pairs. ``choose``: whether a tensor of the
    model is averaged, copied at each update, or left alone; what is not floating is copied where others are averaged.

    Names are matched without what wrappers put into them. Replaced or moved tensors of either model, and another ``module``, are found at the next update, and paired again.
    """

    def __init__(self, module: nn.Module, rule: Rule, choose: Choose = everything_saved, **options: Any) -> None:
        self.module = module
        self._rule, self._choose, self._options = rule, choose, options
        self._model: nn.Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or in a pickle: nothing is paired yet."""
        return {"module": self.module, "_rule": self._rule, "_choose": self._choose, "_options": self._options, "_model": None}

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float, weight: float) -> None:
        """The averages by ``decay`` and ``weight``, the rest copied. Raises ValueError and RuntimeError, before anything changes, where the models differ in names or shapes."""
        self._bind(model)
        self._pairs.update(decay, weight)
        self._copy_rest()

    @torch.no_grad()
    def apply(self, model: nn.Module, change: Callable[[Tensors, Tensors], None]) -> None:
        """update() by other arithmetic: change(averages, weights) gets lists of tensors and writes the former."""
        self._bind(model)
        self._pairs.apply(change)
        self._copy_rest()

    @torch.no_grad()
    def copy(self, model: nn.Module) -> None:
        """Everything that is averaged or copied becomes the model's."""
        self._bind(model)
        self._pairs.copy()
        self._copy_rest()

    def held(self) -> int:
        return self._pairs.held() if self._model is not None else 0

    def _copy_rest(self) -> None:
        pairs = [(buffer.ours[buffer.key], buffer.theirs[buffer.key]) for buffer in self._buffers if buffer.fate == "copy"] + self._copied
        copy_all([ours for ours, _ in pairs if ours is not None], [theirs for _, theirs in pairs if theirs is not None])

    def _bind(self, model: nn.Module) -> None:
        if self._model is not None and self.module is not self._paired:
            self._model = None
        if model is self._model and self._unchanged():
            return
        if self._model is not None:
            self._ours.reshard()
            self._theirs.reshard()
        if model is not self._model or not self._unchanged():
            self._pair(model)

    def _unchanged(self) -> bool:
        return self._ours.unchanged() and self._theirs.unchanged() and all(buffer.unchanged() for buffer in self._buffers)

    def _pair(self, model: nn.Module) -> None:
        self._model = None  # nothing is known until all is
        ours = find(self.module, strided=True)
        inner, theirs = _unwrapped(model, ours)
        ours.reshard()
        theirs.reshard()
        weights = [(one.name, p, e, self._choose(one.name, p, "parameter")) for one, p, e in _matched(ours, theirs)]
        self._copied: list[tuple[torch.Tensor | None, torch.Tensor | None]] = [(e, p) for _, p, e, fate in weights if fate == "copy"]
        pairs = [Pair(name, p, e) for name, p, e, fate in weights if fate == "average"]
        self._buffers = list(self._found_buffers(inner))
        for buffer in self._buffers:
            buffer.was = buffer.now()
            if buffer.fate == "average":
                pairs.append(Pair(buffer.name, buffer.was[0].detach(), buffer.was[2].detach()))
        dtypes = [(pair.source.dtype, pair.average.dtype) for pair in pairs if pair.average.is_floating_point()]
        self._pairs = Pairs(pairs, self._rule if isinstance(self._rule, str) else self._rule(dtypes), **self._options)
        self._ours, self._theirs, self._model, self._paired = ours, theirs, model, self.module

    def _found_buffers(self, model: nn.Module) -> Iterator[_Buffer]:
        theirs = dict(_slots(model))
        seen: set[int] = set()
        for name, (module, key) in _slots(self.module):
            buffer = module._buffers[key]
            fate = "leave" if buffer is None or id(buffer) in seen else self._choose(name, buffer, _kind(module, key))
            if buffer is None or fate == "leave":
                continue
            seen.add(id(buffer))
            there = theirs[name][0]._buffers[key] if name in theirs else None
            if there is None or there.shape != buffer.shape:
                raise _differ(f"buffer '{name}'", buffer, there)
            floating = buffer.is_floating_point() or buffer.is_complex()
            yield _Buffer(name, theirs[name][0]._buffers, module._buffers, key, fate if floating else "copy")


def _unwrapped(model: nn.Module, ours: ModelView) -> tuple[nn.Module, ModelView]:
    """What is in a wrapper that nobody here knows, such as another library's engine, by the name that they all have for it."""
    known = {one.name for one in ours.parameters}
    inner: Any = model
    theirs = find(inner, strided=True)
    while known and known.isdisjoint(one.name for one in theirs.parameters) and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
        theirs = find(inner, strided=True)
    return inner, theirs


def _kind(module: nn.Module, key: str) -> Kind:
    return "temporary" if key in module._non_persistent_buffers_set else "buffer"


def _slots(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Every buffer's clean name and place."""
    for prefix, one in walk(module):
        for key, buffer in one._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, (one, key)


def _matched(ours: ModelView, theirs: ModelView) -> Iterator[tuple[LocalTensor, torch.Tensor, torch.Tensor]]:
    """(the model's parameter, its memory, the twin's)."""
    known = {one.name: one for one in theirs.parameters}
    extra = [name for name in known if name not in {one.name for one in ours.parameters}]
    if extra:
        raise errors.make_also(
            RuntimeError, f"the model has '{extra[0]}', which its average has not; make the average anew after the model has its final form"
        )
    for one in ours.parameters:
        other = known.get(one.name)
        if other is None or other.region != one.region:
            raise _differ(f"'{one.name}'", one.tensor, None if other is None else other.tensor, one, other)
        yield other, other.tensor, one.tensor


def _differ(
    name: str, ours: torch.Tensor, theirs: torch.Tensor | None, here: LocalTensor | None = None, there: LocalTensor | None = None
) -> Exception:
    if theirs is None:
        return errors.make_also(
            _MissingError, f"{name} is averaged, but the model has it no more; make the average anew after the model has its final form"
        )
    shapes = (
        (tuple(ours.shape), tuple(theirs.shape)) if here is None or there is None else (tuple(here.region.shape), tuple(there.region.shape))
    )
    parts = (
        ""
        if here is None or there is None or shapes[0] != shapes[1]
        else f": this rank has {here.region} of the average and {there.region} of the weight"
    )
    return errors.make_also(RuntimeError, f"{name} is {shapes[0]} in the average and {shapes[1]} in the model{parts}")
