"""Snapshots of averages while a model trains: when one is due, and the record of updates that goes with it (docs/posthoc.md).

The record is what makes any schedule, any resume and uneven steps exact later: which updates were made, run-length coded, in a segment for
each process that the run had. snapshot() sees each update where it is called after each; else it takes them to be even, and says where
they can't have been.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardow import _core, errors
from shardow.averages.core import Averages
from shardow.base.checks import invalid
from shardow.base.warnings import warn
from shardow.model import dtypes

WHAT = "snapshot()"
_DIRECTORY = re.compile(r"snapshot-(\d{9,})")


class Counts(NamedTuple):
    """Of an EMA: steps counted, updates after start_step, the step of the last, training samples by then."""

    step: int
    updates: int
    applied: int
    samples: float


def directory_of(step: int) -> str:
    return f"snapshot-{step:09}"


def stored_as(dtype: torch.dtype | str | None) -> str | None:
    """The engine's name of a snapshot's dtype."""
    found = dtypes.floating(dtype)
    if found is not None and found.itemsize < 2:
        raise invalid(f"{WHAT}: dtype={dtype}; averages after the fact are made of float32, bfloat16, float16 or float64")
    return None if found is None else dtypes.NAMES[found]


class Snapshots:
    """Those of one EMA in one directory, from here on. Construction is collective."""

    def __init__(self, directory: Path, core: Averages) -> None:
        now = Counts(*core.engine.progress)
        own: dict[str, Any] = json.loads(core.engine.state())
        look = core.team.agree(WHAT, lambda: _before(directory, now.step) if core.team.rank == 0 else None)
        found = json.loads(core.team.first(WHAT, json.dumps({"run": secrets.token_hex(8), "before": look}).encode()))
        before, schedules = found["before"], dict(zip(core.keys, map(json.loads, _json_of(core)), strict=True))
        self._every, self._start = own["update_every"], own["start_step"]
        self._in_samples = any(one["kind"] == "half_life_in_samples" for one in schedules.values())
        past = [] if before is None else core.team.agree(WHAT, lambda: _renamed(before["segments"], core.keys, directory))
        self._segments = [*past, {"run": found["run"], "start_step": self._start, "schedules": schedules, "updates": []}]
        self.seen = Counts(0, 0, 0, 0.0) if before is None else Counts(*before["counts"])
        self.last = now.step - 1 if before is None else self.seen.step  # what comes next is due after this
        self.see(now)

    def see(self, now: Counts) -> None:
        """Updates that were made since it was called last. Local."""
        if now.applied > self.seen.applied:
            self._extend(now)
        self.seen = now

    def is_due(self, every: int) -> bool:
        return self.seen.step > 0 and self.seen.step // every > self.last // every

    def record(self) -> str:
        """For the metadata of a snapshot's files."""
        return json.dumps({"format": 1, "segments": [one for one in self._segments if one["updates"]]}, separators=(",", ":"))

    def _extend(self, now: Counts) -> None:
        made, before = now.updates - self.seen.updates, self.seen.applied
        if made <= 1 and (made == 0 or before >= self._start or before == 0):
            return self._add(now.applied, now.samples)
        if before < self._start:  # the copy that averaging began with
            before = self._start
            self._add(before, self.seen.samples)
        gap = now.applied - before
        if gap != made * self._every:
            warn(
                f"{WHAT}: {made} updates between steps {before} and {now.applied} were not seen, and can't have been at even distances of "
                f"{self._every}; averages after the fact take them as spread evenly. Call it after each step",
                RuntimeWarning,
            )
        for k in range(1, made + 1):
            self._add(before + gap * k // made, self.seen.samples + (now.samples - self.seen.samples) * k / made)

    def _add(self, step: int, samples: float) -> None:
        runs: list[list[Any]] = self._segments[-1]["updates"]
        told = [samples, 0.0] if self._in_samples else []
        if not runs or not _continues(runs[-1], step, told):
            runs.append([step, 1, 1, *told])


def _continues(run: list[Any], step: int, samples: list[float]) -> bool:
    """Makes the update part of ``run`` if it can be."""
    first, every, count = run[:3]
    if count == 1:
        run[1:] = [step - first, 2, *(samples and [run[3], samples[0] - run[3]])]
        return True
    fits = step == first + every * count and (not samples or samples[0] == run[3] + run[4] * count)
    run[2] += fits
    return bool(fits)


def _json_of(core: Averages) -> list[str]:
    return [one.to_json() for one in core.engine.schedules]


def _before(directory: Path, step: int) -> dict[str, Any] | None:
    """The record and the counts of the last snapshot up to ``step``; of one rank."""
    steps = steps_in(directory)
    if later := [one for one in steps if one > step]:
        warn(
            f"{directory} has {len(later)} snapshots of later steps than {step}, up to {max(later)}: of a run that was resumed from an "
            "earlier step, or another one. They are replaced as this run comes to their steps; averages after the fact leave out the rest",
            RuntimeWarning,
        )
    for one in sorted((one for one in steps if one <= step), reverse=True):
        at = directory / directory_of(one)
        for name in _core.ema_files_in(at).values():
            told = _core.Checkpoint.open(at / name).metadata
            if _core.RECORD_KEY in told:
                state = json.loads(told[_core.STATE_KEY])
                counts = [state[key] for key in ("step", "updates", "applied_step", "applied_samples")]
                return {"segments": json.loads(told[_core.RECORD_KEY])["segments"], "counts": counts}
    return None


def steps_in(directory: Path) -> list[int]:
    try:
        found = [_DIRECTORY.fullmatch(name) for name in os.listdir(directory)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise errors.make("io", f"{directory}: {error.strerror}") from None
    return [int(one[1]) for one in found if one and one[0] == directory_of(int(one[1]))]


def _renamed(segments: list[dict[str, Any]], keys: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """With the schedules of the averages that ``keys`` go on from: of the same key, or where options have changed, of the same place."""
    theirs = list(segments[-1]["schedules"]) if segments else list(keys)
    if not set(keys) <= set(theirs) and len(keys) != len(theirs):
        there, here = ", ".join(theirs), ", ".join(keys)
        raise invalid(f"{WHAT}: {directory} has snapshots of averages {there}, this EMA keeps {here}; give another directory")
    old = list(keys) if set(keys) <= set(theirs) else theirs
    return [{**one, "schedules": {new: one["schedules"][key] for new, key in zip(keys, old, strict=True)}} for one in segments]
