"""SwappedModelProxy: looks like an averaged second model where none can be had: the first model, with an EMA's averages
in it while it is called. And the ranks that act together, for classes whose upstreams have no word for them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.averages.core import Averages
from shardow.averages.options import Replicas
from shardow.averages.tracked import Tracked
from shardow.base.checks import invalid, one_of, unsupported
from shardow.compat._impl.averaged_copy import Change, Choose, Fate, Kind, Rule
from shardow.compat._impl.filling import load_averages
from shardow.compat._impl.given_memory import copy_all
from shardow.distributed.rank_group import RankGroup, Step, equal_facts
from shardow.ema import EMA, model_averages
from shardow.model.groups import group_of_model
from shardow.model.local import LocalTensor
from shardow.model.modules import modes_kept
from shardow.model.owners import has_fsdp
from shardow.model.view import find


def needed(model: nn.Module, replicas: Replicas) -> bool:
    """True where no second model can be had: FSDP's cannot be copied; ``replicas="split"`` asks for parts on each
    rank."""
    return replicas == "split" or has_fsdp(model)


class SwappedModelProxy(nn.Module):
    """A module without parameters of its own, that acts as ``model`` with the averages of ``ema``.

    Calling it is collective, as calling a sharded model is: it swaps the averages in, and out again. state_dict() and
    load_state_dict() are of the averages, in pieces as this rank has them, under the model's clean names, and of the
    model's buffers. It has its own train() and eval(). Other attributes are the model's, whose weights are not averaged
    outside of a call: use ``with ema.swapped()`` for them.
    """

    ema: EMA
    _model: nn.Module

    def __init__(self, ema: EMA, model: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(ema=ema, _model=model)  # not submodules

    @property
    def core(self) -> Averages:
        return model_averages(self.ema)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Backward through the result raises, since the weights have changed by then."""
        return self.run(self._model, *args, **kwargs)

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A method of the model, with the averages in it and in this module's mode."""
        with self.ema.swapped(), modes_kept(self._model):
            self._model.train(self.training)
            return method(*args, **kwargs)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        state = OrderedDict() if destination is None else destination
        state.update({prefix + name: tensor for name, tensor in self._entries()})
        return state

    def _entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        averages = self.core.averages()
        yield from averages.items()
        others = (buffer for buffer in self.core.view.buffers if buffer.name not in averages)
        yield from ((buffer.name, buffer.tensor.view(buffer.region.shape)) for buffer in others)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        _, _, missing, unexpected, _ = args  # as torch passes them
        values = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        names = self.core.averages()
        missing += [prefix + name for name in names if name not in values]
        unexpected += [prefix + name for name in values if name not in dict(self._entries())]
        load_averages(self.core, {name: value for name, value in values.items() if name in names}, strict=False)

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
    """The state_dict() of a module in fresh CPU tensors; of a stand-in on rank 0, {} elsewhere. Collective then."""
    if isinstance(module, SwappedModelProxy):
        return module.ema.full_state_dict(complete=True)
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


NARROW = (torch.bfloat16, torch.float16)


def proxy_for(
    model: nn.Module, rule: Rule, choose: Choose, *, device: Any = None, dtype: torch.dtype | None = None,
    replicas: Replicas = "copy", stochastic: bool = False, seed: int = 0,
) -> SwappedModelProxy | None:  # fmt: skip
    """Returns None where a second model can be had. Else averages of everything floating that ``model`` saves, whatever
    ``choose`` will make of it; they are float32 (float64 of such weights, ``dtype`` if given; 16-bit ones only where
    they are rounded stochastically). Buffers that are not saved are the model's own. Collective over the ranks that
    share the model."""
    if not needed(model, one_of("replicas", replicas, ("copy", "split"))):
        return None
    view = find(model, odd=True)
    weights = [local.tensor.dtype for local in view.parameters if _is_averaged(choose, local, "parameter")]
    weights += [local.tensor.dtype for local in view.buffers if _is_averaged(choose, local, "buffer")]
    chosen = _dtype_of(weights, dtype, stochastic)
    ema = EMA(
        model, dtype=chosen, device=device, replicas=replicas, params=_is_real, buffers="average",
        stochastic=chosen in NARROW, seed=seed,
        rule=rule if isinstance(rule, str) else rule([(weight, chosen) for weight in weights]),
    )  # fmt: skip
    return SwappedModelProxy(ema, model)


