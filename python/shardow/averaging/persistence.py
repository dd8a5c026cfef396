"""Files of averages: saves, snapshots, loads and exports."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from shardow import _core, errors
from shardow.averaging import history
from shardow.averaging.model_averages import ModelAverages
from shardow.averaging.state_dict import Decay, OptionsFrom, Taking
from shardow.base.checks import invalid, whole
from shardow.base.progress import Progress
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import Comparison, RankGroup, Step, equal_facts, equal_states
from shardow.files import engine, paths
from shardow.files.background import SaveHandle
from shardow.files.reading import choose
from shardow.sharding import dtypes
from shardow.sharding.equal import common_of, equal_copies
from shardow.sharding.extra_state import extra_states
from shardow.sharding.local import refuse_all_odd
from shardow.sharding.saved_form import saved_form

Report = dict[str, Any]
Metadata = Mapping[str, str] | None


def to_save(
    averages: ModelAverages, what: str, max_shard_size: int | str | None, metadata: Metadata,
    dtype: torch.dtype | str | None = None, named: bool = False,
) -> engine.SaveStep:  # fmt: skip
    """Returns this rank's step of a save of averages. May raise."""
    handing = averages.handing_out(what)
    if max_shard_size is not None and len(averages.keys) > 1:
        raise invalid(f"{what}: max_shard_size= goes with one decay; of several, each average has one file")
    for key in {_core.STATE_KEY, _core.RECORD_KEY} & set(engine.texts(metadata)):
        raise invalid(f"{what}: metadata {key!r} is the EMA's own state; choose another key")
    files = _files(averages, handing.value.state, engine.texts(metadata), named)

    def texts() -> list[dict[str, str]]:  # with the state of all ranks
        return [texts for _, texts in _core.ema_files(averages.engine, handing.value.state)]

    options = engine.dtype_and_limit(dtype, max_shard_size)
    return Step(engine.ToSave(files, options, texts), handing.compared)


def snapshot(
    averages: ModelAverages, directory: paths.StrPath, every: int, dtype: torch.dtype | str | None, asynchronous: bool,
    progress: Progress | None,
) -> Report | SaveHandle | None:  # fmt: skip
    """See EMA.snapshot()."""
    path = Path(paths.to_write(directory))
    every = whole("every", every, 1)
    chosen = dtypes.floating(dtype)
    if chosen is not None and chosen.itemsize < 2:
        raise invalid(f"{history.WHAT}: dtype={dtype}; snapshots are float32, bfloat16, float16 or float64")
    counts = history.Counts(*averages.engine.progress)
    if counts.step < averages.history.seen.step:
        averages.go_on_from(history.UpdateHistory())  # the averages have begun again
    snapshots = averages.snapshots.get(path)
    if snapshots is None:
        snapshots = averages.snapshots[path] = Snapshots(path, averages, counts.step)
    averages.history.extend(counts)
    if counts.step == 0 or counts.step // every <= snapshots.last // every:  # none is due
        return None

    def find() -> engine.SaveStep:
        if averages.ranks.rank == 0:
            snapshots.check(counts.step)
        step = to_save(averages, history.WHAT, None, None, dtype, named=True)
        _refuse_infinite(step.value.files, chosen)
        return step

    call = engine.SaveCall(find, path / directory_of(counts.step), averages.ranks, history.WHAT, progress)
    saved = call.write_in_background() if asynchronous else call.write()
    snapshots.last = counts.step
    return saved


def _refuse_infinite(files: Sequence[engine.FileParts], dtype: torch.dtype | None) -> None:
    for part in (part for file in files for part in file.parts if dtype is not None):
        if lost := int((part.flat.to(dtype).isinf() & part.flat.isfinite()).sum()):
            count = f"{lost} averages of '{part.name}' are beyond the largest {dtype}"
            raise invalid(f"{history.WHAT}: {count}, and would be stored as infinite; give a wider dtype, as bfloat16")


