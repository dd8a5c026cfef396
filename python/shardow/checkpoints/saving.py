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
import random
import secrets
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardow import _core
from shardow.averaging.model_averages import ModelAverages
from shardow.averaging.persistence import to_save_beside
from shardow.base import plain
from shardow.base.checks import instance, invalid
from shardow.checkpoints import manifest
from shardow.checkpoints.optimizers import Tensors, Tree, tree_of
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import Combined, RankGroup, Step, equal_facts
from shardow.ema import EMA
from shardow.files.engine import FileParts, with_extra
from shardow.sharding.equal import DIFFERENT_WEIGHTS, Common, common_of, equal_copies
from shardow.sharding.local_state import LocalState, held_by
from shardow.sharding.swap_guard import refuse_foreign
from shardow.sharding.view import ModelView

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


class Saving:
    """A step that this rank saves with others. ``asked``: what the call was given, by the parts' names."""

    def __init__(self, step: int, asked: Mapping[str, Any], state: Mapping[str, Any] | None, ranks: RankGroup) -> None:
        self._step, self._asked, self._state, self._ranks = step, asked, state, ranks
        self._held: LocalState | None = None
        self._optimizer, self._values = Tensors(), Tensors()

    def _look(self) -> Step[None]:  # (1)
        ranks, given = self._ranks, Given.of(WHAT, **self._asked)
        self._given, self._trees = given, {}
        if given.model in half_restored or given.averages in half_restored:
            raise invalid(f"{WHAT}: restore() of this model stopped halfway: it is a mixture; restore() it again")
        if given.model is None and given.averages is None and self._state is None and not given.scheduler:
            raise invalid(f"{WHAT}: nothing to save; give model=, averages=, optimizer=, scheduler= or state=")
        if given.model is not None:
            held = self._held = held_by(given.model, ranks.process_group, saving=True)
            refuse_foreign(WHAT, held.memory, instead="")
            assert held.view is not None
            given.refuse_strangers(WHAT, held.view)
            for name, optimizer in given.optimizer.items():
                self._trees[name] = tree_of(optimizer, held.view, prefix("optimizer", name), self._optimizer)
        self._scheduler = {
            name: plain.encode(scheduler.state_dict(), prefix("scheduler", name), self._values.whole)
            for name, scheduler in given.scheduler.items()
        }
        state = {} if self._state is None else self._state
        if not isinstance(state, Mapping) or not all(type(key) is str for key in state):
            raise invalid("state= is a dict of values by their names")
        self._encoded = plain.encode(dict(state), "state", self._values.whole)
        self._random = random_states()
        own = None if given.averages is None else given.averages._averages
        averages = own if own is not None and own.ranks.group is ranks.group else None
        copies = equal_copies(WHAT, self._common(averages), ranks)
        facts = equal_facts(WHAT, self._facts([] if own is None else list(own.keys)), ranks)
        self._longest = Combined(b"%d" % len(self._random), lambda by_rank: max(by_rank, key=int))
        digest = hashlib.sha256(json.dumps(self._trees, sort_keys=True).encode()).digest()
        self._other_trees = Combined(digest, lambda by_rank: b"other" if len(set(by_rank)) > 1 else b"")
        self._states = None if averages is None else averages.states(WHAT)
        compared = [copies, facts, self._longest, self._other_trees]
        return Step(None, compared if self._states is None else [*compared, self._states])

    @torch.no_grad()
    def files(self) -> tuple[list[FileParts], dict[str, str]]:
        """Returns (files, texts) of the step. Collective."""
        ranks = self._ranks
        ranks.step(WHAT, self._look)
        given, save = self._given, secrets.token_hex(8)
        metadata = {manifest.SAVE: save, manifest.STEP: str(self._step)}
        averages = {}  # (2)
        if given.averages is not None:
            state_of_all = None if self._states is None else self._states.state
            averages = to_save_beside(given.averages._averages, WHAT, metadata, ranks, state_of_all)
        if self._other_trees.total:  # (3)
            own = json.dumps(self._trees).encode()
            self._trees = json.loads(ranks.decide_each(WHAT, own, self._joined) or b"{}")
        length = int(self._longest.total)
        row = torch.frombuffer(bytearray(self._random.ljust(length)), dtype=torch.uint8)
        region = _core.Region.grid([ranks.size, length], [[(ranks.rank, ranks.rank + 1)], [(0, length)]])
        files = []
        if self._held is not None:
            extra = self._held.extra if ranks.rank == 0 else {}
            files.append(with_extra(manifest.MODEL, self._held.parts, extra, metadata))
        files += averages.values()
        if given.optimizer:
            files.append(FileParts(manifest.OPTIMIZER, self._optimizer.parts, metadata))
        files.append(FileParts(manifest.STATE, [*self._values.parts, LocalShard(_RANDOM, row, region)], metadata))
        model = manifest.MODEL if given.model is not None else None
        names, keys = [file.name for file in files], {key: file.name for key, file in averages.items()}
        written = manifest.Manifest(
            self._step, save, ranks.size, names, model, keys, self._trees, self._scheduler, self._encoded, given.kinds()
        )
        return files, {manifest.NAME: written.text()} if ranks.rank == 0 else {}

    def _common(self, averages: ModelAverages | None) -> list[Common | None]:
        held = self._held.view.parameters if self._held is not None and self._held.view is not None else []
        weights = [weight for weight in map(common_of, held) if weight is not None]
        once = {weight.tensor.data_ptr() for weight in weights}  # replicas' averages follow them, compared by them
        common = [] if averages is None else averages.handed_out(WHAT)
        more = [copy for copy in common if copy is not None and copy.tensor.data_ptr() not in once]
        named = [replace(copy, name=f"averages of {copy.name}") for copy in more]
        return [*weights, *self._optimizer.common, *self._values.common, *named]

    def _facts(self, averages: list[str]) -> dict[str, Any]:
        """Returns what must be equal on all ranks, as the message names it where it is not."""
        facts = {
            "step": self._step,
            "model=": self._held is not None,
            "averages=": averages,
            "optimizer=": list(self._trees),
            "scheduler=": list(self._scheduler),
        }
        schedulers = {f"scheduler {name}".strip(): tree for name, tree in self._scheduler.items()}
        for name, tree in {"state": self._encoded, **schedulers}.items():
            inner = tree if isinstance(tree, dict) else {"": tree}
            facts |= {f"{name}[{key!r}]": json.dumps(value) for key, value in inner.items()}
        return facts

    def _joined(self, by_rank: list[bytes]) -> list[bytes]:
        return [json.dumps(_join(map(json.loads, by_rank))).encode(), *[b""] * (self._ranks.size - 1)]


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


def random_states() -> bytes:
    """Returns the random generators of this rank as JSON, which plain.decode() reads: Python's, numpy's where it is
    imported, torch's on the CPU and on CUDA devices.
    """
    found: dict[str, Any] = {"python": random.getstate(), "torch": _bytes(torch.get_rng_state())}
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":
            inner = state["state"]
            found["numpy"] = {**state, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = [_bytes(one) for one in torch.cuda.get_rng_state_all()]
    return json.dumps(plain.encode(found, "random generators"), separators=(",", ":")).encode()


def give_random(states: bytes) -> None:
    """Random generators go on as they were. What was not there then, or is not here now, stays as it is."""
    found = plain.decode(json.loads(states))
    random.setstate(found["python"])
    torch.set_rng_state(_tensor(found["torch"]))
    if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(found["numpy"])
    if torch.cuda.is_available():
        for device, one in zip(range(torch.cuda.device_count()), found.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(_tensor(one), device)


def _bytes(state: torch.Tensor) -> bytes:
    return bytes(state.tolist())


def _tensor(state: bytes) -> torch.Tensor:
    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")
