"""What a save of a step writes, put together by all ranks:

1. each rank looks at what it holds. In one round, checksums are compared of what several hold alike, plain values, and
   the averages' state
2. averages that other ranks have are compared by those
3. the trees of optimizers, of which each rank knows its parameters, are joined on rank 0
4. the file engine writes all files and the manifest as one directory
"""

from __future__ import annotations

import hashlib
import json
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardow import _core
from shardow.averages.core import Averages
from shardow.averages.persistence import common_beside, to_save_beside
from shardow.base import plain
from shardow.base.checks import instance, invalid
from shardow.checkpoints import generators, manifest
from shardow.checkpoints.optimizers import Tensors, Tree, tree_of
from shardow.distributed.gather import Part
from shardow.distributed.rank_group import Comparison, RankGroup, Step, equal_facts
from shardow.ema import EMA
from shardow.files.engine import FileParts, with_extra
from shardow.model.equal import DIFFERENT_WEIGHTS, Common, common_of, equal_copies
from shardow.model.parts import Held, held_by
from shardow.model.swap_guard import refuse_foreign
from shardow.model.view import ModelView

WHAT = "Checkpoints.save()"
_RANDOM = "random"
#: Models and averages that a restore() began to fill and did not end: a mixture of two steps, until another one ends.
half_restored: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class Given:
    """The arguments of a save or a restore; several optimizers or schedulers by name, one as ""."""

    model: nn.Module | None
    averages: EMA | None
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any]

    @staticmethod
    def of(what: str, model: Any, averages: Any, optimizer: Any, scheduler: Any) -> Given:
        for name, value, kind in (("model", model, nn.Module), ("averages", averages, EMA)):
            if value is not None:
                instance(f"{what}: {name}", value, kind)
        optimizers, schedulers = _by_name(optimizer), _by_name(scheduler)
        if optimizers and model is None:
            raise invalid(f"{what}: optimizer= needs model=, which names its parameters")
        for name, one in {
            **{f"optimizer {k}": v for k, v in optimizers.items()},
            **{f"scheduler {k}": v for k, v in schedulers.items()},
        }.items():
            wanted = ("state_dict", "load_state_dict", *["param_groups"] * name.startswith("optimizer"))
            if without := [verb for verb in wanted if not hasattr(one, verb)]:
                raise invalid(f"{what}: {name.strip()} is a {type(one).__name__}, without {' and '.join(without)}")
        return Given(model, averages, optimizers, schedulers)

    def kinds(self) -> dict[str, dict[str, str]]:
        """The names of their classes."""
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        return {part: {name: type(one).__qualname__ for name, one in found.items()} for part, found in parts.items()}

    def refuse_strangers(self, what: str, view: ModelView) -> None:
        """Raises where the averages follow other parameters than the model's: those of a copy never move."""
        if self.averages is not None and view.by_parameter().keys().isdisjoint(
            self.averages._averages.view.by_parameter()
        ):
            raise invalid(
                f"{what}: averages= are those of another model, which shares no parameter with model=; give the EMA "
                "of this one"
            )


