"""Saves of some of a job's ranks: who saved what to which path, kept in the job's store, so that parts of one model
(pipeline stages) do not replace each other there without a word. All that follows is of the place where the files will
be:

1. Whoever saves first leaves a claim (``compare_set``): its ranks, and a digest of names and global shapes. Whoever
   comes later with the same tensors shares the claim.
2. One with other tensors takes the claim over where it shares it, where it is joined by all ranks of the claim, or
   where what the claim's save left is not there any more. Else it is refused.
3. ``left`` says what the last of these saves left there (a file, its inode, size and time), and nothing while one is
   under way.

Nobody waits: rank 0 of those who save asks the store, for as long as it may take to answer. Where it does not, the save
goes on without a claim, and a warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardow import _core, errors
from shardow.base import warnings
from shardow.files.background import Save
from shardow.ranks.store_group import ANSWER, StoreGroup, store_group
from shardow.ranks.team import Team

_CHANNEL = 2  # of the job's store


@dataclass(frozen=True)
class _Claim:
    ranks: list[int]
    digest: str
    tensors: int
    first: str  # tensor
    root: str  # all who share the claim have it in common
    nonce: str

    @staticmethod
    def of(ranks: list[int], tensors: Sequence[tuple[str, Sequence[int]]]) -> _Claim:
        digest = hashlib.sha256(json.dumps(tensors).encode()).hexdigest()
        return _Claim(
            ranks, digest, len(tensors), tensors[0][0] if tensors else "", secrets.token_hex(8), secrets.token_hex(8)
        )

    def __str__(self) -> str:
        some = ", ".join(map(str, self.ranks[:8])) + ", ..." * (len(self.ranks) > 8)
        others = f" and {self.tensors - 1} more" if self.tensors > 1 else ""
        return f"'{self.first}'{others} of rank{'s' * (len(self.ranks) > 1)} {some}"


@dataclass(frozen=True)
class ClaimedSave:
    """_core.Save of a place that is claimed. ``before``: what was left there."""

    save: _core.Save
    group: StoreGroup
    patience: float
    place: _Place
    nonce: str
    before: str | None

    @property
    def staging_bytes(self) -> int:
        return self.save.staging_bytes

    def stage(self, memory: int, size: int) -> None:
        self.save.stage(memory, size)

    def write(self) -> dict[str, Any]:
        """(3). Where it fails, what was there still is; where nothing was, the next claim finds it gone."""
        try:
            report: dict[str, Any] = self.save.write()
        except BaseException:
            if self.before != "":  # that of others, who are on the way
                self._leave(json.loads(self.before or '{"file": "", "what": "nothing"}'))
            raise
        file = os.path.abspath(report["files"][0])
        self._leave({"file": file, "what": _what_is_at(file)})
        return report

    def _leave(self, left: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the job may be at its end
            self.group.ask(lambda store: self.place.leave(store, {**left, "nonce": self.nonce}), self.patience)


def claimed(save: _core.Save, names: Sequence[str], path: str, team: Team) -> Save:
    """``save``, to be written in place of the given one. ``names``: of its files, empty where the engine names one or
    more. Raises ValueError on all of the save's ranks where it must not be written. Collective."""
    if not dist.is_initialized() or team.size >= dist.get_world_size():
        return save
    ranks = [dist.get_rank()] if team.process_group is None else dist.get_process_group_ranks(team.process_group)
    answer = team.agree(
        "save()", lambda: _claim(save, ranks, _Place(path, names), path, team.timeout) if team.rank == 0 else save
    )
    refusal = team.first("save()", answer.encode() if isinstance(answer, str) else b"").decode()
    if refusal or isinstance(answer, str):
        raise errors.make("invalid_argument", refusal)
    return answer