def directory_of(step: int) -> str:
    return paths.name_of("snapshot", step)


class Snapshots:
    """The snapshots of one EMA in one directory, from here on. Construction is collective."""

    def __init__(self, directory: Path, averages: ModelAverages, step: int) -> None:
        self._directory, self._averages = directory, averages
        listing = json.loads(averages.ranks.on_first(history.WHAT, lambda: self._list(step)))
        self.last: int = listing["last"]  # the next snapshot is due after this step
        # Snapshots of other runs, which this one replaces as it comes to their steps.
        self._strange = {(at, run) for at, run in listing["strange"]}
        updates = averages.history
        if not updates.begun:
            state = averages.engine.state()
            averages.ranks.agree(history.WHAT, lambda: updates.begin(state, averages.keys, listing["run"]))
        updates.replace({run for _, run in self._strange if run})

    def check(self, step: int) -> None:
        """Raises where another EMA or job has begun to write here. For one rank."""
        for at in (self.last, step):
            run, *_ = _snapshot_at(self._directory, at)
            if run and run not in self._averages.history.runs() and (at, run) not in self._strange:
                raise invalid(
                    f"{history.WHAT}: {self._directory / directory_of(at)} was written by another EMA, or another job, "
                    "since this one began: give each a directory of its own"
                )

    def _list(self, step: int) -> bytes:
        """Returns as JSON the snapshots that rank 0 sees, and the name of this run."""
        updates, last, strange = self._averages.history, step - 1, []
        own = updates.record()
        for at in sorted(paths.numbered(self._directory, "snapshot")):
            run, record, keys = _snapshot_at(self._directory, at)
            if at <= step and record and _core.is_past(record, own, at):
                last = at
                continue
            # This run's snapshots after the state that it goes on from may be of decays that it had then.
            if record and run not in updates.runs() and set(keys) != set(self._averages.keys):
                names, kept = ", ".join(keys), ", ".join(self._averages.keys)
                raise invalid(
                    f"{history.WHAT}: {self._directory} has snapshots of averages {names}, this EMA keeps {kept}; give "
                    "another directory"
                )
            strange.append((at, run))
        return json.dumps({"run": secrets.token_hex(8), "last": last, "strange": strange}).encode()


def _snapshot_at(directory: Path, step: int) -> tuple[str, str, list[str]]:
    """Returns the name of the process that took a snapshot, its record and the keys of its averages; "" for a process
    without a name, and all empty where there is no snapshot."""
    at = directory / directory_of(step)
    try:
        files = _core.ema_files_in(at)
        record = _core.Checkpoint.open(at / next(iter(files.values()))).metadata[_core.RECORD_KEY]
    except (StopIteration, KeyError, errors.Error):
        # Not ours, or not whole: this run replaces it where it comes to its step.
        return "", "", []
    _core.is_past(record, record, 0)  # raises where it is damaged
    return ["", *(segment["run"] for segment in json.loads(record)["segments"])][-1], record, list(files)


def _files(
    averages: ModelAverages, state: str, metadata: Mapping[str, str], named: bool = False
) -> list[engine.FileParts]:
    """Returns one file for each average, named by the engine, or with ``named`` by its key in any case."""
    record, files = averages.history.to_save(averages.engine, averages.keys), []
    for k, (name, texts) in enumerate(_core.ema_files(averages.engine, state)):
        called = _core.ema_file_name(averages.keys[k]) if named else name
        files.append(engine.FileParts(called, averages.parts(k, saving=True), {**metadata, **record, **texts}))
    return files


