"""Records which updates made an EMA's averages, over all processes of its run; snapshots carry the record
(docs/posthoc.md).

The record is part of the EMA's saved state: a resumed run goes on with exactly its own past, whatever else lies in a
directory of snapshots. A resume adds a segment, of a process with a unique name. snapshot() records each update where
it is called after each; else it assumes evenly spaced updates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardow import _core, errors
from shardow.base.checks import invalid

WHAT = "snapshot()"
IN_STATE = "snapshots"  # the record's name in the state of a state_dict(); a file has it beside the state


class Counts(NamedTuple):
    """Counters of an EMA: steps, updates after start_step, the step of the last update, training samples by then."""

    step: int
    updates: int
    applied: int
    samples: float


class UpdateHistory:
    """The record of one EMA's updates, or none. ``past``: segments of the processes before; ``seen``: the counts up to
    which it has all updates."""

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
        """Begins a segment: further updates are those of ``run`` (empty while it takes no snapshots), under the options
        of ``state``."""
        options = json.loads(state)
        schedules = dict(zip(keys, options["schedules"], strict=True))
        self._past = _renamed(self._segments(), keys)
        self._own = {"run": run, "start_step": options["start_step"], "schedules": schedules}
        self._in_samples = any(schedule["kind"] == "half_life_in_samples" for schedule in schedules.values())
        self._updates = []

    def replace(self, runs: set[str]) -> None:
        """Records that this run takes the place of ``runs``."""
        if more := runs - self.runs():
            self._own["replaces"] = sorted(more.union(self._own.get("replaces", ())))

    def extend(self, counts: Counts) -> None:
        """Records the updates since the last call, up to ``counts``. Local."""
        if counts.applied > self.seen.applied:
            self._add_updates(counts)
        self.seen = counts

    def record(self) -> str:
        """Returns the record as text, for the metadata of files."""
        segments = self._segments()
        packed = any("packed" in segment for segment in segments)  # written by an earlier version
        return json.dumps({"format": 2 if packed else 1, "segments": segments}, separators=(",", ":"))

    def _segments(self) -> list[dict[str, Any]]:
        if not self._updates:
            return self._past
        numbers = 5 if self._in_samples else 3
        return [*self._past, {**self._own, "updates": [entry[:numbers] for entry in self._updates]}]

    def to_save(self, engine: _core.Average, keys: Sequence[str]) -> dict[str, str]:
        """Returns the metadata of a state that is saved: the record up to now, where there is one. Local."""
        if not self._past and not self._own:
            return {}
        counts = Counts(*engine.progress)
        if counts.applied > self.seen.applied and not self._own:
            self.begin(engine.state(), keys, "")
        self.extend(counts)
        return {_core.RECORD_KEY: self.record()}

    def _add_updates(self, counts: Counts) -> None:
        made, before, start = counts.updates - self.seen.updates, self.seen.applied, self._own["start_step"]
        if made <= 1 and (made == 0 or before >= start or before == 0):
            return self._add(counts.applied, counts.samples)
        if before < start:  # averaging began with a copy of the weights
            before = start
            self._add(before, self.seen.samples)
        for k in range(1, made + 1):
            samples = self.seen.samples + (counts.samples - self.seen.samples) * k / made
            self._add(before + (counts.applied - before) * k // made, samples)

    def _add(self, step: int, samples: float) -> None:
        """Adds an update to the last range where it continues that range, else begins another range."""
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
    """Raises ValueError for a record that is damaged, or of another number of averages; NotImplementedError for one of
    a later version."""
    if record is None:
        return
    try:
        _core.is_past(record, record, 0)
    except errors.Error as error:
        raise errors.make(error.code, f"{where}: {error}") from None
    keys = [list(segment["schedules"]) for segment in json.loads(record)["segments"]]
    if any(names != keys[0] or len(names) != averages for names in keys):
        raise errors.make(
            "corrupt", f"{where}: its record of updates is of averages {keys}, and not of the {averages} that are there"
        )


def after_load(engine: _core.Average, record: str | None, state: str, keys: Sequence[str]) -> UpdateHistory:
    """Returns the history of a state that ``engine`` has loaded, with a record that check() accepted. A run without a
    record took no snapshots: its updates are recorded only where it had other options than this EMA."""
    counts = Counts(*engine.progress)
    if record is not None:
        return UpdateHistory(_renamed(json.loads(record)["segments"], keys), counts)
    saved, own = (json.loads(text) for text in (state, engine.state()))
    if counts.applied == 0 or all(
        saved[option] == own[option] for option in ("schedules", "start_step", "update_every")
    ):
        return UpdateHistory()
    history = UpdateHistory()
    history.begin(state, _core.decay_keys_in({_core.STATE_KEY: state}), "")
    history.extend(counts)
    return UpdateHistory(_renamed(json.loads(history.record())["segments"], keys), counts)


def with_record(state: str, metadata: Mapping[str, str]) -> str:
    """Returns the text of a state for a state_dict(), with the metadata that to_save() returned."""
    return json.dumps({**json.loads(state), IN_STATE: json.loads(metadata[_core.RECORD_KEY])}) if metadata else state


def metadata_of(state: str) -> dict[str, str]:
    """Returns the metadata of a file for a text that with_record() returned."""
    record = json.loads(state).get(IN_STATE)
    return {_core.STATE_KEY: state} | ({} if record is None else {_core.RECORD_KEY: json.dumps(record)})


def _renamed(segments: list[dict[str, Any]], keys: Sequence[str]) -> list[dict[str, Any]]:
    """Returns ``segments`` with the schedules of the averages that ``keys`` go on from: those of the same key, or where
    options have changed, of the same position."""
    saved_keys = list(segments[-1]["schedules"]) if segments else list(keys)
    if not set(keys) <= set(saved_keys) and len(keys) != len(saved_keys):
        saved, kept = ", ".join(saved_keys), ", ".join(keys)
        raise invalid(f"{WHAT}: the loaded state is of averages {saved}, this EMA keeps {kept}; begin anew: reset()")
    old = list(keys) if set(keys) <= set(saved_keys) else saved_keys
    return [
        {**segment, "schedules": {new: segment["schedules"][key] for new, key in zip(keys, old, strict=True)}}
        for segment in segments
    ]
