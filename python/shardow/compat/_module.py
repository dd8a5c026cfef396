"""What acts as the averaged model, for surfaces that promise a module: a whole second one (Twin), or, where none can be had, a stand-in on an EMA. Chosen once, at construction."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from shardow import errors
from shardow.averages.options import Replicas
from shardow.base.checks import one_of, unsupported
from shardow.compat._pairs import Tensors, copy_all, warn_of_rounding
from shardow.compat._scripted import Scripted
from shardow.compat._stand_in import StandIn, needed
from shardow.compat._teams import team_of
from shardow.compat._twin import Choose, Kind, Rule, Twin, everything_saved
from shardow.compat._whole import whole_averages
from shardow.ema import EMA
from shardow.model.local import LocalTensor
from shardow.model.names import clean_file_key
from shardow.model.piece import Piece
from shardow.model.view import find
from shardow.start.materialize import Request, fill_model

NARROW = (torch.bfloat16, torch.float16)


class Follower(Protocol):
    """Keeps ``module`` at a model's averages. A protocol, so that a surface need not know whether there is a second model."""

    module: nn.Module

    def update(self, model: nn.Module, decay: float, weight: float) -> None:
        """One update by the rule, with the caller's factors; what is not averaged is copied."""

    def apply(self, model: nn.Module, change: Callable[[Tensors, Tensors], None]) -> None:
        """One update by other arithmetic: change(averages, weights) gets lists of tensors, of a sharded model this rank's parts in one dimension, and writes the former."""

    def copy(self, model: nn.Module) -> None:
        """Everything that is averaged or copied becomes the model's."""


def follow(
    model: nn.Module,
    rule: Rule,
    choose: Choose = everything_saved,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    replicas: Replicas = "copy",
    stochastic: bool = False,
    seed: int = 0,
) -> Follower:
    """``rule``, ``choose``: as in Twin. ``device``, ``dtype``: of the averages, by default the model's. ``stochastic``: 16-bit averages are rounded so, by ``seed``. ``replicas="split"``: ranks
    with the same weights keep a part of the averages each; that is a stand-in, as FSDP's modules are. Collective then."""
    one_of("replicas", replicas, ("split", "copy"))
    if needed(model, replicas):
        return Sharded(model, rule, choose, device=device, dtype=dtype, replicas=replicas, stochastic=stochastic, seed=seed)
    module = copy.deepcopy(model)
    if device is not None:
        module.to(device=device)
    if dtype is not None:
        module.to(dtype=dtype)
    if not stochastic:
        warn_of_rounding(
            module.parameters(), "Average a float32 copy, or use ModelEmaV3 with dtype=torch.float32 or its stochastic rounding"
        )
    options: dict[str, Any] = {"stochastic": stochastic, "seed": seed}
    kind = Scripted if isinstance(model, torch.jit.ScriptModule) else Twin
    return kind(module, rule, choose, **options)


class Sharded:
    """Follower of an FSDP model, or of one whose replicas split the work: an EMA, and its StandIn as ``module``.

    Averages are float32 (float64 of such weights, ``dtype`` if given; 16-bit ones only where they are rounded stochastically). Buffers that are not saved are the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        choose: Choose,
        *,
        device: Any,
        dtype: torch.dtype | None,
        replicas: Replicas,
        stochastic: bool,
        seed: int,
    ) -> None:
        view = find(model, odd=True)
        averaged = {one.name: one.tensor.dtype for one in view.parameters if _averages(choose, one, "parameter")}
        names = set(averaged)
        averaged.update({one.name: one.tensor.dtype for one in view.buffers if _averages(choose, one, "buffer")})
        chosen = _dtype_of(list(averaged.values()), dtype, stochastic)
        self._ema = EMA(
            model, dtype=chosen, device=device, replicas=replicas, params=functools.partial(_is_in, frozenset(names)), buffers="average",
            rule=rule if isinstance(rule, str) else rule([(one, chosen) for one in averaged.values()]), stochastic=chosen in NARROW, seed=seed,
        )  # fmt: skip
        self._names = frozenset(averaged)
        self._sort()
        self._model = self._seen = model
        self.module: nn.Module = StandIn(self._ema, model)

    def _sort(self) -> None:
        self._copied = [one for one in self._ema._core.tracked if one.name not in self._names]
        self._averaged = [one for one in self._ema._core.tracked if one.name in self._names]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_copied", "_averaged")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sort()

    def update(self, model: nn.Module, decay: float, weight: float) -> None:
        self._check(model)
        self._ema._core.update_by(decay, weight)
        self._copy_rest()

    @torch.no_grad()
    def apply(self, model: nn.Module, change: Callable[[Tensors, Tensors], None]) -> None:
        self._check(model)
        self._ema._core.ready_to_update()
        change([one.averages[0] for one in self._averaged], [one.sources() for one in self._averaged])
        self._copy_rest()

    def copy(self, model: nn.Module) -> None:
        self.update(model, 0.0, 1.0)

    @torch.no_grad()
    def _copy_rest(self) -> None:
        copy_all([one.averages[0] for one in self._copied], [one.sources() for one in self._copied])

    def _check(self, model: nn.Module) -> None:
        if model is not self._seen:
            if [*map(id, model.parameters())] != [*map(id, self._model.parameters())]:
                raise errors.make_also(
                    RuntimeError,
                    "the averages of a sharded model follow the one that they were made of, and this is another; make them anew after the model has its final form",
                )
            self._seen = model


def _is_in(names: frozenset[str], name: str, _: object) -> bool:
    return name in names


def _averages(choose: Choose, one: LocalTensor, kind: Kind) -> bool:
    chosen = choose(one.name, one.tensor, kind) == "average"
    if chosen and one.tensor.is_complex():
        raise unsupported(
            f"'{one.name}' is {one.tensor.dtype}; averages that ranks share are of real numbers: keep it as two of them (torch.view_as_real)"
        )
    return chosen and one.tensor.is_floating_point()


def _dtype_of(weights: list[torch.dtype], wanted: torch.dtype | None, stochastic: bool) -> torch.dtype:
    narrow = wanted if wanted is not None else weights[0] if len(set(weights)) == 1 else None
    if narrow in NARROW:
        return narrow if stochastic and narrow is not None else torch.float32
    return wanted or (torch.float64 if torch.float64 in weights else torch.float32)


class Averaged(nn.Module):
    """Base of modules that are called as the average at ``module``: its averages have the keys ``module.*``."""

    module: nn.Module

    def _begin(self, follower: Follower) -> None:
        self._follower, self.module = follower, follower.module

    def _follow(self) -> Follower:
        """``module`` may have been replaced since."""
        self._follower.module = self.module
        return self._follower

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """state_dict() in fresh CPU tensors, whole also where the averages are sharded: then collective, on rank 0, and {} elsewhere."""
        own = {name: tensor.detach().cpu().clone() for name, tensor in self._buffers.items() if tensor is not None}
        averages = {f"module.{name}": tensor for name, tensor in whole_averages(self.module).items()}
        return {**own, **averages} if averages else {}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch. Of sharded averages: pieces as from state_dict(), or whole tensors, under the names of any wrapping; everything is checked on every rank first. Collective then."""
        if not isinstance(self.module, StandIn):
            _refuse_unfit(self.state_dict(), state_dict, strict)
            return super().load_state_dict(state_dict, strict, assign)
        own = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        given = {name: value for name, value in state_dict.items() if name not in own}
        self.module.ema._core.team.agree("load_state_dict()", lambda: _all_there(own, state_dict, strict))
        load(self.module, {name.removeprefix("module."): value for name, value in given.items()}, strict)
        for name, buffer in own.items():
            buffer.copy_(state_dict.get(name, buffer))
        return _IncompatibleKeys([], [])