def _by_name(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        if not all(type(name) is str and name for name in given):
            raise invalid("several optimizers or schedulers have names: {'generator': ..., 'critic': ...}")
        return dict(given)
    return {"": given}


def prefix(kind: str, name: str) -> str:
    """Of the names of tensors: "state.w.exp_avg" of one optimizer, "critic.state.w.exp_avg" of several."""
    return {"optimizer": f"{name}." if name else "", "scheduler": f"scheduler.{name}" if name else "scheduler"}[kind]


@dataclass
class _Mine:
    """What this rank holds."""

    held: Held | None
    optimizer: Tensors
    trees: Tree
    values: Tensors
    scheduler: Tree
    state: Any
    random: bytes


@torch.no_grad()
def files_to_save(
    step: int, asked: Callable[[], Given], state: Mapping[str, Any], ranks: RankGroup
) -> tuple[list[FileParts], dict[str, str]]:
    """(files, texts) of a step. ``asked()``: what the call was given; may raise. Collective."""

    def look() -> Step[tuple[Given, _Mine, _Longest, _Trees, _core.EqualStates | None]]:  # (1)
        given = asked()
        mine = _look(given, state, ranks)
        own = None if given.averages is None else given.averages._averages
        averages = own if own is not None and own.ranks.group is ranks.group else None
        keys = [] if own is None else list(own.keys)
        copies = equal_copies(WHAT, _common(mine, averages), ranks)
        facts = equal_facts(WHAT, _facts(step, mine, keys), ranks)
        longest, trees = _Longest(mine.random), _Trees(mine.trees, ranks)
        states = None if averages is None else averages.states(WHAT, {})
        compared = [copies, facts, longest, trees, *([states] if states else [])]
        return Step((given, mine, longest, trees, states), compared)

    given, found, longest, joined, states = ranks.step(WHAT, look)
    length, trees = longest.length, joined.trees
    save = secrets.token_hex(8)
    metadata = {manifest.SAVE: save, manifest.STEP: str(step)}
    averages = {}  # (2)
    if given.averages is not None:
        state_of_all = None if states is None else states.state
        averages = to_save_beside(given.averages._averages, WHAT, metadata, ranks, state_of_all)
    row = torch.frombuffer(bytearray(found.random.ljust(length)), dtype=torch.uint8)
    region = _core.Region.grid([ranks.size, length], [[(ranks.rank, ranks.rank + 1)], [(0, length)]])
    files = []
    if found.held is not None:
        extra = found.held.extra if ranks.rank == 0 else {}
        files.append(with_extra(manifest.MODEL, found.held.parts, extra, metadata))
    files += averages.values()
    if given.optimizer:
        files.append(FileParts(manifest.OPTIMIZER, found.optimizer.parts, metadata))
    files.append(FileParts(manifest.STATE, [*found.values.parts, Part(_RANDOM, row, region)], metadata))
    model = manifest.MODEL if given.model is not None else None
    names, keys = [file.name for file in files], {key: file.name for key, file in averages.items()}
    written = manifest.Manifest(
        step, save, ranks.size, names, model, keys, trees, found.scheduler, found.state, given.kinds()
    )
    return files, {manifest.NAME: written.text()} if ranks.rank == 0 else {}


def _look(given: Given, state: Mapping[str, Any], ranks: RankGroup) -> _Mine:
    held = None if given.model is None else held_by(given.model, ranks.process_group, saving=True)
    optimizer, values = Tensors(), Tensors()
    trees = {}
    if held is not None:
        refuse_foreign(WHAT, held.memory, instead="")
        assert held.view is not None
        given.refuse_strangers(WHAT, held.view)
        for name, one in given.optimizer.items():
            trees[name] = tree_of(one, held.view, prefix("optimizer", name), optimizer)
    scheduler = {
        name: plain.encode(one.state_dict(), prefix("scheduler", name), values.whole)
        for name, one in given.scheduler.items()
    }
    if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
        raise invalid("state= is a dict of values by their names")
    return _Mine(
        held, optimizer, trees, values, scheduler, plain.encode(dict(state), "state", values.whole), generators.states()
    )


def _common(mine: _Mine, averages: Averages | None) -> list[Common | None]:
    held = mine.held.view.parameters if mine.held is not None and mine.held.view is not None else []
    weights = [weight for weight in map(common_of, held) if weight is not None]
    once = {weight.tensor.data_ptr() for weight in weights}  # replicas' averages follow them, and are compared by them
    common = [] if averages is None else common_beside(averages, WHAT)
    more = [copy for copy in common if copy is not None and copy.tensor.data_ptr() not in once]
    return [*weights, *mine.optimizer.common, *mine.values.common, *more]


class _Longest(Comparison):
    """Finds the length of the longest random state."""

    def __init__(self, random: bytes) -> None:
        super().__init__()
        self.length = len(random)

    def words(self) -> bytes:
        return b"%d" % self.length

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        return max(by_rank, key=int)

    def take(self, total: bytes) -> None:
        self.length = int(total)


class _Trees(Comparison):
    """(3): joins the trees of optimizers on rank 0, where they differ."""

    def __init__(self, trees: Tree, ranks: RankGroup) -> None:
        super().__init__()
        self.trees, self._ranks = trees, ranks

    def words(self) -> bytes:
        return _digest(self.trees)

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        return b"!" if len(set(by_rank)) > 1 else b""

    def take(self, total: bytes) -> None:
        if total:
            own = json.dumps(self.trees).encode()
            self.trees = json.loads(self._ranks.decide_each(WHAT, own, self._joined) or b"{}")

    def _joined(self, by_rank: list[bytes]) -> list[bytes]:
        return [json.dumps(_join(map(json.loads, by_rank))).encode(), *[b""] * (self._ranks.size - 1)]


def _facts(step: int, mine: _Mine, averages: list[str]) -> dict[str, Any]:
    """What must be equal on all ranks, in words for the message where it is not."""
    facts = {
        "step": step,
        "model=": mine.held is not None,
        "averages=": averages,
        "optimizer=": list(mine.trees),
        "scheduler=": list(mine.scheduler),
    }
    for name, tree in {
        "state": mine.state,
        **{f"scheduler {name}".strip(): tree for name, tree in mine.scheduler.items()},
    }.items():
        inner = tree if isinstance(tree, dict) else {"": tree}
        facts |= {f"{name}[{key!r}]": json.dumps(value) for key, value in inner.items()}
    return facts


def _digest(values: Any) -> bytes:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


def _join(by_rank: Iterable[Tree]) -> Tree:
    """Of each optimizer all ranks' groups and states. Raises where they differ in what they both have."""
    joined: Tree = {}
    for rank, trees in enumerate(by_rank):
        for name, tree in trees.items():
            one = joined.setdefault(name, {"groups": [], "state": {}})
            for i, group in enumerate(tree["groups"]):
                _join_group(one["groups"], i, group, rank)
            for param, state in tree["state"].items():
                if one["state"].setdefault(param, state) != state:
                    raise invalid(
                        f"{WHAT}: the optimizer's state of '{param}' on rank {rank} is not that of another rank; "
                        f"{DIFFERENT_WEIGHTS}"
                    )
    return joined


def _join_group(groups: list[Tree], i: int, group: Tree, rank: int) -> None:
    if i == len(groups):
        groups.append({**group, "params": []})
    for option in {*groups[i], *group} - {"params"}:
        first, here = groups[i].get(option), group.get(option)
        if first != here:
            raise invalid(
                f"{WHAT}: {option!r} of group {i} of the optimizer is {first!r} on rank 0 and {here!r} on rank {rank}"
            )
    known = set(groups[i]["params"])
    groups[i]["params"] += [param for param in group["params"] if param not in known]
