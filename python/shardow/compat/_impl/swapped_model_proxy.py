"""SwappedModelProxy: looks like an averaged second model where the model cannot be copied. A call puts an EMA's
averages into the first model and runs that. Also finds the ranks that act together, for classes whose upstream takes
no process group, and fills averages from a state that all ranks have compared."""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from shardow import _core, errors
from shardow.averaging import state_dict as _state
from shardow.averaging.model_averages import ModelAverages
from shardow.averaging.options import Replicas
from shardow.averaging.tracked import Tracked
from shardow.base.checks import invalid, one_of, unsupported
from shardow.compat._impl.averaged_copy import AveragedCopy, Change, ChosenRule, everything_saved
from shardow.compat._impl.given_memory import Choose, Fate, Kind, copy_all, warn_of_rounding
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.ema import EMA, model_averages
from shardow.files.checkpoint import full_state_dict
from shardow.sharding.fsdp_ownership import has_fsdp
from shardow.sharding.groups import group_of_model
from shardow.sharding.local_state import LocalState
from shardow.sharding.match import Fit, Form, compare, fit
from shardow.sharding.modules import modes_kept
from shardow.sharding.names import clean_file_key, refuse_scripted
from shardow.sharding.view import find
from shardow.start.materialize import Request


class SwappedModelProxy(nn.Module):
    """A module that acts as ``model`` with the averages of ``ema``, and owns no parameters.

    Calling it is collective, as calling a sharded model is: it swaps the averages in, and out again. state_dict() and
    load_state_dict() are of the averages, in pieces as this rank has them, under the model's clean names, and of the
    model's buffers. Its train() and eval() are apart from the model's. Other attributes are the model's, whose weights
    are not averaged outside of a call: use ``with ema.swapped()`` for them.
    """

    ema: EMA
    _model: nn.Module

    def __init__(self, ema: EMA, model: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(ema=ema, _model=model)  # not submodules

    @property
    def core(self) -> ModelAverages:
        return model_averages(self.ema)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model. Backward through the result raises, since the weights have changed by then."""
        return self.run(self._model, *args, **kwargs)

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the model, with the averages in it and in this module's mode."""
        with self.ema.swapped(), modes_kept(self._model):
            self._model.train(self.training)
            return method(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._entries().items()})

    def _entries(self) -> dict[str, torch.Tensor]:
        averages = self.core.averages()
        others = [buffer for buffer in self.core.view.buffers if buffer.name not in averages]
        return {**averages, **{buffer.name: buffer.tensor.view(buffer.region.shape) for buffer in others}}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, _, missing, unexpected, _ = args  # as torch passes them
        values = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        compared = load_averages(self.core, values, strict=False)
        missing += [prefix + name for name in compared.missing]
        unexpected += [prefix + name for name in compared.unexpected]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        yield from ((f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in self.core.averages().items())

    def __getattr__(self, name: str) -> Any:
        way_out = "for anything else enter `with ema.swapped():` and use the model itself"
        raise unsupported(
            f"'{name}': this stands in for the averaged model, to be called, saved and loaded; {way_out}",
            AttributeError,
        )


def whole_averages(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state_dict() of a module in fresh CPU tensors. Of a proxy, or a module that has one beside models and
    its own buffers: on rank 0, whole and under clean names, {} elsewhere. Collective then."""
    if isinstance(module, SwappedModelProxy):
        return module.ema.full_state_dict(complete=True)
    children = dict(module.named_children())
    if not any(isinstance(child, SwappedModelProxy) for child in children.values()):
        return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}
    own = {name: buffer.cpu().clone() for name, buffer in module.named_buffers(recurse=False)}
    states = {
        key: (whole_averages if isinstance(m, SwappedModelProxy) else full_state_dict)(m) for key, m in children.items()
    }
    full = {f"{key}.{name}": tensor for key, state in states.items() for name, tensor in state.items()}
    return {**own, **full} if full else {}


NARROW = (torch.bfloat16, torch.float16)


def proxy_for(
    model: nn.Module, rule: ChosenRule, choose: Choose, *, device: Any = None, dtype: torch.dtype | None = None,
    replicas: Replicas = "copy", stochastic: bool = False, seed: int = 0,
) -> SwappedModelProxy | None:  # fmt: skip
    """Returns a proxy for an FSDP model, which cannot be copied, and with ``replicas="split"``, which asks for parts on
    each rank; else None. It averages everything floating that ``model`` saves, whatever ``choose`` will make of it.
    Averages are float32 (float64 of such weights, ``dtype`` if given; 16-bit ones only where they are rounded
    stochastically). Buffers that are not saved are the model's own. Collective over the ranks that share the model."""
    if one_of("replicas", replicas, ("copy", "split")) != "split" and not has_fsdp(model):
        return None
    view = find(model, odd=True)
    averaged = [local for local in view.parameters if choose(local.name, local.tensor, "parameter") == "average"]
    averaged += [local for local in view.buffers if choose(local.name, local.tensor, "buffer") == "average"]
    if numbers := [local for local in averaged if local.tensor.is_complex()]:
        wanted = "shared averages are of real numbers: keep it as two of them (torch.view_as_real)"
        raise unsupported(f"'{numbers[0].name}' is {numbers[0].tensor.dtype}; {wanted}")
    weights = [local.tensor.dtype for local in averaged if local.tensor.is_floating_point()]
    chosen = dtype or (torch.float64 if torch.float64 in weights else torch.float32)
    narrow = weights[0] if dtype is None and len(set(weights)) == 1 else dtype
    if narrow in NARROW:
        chosen = narrow if stochastic else torch.float32
    ema = EMA(
        model, dtype=chosen, device=device, replicas=replicas, params=_is_real, buffers="average",
        stochastic=chosen in NARROW, seed=seed,
        rule=rule if isinstance(rule, str) else rule([(weight, chosen) for weight in weights]),
    )  # fmt: skip
    return SwappedModelProxy(ema, model)


def _is_real(name: str, parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point()


class AveragesOfProxy:
    """Lets the averages of a proxy follow its model by the EMA's rule and rounding. It is used as an AveragedCopy."""

    _averages: ModelAverages
    _seen: nn.Module | None = None

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def __getstate__(self) -> dict[str, Any]:
        return {"_choose": self._choose}

    @functools.cached_property
    def _rows(self) -> dict[Fate, list[Tracked]]:
        rows: dict[Fate, list[Tracked]] = defaultdict(list)
        buffers = {local.name for local in self._averages.view.buffers}
        for row in self._averages.tracked:
            kind: Kind = "buffer" if row.name in buffers else "parameter"
            rows[self._choose(row.name, row.local.tensor, kind)].append(row)
        return rows

    @torch.no_grad()
    def update(self, decay: float, weight: float) -> None:
        self._averages.wait()
        held = [row.averages[0].clone() for row in self._rows["hold"]]  # the engine averages all, in one pass
        self._averages.update_by(decay, weight)
        self._change(lambda averages, _: copy_all(averages, held), "hold")
        self._change(copy_all, "copy")

    @torch.no_grad()
    def apply(self, change: Change) -> None:
        self._averages.ready_to_update()
        self._change(change, "average")
        self._change(copy_all, "copy")

    @torch.no_grad()
    def copy(self) -> None:
        """Makes all averages equal to the model's tensors, whatever their fate."""
        self._averages.update_by(0.0, 1.0)
        self._change(copy_all, "copy")

    def _change(self, change: Change, fate: Fate) -> None:
        if rows := self._rows[fate]:
            self._averages.wait()
            averages = [row.averages[0] for row in rows]
            weights = [row.sources().to(average.device) for row, average in zip(rows, averages, strict=True)]
            change(averages, weights)

    def bind(self, module: Any, model: nn.Module) -> AveragesOfProxy:
        """Takes the averages of ``module``, the proxy. Raises where they are not those of ``model``."""
        self._averages = module.core
        if model is not self._seen:
            if [*map(id, model.parameters())] != [*map(id, self._averages.view.model.parameters())]:
                made = "those of a sharded model follow the one they were made of, and this is another"
                way_out = "make them anew after the model has its final form"
                raise invalid(f"these averages are another model's; {made}; {way_out}", RuntimeError)
            self._seen = model
        return self


def ranks_of(module: nn.Module) -> RankGroup:
    """Returns the ranks that share a module, or the model of a proxy."""
    return module.core.ranks if isinstance(module, SwappedModelProxy) else RankGroup(group_of_model(module, None), None)


def refuse_copies(ranks: RankGroup) -> None:
    """Raises NotImplementedError where a part of the averages is another rank's."""
    if ranks.process_group is not None:
        raise unsupported(
            f"averages of a model that {ranks.size} ranks share can't be copied or pickled: each has a part. Use save()"
        )


def all_ranks(process_group: dist.ProcessGroup | None = None) -> RankGroup:
    """Returns the ranks of ``process_group``; None: all ranks, each of which has a plain model, where one file is
    enough."""
    return RankGroup(dist.group.WORLD if process_group is None and dist.is_initialized() else process_group, None)


def joined(what: str, facts: dict[str, Any], process_group: dist.ProcessGroup | None = None) -> RankGroup:
    """Returns all_ranks() for a new object of class ``what`` ("DistEMA"), whose collective calls meet its own alone.
    Raises ValueError where ``facts`` differ. Collective."""
    ranks = all_ranks(process_group)
    ranks.step(f"{what}(...)", lambda: Step(None, [equal_facts(f"{what}(...)", facts, ranks), ranks.join(what)]))
    return ranks


@torch.no_grad()
def fill(
    what: str, ranks: RankGroup, look: Callable[[], LocalState], state: Mapping[str, Any],
    names_error: type[Exception] = RuntimeError, strict: bool = True, hint: str = _state.HINT,
) -> Fit[Form | None]:  # fmt: skip
    """Fills the tensors that ``look()`` returns with a state's whole tensors, or the same parts. Raises on every rank,
    before anything changes, where a tensor differs or, if ``strict``, a name. The error is a ValueError, and a
    ``names_error`` for names, else a RuntimeError. Collective."""

    def check() -> tuple[LocalState, list[_state.Copy], Fit[Form | None]]:
        held = look()
        compared = fit(held, state, "the state")
        copies = _state.copies_of(held.parts, state, compared)
        wrong = compared if strict else compared.only_different()
        error = names_error if wrong.missing or wrong.unexpected else RuntimeError
        wrong.refuse(what, "the state", error, hint=hint)
        return held, copies, compared

    held, copies, compared = ranks.agree(what, check)
    for fill_part in copies:
        fill_part()
    held.put_back()
    return compared


@torch.no_grad()
def load_averages(
    core: ModelAverages, state: Mapping[str, Any], strict: bool = True, what: str = "load_state_dict()",
    others: Iterable[LocalShard] = (),
) -> Fit[Form | None]:  # fmt: skip
    """Loads pieces of the same sharding, DTensors, or full tensors, under any of their names, into the averages and
    into ``others``. Other names of the model, and unless ``strict`` all other names, are passed over. What is missing
    keeps its value; counters do too. Collective."""

    def look() -> LocalState:
        core.swap.refuse(what)
        held, view = core.held(), core.view
        held.parts += others
        held.names.update((part.name, (part.name,)) for part in others)
        rest = (local for local in (*view.parameters, *view.buffers) if local.name not in held.names)
        held.others = [name for local in rest for name in (local.name, *local.aliases)]
        return held

    return fill(what, core.ranks, look, state, strict=strict)


Follower = AveragedCopy | AveragesOfProxy


def follow(
    model: nn.Module, rule: ChosenRule, choose: Choose = everything_saved, *, device: Any = None,
    dtype: torch.dtype | None = None, replicas: Replicas = "copy", **rounding: Any,
) -> tuple[nn.Module, Follower]:  # fmt: skip
    """Returns a copy of ``model`` and its follower, which keeps it at the averages. It is a proxy where the model
    cannot be copied, or with ``replicas="split"``, where ranks with the same weights keep a part each. The choice is
    made once, collectively for a proxy. ``rule``, ``choose``: as in AveragedCopy. ``device``, ``dtype``: of the
    averages, by default the model's. ``rounding``: of 16 bits, as in GivenMemory."""
    refuse_scripted(model.named_modules())
    proxy = proxy_for(model, rule, choose, device=device, dtype=dtype, replicas=replicas, **rounding)
    if proxy is not None:
        return proxy, AveragesOfProxy(choose)
    module = copy.deepcopy(model)
    if device is not None or dtype is not None:
        module.to(device=device, dtype=dtype)
    if not rounding.get("stochastic"):
        way_out = "Average a float32 copy, or use ModelEmaV3 with dtype=torch.float32 or stochastic rounding"
        warn_of_rounding(module.parameters(), way_out)
    return module, AveragedCopy(rule, choose, **rounding)


class Averaged(nn.Module):
    """Base of modules whose calls go to the average at ``module``: its averages have the keys ``module.*``."""

    module: nn.Module

    def __init__(self, module: nn.Module, follower: Follower) -> None:
        super().__init__()
        self.module, self._follower = module, follower

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Returns state_dict() in fresh CPU tensors, whole also where the averages are sharded: then collective, on
        rank 0, and {} elsewhere."""
        return whole_averages(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads as in torch. Sharded averages take pieces as from state_dict(), or whole tensors, under the names of
        any wrapping; everything is checked on every rank first. Collective then."""
        if not isinstance(self.module, SwappedModelProxy):
            shapes = compare(_shapes(self.state_dict()), _shapes(state_dict))
            (shapes if strict else shapes.only_different()).refuse("load_state_dict()", "the state", RuntimeError)
            return super().load_state_dict(state_dict, strict, assign)
        own = [
            LocalShard(name, buffer.view(-1), _core.Region.whole(list(buffer.shape)))
            for name, buffer in self.named_buffers(recurse=False)
        ]
        compared = load_averages(self.module.core, state_dict, strict, others=own)
        return _IncompatibleKeys(compared.missing, compared.unexpected)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {name: tuple(value.shape) if isinstance(value, torch.Tensor) else None for name, value in state.items()}


def load(what: str, module: nn.Module, find: Callable[[], Mapping[str, Any]], strict: bool) -> None:
    """Loads the state that ``find()`` returns, whole tensors, or a proxy's pieces, into any module. Names are compared
    without what wrappers put into them, on either side. Raises RuntimeError and ValueError, before anything changes,
    where a shape differs or, if ``strict``, a name is missing or unknown; where no name fits, always. Collective where
    ranks share the module, which then may be sharded. ``what`` is for messages."""
    own = {clean_file_key(name) for name in module.state_dict()}

    def check() -> Mapping[str, Any]:
        state = find()
        if own and own.isdisjoint(map(clean_file_key, state)):
            some = f"there '{next(iter(state), '')}', here '{min(own)}'"
            raise invalid(f"none of the {len(state)} names fits, nothing was loaded: {some}", RuntimeError)
        return state

    state = ranks_of(module).agree(what, check)
    try:
        if isinstance(module, SwappedModelProxy):
            load_averages(module.core, state, strict, what)
        else:
            Request(what, module, state, strict=strict).run()
    except errors.InvalidArgumentError as error:
        raise invalid(str(error), RuntimeError) from None
