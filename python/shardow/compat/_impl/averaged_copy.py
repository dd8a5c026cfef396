"""AveragedCopy: keeps a second model at the averages of the first one's weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardow.averaging.options import Rule
from shardow.compat._impl.given_memory import AveragedTensor, Choose, Fate, GivenMemory, Kind, Tensors, warn_of_rounding
from shardow.sharding.match import compare
from shardow.sharding.slots import Slot, slots
from shardow.sharding.view import ModelView, find

#: change(averages, weights) writes the averages. Both are lists of tensors; of a sharded model they are this rank's
#: parts in one dimension.
Change = Callable[[Tensors, Tensors], None]
#: A rule's name, or a function that gets it from the pairs (dtype of a weight, dtype of its average).
ChosenRule = Rule | Callable[[list[tuple[torch.dtype, torch.dtype]]], Rule]


def everything(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    return "average"


def everything_saved(name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
    """Averages the tensors that state_dict() has."""
    return "leave" if kind == "table" else "average"


_ANEW = "Make the average anew after the model has its final form"


class _MissingError(RuntimeError, KeyError):
    """Has the types of the errors that torch and timm raise where a name is missing."""


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
        """Returns the options alone: copies and pickles pair their modules anew."""
        return {"_rule": self._rule, "_choose": self._choose, "_options": self._options}

    def with_choice(self, choose: Choose) -> AveragedCopy:
        """Returns the same with another choice of what is averaged."""
        return type(self)(self._rule, choose, **self._options)

    def held(self) -> int:
        return self._pairs.held() if self._paired is not None else 0

    def bind(self, module: nn.Module, model: nn.Module) -> GivenMemory:
        """Returns the averages in ``module`` beside the weights of ``model``. They are paired anew where a module is
        not the one of the last call, or tensors of either have been replaced or moved. Raises ValueError and
        RuntimeError where the modules differ in names or shapes."""
        if self._paired != (module, model) or not self._unchanged():
            self._paired = None  # a failure leaves nothing paired
            self._pair(module, model)
            self._paired = module, model
        return self._pairs

    def _unchanged(self) -> bool:
        return (self._averages.unchanged_at_rest() and self._weights.unchanged_at_rest()) and all(
            slot.owner.get(slot.key) is slot.recorded and slot.recorded.data_ptr() == address
            for slot, address in self._watched
        )

    def _pair(self, module: nn.Module, model: nn.Module) -> list[AveragedTensor]:
        """Pairs the tensors of both modules. Returns the pairs, each with its fate."""
        averages = find(module)
        weights = _unwrapped(model, averages)
        averages.reshard()
        weights.reshard()
        buffers = self._chosen_buffers(module)
        sources = {slot.name: slot for slot in slots(weights.model, "buffer", "table") if slot.name in buffers}
        fit = compare(_forms(averages, buffers), _forms(weights, sources))
        error = _MissingError if fit.missing or fit.unexpected else RuntimeError
        fit.refuse("", "the model", error, target="in its average", done="nothing was averaged", hint=_ANEW)
        by_name = {local.name: local for local in weights.parameters}
        pairs = [(local, by_name[local.name]) for local in averages.parameters]
        rows = [
            AveragedTensor(
                local.name, weight.tensor, local.tensor, fate=self._choose(local.name, weight.shown, "parameter")
            )
            for local, weight in pairs
        ]
        rows += [
            AveragedTensor(
                name, sources[name].recorded, slot.recorded, fate=self._choose(name, slot.recorded, slot.kind)
            )
            for name, slot in buffers.items()
        ]
        floating = [row for row in rows if row.average.is_floating_point() and row.fate == "average"]
        dtypes = [(row.source.dtype, row.average.dtype) for row in floating]
        rule = self._rule if isinstance(self._rule, str) else self._rule(dtypes)
        self._pairs = GivenMemory(rows, rule, **self._options)
        self._averages, self._weights = averages, weights
        #: Places of buffers in both modules, and their addresses.
        self._watched = [(slot, slot.recorded.data_ptr()) for slot in (*buffers.values(), *sources.values())]
        return rows

    def _chosen_buffers(self, module: nn.Module) -> dict[str, Slot]:
        """Returns the buffers that ``choose`` does not leave alone, each tensor once."""
        chosen: dict[int, Slot] = {}
        for slot in slots(module, "buffer", "table"):
            if self._choose(slot.name, slot.recorded, slot.kind) != "leave":
                chosen.setdefault(id(slot.recorded), slot)
        return {slot.name: slot for slot in chosen.values()}


def _forms(view: ModelView, buffers: Mapping[str, Slot]) -> dict[str, Any]:
    """Returns the forms that two models must share: the regions of parameters, the shapes of buffers."""
    shapes = {name: tuple(slot.recorded.shape) for name, slot in buffers.items()}
    return {**{local.name: local.region for local in view.parameters}, **shapes}


def _unwrapped(model: nn.Module, averages: ModelView) -> ModelView:
    """Returns the view of the module that ``averages`` are of, also from inside an unknown wrapper, such as another
    library's engine: all of them keep it as ``module``."""
    weights, inner = find(model), getattr(model, "module", None)
    names = {local.name for local in averages.parameters}
    if isinstance(inner, nn.Module) and names and names.isdisjoint(local.name for local in weights.parameters):
        return _unwrapped(inner, averages)
    return weights


class TrainedCopy(AveragedCopy):
    """Averages trained parameters, copies persistent buffers and leaves the rest alone. What is trained may change from
    update to update; ``keeps``: a parameter that was trained once is averaged for good."""

    def __init__(self, keeps: bool) -> None:
        super().__init__("mul_add", self._fate)
        self._keeps = keeps
        self.names: dict[str, None] = {}  # of what is averaged, in the model's order

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_keeps": self._keeps, "names": self.names}

    def _unchanged(self) -> bool:
        return [parameter.requires_grad for parameter in self._parameters] == self._flags and super()._unchanged()

    def _fate(self, name: str, tensor: torch.Tensor, kind: Kind) -> Fate:
        if kind == "parameter":
            return "average" if tensor.requires_grad or (self._keeps and name in self.names) else "leave"
        return "copy" if kind == "buffer" else "leave"

    def _pair(self, module: nn.Module, model: nn.Module) -> list[AveragedTensor]:
        rows = super()._pair(module, model)
        self._parameters = [*self._weights.model.parameters()]
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        averaged = [row for row in rows if row.fate == "average"]
        if not self.names:
            once = "Build the averaged model in float32; the trained one may keep its dtype. This warning is given once"
            warn_of_rounding((row.average for row in averaged), once)
        self.names.clear()
        self.names.update((row.name, None) for row in averaged)
        return rows
