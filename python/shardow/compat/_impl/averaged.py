"""Averaged: modules that are called as the average of a model, and how whole tensors or pieces are loaded into them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from shardow import errors
from shardow.averages.options import Replicas
from shardow.base.checks import invalid
from shardow.compat._impl.averaged_copy import AveragedCopy, Choose, Rule, everything_saved
from shardow.compat._impl.filling import load_averages
from shardow.compat._impl.given_memory import warn_of_rounding
from shardow.compat._impl.swapped_model_proxy import (
    AveragesOfProxy,
    SwappedModelProxy,
    proxy_for,
    ranks_of,
    whole_averages,
)
from shardow.model.match import compare
from shardow.model.names import clean_file_key, refuse_scripted
from shardow.model.piece import Piece
from shardow.start.materialize import Request

Follower = AveragedCopy | AveragesOfProxy


def follow(
    model: nn.Module, rule: Rule, choose: Choose = everything_saved, *, device: Any = None,
    dtype: torch.dtype | None = None, replicas: Replicas = "copy", **rounding: Any,
) -> Follower:  # fmt: skip
    """Returns the averages of a copy of ``model``; of a proxy where none can be had, or ``replicas="split"``: ranks
    with the same weights keep a part of the averages each. That is chosen once, and collective then. ``rule``,
    ``choose``: as in AveragedCopy. ``device``, ``dtype``: of the averages, by default the model's. ``rounding``: of 16
    bits, as in GivenMemory."""
    refuse_scripted(model.named_modules())
    proxy = proxy_for(model, rule, choose, device=device, dtype=dtype, replicas=replicas, **rounding)
    if proxy is not None:
        return AveragesOfProxy(proxy, choose)
    module = copy.deepcopy(model)
    if device is not None or dtype is not None:
        module.to(device=device, dtype=dtype)
    if not rounding.get("stochastic"):
        way_out = "Average a float32 copy, or use ModelEmaV3 with dtype=torch.float32 or stochastic rounding"
        warn_of_rounding(module.parameters(), way_out)
    return AveragedCopy(module, rule, choose, **rounding)


class Averaged(nn.Module):
    """Base of modules that are called as the average at ``module``: its averages have the keys ``module.*``."""

    module: nn.Module

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower, self.module = follower, follower.module

    def _follow(self) -> Follower:
        """``module`` may have been replaced since."""
        self._follower.module = self.module
        return self._follower

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """state_dict() in fresh CPU tensors, whole also where the averages are sharded: then collective, on rank 0, and
        {} elsewhere.
        """
        own = {name: tensor.detach().cpu().clone() for name, tensor in self.named_buffers(recurse=False)}
        averages = {f"module.{name}": tensor for name, tensor in whole_averages(self.module).items()}
        return {**own, **averages} if averages else {}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch. Of sharded averages: pieces as from state_dict(), or whole tensors, under the names of any
        wrapping; everything is checked on every rank first. Collective then."""
        if not isinstance(self.module, SwappedModelProxy):
            refuse_unfit(self.state_dict(), state_dict, strict)
            return super().load_state_dict(state_dict, strict, assign)
        own = dict(self.named_buffers(recurse=False))
        counters = {name: value for name, value in state_dict.items() if name in own}
        self.module.core.ranks.agree("load_state_dict()", lambda: refuse_unfit(own, counters, strict))
        averages = {name.removeprefix("module."): value for name, value in state_dict.items() if name not in own}
        load(self.module, averages, strict)
        for name, buffer in own.items():
            buffer.copy_(counters.get(name, buffer))
        return _IncompatibleKeys([], [])


def refuse_unfit(own: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    """Raises RuntimeError where torch would, but before anything changes."""
    fit = compare(_shapes(own), _shapes(state))
    (fit if strict else fit.only_different()).refuse("load_state_dict()", "the state", RuntimeError)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else None for name, value in state.items()}


def load(module: nn.Module, state: Mapping[str, Any], strict: bool = True, what: str = "load_state_dict()") -> None:
    """Whole tensors, or a stand-in's pieces, into any module, by names without what wrappers put into them, here and
    there. Raises RuntimeError and ValueError, before anything changes, where a shape differs or, if ``strict``, a name
    is missing or unknown; where no name fits, always. Collective where ranks share the module, which then may be
    sharded. ``what`` is for messages."""
    own, proxy = {clean_file_key(name) for name in module.state_dict()}, isinstance(module, SwappedModelProxy)
    fitting = [name for name in state if clean_file_key(name) in own]

    def check() -> None:
        if own and not fitting:
            some = f"there '{next(iter(state), '')}', here '{min(own)}'"
            raise invalid(f"none of the {len(state)} names fits, nothing was loaded: {some}", RuntimeError)
        for name in fitting if not proxy else ():  # a proxy takes the parts that this rank has
            value = state[name]
            if isinstance(value, Piece) and value.local.numel() != math.prod(value.size()):
                way_out = "save full_state_dict() instead (call it on all ranks; rank 0 has the whole)"
                raise invalid(f"'{name}' is one rank's piece, and nothing was loaded; {way_out}", RuntimeError)

    ranks_of(module).agree(what, check)
    try:
        if isinstance(module, SwappedModelProxy):
            view = module.core.view  # what is not averaged is the model's own, and stays
            load_averages(module.core, state, strict, [*view.parameters, *view.buffers])
        else:
            Request(what, module, state, strict=strict).run()
    except errors.InvalidArgumentError as error:
        raise invalid(str(error), RuntimeError) from None
