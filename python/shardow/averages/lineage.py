"""Which updates made an EMA's averages, over all processes that its run had: the record that snapshots carry
(docs/posthoc.md).

It is part of the EMA's saved state: a run that is resumed goes on with exactly the past that it has, whatever else lies
in a directory of snapshots. Updates are told in a segment for each process, which has a name that nobody else has; the
engine spells them. snapshot() sees each update where it is called after each; else they are taken to be even, and it is
said where they can't have been.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardow import _core, errors
from shardow.base.checks import invalid
from shardow.base.warnings import warn

WHAT = "snapshot()"
IN_STATE = "snapshots"  # the record's name in the state of a state_dict(); in files it stands beside the state


class Counts(NamedTuple):
    """Of an EMA: steps counted, updates after start_step, the step of the last, training samples by then."""

    step: int
    updates: int
    applied: int
    samples: float


class Lineage:
    """``past``: segments of the processes before; ``seen``: the counts up to which all is told."""

    def __init__(self, past: Sequence[dict[str, Any]] = (), seen: Counts = Counts(0, 0, 0, 0.0)) -> None:  # noqa: B008
        self._past, self.seen = list(past), seen
        self._own: dict[str, Any] | None = None  # this process's segment, but for its updates
        self._updates = _core.RecordedUpdates(in_samples=False)

    @property
    def begun(self) -> bool:
        return self._own is not None and bool(self._own["run"])

    def runs(self) -> set[str]:
        return {one["run"] for one in (*self._past, *([self._own] if self._own else []))}

    def begin(self, state: str, keys: Sequence[str], run: str) -> None:
        """From here on updates are those of ``run`` (empty while it takes no snapshots), under the options of
        ``state``.
        """
        now = json.loads(state)
        schedules = dict(zip(keys, now["schedules"], strict=True))
        self._past = _renamed(self._segments(), keys)
        self._own = {"run": run, "start_step": now["start_step"], "schedules": schedules}
        self._every, self._start = now["update_every"], now["start_step"]
        self._in_samples = any(one["kind"] == "half_life_in_samples" for one in schedules.values())
        self._updates = _core.RecordedUpdates(self._in_samples)

    def replace(self, runs: set[str]) -> None:
        """This one takes the place of others."""
        if self._own is not None and (more := runs - self.runs()):
            self._own["replaces"] = sorted(more.union(self._own.get("replaces", ())))

    def see(self, now: Counts, warns: bool = True) -> None:
        """Updates that were made since it was called last. Local."""
        if now.applied > self.seen.applied:
            self._extend(now, warns)
        self.seen = now

    def record(self) -> str:
        """For the metadata of files."""
        segments = self._segments()
        packed = any("packed" in one for one in segments)  # which earlier versions don't read
        return json.dumps({"format": 2 if packed else 1, "segments": segments}, separators=(",", ":"))

    def _segments(self) -> list[dict[str, Any]]:
        return [
            *self._past,
            *([{**self._own, **json.loads(self._updates.to_json())}] if self._own and self._updates else ()),
        ]

    def to_save(self, engine: _core.Average, keys: Sequence[str]) -> str:
        """The record up to now, for a state that is saved. Local."""
        now = Counts(*engine.progress)
        if now.applied > self.seen.applied and self._own is None:
            self.begin(engine.state(), keys, "")
        self.see(now)
        return self.record()

    def _extend(self, now: Counts, warns: bool) -> None:
        made, before = now.updates - self.seen.updates, self.seen.applied
        if made <= 1 and (made == 0 or before >= self._start or before == 0):
            return self._updates.add(now.applied, now.samples)
        if before < self._start:  # the copy that averaging began with
            before = self._start
            self._updates.add(before, self.seen.samples)
        gap = now.applied - before
        if gap != made * self._every:
            if warns:
                self._warn(made, before, now.applied)
        elif not self._in_samples:
            return self._updates.add_evenly(before + self._every, self._every, made)
        for k in range(1, made + 1):
            self._updates.add(
                before + gap * k // made, self.seen.samples + (now.samples - self.seen.samples) * k / made
            )

    def _warn(self, made: int, before: int, applied: int) -> None:
        warn(
            f"{WHAT}: {made} updates between steps {before} and {applied} were not seen, and can't have been at even "
            "distances of "
            f"{self._every}; averages after the fact take them as spread evenly. Call it after each step",
            RuntimeWarning,
        )


def check(record: str | None, averages: int, where: str) -> None:
    """Raises ValueError for a record that is damaged, or not of so many averages, NotImplementedError for one of a
    later version.
    """
    if record is None:
        return
    try:
        _core.is_past(record, record, 0)
    except errors.Error as error:
        raise errors.make(error.code, f"{where}: {error}") from None
    keys = [list(one["schedules"]) for one in json.loads(record)["segments"]]
    if any(one != keys[0] or len(one) != averages for one in keys):
        raise errors.make(
            "corrupt", f"{where}: its record of updates is of averages {keys}, and not of the {averages} that are there"
        )


def taken(engine: _core.Average, record: str | None, state: str, keys: Sequence[str]) -> Lineage | None:
    """Of a state that ``engine`` has taken, with a record that check() took. Where there is none, nobody took snapshots
    in that run: that it had other options is told all the same, and else there is nothing to tell."""
    now = Counts(*engine.progress)
    if record is not None:
        return Lineage(_renamed(json.loads(record)["segments"], keys), now)
    theirs, ours = (json.loads(one) for one in (state, engine.state()))
    if now.applied == 0 or all(
        theirs[option] == ours[option] for option in ("schedules", "start_step", "update_every")
    ):
        return None
    lineage = Lineage()
    lineage.begin(state, _core.decay_keys_in({_core.STATE_KEY: state}), "")
    lineage.see(now, warns=False)
    return Lineage(_renamed(json.loads(lineage.record())["segments"], keys), now)


def with_record(state: str, lineage: Lineage | None, engine: _core.Average, keys: Sequence[str]) -> str:
    """The text of a state for a state_dict()."""
    if lineage is None:
        return state
    return json.dumps({**json.loads(state), IN_STATE: json.loads(lineage.to_save(engine, keys))})


def record_in(state: str) -> str | None:
    found = json.loads(state).get(IN_STATE)
    return None if found is None else json.dumps(found)


def _renamed(segments: list[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """With the schedules of the averages that ``keys`` go on from: of the same key, or where options have changed, of
    the same place.
    """
    theirs = list(segments[-1]["schedules"]) if segments else list(keys)
    if not set(keys) <= set(theirs) and len(keys) != len(theirs):
        there, here = ", ".join(theirs), ", ".join(keys)
        raise invalid(
            f"{WHAT}: the state that was loaded is of averages {there}, this EMA keeps {here}; begin anew: reset()"
        )
    old = list(keys) if set(keys) <= set(theirs) else theirs
    return [
        {**one, "schedules": {new: one["schedules"][key] for new, key in zip(keys, old, strict=True)}}
        for one in segments
    ]
