"""ckczzj/DistEMA: averages of a replicated model, cut into one equal range for each rank, on shardow's engine and
files. Names, signatures, the partition, the recursion ``e.mul_(d).add_(p, alpha=1 - d)`` and the warm-up are
upstream's."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardow import _core, errors
from shardow.averaging.tracked import Tracked, divide
from shardow.base.checks import fraction, invalid, seconds, unsupported, whole
from shardow.compat._impl.given_memory import AveragedTensor, GivenMemory
from shardow.compat._impl.swapped_model_proxy import fill, refuse_copies
from shardow.distributed.gather import Gatherer, LocalShard
from shardow.distributed.rank_group import RankGroup, Step, equal_facts, equal_updates
from shardow.files import engine, paths
from shardow.sharding.fsdp_ownership import has_fsdp
from shardow.sharding.local_state import LocalState
from shardow.sharding.match import compare
from shardow.sharding.names import called
from shardow.sharding.view import ModelView, find
from shardow.sharding.zero3 import is_partitioned
from shardow.start.fill import FileLoad, Job

__all__ = ["PRECISION_TO_TYPE", "DistEMA", "requires_grad"]

CONFIG = "shardow.dist_ema"  # key of ``config`` in a file's metadata
PRECISION_TO_TYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def requires_grad(model: nn.Module, flag: bool = True) -> None:
    """Sets requires_grad on every parameter."""
    for p in model.parameters():
        p.requires_grad = flag


class DistEMA:
    """Averages of all parameters of ``model``, of which this rank keeps one range. Collective over the ``world_size``
    ranks that share it.

    Parameters lie one after another in the order of named_parameters(), P elements in all; with n = ceil(P /
    world_size), rank r averages elements [r n, min(r n + n, P)). Of a model that is sharded, each rank averages the
    shards that it holds instead, which replicas divide.

    Args:
        world_size, rank: of the ranks that share the model: torch.distributed's, or ``group``'s.
        dtype: of averages: "fp32"; "bf16" and "fp16" halve their memory, and are rounded stochastically by ``seed``:
            0.5 to 1.6 % of noise in bf16.
        decay, warmup, power, min_decay, inv_gamma, update_after_step: see get_decay(). ``warmup`` needs a ``power``: 2
            / 3 reaches a decay of 0.999 in 31.6 thousand steps, 3 / 4 in 10 thousand.
        timeout: seconds or timedelta, the deadline of every collective call.

    Attributes:
        name_list, index_list, ema_param_list: of the parameters that this rank has a part of: the name, the (first,
            last) element, both included, in row-major order of the parameter (of what this rank holds of it, where it
            is sharded), and its average, 1-D, the memory itself.
        decay_steps: updates so far. torch_dtype: of averages. model: the one that they were made of.

    Raises:
        KeyError (no such dtype), TypeError (warmup without power), ValueError: each a ValueError too.
    """

    def __init__(
        self, model: nn.Module, world_size: int, rank: int, dtype: str = "fp32", decay: float = 0.999,
        warmup: bool = False, power: float | None = None, min_decay: float = 0.0, inv_gamma: float = 1.0,
        update_after_step: int = 0, *, seed: int = 0, group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        self.model, self.world_size, self.rank, self.dtype = model, world_size, rank, dtype
        self.decay, self.warmup, self.power = decay, warmup, power
        self.min_decay, self.inv_gamma, self.update_after_step = min_decay, inv_gamma, update_after_step
        self.decay_steps = 0
        self._seed, self._group = seed, group
        self._view = find(model, group=self._group)
        process_group = group or self._view.process_group
        if process_group is None and dist.is_initialized() and world_size != 1:
            process_group = dist.group.WORLD
        self._ranks = RankGroup(process_group, seconds(timeout))
        self._ranks.step("DistEMA(...)", self._start)

    def _start(self) -> Step[None]:
        """Checks options and cuts the model. Raises ValueError; also KeyError and TypeError, where upstream does."""
        if self.dtype not in PRECISION_TO_TYPE:
            names = ", ".join(map(repr, PRECISION_TO_TYPE))
            raise invalid(f"dtype={self.dtype!r}; it must be one of {names}", KeyError)
        if self.warmup and self.power is None:
            powers = "2 / 3 reaches a decay of 0.999 in 31.6 thousand steps, 3 / 4 in 10 thousand"
            raise invalid(f"warmup=True needs a power: {powers}", TypeError)
        if whole("rank", self.rank, 0) >= whole("world_size", self.world_size, 1):
            raise invalid(f"rank={self.rank}; with world_size={self.world_size} it must be less")
        for name in ("decay", "min_decay"):
            fraction(name, getattr(self, name))
        if self.warmup and not self.inv_gamma > 0:
            raise invalid(f"inv_gamma={self.inv_gamma}; it must be more than 0")
        if dist.is_initialized() and (self.world_size, self.rank) != (self._ranks.size, self._ranks.rank):
            raise invalid(
                f"DistEMA(world_size={self.world_size}, rank={self.rank}), but this is rank {self._ranks.rank} of the "
                f"{self._ranks.size} that share the model; give these, or the ranks' own group="
            )
        self.torch_dtype = PRECISION_TO_TYPE[self.dtype]
        self.build_ema_model()
        tensors = {share.name: tuple(share.local.region.shape) for share in self._shares}
        facts = {"world_size": self.world_size, "tensors": tensors, "order": list(tensors), "config": self.config}
        return Step(None, [equal_facts("DistEMA(...)", facts, self._ranks), self._ranks.join("DistEMA")])

    def __getstate__(self) -> dict[str, Any]:
        """Returns a state that includes the model. Raises NotImplementedError where ranks share it."""
        refuse_copies(self._ranks)
        names = ("model", "world_size", "rank", *self.config, "_seed", "torch_dtype")
        state = {name: getattr(self, name) for name in names}
        return {**state, "_averages": [share.averages[0] for share in self._shares], "_timeout": self._ranks.timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {name: value for name, value in state.items() if name not in ("_averages", "_timeout")}
        self.__dict__.update(own, _group=None, _ranks=RankGroup(None, state["_timeout"]))
        self.build_ema_model()
        for share, average in zip(self._shares, state["_averages"], strict=True):
            share.averages[0].copy_(average)

    @torch.no_grad()
    def build_ema_model(self) -> None:
        """Cuts the averages of ``self.model`` anew; they become equal to its weights. Local."""
        name_of = called(self.model)
        self._view = find(self.model, group=self._group)
        self._shares = shares(self._view, self.world_size, self.rank, self.torch_dtype, is_sharded(self.model))
        self._called = {local.name: name_of(local.name) for local in [*self._view.parameters, *self._view.buffers]}
        own = [share for share in self._shares if share.region.size]
        self.name_list = [self._called[share.name] for share in own]
        self.index_list = [(share.begin, share.begin + share.region.size - 1) for share in own]
        self.ema_param_list = [share.averages[0] for share in own]
        self._pair()

    def _pair(self) -> None:
        own = [share for share in self._shares if share.region.size]
        rows = [AveragedTensor(share.name, share.weights(), share.averages[0], share.region) for share in own]
        self._staged = [share for share in own if share.stage is not None]
        rule = "mul_add" if self.dtype == "fp32" else "lerp"
        self._pairs = GivenMemory(rows, rule, stochastic=True, seed=self._seed)
        self._counted = self.decay_steps

    # ---- training

    def set_decay_steps(self, decay_steps: int) -> None:
        """Sets the number of updates so far, for the warm-up, and for the noise of 16-bit averages."""
        self.decay_steps = decay_steps

    def get_decay(self) -> float:
        """Returns the decay of the next update. With ``warmup``: s = max(0, decay_steps - update_after_step - 1), then
        1 - (1 + s / inv_gamma)^-power into [min_decay, decay]: the first two updates copy. Else ``decay``."""
        if self.power is None or not self.warmup:
            return self.decay
        steps = max(0, self.decay_steps - self.update_after_step - 1)
        value: float = 1 - (1 + steps / self.inv_gamma) ** -self.power
        return max(self.min_decay, min(value, self.decay))

    @torch.no_grad()
    def update(self, model: nn.Module, decay: float | None = None) -> None:
        """Updates the averages after an optimizer step: one pass over this rank's range; no communication. Raises
        KeyError (a ValueError too), before anything changes, where ``model`` is not the one that the averages were made
        of: another model must have the same names."""
        used = fraction("decay", self.get_decay() if decay is None else decay)
        self._bind(model)
        for share in self._staged:
            share.gather()
        self._pairs.update(used, 1.0 - used, self.decay_steps + 1)
        self.decay_steps += 1
        self._counted = self.decay_steps

    def _bind(self, model: nn.Module) -> None:
        """Pairs anew the parameters that have been replaced or have moved."""
        if model is not self._view.model or not self._view.unchanged_at_rest():
            view = find(model, group=self._group)
            locals_ = {local.name: local for local in view.parameters}
            regions = {share.name: share.local.region for share in self._shares}
            compare(regions, {name: local.region for name, local in locals_.items()}).refuse(
                "update()", "the model", KeyError, target="in the averages", done="nothing was averaged",
                hint="The averages were made of another model; make a DistEMA of this one",
            )  # fmt: skip
            self._shares = [
                Tracked(locals_[share.name], share.region, share.begin, averages=share.averages)
                for share in self._shares
            ]
            self._view = view
            self._pair()
        elif self._counted > self.decay_steps:  # steps went back, and the noise goes with them
            self._pair()

    # ---- state

    @property
    def config(self) -> dict[str, Any]:
        """All options, and decay_steps."""
        names = ("dtype", "decay", "warmup", "power", "min_decay", "inv_gamma", "update_after_step", "decay_steps")
        return {name: getattr(self, name) for name in names}

    @torch.no_grad()
    def state_dict(
        self, cpu_group: dist.ProcessGroup | None = None, *, everywhere: bool = False, buffers: bool = False
    ) -> OrderedDict[str, torch.Tensor]:
        """Returns whole averages, CPU tensors, by the names of ``model.named_parameters()``, on rank 0, {} elsewhere;
        collective.

        Args:
            cpu_group: as in upstream, a gloo group of the same ranks; the ranks' own group moves the tensors.
            everywhere: on every rank, as in upstream.
            buffers: the model's persistent buffers too, of rank 0: what a complete model has.
        """

        def prepare() -> Step[list[LocalShard]]:
            if cpu_group is not None and (size := dist.get_world_size(cpu_group)) != self.world_size:
                raise invalid(f"state_dict(): cpu_group has {size} ranks, the averages are on {self.world_size}")
            parts = [LocalShard(share.name, share.averages[0], share.region) for share in self._shares]
            if buffers:
                parts += [LocalShard(own.name, own.tensor.reshape(-1), own.region) for own in self._view.buffers]
            return Step(parts, [equal_updates("state_dict()", self.decay_steps, self._ranks)])

        self._needs_all("state_dict()")
        parts = self._ranks.step("state_dict()", prepare)
        gatherer, host = Gatherer("state_dict()", parts, self._ranks), torch.device("cpu")
        tensors = dict(gatherer.everywhere(lambda _: host)) if everywhere else gatherer.whole({})
        return OrderedDict((self._called[name], full) for name, full in tensors.items())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads whole averages, on every rank; or ``{"model": averages, "config": config}``, with its decay_steps.
        Wrappers' names and buffers are passed over.

        Raises ValueError (KeyError where names are missing), on every rank and before anything changes, with all that
        does not fit, other options too.
        """
        is_wrapped = set(state_dict) == {"model", "config"} and isinstance(state_dict["model"], Mapping)
        weights, steps = state_dict["model"] if is_wrapped else state_dict, self.decay_steps

        def look() -> LocalState:
            nonlocal steps
            if is_wrapped:
                steps = steps_in(state_dict["config"], self.config)
            held = self._held(saving=False)
            held.others = self._called  # buffers, too
            return held

        what = "load_state_dict()"
        fill(what, self._ranks, look, weights, KeyError, hint="")
        self.decay_steps = steps

    def _needs_all(self, what: str) -> None:
        if self._ranks.size != self.world_size:
            way_out = "call dist.init_process_group() before DistEMA(...)"
            raise invalid(f"{what} needs the other {self.world_size - 1} ranks: {way_out}")

    # ---- files

    def save(self, path: str | Path) -> None:
        """Writes averages and ``config`` into a .safetensors file, each rank its own bytes; for load(). Collective;
        nothing is gathered."""
        self._needs_all("save()")

        def find() -> engine.SaveStep:
            file = engine.FileParts("", self._held(saving=True).parts, {CONFIG: json.dumps(self.config)})
            return Step(engine.ToSave([file], {}), [equal_updates("save()", self.decay_steps, self._ranks)])

        engine.SaveCall(find, path, self._ranks).write()

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """Loads what save() wrote, at any world size, with its decay_steps; each rank reads its own bytes. Collective.
        Raises, before anything changes, where names, shapes or options differ."""
        self._needs_all("load()")

        def look() -> Step[Job]:
            held = self._held(saving=False)
            facts = equal_facts("load()", {"path": paths.to_read(path)}, self._ranks)
            return Step(Job("load()", held, self._ranks, held.names, (), strict=True), [facts])

        loading = _Load(path, look)
        loading.config = self.config
        loading.fill(self._ranks)
        self.decay_steps = loading.steps

    def _held(self, saving: bool) -> LocalState:
        """Returns this rank's averages. ``saving``: in a sharded model rank 0 alone saves what all ranks hold whole."""
        everything = not saving or not is_sharded(self.model)
        parts = [
            LocalShard(share.name, share.averages[0], share.region)
            for share in self._shares
            if everything or share.local.counts_on(self._ranks.rank)
        ]
        return LocalState(parts, {share.name: (share.name, self._called[share.name]) for share in self._shares}, None)


