"""What an EMA writes to files and reads from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardow import _core
from shardow.averages import lineage, snapshots
from shardow.averages import state as _state
from shardow.averages.states import Decay, OptionsFrom, States
from shardow.base.checks import invalid, one_of, whole
from shardow.base.progress import Progress, shown
from shardow.files import engine, paths
from shardow.files.background import SaveHandle, settle
from shardow.files.decay_keys import choose
from shardow.model.dtypes import floating
from shardow.model.equal import DIFFERENT_WEIGHTS, Common, check_equal, common_of
from shardow.model.extra_state import extra_states, for_file
from shardow.model.local import LocalTensor, refuse_all_odd
from shardow.ranks.gather import Part
from shardow.ranks.team import Team


class Saved(States):
    """Files of averages; EMA has the rest."""

    def save(
        self, path: paths.StrPath, *, max_shard_size: int | str | None = None, progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """All averages with their state into ``path``: a .safetensors file, or with several decays a directory of them.
        Collective.

        load() resumes from it. Every rank writes its own bytes of the final file, which replaces what was there when it
        is whole.

        Args:
            max_shard_size: of a file in a directory, in bytes or like "5GB"; of an EMA with one decay.
            progress: called on rank 0 with (bytes done, bytes in all) about twice a second.
            metadata: texts for the header, beside the state.

        Returns:
            {"files": [path], "bytes_written": by this rank, "seconds": float}.
        """
        files, options = self._to_save("save()", max_shard_size, metadata)
        return engine.write(files, path, self._core.team, progress=progress, **options)

    def async_save(
        self, path: paths.StrPath, *, max_shard_size: int | str | None = None, progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SaveHandle:  # fmt: skip
        """save() that returns when this rank's averages are copied, so that training and updates go on; see
        shardow.async_save(). Collective."""
        files, options = self._to_save("async_save()", max_shard_size, metadata)
        return engine.write_in_background(files, path, self._core.team, progress=progress, **options)

    def snapshot(
        self, directory: paths.StrPath, every: int, *, dtype: torch.dtype | str | None = None,
        asynchronous: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any] | SaveHandle | None:  # fmt: skip
        """After each step: saves all averages into ``directory/snapshot-000001000`` where one is due, for
        shardow.posthoc. Collective then, and at the first call; else it costs nothing.

        A resumed run goes on where its snapshots are, without a gap: call it with the same directory. Each is whole or
        not there; other files stay. Their metadata say which updates the run made, so that any schedule, and any
        spacing, is exact later.

        Args:
            every: steps between snapshots, counted from step 0.
            dtype: as they are stored: torch.bfloat16 takes half of the space, and rounds to 8 bits; None: the averages'
                own.
            asynchronous: returns when this rank has copied what it will write, as async_save() does.
            progress: called on rank 0 with (bytes done, bytes in all).

        Returns:
            None where nothing was due; else as save(): {"files": [path], ...}, or with ``asynchronous`` a SaveHandle.

        Raises:
            ValueError: an option out of range; snapshots of other averages are there; inside swapped(). OSError,
                TimeoutError.
        """
        where = Path(paths.to_write(directory)).absolute()
        whole("every", every, 1)
        stored = snapshots.stored_as(dtype)
        now = lineage.Counts(*self._core.engine.progress)
        if self._core.lineage is not None and now.step < self._core.lineage.seen.step:
            self._core.go_on_from(None)  # it has begun again
        mine = self._core.snapshots.get(where)
        if mine is None:
            mine = self._core.snapshots[where] = snapshots.Snapshots(where, self._core, now.step)
        self._core.lineage.see(now)  # type: ignore[union-attr]
        if not mine.is_due(now.step, every):
            return None
        self._core.team.agree(lineage.WHAT, lambda: mine.check(now.step) if self._core.team.rank == 0 else None)
        files, options = self._to_save(lineage.WHAT, None, None)
        for key, file in zip(self._core.keys, files, strict=True):
            file.name = _core.ema_file_name(key)
        write = engine.write_in_background if asynchronous else engine.write
        told = write(
            files,
            where / snapshots.directory_of(now.step),
            self._core.team,
            progress=progress,
            **{**options, "dtype": stored},
        )
        mine.last = now.step
        return told

    def _to_save(
        self, what: str, max_shard_size: int | str | None, metadata: Mapping[str, str] | None
    ) -> tuple[list[engine.FileParts], dict[str, Any]]:
        def check() -> dict[str, Any]:
            self._core.swap.refuse(what)
            if max_shard_size is not None and len(self._core.keys) > 1:
                raise invalid(f"{what}: max_shard_size= goes with one decay; of several, each average has one file")
            for key in {_core.STATE_KEY, _core.RECORD_KEY} & set(metadata or {}):
                raise invalid(f"{what}: metadata {key!r} is the EMA's own state; choose another key")
            return engine.dtype_and_limit(None, max_shard_size)

        options = self._core.team.agree(what, check)
        return self._files(self._core.ready_to_hand_out(what), metadata or {}), options

    def _files(self, state: str, metadata: Mapping[str, str]) -> list[engine.FileParts]:
        """As the engine names them, one for each average."""
        core = self._core
        record = {} if core.lineage is None else {_core.RECORD_KEY: core.lineage.to_save(core.engine, core.keys)}
        named = enumerate(_core.ema_files(core.engine, state))
        return [
            engine.FileParts(name, core.parts(k, saving=True), {**metadata, **record, **told})
            for k, (name, told) in named
        ]

    @torch.no_grad()
    def load(
        self,
        path: paths.StrPath,
        strict: bool = True,
        *,
        verify: bool = True,
        options: OptionsFrom = "file",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Takes what save() wrote, at any world size and sharding; each rank reads its own slices. Collective.

        Args:
            strict: every average here is in the file, and every one there is wanted; else the rest is in the report,
                and averages that the file lacks stay as they are.
            verify: compare checksums where the file carries them; no extra reads.
            options: as in load_state_dict(): "file" or "own".
            progress: called on rank 0 with (bytes done, bytes in all) about twice a second.

        Returns:
            {"missing": [name], "unexpected": [name], "bytes_read": by this rank, "seconds": float}.

        Raises:
            ValueError: something does not fit, or the file is corrupt; FileNotFoundError, OSError, TimeoutError.
        """

        def ready() -> str:
            self._core.swap.refuse("load()")
            one_of("options", options, ("file", "own"))
            return paths.to_read(path)

        where, team = self._core.team.agree("load()", ready), self._core.team
        settle(team.process_group)
        found = _core.open_ema(team.group, self._core.engine, where, getattr(_core.OptionsFrom, options), team.timeout)
        return Loading(self, found, where, options, strict, verify, progress).take()

    def export(
        self,
        path: paths.StrPath,
        dtype: torch.dtype | str | None = None,
        *,
        max_shard_size: int | str | None = None,
        decay: Decay | None = None,
        progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """A complete model with averaged weights for inference: a directory in the Hugging Face layout, or one
        .safetensors file.

        Collective.

        Args:
            dtype: of all floating tensors, "bfloat16", torch.float8_e4m3fn, ...; None: each weight's own. float8, and
                weights of several dtypes, take a copy of this rank's part in memory.
            max_shard_size: of a file in the directory, in bytes or like "5GB".
            decay: which of several averages.
            progress: called on rank 0 with (bytes done, bytes in all) about twice a second.
            metadata: texts for the header.

        Returns:
            {"files": [path], "bytes_written": by this rank, "seconds": float}.
        """
        self._core.ready_to_hand_out("export()", self._core.others, self._core.asked(decay))
        k = choose(self._core.keys, decay)
        others = self._core.others()

        def check() -> tuple[list[Part], dict[str, Any]]:
            refuse_all_odd(others)
            own = {one.name: one.local.tensor.dtype for one in self._core.tracked} | {
                one.name: one.tensor.dtype for one in others
            }
            parts = self._core.parts(k, saving=True)
            parts += [Part(one.name, one.flat(), one.region) for one in others if one.counts_on(self._core.team.rank)]
            parts, cast = engine.in_dtypes(parts, own, floating(dtype))
            return parts, {**engine.dtype_and_limit(None, max_shard_size), "dtype": cast}

        parts, options = self._core.team.agree("export()", check)
        extra, texts = for_file(extra_states(self._core.view.model)) if self._core.team.rank == 0 else ([], {})
        file = engine.FileParts("", [*parts, *extra], {**texts, **(metadata or {})})
        return engine.write([file], path, self._core.team, progress=progress, **options)


class Loading:
    """load() from files that are open: whatever does not fit is listed when this is made, before anything has changed.
    Collective.
    """

    def __init__(
        self, ema: Saved, found: Sequence[_core.Checkpoint], where: str, options: OptionsFrom, strict: bool = True,
        verify: bool = True,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """``found``: in the order of this EMA's averages; ``where`` is for messages."""
        self._ema, core = ema, ema._core
        self._record, self._state = found[0].metadata.get(_core.RECORD_KEY), found[0].metadata.get(_core.STATE_KEY, "")
        lineage.check(self._record, len(found), where)  # the same on every rank
        self._loading = _core.Loading(
            core.team.group, core.engine, found, where, getattr(_core.OptionsFrom, options), strict=strict,
            verify=verify,
            timeout=core.team.timeout, progress=shown(progress, "load", core.team.rank),
        )  # fmt: skip

    def take(self) -> dict[str, Any]:
        core = self._ema._core
        with core.or_as_before():
            taken: tuple[dict[str, Any], list[tuple[str, str, str]]] = self._loading.take()
            report, changed = taken
            self._ema._go_on("load()", changed)
        core.go_on_from(lineage.taken(core.engine, self._record, self._state, core.keys))
        return report


def common_beside(ema: Saved, what: str, everybody: Team) -> list[Common | None]:
    """What ranks should have in common, for one comparison with all else that they save; nothing where the EMA has
    other ranks, which to_save_beside() asks. Raises where averages can't be handed out."""
    if ema._core.team.group is not everybody.group:
        return []
    return [one and replace(one, name=f"averages of {one.name}") for one in ema._core.handed_out(what)]


def to_save_beside(ema: Saved, what: str, metadata: Mapping[str, str], everybody: Team) -> dict[str, engine.FileParts]:
    """By key, the files of an EMA in a directory that has others, after common_beside(); ``everybody``: who saves that.
    Collective, over the EMA's ranks too."""
    compared = ema._core.team.group is everybody.group
    files = ema._files(ema._core.agreed_state(what, {}) if compared else ema._core.ready_to_hand_out(what), metadata)
    if ema._core.team.size < everybody.size:  # each rank of its own: they must have the same
        check_equal(what, lambda: map(common_of, *_alone(ema)), everybody, DIFFERENT_WEIGHTS)
        _state.agreed(what, ema._core.engine.state(), everybody, {})
    for key, file in zip(ema._core.keys, files, strict=True):
        file.name = _core.ema_file_name(key)
    return dict(zip(ema._core.keys, files, strict=True))


def loading_beside(ema: Saved, found: Mapping[str, _core.Checkpoint], where: str, options: OptionsFrom) -> Loading:
    """``found``: all averages that are there, by their keys. Collective."""

    def ready() -> list[str]:
        ema._core.swap.refuse("restore()")
        return ema._taken_as(list(found), options, where)

    keys = ema._core.team.agree("restore()", ready)
    return Loading(ema, [found[key] for key in keys], where, options)


def _alone(ema: Saved) -> tuple[list[LocalTensor], list[torch.Tensor]]:
    pairs = [(one.local, average) for one in ema._core.tracked_weights() for average in one.averages]
    return [local for local, _ in pairs], [average for _, average in pairs]
