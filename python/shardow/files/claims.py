"""Saves by some ranks of a job alone. Their files say in the header which ranks of which job saved which tensors, so
that parts of one model (pipeline stages) do not replace each other without an error: the file is the claim on its path.

A rank of a save reads the claim before the save begins, and rank 0 again at each call of ``progress``: the save has the
path's lock then, and has published nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardow import _core, errors
from shardow.base.checks import invalid, warn
from shardow.base.progress import Progress
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import Combined, RankGroup
from shardow.distributed.store_group import ANSWER, store_group

KEY = "shardow.part"
_CHANNEL = 2  # of the job's store
_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_saved: set[tuple[str, bytes]] = set()  # path and claim of this process's saves


class Claim(Combined):
    """A save by some ranks of a job to a path. ``names``: of its files, empty where the engine names them. Ranks make
    what the files say of it, and raise ValueError where other ranks of the job have saved other tensors there."""

    def __init__(self, path: str, names: Sequence[str], parts: Iterable[LocalShard], ranks: RankGroup) -> None:
        self._path, self._names, self._place = path, names, os.path.realpath(path)
        self._tensors = sorted({(part.name, tuple(part.region.shape)) for part in parts})
        group = ranks.process_group
        self._members = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        job = _job(path, min(ANSWER, ranks.timeout / 2)) if ranks.rank == 0 else ""
        super().__init__(json.dumps([job, _digest(self._tensors)]).encode(), self._joined)

    def _joined(self, by_rank: list[bytes]) -> bytes:
        jobs, digests = zip(*map(json.loads, by_rank), strict=True)
        claim = {"job": jobs[0], "ranks": self._members, "digest": _digest(sorted(set(digests)))}
        self._refuse(claim)
        return json.dumps(claim).encode()

    def metadata(self) -> dict[str, str]:
        """Returns what the files say of the save, when ranks have combined it."""
        _saved.add((self._place, self.total))
        return {KEY: self.total.decode()} if json.loads(self.total)["job"] else {}

    def watched(self, progress: Progress | None) -> Progress:
        """Returns ``progress``, which raises where other ranks have claimed the path meanwhile. Of rank 0."""

        def checked(done: int, total: int) -> None:
            self._refuse(json.loads(self.total))
            if progress is not None:
                progress(done, total)

        return checked

    def _refuse(self, own: Mapping[str, Any]) -> None:
        """Raises where the files that are there are other ranks', and of other tensors than ``own`` says."""
        for name in self._names if own["job"] else ():
            path = os.path.join(self._path, name) if name else self._path
            try:
                opened = _core.Checkpoint.open(path)
                claim = json.loads(opened.metadata[KEY])
                is_other = claim["job"] != own["job"]
                may = is_other or claim["digest"] == own["digest"] or set(claim["ranks"]) <= set(self._members)
                shared = json.dumps({**own, "digest": claim["digest"]}).encode()
            except (errors.Error, LookupError, TypeError, ValueError):  # nothing, or no such save's
                continue
            if not may and (self._place, shared) not in _saved:
                raise invalid(
                    f"{self._path}: two saves of one job would replace each other, and nothing was written. Saved "
                    f"before: {_words(opened.tensors, claim['ranks'])}. This save: "
                    f"{_words(dict(self._tensors), self._members)}. Give each part of a model a path of its own (a "
                    "pipeline stage: its number in the name), or save all parts as one: shardow.save(part, path, "
                    "group=) with a group of all their ranks"
                )


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _words(names: Collection[str], ranks: Sequence[int]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    some = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"'{min(names, default='')}'{others} of rank{'s' * (len(ranks) > 1)} {some}"


def _job(path: str, patience: float) -> str:
    """Returns the job's id, which its first such save leaves in the job's store; "" where the store has no answer."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _jobs:
        own = secrets.token_hex(8)
        try:
            answer = store_group(world, _CHANNEL).try_compare_set("job", "", own, patience)
        except RuntimeError:  # a simulated job's store has no compare_set()
            return ""
        if answer is None:
            warn(
                f"{path}: the job's store did not answer within {patience:g} s, so that it is not noticed where other "
                "ranks save other tensors there; if they do, the last save stays",
                RuntimeWarning,
            )
            return ""
        _jobs[world] = answer
    return _jobs[world]
