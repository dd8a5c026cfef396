"""AveragedCopy: keeps a second model at the averages of the first one's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardow.averages.options import Rule
from shardow.compat._impl.given_memory import AveragedTensor, Choose, Fate, GivenMemory, Kind, Tensors, warn_of_rounding
from shardow.model.match import Fit, compare
from shardow.model.slots import Slot, slots
from shardow.model.view import ModelView, find

#: change(averages, weights) gets lists of tensors, of a sharded model this rank's parts in one dimension, and writes
#: the former.
Change = Callable[[Tensors, Tensors], None]
#: A rule's name, or what tells it from (dtype of the weight, dtype of its average) of everything that is averaged.
ChosenRule = Rule | Callable[[list[tuple[torch.dtype, torch.dtype]]], Rule]


def everything(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    return "average"


def everything_saved(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    """What state_dict() has is averaged."""
    return "leave" if kind == "table" else "average"


_ANEW = "Make the average anew after the model has its final form"


class _MissingError(RuntimeError, KeyError):
    """What torch and timm raise where a name is missing."""


class AveragedCopy:
    """Keeps a second module, of the model's structure and sharding, at the averages. Names are matched without what
    wrappers put into them. ``rule``: as in GivenMemory, or a function that returns it; ``options``: as in GivenMemory.
    ``choose``: the fate of each tensor; integers are copied where others are averaged.
    """

    _pairs: GivenMemory
    _paired: tuple[nn.Module, nn.Module] | None = None

    def __init__(self, rule: ChosenRule, choose: Choose = everything_saved, **options: Any) -> None:
        self._rule, self._choose, self._options = rule, choose, options

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, or in a pickle: nothing is paired yet."""
        return {"_rule": self._rule, "_choose": self._choose, "_options": self._options}

    def again(self, choose: Choose) -> AveragedCopy:
        """The same, but for what is averaged."""
        return type(self)(self._rule, choose, **self._options)

    def held(self) -> int:
        return self._pairs.held() if self._paired is not None else 0

    def bind(self, module: nn.Module, model: nn.Module) -> GivenMemory:
        """Returns the averages in ``module`` beside the weights of ``model``, paired anew where one of them is another
        one, or tensors of either have been replaced or moved. Raises ValueError and RuntimeError where they differ in
        names or shapes."""
        if self._paired != (module, model) or not self._unchanged():
            self._paired = None  # nothing is known until all is
            self._pair(module, model)
            self._paired = module, model
        return self._pairs

    def _unchanged(self) -> bool:
        return (self._ours.unchanged_at_rest() and self._theirs.unchanged_at_rest()) and all(
            slot.owner.get(slot.key) is slot.recorded and slot.recorded.data_ptr() == address
            for slot, address in self._watched
        )

    def _pair(self, module: nn.Module, model: nn.Module) -> None:
        ours = find(module)
        weights = _unwrapped(model, ours)
        ours.reshard()
        weights.reshard()
        self._look(weights)
        known = {local.name: local for local in weights.parameters}
        regions = {name: local.region for name, local in known.items()}
        _refuse(compare({local.name: local.region for local in ours.parameters}, regions))
        self._watched: list[tuple[Slot, int]] = []  # places of buffers in both modules, and addresses
        rows = [
            AveragedTensor(local.name, known[local.name].tensor, local.tensor, fate=fate)
            for local in ours.parameters
            if (fate := self._choose(local.name, known[local.name].tensor, "parameter")) != "leave"
        ]
        rows += self._found_buffers(module, weights.model)
        floating = [row for row in rows if row.average.is_floating_point() and row.fate == "average"]
        dtypes = [(row.source.dtype, row.average.dtype) for row in floating]
        rule = self._rule if isinstance(self._rule, str) else self._rule(dtypes)
        self._pairs = GivenMemory(rows, rule, **self._options)
        self._ours, self._theirs = ours, weights

    def _look(self, weights: ModelView) -> None:
        """Looks at the model before its tensors are chosen."""

    def _found_buffers(self, module: nn.Module, model: nn.Module) -> Iterator[AveragedTensor]:
        weights = {slot.name: slot for slot in slots(model, "buffer", "table")}
        seen: set[int] = set()
        for slot in slots(module, "buffer", "table"):
            buffer = slot.recorded
            fate = "leave" if id(buffer) in seen else self._choose(slot.name, buffer, slot.kind)
            if fate == "leave":
                continue
            seen.add(id(buffer))
            other = weights.get(slot.name)
            shapes = {} if other is None else {slot.name: tuple(other.recorded.shape)}
            _refuse(compare({slot.name: tuple(buffer.shape)}, shapes))
            assert other is not None  # what is missing was refused
            self._watched += [(place, place.recorded.data_ptr()) for place in (other, slot)]
            yield AveragedTensor(slot.name, other.recorded, buffer, fate=fate)


def _unwrapped(model: nn.Module, ours: ModelView) -> ModelView:
    """What is in a wrapper that nobody here knows, such as another library's engine, by the name that they all have for
    it.
    """
    weights, inner = find(model), getattr(model, "module", None)
    names = {local.name for local in ours.parameters}
    if isinstance(inner, nn.Module) and names and names.isdisjoint(local.name for local in weights.parameters):
        return _unwrapped(inner, ours)
    return weights


def _refuse(fit: Fit[Any]) -> None:
    """Raises RuntimeError, a KeyError too for a missing name, where a model is not as its average."""
    also = _MissingError if fit.missing else RuntimeError
    fit.refuse("", "the model", also, here="in its average", done="nothing was averaged", hint=_ANEW)


class TrainedCopy(AveragedCopy):
    """Trained parameters are averaged, persistent buffers copied, the rest is left as it is. What is trained may change
    from update to update; ``keeps``: a parameter that was trained once is averaged for good."""

    _parameters: list[nn.Parameter]
    _flags: list[bool]
    _warned = False

    def __init__(self, keeps: bool) -> None:
        super().__init__("mul_add", self._fate)
        self._keeps = keeps
        self.names: dict[str, None] = {}  # of what is averaged, in the model's order

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_keeps": self._keeps, "_warned": self._warned, "names": self.names}

    def _unchanged(self) -> bool:
        return [parameter.requires_grad for parameter in self._parameters] == self._flags and super()._unchanged()

    def _look(self, weights: ModelView) -> None:
        self._parameters = list(weights.model.parameters())
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        kept = self.names if self._keeps else ()
        self._trained = {local.name: None for local in weights.parameters if local.requires_grad or local.name in kept}

    def _fate(self, name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
        if kind == "parameter":
            return "average" if name in self._trained else "leave"
        return "copy" if kind == "buffer" else "leave"

    def _pair(self, module: nn.Module, model: nn.Module) -> None:
        super()._pair(module, model)
        self.names = self._trained
        averages = (local.tensor for local in self._ours.parameters if local.name in self.names)
        way_out = "Build the averaged model in float32; the trained one may keep its dtype. This warning is given once"
        self._warned = self._warned or warn_of_rounding(averages, way_out)