@torch.no_grad()
def load(
    averages: ModelAverages, path: paths.StrPath, strict: bool, verify: bool, options: OptionsFrom,
    progress: Progress | None,
) -> Report:  # fmt: skip
    """See EMA.load()."""
    loading = _FileLoad(averages, path, bool(strict), bool(verify), options)
    with contextlib.ExitStack() as loading.begun:
        reports = loading.run(path, averages.ranks, verify=bool(verify), progress=progress)
    names = {key: [*dict.fromkeys(chain(*(report[key] for report in reports)))] for key in ("missing", "unexpected")}
    bytes_read, seconds = sum(report["bytes_read"] for report in reports), max(report["seconds"] for report in reports)
    return {**names, "bytes_read": bytes_read, "seconds": seconds}


def export(
    averages: ModelAverages, path: paths.StrPath, dtype: torch.dtype | str | None, max_shard_size: int | str | None,
    decay: Decay | None, progress: Progress | None, metadata: Metadata, pretrained: bool = False,
) -> Report:  # fmt: skip
    """See EMA.export(). ``pretrained``: with the tensors of transformers' save_pretrained()."""
    ranks = averages.ranks

    def find() -> engine.SaveStep:
        compared = averages.handing_out("export()", averages.others, decay=decay).compared
        k, others = choose(averages.keys, decay), averages.others()
        refuse_all_odd(others)
        own = {local.name: local.tensor.dtype for local in (*(row.local for row in averages.tracked), *others)}
        held = averages.held(k, complete=True, saving=True)
        parts, cast = engine.in_dtypes(held.parts, own, dtypes.floating(dtype))
        if pretrained and (form := saved_form(averages.view)):
            parts = form.parts(parts)
        extra = extra_states(averages.view.model) if ranks.rank == 0 else {}
        file = engine.with_extra("", parts, extra, engine.texts(metadata))
        options = {**engine.dtype_and_limit(None, max_shard_size), "dtype": cast}
        return Step(engine.ToSave([file], options), compared)

    return engine.SaveCall(find, path, ranks, "export()", progress).write()


class _FileLoad(engine.Load):
    """One rank's part of EMA.load()."""

    begun: contextlib.ExitStack

    def __init__(
        self, averages: ModelAverages, path: paths.StrPath, strict: bool, verify: bool, options: OptionsFrom
    ) -> None:
        self._averages, self._path, self._options, self._strict = averages, path, options, strict
        self._facts = {"options": options, "strict": strict, "verify": verify, "decays": list(averages.keys)}

    def look(self) -> list[Comparison]:
        self._averages.swap.refuse("load()")
        self._where = paths.to_read(self._path)
        self._taking = Taking(self._averages, self._options)
        return [equal_facts("load()", {**self._facts, "path": self._where}, self._averages.ranks)]

    def find(self) -> tuple[str, list[str], bytes]:
        return self._where, self._taking.loading.names_at(self._where), b""

    def wanted(self, _: bytes, files: list[_core.Checkpoint]) -> list[tuple[list[LocalShard], bool]]:
        self._taking.look(files[0].metadata, len(files), self._where)
        return [(self._averages.parts(k), self._strict) for k in range(len(files))]

    def begin(self, _: list[Report]) -> None:
        self.begun.enter_context(self._taking.begun("load()"))


def to_save_beside(
    averages: ModelAverages, what: str, metadata: Mapping[str, str], savers: RankGroup, state: str | None
) -> dict[str, engine.FileParts]:
    """Returns by key the files of averages in a directory that has other files; ``savers``: the ranks that save those.
    ``state``: that of all ranks, which have compared it; None where averages have other ranks. Collective then."""
    if state is None:
        state = averages.ranks.step(what, lambda: averages.handing_out(what)).state
    files = _files(averages, state, metadata, named=True)
    if averages.ranks.size < savers.size:  # each rank averages alone: all must have the same averages

        def prepare() -> Step[None]:
            common = [common_of(row.local, average) for row in averages.tracked_weights() for average in row.averages]
            states = equal_states(what, savers, averages.engine.state(), {})
            return Step(None, [equal_copies(what, common, savers), states])

        savers.step(what, prepare)
    return dict(zip(averages.keys, files, strict=True))
