"""Saves by some ranks of a job alone. Their files say in the header which ranks of which job saved which tensors, so
that parts of one model (pipeline stages) do not replace each other without an error: the file is the claim on its path.

Rank 0 of a save reads the claim before the save begins, and again at each call of ``progress``: the save has the path's
lock then, and has published nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Collection, Iterable, Sequence

import torch.distributed as dist

from shardow import _core, errors
from shardow.base.checks import invalid, warn
from shardow.base.progress import Progress
from shardow.ranks.gather import Part
from shardow.ranks.store_group import ANSWER, store_group
from shardow.ranks.team import Team

KEY = "shardow.part"
_CHANNEL = 2  # of the job's store
_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
_saved: set[tuple[str, str, str]] = set()  # path, claimant (job and ranks) and digest of this process's saves


def claimed(
    path: str, names: Sequence[str], parts: Iterable[Part], team: Team, progress: Progress | None
) -> tuple[dict[str, str], Progress | None]:
    """Returns (metadata, progress) of a save. ``names``: of its files, empty where the engine names them. Raises
    ValueError on all ranks where other ranks of the job have saved other tensors there. Collective."""
    if not dist.is_initialized() or team.size >= dist.get_world_size():
        return {}, progress
    tensors = sorted({(part.name, tuple(part.region.shape)) for part in parts})

    def joined(digests: list[bytes]) -> bytes:
        return hashlib.sha256(b"".join(sorted(set(digests)))).hexdigest().encode()

    digest = team.decide("save()", hashlib.sha256(json.dumps(tensors).encode()).digest(), joined).decode()
    group, place = team.process_group, os.path.realpath(path)
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    job: str | None = None

    def refusal() -> str:
        nonlocal job
        job = job or _job(path, min(ANSWER, team.timeout / 2))
        for name in names if job is not None else ():
            try:
                opened = _core.Checkpoint.open(_core.solo(), os.path.join(path, name) if name else path, team.timeout)
                theirs = json.loads(opened.metadata[KEY])
                may = theirs["job"] != job or theirs["digest"] == digest or set(theirs["ranks"]) <= set(ranks)
            except (errors.Error, LookupError, TypeError, ValueError):  # nothing, or no such save's
                continue
            if not may and (place, f"{job} {ranks}", theirs["digest"]) not in _saved:
                return (
                    f"{path}: two saves of one job would replace each other, and nothing was written. Saved before: "
                    f"{_words(opened.tensors, theirs['ranks'])}. This save: {_words(dict(tensors), ranks)}. Give each "
                    "part of a model a path of its own (a pipeline stage: its number in the name), or save all parts "
                    "as one: shardow.save(part, path, group=) with a group of all their ranks"
                )
        _saved.add((place, f"{job} {ranks}", digest))
        return ""

    def guarded(done: int, total: int) -> None:
        if found := refusal():
            raise invalid(found)
        if progress is not None:
            progress(done, total)

    if text := team.on_first("save()", lambda: os.fsencode(refusal())):
        raise invalid(os.fsdecode(text))
    if job is None:
        return {}, progress
    return {KEY: json.dumps({"job": job, "ranks": ranks, "digest": digest})}, guarded


def _words(names: Collection[str], ranks: Sequence[int]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    some = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"'{min(names, default='')}'{others} of rank{'s' * (len(ranks) > 1)} {some}"


def _job(path: str, patience: float) -> str | None:
    """Returns the job's id, which its first such save leaves in the job's store; None where the store has no answer."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _jobs:
        own = secrets.token_hex(8)
        try:
            answer = store_group(world, _CHANNEL).try_compare_set("job", "", own, patience)
        except RuntimeError:  # a simulated job's store has no compare_set()
            return None
        if answer is None:
            warn(
                f"{path}: the job's store did not answer within {patience:g} s, so that it is not noticed where other "
                "ranks save other tensors there; if they do, the last save stays",
                RuntimeWarning,
            )
            return None
        _jobs[world] = answer
    return _jobs[world]
