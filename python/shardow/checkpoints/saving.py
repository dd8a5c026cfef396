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
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from shardow.ema import EMA
from shardow.files.engine import FileParts, with_extra
from shardow.model.equal import DIFFERENT_WEIGHTS, Common, check_equal, common_of
from shardow.model.parts import Held, held_by
from shardow.model.swap_guard import refuse_foreign
from shardow.model.view import ModelView
from shardow.ranks.gather import Part
from shardow.ranks.team import Team, Words

WHAT = "Checkpoints.save()"
_RANDOM = "random"
_WORDS, _SUM = struct.Struct("<32s32sq"), struct.Struct("<??q")  # of a rank; of all
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
    step: int, asked: Callable[[], Given], state: Mapping[str, Any], team: Team
) -> tuple[list[FileParts], dict[str, str]]:
    """(files, texts) of a step. ``asked()``: what the call was given; may raise. Collective."""
    mine: list[tuple[Given, _Mine]] = []

    words = _Words(step, mine, team)

    def look() -> list[Common | None]:  # (1)
        mine[:] = [(given := asked(), found := _look(given, state, team))]
        held = found.held.view.parameters if found.held is not None and found.held.view is not None else []
        weights = [one for one in map(common_of, held) if one is not None]
        once = {one.tensor.data_ptr() for one in weights}  # replicas' averages follow them, and are compared by them
        averages = words.compared
        common = [] if averages is None else common_beside(averages, WHAT)
        more = [one for one in common if one is not None and one.tensor.data_ptr() not in once]
        return [*weights, *found.optimizer.common, *found.values.common, *more]

    length, trees, averages_state = words.agreed(*check_equal(WHAT, look, team, DIFFERENT_WEIGHTS, words))
    given, found = mine[0]
    save = secrets.token_hex(8)
    metadata = {manifest.SAVE: save, manifest.STEP: str(step)}
    averages = {}  # (2)
    if given.averages is not None:
        averages = to_save_beside(given.averages._averages, WHAT, metadata, team, averages_state)
    row = torch.frombuffer(bytearray(found.random.ljust(length)), dtype=torch.uint8)
    region = _core.Region.grid([team.size, length], [[(team.rank, team.rank + 1)], [(0, length)]])
    files = []
    if found.held is not None:
        extra = found.held.extra if team.rank == 0 else {}
        files.append(with_extra(manifest.MODEL, found.held.parts, extra, metadata))
    files += averages.values()
    if given.optimizer:
        files.append(FileParts(manifest.OPTIMIZER, found.optimizer.parts, metadata))
    files.append(FileParts(manifest.STATE, [*found.values.parts, Part(_RANDOM, row, region)], metadata))
    one = manifest.Manifest(
        step,
        save,
        team.size,
        [file.name for file in files],
        manifest.MODEL if given.model is not None else None,
        {key: file.name for key, file in averages.items()},
        trees,
        found.scheduler,
        found.state,
        given.kinds(),
    )
    return files, {manifest.NAME: one.text()} if team.rank == 0 else {}


def _look(given: Given, state: Mapping[str, Any], team: Team) -> _Mine:
    held = None if given.model is None else held_by(given.model, team.process_group, saving=True)
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


class _Words(Words):
    """Facts that ranks compare beside values, optimizers' trees, the length of random states, the averages' state.
    ``mine``: what this rank was given and holds, once it has looked."""

    def __init__(self, step: int, mine: Sequence[tuple[Given, _Mine]], team: Team) -> None:
        self._step, self._mine, self._team = step, mine, team

    @property
    def compared(self) -> Averages | None:
        """Averages that the same ranks have."""
        ema = self._mine[0][0].averages
        return ema._averages if ema is not None and ema._averages.team.group is self._team.group else None

    def words(self) -> bytes:
        (given, found), averages = self._mine[0], self.compared
        self._facts = _facts(self._step, found, [] if given.averages is None else list(given.averages._averages.keys))
        self._states = None if averages is None else averages.state_round(WHAT, {})
        own = _WORDS.pack(_digest(self._facts), _digest(found.trees), len(found.random))
        return own + (self._states.words() if self._states else b"")

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        facts, trees, lengths = map(set, zip(*(_WORDS.unpack_from(text) for text in by_rank), strict=True))
        states = b""
        if self._states and len(facts) == 1:
            states = self._states.sum_up([text[_WORDS.size :] for text in by_rank])
        return _SUM.pack(len(facts) > 1, len(trees) > 1, max(lengths)) + states

    def agreed(self, total: bytes) -> tuple[int, Tree, str | None]:
        """(3): (length of random states, the trees of optimizers on rank 0, the state of the averages that the same
        ranks have). Collective."""
        team, trees = self._team, self._mine[0][1].trees
        facts_differ, trees_differ, length = _SUM.unpack_from(total)
        if facts_differ:
            team.same(WHAT, lambda: self._facts)
        if trees_differ:

            def joined(by_rank: list[bytes]) -> list[bytes]:
                return [json.dumps(_join(map(json.loads, by_rank))).encode(), *[b""] * (team.size - 1)]

            trees = json.loads(team.decide_each(WHAT, json.dumps(trees).encode(), joined) or b"{}")
        return length, trees, None if self._states is None else self._states.state_of_all(total[_SUM.size :])


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
