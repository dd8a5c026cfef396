"""Which updates made an EMA's averages, over all processes that its run had: the record that snapshots carry
(docs/posthoc.md).

It is part of the EMA's saved state: a run that is resumed goes on with exactly the past that it has, whatever else lies
in a directory of snapshots. A resume adds a segment, of a process with a name that no other has. snapshot() sees each
update where it is called after each; else it takes them as spread evenly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardow import _core, errors
from shardow.base.checks import invalid

WHAT = "snapshot()"
IN_STATE = "snapshots"  # the record's name in the state of a state_dict(); in files it stands beside the state


class Counts(NamedTuple):
    """Of an EMA: steps counted, updates after start_step, the step of the last, training samples by then."""

    step: int
    updates: int
    applied: int
    samples: float


class UpdateHistory:
    """The record of one EMA, or none: ``past``: segments of the processes before; ``seen``: the counts up to which it
    has all updates."""

    def __init__(self, past: Sequence[dict[str, Any]] = (), seen: Counts = Counts(0, 0, 0, 0.0)) -> None:  # noqa: B008
        self._past, self.seen = list(past), seen
        self._own: dict[str, Any] = {}  # this process's segment, once it has begun, but for its updates
        self._updates: list[list[Any]] = []  # [first step, every, count, samples at the first, samples between two]

    @property
    def begun(self) -> bool:
        return bool(self._own.get("run"))

    def runs(self) -> set[str]:
        return {segment["run"] for segment in (*self._past, self._own) if segment}

    def begin(self, state: str, keys: Sequence[str], run: str) -> None:
        """From here on updates are those of ``run`` (empty while it takes no snapshots), under the options of
        ``state``.
        """
        now = json.loads(state)
        schedules = dict(zip(keys, now["schedules"], strict=True))
        self._past = _renamed(self._segments(), keys)
        self._own = {"run": run, "start_step": now["start_step"], "schedules": schedules}
        self._in_samples = any(one["kind"] == "half_life_in_samples" for one in schedules.values())
        self._updates = []

    def replace(self, runs: set[str]) -> None:
        """This one takes the place of others."""
        if more := runs - self.runs():
            self._own["replaces"] = sorted(more.union(self._own.get("replaces", ())))

    def see(self, now: Counts) -> None:
        """Updates that were made since it was called last. Local."""
        if now.applied > self.seen.applied:
            self._extend(now)
        self.seen = now

    def record(self) -> str:
        """For the metadata of files."""
        segments = self._segments()
        packed = any("packed" in one for one in segments)  # of a process that an earlier version ran
        return json.dumps({"format": 2 if packed else 1, "segments": segments}, separators=(",", ":"))

    def _segments(self) -> list[dict[str, Any]]:
        if not self._updates:
            return self._past
        numbers = 5 if self._in_samples else 3
        return [*self._past, {**self._own, "updates": [one[:numbers] for one in self._updates]}]

    def to_save(self, engine: _core.Average, keys: Sequence[str]) -> dict[str, str]:
        """Returns the metadata of a state that is saved: the record up to now, where there is one. Local."""
        if not self._past and not self._own:
            return {}
        now = Counts(*engine.progress)
        if now.applied > self.seen.applied and not self._own:
            self.begin(engine.state(), keys, "")
        self.see(now)
        return {_core.RECORD_KEY: self.record()}

    def _extend(self, now: Counts) -> None:
        made, before, start = now.updates - self.seen.updates, self.seen.applied, self._own["start_step"]
        if made <= 1 and (made == 0 or before >= start or before == 0):
            return self._add(now.applied, now.samples)
        if before < start:  # the copy that averaging began with
            before = start
            self._add(before, self.seen.samples)
        for k in range(1, made + 1):
            samples = self.seen.samples + (now.samples - self.seen.samples) * k / made
            self._add(before + (now.applied - before) * k // made, samples)

    def _add(self, step: int, samples: float) -> None:
        """Adds an update to the last range where it goes on with that, else begins another range."""
        if not self._in_samples:
            samples = 0.0
        first, every, count, begin, apart = self._updates[-1] if self._updates else (0, 0, 0, 0.0, 0.0)
        if count == 1:
            self._updates[-1][1:] = [step - first, 2, begin, samples - begin]
        elif count and (step, samples) == (first + every * count, begin + apart * count):
            self._updates[-1][2] += 1
        else:
            self._updates.append([step, 1, 1, samples, 0.0])


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


def taken(engine: _core.Average, record: str | None, state: str, keys: Sequence[str]) -> UpdateHistory:
    """Of a state that ``engine`` has taken, with a record that check() took. Where there is none, nobody took snapshots
    in that run: that it had other options is told all the same, and else there is nothing to tell."""
    now = Counts(*engine.progress)
    if record is not None:
        return UpdateHistory(_renamed(json.loads(record)["segments"], keys), now)
    theirs, ours = (json.loads(one) for one in (state, engine.state()))
    if now.applied == 0 or all(
        theirs[option] == ours[option] for option in ("schedules", "start_step", "update_every")
    ):
        return UpdateHistory()
    history = UpdateHistory()
    history.begin(state, _core.decay_keys_in({_core.STATE_KEY: state}), "")
    history.see(now)
    return UpdateHistory(_renamed(json.loads(history.record())["segments"], keys), now)


def with_record(state: str, metadata: Mapping[str, str]) -> str:
    """Returns the text of a state for a state_dict(), with what to_save() returned."""
    return json.dumps({**json.loads(state), IN_STATE: json.loads(metadata[_core.RECORD_KEY])}) if metadata else state


def metadata_of(state: str) -> dict[str, str]:
    """Returns what with_record() wrote as the metadata of a file have it."""
    record = json.loads(state).get(IN_STATE)
    return {_core.STATE_KEY: state} | ({} if record is None else {_core.RECORD_KEY: json.dumps(record)})


def _renamed(segments: list[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """With the schedules of the averages that ``keys`` go on from: of the same key, or where options have changed, of
    the same place.
    """
    theirs = list(segments[-1]["schedules"]) if segments else list(keys)
    if not set(keys) <= set(theirs) and len(keys) != len(theirs):
        there, here = ", ".join(theirs), ", ".join(keys)
        raise invalid(f"{WHAT}: the loaded state is of averages {there}, this EMA keeps {here}; begin anew: reset()")
    old = list(keys) if set(keys) <= set(theirs) else theirs
    return [
        {**one, "schedules": {new: one["schedules"][key] for new, key in zip(keys, old, strict=True)}}
        for one in segments
    ]
