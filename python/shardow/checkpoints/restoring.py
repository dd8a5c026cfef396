"""A step that is read back: everything is compared first, on all ranks, then the averages, the weights and the
optimizers are filled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shardow import _core, errors
from shardow.averages.persistence import Loading, loading_beside
from shardow.averages.state_dict import OptionsFrom
from shardow.base import plain
from shardow.base.checks import invalid, warn
from shardow.checkpoints import generators, manifest
from shardow.checkpoints.manifest import Manifest
from shardow.checkpoints.resumed import Resumed, Wanted
from shardow.checkpoints.saving import Given, half_restored, prefix
from shardow.files import engine
from shardow.model.extra_state import FromFile
from shardow.model.match import matched
from shardow.model.parts import Held, held_by
from shardow.model.swap_guard import refuse_foreign
from shardow.ranks.gather import Part
from shardow.ranks.memory import empty
from shardow.ranks.team import Team

WHAT = "Checkpoints.restore()"
#: What may become of a part that is given and is not in the step.
ABSENT = {"averages": "from_model", "optimizer": "keep", "scheduler": "keep"}
_TRIES = 5  # while somebody saves the same step again
Files = Mapping[str, _core.Checkpoint]


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


def opened(root: Path, step: int | None, team: Team, tries: int = _TRIES) -> tuple[Manifest, Files]:
    """A step, by default the newest whole one, and all its files, of one save. Collective."""

    def text() -> bytes:
        found = newest(root) if step is None else manifest.read(root / manifest.directory_of(step))
        if found is None:
            raise manifest.missing(root, step)
        return found.text().encode()

    one = manifest.parse(team.on_first(WHAT, text).decode(), str(root))
    at = str(root / manifest.directory_of(one.step))
    try:
        files = _core.Checkpoint.open_files(team.group, at, one.files, team.timeout)
        by_name = dict(zip(one.files, files, strict=True))
        one.check(by_name, at)
        return one, by_name
    except (errors.CorruptError, errors.NotFoundError):  # the same on all ranks: saved again meanwhile, or removed
        if tries == 1:
            raise
        return opened(root, step, team, tries - 1)


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


class Restoring:
    """A step that fits what was given: made by all ranks before anything changes. Collective, and so is take()."""

    def __init__(
        self, one: Manifest, files: Files, given: Given, choose: Callable[[], set[str]], options: OptionsFrom,
        team: Team, where: str,
    ) -> None:  # fmt: skip
        """``choose()``: the parts that are restored; may raise."""
        self._one, self._given, self._team, self._files = one, given, team, files
        self._averages: Loading | None = None
        self._held: Held | None = None
        self._extra: FromFile | None = None
        self._optimizers: list[Resumed] = []
        self._reads: list[tuple[list[Part], _core.Checkpoint, bool]] = []
        self._parts = team.agree(WHAT, lambda: self._look(choose(), where))
        if "averages" in self._parts:
            assert given.averages is not None
            self._averages = loading_beside(
                given.averages._averages, {key: files[name] for key, name in one.averages.items()}, where, options
            )
        self._read(check_only=True)

    def _look(self, parts: set[str], where: str) -> set[str]:
        self._parts = parts
        self._say_other_kinds(where)
        small = self._small = Wanted(self._files[manifest.STATE], "the state")
        self.state = plain.decode(self._one.state, small.whole, f"{where}: state")
        if "model" in self._parts:
            self._look_at_model(where)
        if "optimizer" in self._parts:
            _same_names("optimizer", self._given.optimizer, self._one.optimizer, where)
            assert self._given.model is not None
            held = self._held or held_by(self._given.model, self._team.process_group, saving=False)
            assert held.view is not None
            file = self._files[manifest.OPTIMIZER]
            for name, one in self._given.optimizer.items():
                tree = self._one.optimizer[name]
                self._optimizers.append(Resumed(one, held.view, tree, file, prefix("optimizer", name)))
            self._reads.append(([part for one in self._optimizers for part in one.wanted.parts], file, True))
        if "scheduler" in self._parts:
            _same_names("scheduler", self._given.scheduler, self._one.scheduler, where)
        trees = self._one.scheduler if "scheduler" in self._parts else {}
        self._scheduler = {name: plain.decode(trees[name], small.whole, f"{where}: a scheduler") for name in trees}
        self._random = self._row()
        self._reads.append((small.parts, self._files[manifest.STATE], False))
        return parts

    def _say_other_kinds(self, where: str) -> None:
        here = self._given.kinds()
        for part in self._parts & self._one.kinds.keys():
            for name, was in self._one.kinds[part].items():
                if (now := here[part].get(name, was)) != was:
                    warn(
                        f"{where}: {f'{part} {name}'.strip()} was of class {was}, and is a {now}, which takes what it "
                        "finds of that; "
                        f'{part}="skip" begins anew'
                    )

    def _look_at_model(self, where: str) -> None:
        assert self._given.model is not None
        file = self._files[manifest.MODEL]
        held = self._held = held_by(self._given.model, self._team.process_group, saving=False)
        refuse_foreign(WHAT, held.memory)
        assert held.view is not None
        self._given.refuse_strangers(WHAT, held.view)
        keys = matched(held, file.tensors.keys(), where)
        self._extra = FromFile(held.extra, file)
        if other := sorted({*held.extra} ^ {*self._extra.values, *self._extra.unexpected}):
            raise invalid(
                f"{where}: extra states are others than the model's: {', '.join(other[:8])}; nothing was restored"
            )
        parts = [Part(keys.get(part.name, part.name), part.flat, part.region) for part in held.parts]
        self._reads.append(([*parts, *self._extra.parts], file, True))

    def _row(self) -> torch.Tensor | None:
        """Of the random generators of this rank; None where other ranks saved them."""
        if self._one.world_size != self._team.size:
            return None
        (ranks, length), _ = self._small.form("random")
        row = empty([length], torch.uint8)
        region = _core.Region.grid([ranks, length], [[(self._team.rank, self._team.rank + 1)], [(0, length)]])
        self._small.read("random", row, region)
        return row

    def _read(self, **options: Any) -> None:
        for parts, file, strict in self._reads:
            engine.read_into(parts, file, self._team, strict=strict, **options)

    @torch.no_grad()
    def take(self, random: bool) -> Any:
        filled = {self._given.model, self._given.averages} - {None}
        half_restored.update(filled)
        if self._averages is not None:
            self._averages.take()
        self._read()
        self._team.agree(WHAT, lambda: [*map(Resumed.check, self._optimizers)])
        self._team.agree(WHAT, self._put)
        if self._given.averages is not None and self._averages is None:
            self._given.averages.reset()
        if random and self._random is None and self._team.rank == 0:
            warn(
                f"{WHAT}: random generators were those of {self._one.world_size} ranks, and there are "
                f"{self._team.size}: they stay as they are; random=False says so"
            )
        elif random and self._random is not None:
            generators.give(bytes(self._random.tolist()))
        half_restored.difference_update(filled)
        return self.state

    def _put(self) -> None:
        self._small.put_back()
        if self._held is not None:
            assert self._extra is not None
            self._held.filled = self._extra.values
            self._held.put_back()
        for one in self._optimizers:
            one.put()
        for name, state in self._scheduler.items():
            self._given.scheduler[name].load_state_dict(state)


def _same_names(kind: str, given: Mapping[str, Any], there: Mapping[str, Any], where: str) -> None:
    if set(given) != set(there):
        names = [", ".join(sorted(one)) if set(one) != {""} else "one without a name" for one in (there, given)]
        raise invalid(f"{where} has {kind}: {names[0]}; given: {names[1]}. Give those that are there, by their names")
