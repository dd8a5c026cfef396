"""The line "two jobs": this job saves, loads and reads a path to which another one saves at the same time."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import shardow
from programs.other_job import version
from programs.same import same
from programs.story import Kept, Tensors

if TYPE_CHECKING:
    from programs.machine import Machine


class TwoJobs:
    """Whoever looks finds one job's version, whole; in the end the last one of either, or any of a job that was
    killed."""

    def __init__(self, machine: Machine, which: int, path: str, other: tuple[str, int, Any]) -> None:
        self._machine, self._which, self._name, self._path = machine, which, path, machine.folder / path
        self._oracle, self._ema, self._marks = machine.oracle, machine.emas[which], machine.marks
        self._names, self._seed, self._dies = other
        self._mine: list[Kept] = []

    def do(self, mine: tuple[str, ...]) -> None:
        self._marks.make("wanted")
        self._marks.wait("ready")
        for number, verb in enumerate(mine):
            getattr(self, "_" + verb)(number)
        dist.barrier()
        self._marks.make("enough")
        self._marks.wait("over")
        others = self._others() if self._dies else self._others()[-1:]
        self._oracle.files[self._name] = self._found([*self._mine[-1:], *others], self._content(), "in the end")
        if self._dies:
            self._oracle.killed.add(self._name)

    def _save(self, number: int) -> None:
        seed = zlib.crc32(f"{self._seed} {number}".encode()) & 0xFFFF
        self._machine.do_step(seed)
        self._oracle.follow(("step", seed))
        self._mine.append(self._oracle.saved(self._which))
        self._ema.save(self._path)

    def _read(self, number: int) -> None:
        content = self._content()
        self._found(self._all(), content, "read")

    def _load(self, number: int) -> None:
        try:
            self._ema.load(self._path, options="own")
        except ValueError as error:
            assert isinstance(error, shardow.Error)
            assert self._names == "other", error
            return
        content = self._ema.full_state_dict(complete=False)
        found: list[Any] = [self._found(self._all(), content, "loaded") if self._machine.rank == 0 else None]
        dist.broadcast_object_list(found, 0)
        assert self._ema.step == found[0][1], "steps of one version, tensors of another"
        self._oracle.loaded(self._which, found[0])

    def _content(self) -> Tensors:
        with shardow.open(self._path) as opened:
            return {name: opened[name] for name in opened}

    def _all(self) -> list[Kept]:
        return [*self._mine, *self._others()]

    def _others(self) -> list[Kept]:
        return [version(self._seed, self._names, number) for number in range(self._marks.versions())]

    def _found(self, versions: list[Kept], content: Tensors, what: str) -> Kept:
        return next_equal(versions, content, f"{what}: nobody saved what {self._name} holds ({len(versions)} versions)")


def next_equal(versions: list[Kept], content: Tensors, otherwise: str) -> Kept:
    def equal(kept: Kept) -> bool:
        try:
            same(content, kept[0], "")
        except AssertionError:
            return False
        return True

    found = next((kept for kept in versions if equal(kept)), None)
    assert found is not None, otherwise
    return found
