"""A step that is read back: everything is compared first, on all ranks, then the averages, the weights and the
optimizers are filled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shardow import _core, errors
from shardow.averaging.state_dict import OptionsFrom, Taking
from shardow.base import plain
from shardow.base.checks import instance, invalid, one_of, warn
from shardow.checkpoints import manifest
from shardow.checkpoints.manifest import Manifest
from shardow.checkpoints.optimizers import Resumed, Wanted
from shardow.checkpoints.saving import Given, give_random, half_restored, prefix
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import Comparison, RankGroup, equal_facts
from shardow.distributed.transfers import empty
from shardow.files import engine
from shardow.sharding.extra_state import FromFile
from shardow.sharding.local_state import held_by
from shardow.sharding.match import matched
from shardow.sharding.swap_guard import refuse_foreign

WHAT = "Checkpoints.restore()"
#: What may become of a part that is given and is not in the step.
ABSENT = {"averages": "from_model", "optimizer": "keep", "scheduler": "keep"}
_TRIES = 5  # while somebody saves the same step again


def newest(root: Path) -> Manifest | None:
    """The newest whole step. Lists again where steps came or went meanwhile: another process may save, and remove what
    was listed."""
    while True:
        steps = manifest.steps_in(root)
        for step in steps:
            at = root / manifest.directory_of(step)
            try:
                if (found := manifest.whole(at)) is not None:
                    return found
            except (errors.NotFoundError, errors.CorruptError) as error:
                if os.path.lexists(at / manifest.NAME):  # what is removed loses this first, and is no damage
                    warn(f"{root}: step {step} is passed over, since it is not whole: {error}", RuntimeWarning)
        if manifest.steps_in(root) == steps:
            return None


def check_parts(
    one: Manifest, given: Given, skipped: Collection[str], absent: Mapping[str, str], where: str
) -> set[str]:
    """The parts that are restored. Raises where one is neither there, nor given, nor said to be left out."""
    asked, there = manifest.parts_of(given), manifest.parts_of(one)
    for name in sorted(there - asked - set(skipped)):
        instead = f'{name}="skip"' + (' or averages="from_model"' if name == "averages" else "")
        raise invalid(f"{where} has {name}, and {name}= was not given; {instead} to leave it there")
    for name in sorted(asked - there - set(absent)):
        fate = "lets them begin at the weights that are restored" if name == "averages" else "leaves it as it is"
        way_out = f'absent={{"{name}": "{ABSENT[name]}"}} {fate}' if name in ABSENT else "restore a step that has it"
        raise invalid(f"{where} has no {name}; {way_out}")
    return asked & there


class Restoring(engine.Load):
    """restore() of one rank: everything is compared on all ranks before anything changes. ``asked``: what the call was
    given, by the parts' names, or how a part is left."""

    def __init__(
        self, root: Path, step: int | None, ranks: RankGroup, asked: Mapping[str, Any],
        absent: Mapping[str, str] | None, random: bool, options: OptionsFrom,
    ) -> None:  # fmt: skip
        self._root, self._step, self._ranks, self._asked = root, step, ranks, asked
        self._absent, self._random_too, self._options = absent, random, options
        self._missing: Exception | None = None
        self._has_begun = False

    def look(self) -> list[Comparison]:
        self._skipped = {name for name, given in self._asked.items() if isinstance(given, str)}
        for name in self._skipped:
            one_of(name, self._asked[name], ("skip", "from_model") if name == "averages" else ("skip",))
        absent = self._absent = dict({} if self._absent is None else instance("absent", self._absent, Mapping))
        for name, how in absent.items():
            if how != ABSENT.get(name):
                ways = ", ".join(f"{name!r}: {way!r}" for name, way in ABSENT.items())
                raise invalid(f"absent={{{name!r}: {how!r}}}; it may have {ways}")
        named = {name: None if name in self._skipped else given for name, given in self._asked.items()}
        self._given = Given.of(WHAT, **named)
        facts = {"directory": str(self._root), "step": self._step, "skipped": sorted(self._skipped), "absent": absent}
        facts |= {"random": self._random_too, "options": self._options}
        return [equal_facts(WHAT, facts, self._ranks)]

    def find(self) -> tuple[str, list[str], bytes]:
        root, step = self._root, self._step
        if self._missing is None:
            found = newest(root) if step is None else manifest.read(root / manifest.directory_of(step))
            if found is not None:
                return str(root / manifest.directory_of(found.step)), found.files, found.text().encode()
            self._missing = manifest.missing(root, step)
        raise self._missing

    def wanted(self, words: bytes, files: list[_core.Checkpoint]) -> list[tuple[list[LocalShard], bool]]:
        one = self._one = manifest.parse(words.decode(), str(self._root))
        where = str(self._root / manifest.directory_of(one.step))
        self._files = one.check(files, where)
        self._taking: Taking | None = None
        self._optimizers: list[Resumed] = []
        self._wanted: dict[str, tuple[list[LocalShard], bool]] = {}
        self._parts = check_parts(one, self._given, self._skipped, self._absent or {}, where)
        self._compare_names(where)
        small = Wanted(self._files[manifest.STATE], "the state")
        self.state = plain.decode(one.state, small.whole, f"{where}: state")
        if self._given.model is not None and self._parts & {"model", "optimizer"}:
            self._held = held_by(self._given.model, self._ranks.process_group, saving=False)
            assert self._held.view is not None
            self._view = self._held.view
        if "model" in self._parts:
            self._look_at_model(where)
        if "averages" in self._parts:
            self._look_at_averages(where)
        if "optimizer" in self._parts:
            self._look_at_optimizers(where)
        trees = one.scheduler if "scheduler" in self._parts else {}
        self._scheduler = {name: plain.decode(trees[name], small.whole, f"{where}: a scheduler") for name in trees}
        self._random = self._row(small)
        self._wanted[manifest.STATE] = small.parts, False
        return [self._wanted.get(name, ([], False)) for name in one.files]

    def begin(self, _: list[dict[str, Any]]) -> None:
        self._has_begun = True
        half_restored.update(self._filled())
        if self._taking is not None:
            self._begun.enter_context(self._taking.begun("load()"))

    def has_read(self) -> None:
        for one in self._optimizers:
            one.check()

    @torch.no_grad()
    def take(self) -> Any:
        """Returns ``state`` as it was saved. Collective."""
        self._read()
        self._ranks.agree(WHAT, self._put)
        averages = self._given.averages
        if averages is not None and self._taking is None:
            averages.reset()
        if self._random_too:
            self._give_random()
        half_restored.difference_update(self._filled())
        return self.state

    def _read(self, tries: int = _TRIES) -> None:
        try:
            with contextlib.ExitStack() as self._begun:
                self.run(self._root, self._ranks, WHAT)
        except (errors.CorruptError, errors.NotFoundError):  # the same on all ranks: saved again meanwhile, or removed
            if self._has_begun or tries == 1:
                raise
            self._read(tries - 1)

    def _filled(self) -> set[Any]:
        return {self._given.model, self._given.averages} - {None}

    def _give_random(self) -> None:
        if self._random is not None:
            give_random(bytes(self._random.tolist()))
        elif self._ranks.rank == 0:
            warn(
                f"{WHAT}: random generators were those of {self._one.world_size} ranks, and there are "
                f"{self._ranks.size}: they stay as they are; random=False says so"
            )

    def _look_at_averages(self, where: str) -> None:
        assert self._given.averages is not None
        averages, files = self._given.averages._averages, self._one.averages
        averages.swap.refuse("restore()")
        self._taking = Taking(averages, self._options)
        names = [files[key] for key in self._taking.keys(files, where)]
        self._taking.look(self._files[names[0]].metadata, len(names), where)
        self._wanted |= {name: (averages.parts(k), True) for k, name in enumerate(names)}

    def _look_at_optimizers(self, where: str) -> None:
        file, trees = self._files[manifest.OPTIMIZER], self._one.optimizer
        self._optimizers = [
            Resumed(optimizer, self._view, trees[name], file, prefix("optimizer", name))
            for name, optimizer in self._given.optimizer.items()
        ]
        self._wanted[manifest.OPTIMIZER] = [part for one in self._optimizers for part in one.wanted.parts], True

    def _compare_names(self, where: str) -> None:
        """Raises where several optimizers or schedulers have other names; warns where they are of other classes."""
        here = self._given.kinds()
        for part in sorted(self._parts & here.keys()):
            given, there = here[part], getattr(self._one, part)
            if set(given) != set(there):
                names = [", ".join(sorted(one)) if set(one) != {""} else "one without a name" for one in (there, given)]
                raise invalid(
                    f"{where} has {part}: {names[0]}; given: {names[1]}. Give those that are there, by their names"
                )
            for name, was in self._one.kinds.get(part, {}).items():
                if (now := given.get(name, was)) != was:
                    warn(
                        f"{where}: {f'{part} {name}'.strip()} was of class {was}, and is a {now}, which takes what it "
                        "finds of that; "
                        f'{part}="skip" begins anew'
                    )

    def _look_at_model(self, where: str) -> None:
        file, held = self._files[manifest.MODEL], self._held
        refuse_foreign(WHAT, held.memory)
        self._given.refuse_strangers(WHAT, self._view)
        keys = matched(held, file.tensors.keys(), where)
        self._extra = FromFile(held.extra, file)
        if other := sorted({*held.extra} ^ {*self._extra.values, *self._extra.unexpected}):
            raise invalid(f"{where}: extra states are not the model's: {', '.join(other[:8])}; nothing was restored")
        parts = [LocalShard(keys.get(part.name, part.name), part.flat, part.region) for part in held.parts]
        self._wanted[manifest.MODEL] = [*parts, *self._extra.parts], True

    def _row(self, small: Wanted) -> torch.Tensor | None:
        """Of the random generators of this rank; None where other ranks saved them."""
        if self._one.world_size != self._ranks.size:
            return None
        (ranks, length), _ = small.form("random")
        row = empty([length], torch.uint8)
        region = _core.Region.grid([ranks, length], [[(self._ranks.rank, self._ranks.rank + 1)], [(0, length)]])
        small.read("random", row, region)
        return row

    def _put(self) -> None:
        if "model" in self._parts:
            self._held.filled = self._extra.values
            self._held.put_back()
        for one in self._optimizers:
            one.put()
        for name, state in self._scheduler.items():
            self._given.scheduler[name].load_state_dict(state)
