"""Files of averages: saves, snapshots, loads and exports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardow import _core
from shardow.averages import lineage, snapshots
from shardow.averages import state as _state
from shardow.averages.core import Averages
from shardow.averages.state_dict import Decay, OptionsFrom, renew_keys, saved_keys
from shardow.base.checks import invalid, one_of, whole
from shardow.base.progress import Progress, shown
from shardow.files import engine, paths
from shardow.files.background import SaveHandle, settle
from shardow.files.decay_keys import choose
from shardow.model.dtypes import floating
from shardow.model.equal import DIFFERENT_WEIGHTS, Common, check_equal, common_of
from shardow.model.extra_state import extra_states, for_file
from shardow.model.local import refuse_all_odd
from shardow.ranks.gather import Part
from shardow.ranks.team import Team

Report = dict[str, Any]
Metadata = Mapping[str, str] | None


def save(
    averages: Averages, path: paths.StrPath, max_shard_size: int | str | None, progress: Progress | None,
    metadata: Metadata,
) -> Report:  # fmt: skip
    """See EMA.save()."""
    files, options = _files_to_save(averages, "save()", max_shard_size, metadata)
    return engine.write(files, path, averages.team, progress=progress, **options)


def async_save(
    averages: Averages, path: paths.StrPath, max_shard_size: int | str | None, progress: Progress | None,
    metadata: Metadata,
) -> SaveHandle:  # fmt: skip
    """See EMA.async_save()."""
    files, options = _files_to_save(averages, "async_save()", max_shard_size, metadata)
    return engine.write_in_background(files, path, averages.team, progress=progress, **options)


def snapshot(
    averages: Averages, directory: paths.StrPath, every: int, dtype: torch.dtype | str | None, asynchronous: bool,
    progress: Progress | None,
) -> Report | SaveHandle | None:  # fmt: skip
    """See EMA.snapshot()."""
    where = Path(paths.to_write(directory))
    whole("every", every, 1)
    stored = snapshots.stored_as(dtype)
    now = lineage.Counts(*averages.engine.progress)
    if averages.lineage is not None and now.step < averages.lineage.seen.step:
        averages.go_on_from(None)  # it has begun again
    mine = averages.snapshots.get(where)
    if mine is None:
        mine = averages.snapshots[where] = snapshots.Snapshots(where, averages, now.step)
    averages.lineage.see(now)  # type: ignore[union-attr]
    if not mine.is_due(now.step, every):
        return None
    averages.team.agree(lineage.WHAT, lambda: mine.check(now.step) if averages.team.rank == 0 else None)
    files, options = _files_to_save(averages, lineage.WHAT, None, None)
    for key, file in zip(averages.keys, files, strict=True):
        file.name = _core.ema_file_name(key)
    write = engine.write_in_background if asynchronous else engine.write
    told = write(
        files,
        where / snapshots.directory_of(now.step),
        averages.team,
        progress=progress,
        **{**options, "dtype": stored},
    )
    mine.last = now.step
    return told


def _files_to_save(
    averages: Averages, what: str, max_shard_size: int | str | None, metadata: Metadata
) -> tuple[list[engine.FileParts], dict[str, Any]]:
    """Returns the files and the engine's options, after all ranks have agreed. Collective."""

    def check() -> dict[str, Any]:
        averages.swap.refuse(what)
        if max_shard_size is not None and len(averages.keys) > 1:
            raise invalid(f"{what}: max_shard_size= goes with one decay; of several, each average has one file")
        for key in {_core.STATE_KEY, _core.RECORD_KEY} & set(metadata or {}):
            raise invalid(f"{what}: metadata {key!r} is the EMA's own state; choose another key")
        return engine.dtype_and_limit(None, max_shard_size)

    options = averages.team.agree(what, check)
    return _files(averages, averages.ready_to_hand_out(what), metadata or {}), options


def _files(averages: Averages, state: str, metadata: Mapping[str, str]) -> list[engine.FileParts]:
    """Returns one file for each average, with the engine's name."""
    record = {}
    if averages.lineage is not None:
        record = {_core.RECORD_KEY: averages.lineage.to_save(averages.engine, averages.keys)}
    return [
        engine.FileParts(name, averages.parts(k, saving=True), {**metadata, **record, **texts})
        for k, (name, texts) in enumerate(_core.ema_files(averages.engine, state))
    ]