class _Load(FileLoad):
    """Loads where the options, which are in the file, fit ``config``. ``steps``: the file's decay_steps."""

    config: dict[str, Any]

    def wanted(self, words: bytes, files: list[_core.Checkpoint]) -> list[tuple[list[LocalShard], bool]]:
        metadata = files[0].metadata
        if CONFIG not in metadata:
            why = f"its metadata has no {CONFIG!r}; use load_state_dict() for weights alone"
            raise errors.make("corrupt", f"{self._path} is not a saved DistEMA: {why}")
        self.steps = steps_in(json.loads(metadata[CONFIG]), self.config)
        return super().wanted(words, files)


def steps_in(saved: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Returns decay_steps of a saved ``config``; raises ValueError where other options differ from ``config``."""
    different = {key: value for key, value in config.items() if key != "decay_steps" and saved.get(key) != value}
    if different:
        differs = ", ".join(f"{key}={saved.get(key)!r} (here {value!r})" for key, value in different.items())
        way_out = "make DistEMA with the same options, or pass the averages alone and set_decay_steps()"
        raise invalid(f"the averages were saved with {differs}; {way_out}")
    return whole("decay_steps", saved.get("decay_steps"), 0)


# ---- shares: which rank averages which elements of a parameter. Whole parameters lie one after another in row-major
# order, cut into equal ranges, one a rank.


def shares(view: ModelView, world: int, rank: int, dtype: torch.dtype, sharded: bool) -> list[Tracked]:
    """Returns a share of each parameter, empty ones too, whose averages equal the weights. ``sharded``: of what a rank
    holds, which replicas divide."""
    if (odd := [local for local in view.parameters if local.tensor.is_complex()]) != []:
        raise unsupported(f"'{odd[0].name}' is {odd[0].tensor.dtype}; averages of complex numbers are not kept here")
    made, offset, length = [], 0, -(-sum(local.region.size for local in view.parameters) // world)
    edges = (rank * length, (rank + 1) * length)
    for local in view.parameters:
        if sharded:
            region, begin = divide(local, "split")
        else:
            begin, end = (min(max(edge - offset, 0), local.region.size) for edge in edges)
            region = local.region.window(begin, end)
            offset += local.region.size
        share = Tracked(local, region, begin)
        share.averages = [share.weights().to(dtype, copy=True)]
        made.append(share)
    return made


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a weight of the model is sharded: the same on every rank, whatever each of them holds."""
    return has_fsdp(model) or any(isinstance(p, DTensor) or is_partitioned(p) for p in model.parameters())