def _refuse_unfit(here: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    """Torch finds the same, when half is loaded."""
    wrong = [
        f"size mismatch for '{name}': {tuple(state[name].shape)} there, {tuple(tensor.shape)} here"
        for name, tensor in here.items()
        if isinstance(state.get(name), torch.Tensor) and state[name].shape != tensor.shape
    ]
    if strict:
        for what, names in (("Missing", [n for n in here if n not in state]), ("Unexpected", [n for n in state if n not in here])):
            if names:
                wrong.append(f"{what} key(s) in state_dict: {', '.join(map(repr, names[:20]))}")
    if wrong:
        raise errors.make_also(RuntimeError, f"nothing was loaded: {'; '.join(wrong[:20])}")


def _all_there(own: Mapping[str, torch.Tensor], state: Mapping[str, Any], strict: bool) -> None:
    missing = [name for name in own if name not in state]
    if missing and strict:
        raise errors.make_also(RuntimeError, f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}; nothing was loaded")


def load(module: nn.Module, state: Mapping[str, Any], strict: bool = True, what: str = "load_state_dict()") -> None:
    """Whole tensors, or a stand-in's pieces, into any module, by names without what wrappers put into them, here and there.

    Raises RuntimeError and ValueError, before anything changes, where a shape differs or, if ``strict``, a name is missing or unknown; where no name fits, always. Collective where ranks share
    the module, which then may be sharded. ``what`` is for messages.
    """
    here = {clean_file_key(name) for name in module.state_dict()}
    fitting = [name for name in state if clean_file_key(name) in here]
    team_of(module).agree(what, lambda: _some_fit(fitting, state, here))
    if not isinstance(module, StandIn):
        team_of(module).agree(what, lambda: _all_whole(fitting, state))
    try:
        if isinstance(module, StandIn):
            _load_averages(module, state, strict)
        else:
            fill_model(Request(what, module, state, strict=strict))
    except errors.InvalidArgumentError as error:
        raise errors.make_also(RuntimeError, str(error)) from None


def _some_fit(fitting: list[str], state: Mapping[str, Any], here: set[str]) -> None:
    if here and not fitting:
        raise errors.make_also(
            RuntimeError, f"none of the {len(state)} names fits, nothing was loaded: there '{next(iter(state), '')}', here '{min(here)}'"
        )


def _all_whole(names: list[str], state: Mapping[str, Any]) -> None:
    for name in names:
        value = state[name]
        if isinstance(value, Piece) and value.local.numel() != math.prod(value.size()):
            raise errors.make_also(
                RuntimeError,
                f"'{name}' is one rank's piece of a sharded average, as state_dict() gives it, nothing was loaded; save full_state_dict() instead (call it on all ranks; rank 0 has the whole)",
            )


def _load_averages(module: StandIn, state: Mapping[str, Any], strict: bool) -> None:
    """What is not averaged is the model's own, and stays."""
    view, averages = module.ema._core.view, module.ema._core.averages()
    names = {clean_file_key(name): one.name for one in [*view.parameters, *view.buffers] for name in (one.name, *one.aliases)}
    given: dict[str, Any] = {} if strict else dict(averages)
    for key, value in state.items():
        name = names.get(clean_file_key(key), key)
        if name in averages or (strict and name not in names.values()):
            given[name] = value
    module.ema._core.load_averages(given)