def _is_averaged(choose: Choose, local: LocalTensor, kind: Kind) -> bool:
    chosen = choose(local.name, local.tensor, kind) == "average"
    if chosen and local.tensor.is_complex():
        way_out = "keep it as two of them (torch.view_as_real)"
        raise unsupported(f"'{local.name}' is {local.tensor.dtype}; shared averages are of real numbers: {way_out}")
    return chosen and _is_real("", local.tensor)


def _is_real(name: str, parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point()


def _dtype_of(weights: list[torch.dtype], wanted: torch.dtype | None, stochastic: bool) -> torch.dtype:
    narrow = wanted if wanted is not None else weights[0] if len(set(weights)) == 1 else None
    if narrow in NARROW:
        return narrow if stochastic else torch.float32
    return wanted or (torch.float64 if torch.float64 in weights else torch.float32)


class AveragesOfProxy:
    """``module``: a proxy, whose averages follow its model by their own rule and rounding. As AveragedCopy."""

    def __init__(self, proxy: SwappedModelProxy, choose: Choose) -> None:
        self.module: Any = proxy
        self._choose, self._seen = choose, proxy.core.view.model

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    @functools.cached_property
    def _rows(self) -> dict[Fate, list[Tracked]]:
        rows: dict[Fate, list[Tracked]] = {"average": [], "copy": [], "leave": []}
        for row, fate in fates(self.module.core, self._choose):
            rows[fate].append(row)
        return rows

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float, weight: float) -> None:
        averages = self._averages_of(model)
        averages.wait()
        left = [row.averages[0].clone() for row in self._rows["leave"]]  # the engine averages all, in one pass
        averages.update_by(decay, weight)
        if left:
            averages.wait()
            copy_all([row.averages[0] for row in self._rows["leave"]], left)
        self._change(copy_all, "copy")

    @torch.no_grad()
    def apply(self, model: nn.Module, change: Change) -> None:
        self._averages_of(model).ready_to_update()
        self._change(change, "average")
        self._change(copy_all, "copy")

    @torch.no_grad()
    def copy(self, model: nn.Module) -> None:
        """All averages become the model's, whatever their fate."""
        self._averages_of(model).update_by(0.0, 1.0)
        self._change(copy_all, "copy")

    def _change(self, change: Change, fate: Fate) -> None:
        if rows := self._rows[fate]:
            self.module.core.wait()
            averages = [row.averages[0] for row in rows]
            weights = [row.sources().to(average.device) for row, average in zip(rows, averages, strict=True)]
            change(averages, weights)

    def _averages_of(self, model: nn.Module) -> Averages:
        averages: Averages = self.module.core
        if model is not self._seen:
            if [*map(id, model.parameters())] != [*map(id, averages.view.model.parameters())]:
                way_out = "make them anew after the model has its final form"
                raise invalid(
                    f"averages of a sharded model follow the one they were made of, and this is another; {way_out}",
                    RuntimeError,
                )
            self._seen = model
        return averages


def fates(averages: Averages, choose: Choose) -> Iterator[tuple[Tracked, Fate]]:
    buffers = {local.name for local in averages.view.buffers}
    for row in averages.tracked:
        kind: Kind = "buffer" if row.name in buffers else "parameter"
        yield row, choose(row.name, row.local.tensor, kind)


def ranks_of(module: nn.Module) -> RankGroup:
    """Those that share a module, or what it stands in for."""
    return module.core.ranks if isinstance(module, SwappedModelProxy) else RankGroup(group_of_model(module, None), None)


def refuse_copies(ranks: RankGroup) -> None:
    """Raises NotImplementedError where a part of the averages is another rank's."""
    if ranks.process_group is not None:
        raise unsupported(
            f"averages of a model that {ranks.size} ranks share can't be copied or pickled: each has a part. Use save()"
        )


def all_ranks(process_group: dist.ProcessGroup | None = None) -> RankGroup:
    """Those of ``process_group``; None: all there are, each of which has a plain model, where one file is enough."""
    return RankGroup(dist.group.WORLD if process_group is None and dist.is_initialized() else process_group, None)


def joined(what: str, facts: dict[str, Any], process_group: dist.ProcessGroup | None = None) -> RankGroup:
    """everybody() for a new ``what`` ("DistEMA"): its calls meet its own alone. ValueError where ``facts`` differ.
    Collective.
    """
    ranks = all_ranks(process_group)
    ranks.step(f"{what}(...)", lambda: Step(None, [equal_facts(f"{what}(...)", facts, ranks), ranks.join(what)]))
    return ranks