@torch.no_grad()
def load(
    averages: Averages, path: paths.StrPath, strict: bool, verify: bool, options: OptionsFrom,
    progress: Progress | None,
) -> Report:  # fmt: skip
    """See EMA.load()."""

    def ready() -> str:
        averages.swap.refuse("load()")
        one_of("options", options, ("file", "own"))
        return paths.to_read(path)

    team = averages.team
    where = team.agree("load()", ready)
    settle(team.process_group)
    files = _core.open_ema(team.group, averages.engine, where, getattr(_core.OptionsFrom, options), team.timeout)
    return Loading(averages, files, where, options, strict, verify, progress).take()


def export(
    averages: Averages, path: paths.StrPath, dtype: torch.dtype | str | None, max_shard_size: int | str | None,
    decay: Decay | None, progress: Progress | None, metadata: Metadata,
) -> Report:  # fmt: skip
    """See EMA.export()."""
    team = averages.team
    averages.ready_to_hand_out("export()", averages.others, averages.asked(decay))
    k = choose(averages.keys, decay)
    others = averages.others()

    def check() -> tuple[list[Part], dict[str, Any]]:
        refuse_all_odd(others)
        own = {row.name: row.local.tensor.dtype for row in averages.tracked}
        own |= {local.name: local.tensor.dtype for local in others}
        parts = averages.parts(k, saving=True)
        parts += [Part(local.name, local.flat(), local.region) for local in others if local.counts_on(team.rank)]
        parts, cast = engine.in_dtypes(parts, own, floating(dtype))
        return parts, {**engine.dtype_and_limit(None, max_shard_size), "dtype": cast}

    parts, options = team.agree("export()", check)
    extra, texts = for_file(extra_states(averages.view.model)) if team.rank == 0 else ([], {})
    file = engine.FileParts("", [*parts, *extra], {**texts, **(metadata or {})})
    return engine.write([file], path, team, progress=progress, **options)


class Loading:
    """load() from files that are open: whatever does not fit is listed when this is made, before anything has changed.
    Collective.
    """

    def __init__(
        self, averages: Averages, files: Sequence[_core.Checkpoint], where: str, options: OptionsFrom,
        strict: bool = True, verify: bool = True,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """``files``: in the order of the averages; ``where`` is for messages."""
        self._averages, metadata = averages, files[0].metadata
        self._record, self._state = metadata.get(_core.RECORD_KEY), metadata.get(_core.STATE_KEY, "")
        lineage.check(self._record, len(files), where)  # the same on every rank
        self._loading = _core.Loading(
            averages.team.group, averages.engine, files, where, getattr(_core.OptionsFrom, options), strict=strict,
            verify=verify,
            timeout=averages.team.timeout, progress=shown(progress, "load", averages.team.rank),
        )  # fmt: skip

    def take(self) -> Report:
        averages = self._averages
        with averages.or_as_before():
            taken: tuple[Report, list[tuple[str, str, str]]] = self._loading.take()
            report, changed = taken
            renew_keys(averages, "load()", changed)
        averages.go_on_from(lineage.taken(averages.engine, self._record, self._state, averages.keys))
        return report


def common_beside(averages: Averages, what: str, everybody: Team) -> list[Common | None]:
    """Returns what ranks should have in common, for one comparison with all else that they save; nothing where the
    averages have other ranks, which to_save_beside() asks. Raises where averages can't be handed out."""
    if averages.team.group is not everybody.group:
        return []
    return [common and replace(common, name=f"averages of {common.name}") for common in averages.handed_out(what)]


def to_save_beside(
    averages: Averages, what: str, metadata: Mapping[str, str], everybody: Team
) -> dict[str, engine.FileParts]:
    """Returns by key the files of averages in a directory that has others, after common_beside(); ``everybody``: who
    saves that. Collective, over the averages' ranks too."""
    compared = averages.team.group is everybody.group
    state = averages.agreed_state(what, {}) if compared else averages.ready_to_hand_out(what)
    files = _files(averages, state, metadata)
    if averages.team.size < everybody.size:  # each rank of its own: they must have the same
        rows = averages.tracked_weights()
        check_equal(
            what, lambda: [common_of(row.local, average) for row in rows for average in row.averages], everybody,
            DIFFERENT_WEIGHTS,
        )  # fmt: skip
        _state.agreed(what, averages.engine.state(), everybody, {})
    for key, file in zip(averages.keys, files, strict=True):
        file.name = _core.ema_file_name(key)
    return dict(zip(averages.keys, files, strict=True))


def loading_beside(
    averages: Averages, files: Mapping[str, _core.Checkpoint], where: str, options: OptionsFrom
) -> Loading:
    """``files``: all averages of a step, by their keys. Collective."""

    def ready() -> list[str]:
        averages.swap.refuse("restore()")
        return saved_keys(averages, list(files), options, where)

    keys = averages.team.agree("restore()", ready)
    return Loading(averages, [files[key] for key in keys], where, options)
