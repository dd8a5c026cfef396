"""Scripted: averages of a torch.jit module, which can't be looked into: what its state_dict() has, name by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardow import errors
from shardow.compat._pairs import Pair, Pairs, Tensors
from shardow.compat._twin import Choose, Rule


class Scripted:
    """As Twin, which see. state_dict() is asked for at every update; a name's absence, or another shape, is a RuntimeError before anything changes."""

    def __init__(self, module: torch.nn.Module, rule: Rule, choose: Choose, **options: Any) -> None:
        self.module = module
        self._rule, self._choose, self._options = rule, choose, options
        self._bound: list[tuple[int, torch.dtype, torch.Size]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: nothing is paired yet."""
        return {"module": self.module, "_rule": self._rule, "_choose": self._choose, "_options": self._options, "_bound": []}

    @torch.no_grad()
    def update(self, model: torch.nn.Module, decay: float, weight: float) -> None:
        self._bind(model)
        self._pairs.update(decay, weight)
        self._copied.copy()

    @torch.no_grad()
    def apply(self, model: torch.nn.Module, change: Callable[[Tensors, Tensors], None]) -> None:
        self._bind(model)
        self._pairs.apply(change)
        self._copied.copy()

    @torch.no_grad()
    def copy(self, model: torch.nn.Module) -> None:
        self._bind(model)
        self._pairs.copy()
        self._copied.copy()

    def _bind(self, model: torch.nn.Module) -> None:
        ours, theirs = self.module.state_dict(), model.state_dict()
        now = [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in [*ours.values(), *theirs.values()]]
        if now == self._bound:
            return
        self._bound = []
        for name in [*ours, *theirs]:
            here, there = (tuple(state[name].shape) if name in state else "missing" for state in (ours, theirs))
            if here != there:
                raise errors.make_also(RuntimeError, f"'{name}' is {here} in the average and {there} in the model")
        parameters = {name for name, _ in self.module.named_parameters()}
        fates = {name: self._choose(name, tensor, "parameter" if name in parameters else "buffer") for name, tensor in ours.items()}
        averaged, copied = ([Pair(name, theirs[name], ours[name]) for name in ours if fates[name] == fate] for fate in ("average", "copy"))
        dtypes = [(pair.source.dtype, pair.average.dtype) for pair in averaged if pair.average.is_floating_point()]
        rule = self._rule if isinstance(self._rule, str) else self._rule(dtypes)
        self._pairs, self._copied = Pairs(averaged, rule, **self._options), Pairs(copied, "lerp")
        self._bound = now