def _claim(save: _core.Save, ranks: list[int], place: _Place, path: str, timeout: float) -> Save | str:
    """The save to write, or why it must not be written."""
    assert dist.group.WORLD is not None
    mine = _Claim.of(ranks, save.tensors)
    group, patience = (
        store_group(dist.group.WORLD, _CHANNEL),
        min(ANSWER, timeout / 2),
    )  # once before the save, once after it
    try:
        answer = group.ask(lambda store: _settle(store, place, mine), patience)
    except RuntimeError:  # a store that can't: the job is only simulated
        return save
    if answer is None:
        warnings.warn(
            f"{path}: the job's store did not answer within {patience:g} s, and can't say whether other ranks save "
            "other tensors there; "
            "if they do, the last save stays",
            RuntimeWarning,
        )
        return ClaimedSave(save, group, patience, place, mine.nonce, None)  # the store may still come to it
    if isinstance(answer, _Claim):
        return (
            f"{path}: two saves of one job would replace each other, and nothing was written. There, or on the way: "
            f"{answer}. "
            f"Now: {mine}. Give each part of a model a path of its own (a pipeline stage: its number in the name), "
            "or save all parts as one: shardow.save(part, path, group=) with a group of all their ranks"
        )
    return ClaimedSave(save, group, patience, place, *answer)


def _settle(store: Any, place: _Place, mine: _Claim) -> tuple[str, str | None] | _Claim:
    """(1), (2): the claim's nonce and what was left before, or who has it."""
    expected = ""
    while True:
        wanted = json.dumps(asdict(mine))
        found = bytes(store.compare_set(f"{place.key}/claim", expected, wanted)).decode()
        if found == wanted:
            return place.begin(store, mine)
        theirs = _Claim(**json.loads(found))
        if theirs.digest == mine.digest:
            return place.begin(store, replace(theirs, ranks=mine.ranks))
        if set(theirs.ranks) <= set(mine.ranks) or place.shares(store, theirs, mine.ranks):
            mine = replace(mine, root=theirs.root)
        elif not place.is_gone(store, theirs):
            return theirs
        expected = found


class _Place:
    """Where files will be, for all of a job that see the same storage. ``key``: in the store."""

    def __init__(self, path: str, names: Sequence[str]) -> None:
        where = Path(os.path.realpath(path))
        if names != [""]:
            where /= "|".join(names)
        elif not path.endswith(".safetensors"):
            where /= "model.safetensors"
        else:  # a link to a file is replaced
            where = Path(os.path.realpath(os.path.dirname(path))) / os.path.basename(path)
        self.key = "place/" + hashlib.sha256(f"{_storage(where)}\0{where}".encode(errors="surrogateescape")).hexdigest()

    def begin(self, store: Any, claim: _Claim) -> tuple[str, str | None]:
        store.set(f"{self.key}/{claim.root}/{claim.ranks}", "shares")
        before = self._left(store)
        store.set(f"{self.key}/left", "")
        return claim.nonce, before

    def shares(self, store: Any, theirs: _Claim, ranks: list[int]) -> bool:
        return bool(store.check([f"{self.key}/{theirs.root}/{ranks}"]))

    def is_gone(self, store: Any, theirs: _Claim) -> bool:
        """What their save left there; False where it has left nothing yet."""
        left = json.loads(self._left(store) or "{}")
        return bool(left.get("nonce") == theirs.nonce and left["what"] != _what_is_at(left["file"]))

    def leave(self, store: Any, left: dict[str, Any]) -> None:
        """Unless others have claimed the place since."""
        key = f"{self.key}/claim"
        if store.check([key]) and json.loads(store.get(key))["nonce"] == left["nonce"]:
            store.set(f"{self.key}/left", json.dumps(left))

    def _left(self, store: Any) -> str | None:
        key = f"{self.key}/left"
        return bytes(store.get(key)).decode() if store.check([key]) else None


def _what_is_at(file: str) -> list[int] | None:
    try:
        descriptor = os.open(
            file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # which makes a network's file system look
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _storage(where: Path) -> str:
    """Different where machines, or containers of one, are known to have each its own."""
    there = next(one for one in where.parents if os.path.isdir(one))
    return f"{_machine()} {os.stat(there).st_dev}" if _core.is_local(there) else ""


@functools.cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
