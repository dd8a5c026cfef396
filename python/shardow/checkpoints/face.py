"""Checkpoints: what a training run needs to go on, as one directory a step that appears whole or not at all."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardow.averaging.state_dict import OptionsFrom
from shardow.base.checks import seconds, whole
from shardow.base.progress import Progress
from shardow.checkpoints import manifest, restoring
from shardow.checkpoints.retention import retire
from shardow.checkpoints.saving import WHAT, Saving
from shardow.distributed.rank_group import RankGroup, Step
from shardow.ema import EMA
from shardow.files import engine, paths
from shardow.files.background import SaveHandle, settle

#: What has a state: an optimizer, a scheduler, a GradScaler; or several by their names.
Stateful = Any


class Checkpoints:
    """The checkpoints of a training run: ``directory/step-000001000`` has model, averages, optimizers, schedulers,
    values and random generators of step 1000, as safetensors and JSON (docs/checkpoints.md).

    A step appears by one rename when all of it is on disk; a process that dies leaves the steps before it. Every rank
    writes and reads its own bytes, whatever the sharding, and a step is restored on any number of ranks.

    Args:
        directory: of one run; other files in it stay.
        keep: how many of the newest steps stay; None: all. Older ones are removed when a new one is whole, without what
            others put there.
        keep_every: steps that are multiples of it stay for ever.
        group: the ranks that train; by default all.
        timeout: seconds or timedelta, the deadline of every collective call.
    """

    def __init__(
        self, directory: paths.StrPath, keep: int | None = 3, keep_every: int | None = None, *,
        group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None,
    ) -> None:  # fmt: skip
        self.directory = Path(paths.to_write(directory))
        self.keep = None if keep is None else whole("keep", keep, 1)
        self.keep_every = None if keep_every is None else whole("keep_every", keep_every, 1)
        self._group, self._timeout = group, seconds(timeout)

    def _ranks(self) -> RankGroup:
        world = dist.group.WORLD if dist.is_initialized() else None
        return RankGroup(world if self._group is None else self._group, self._timeout)

    def save(
        self, step: int, model: nn.Module | None = None, averages: EMA | None = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None, state: Mapping[str, Any] | None = None,
        asynchronous: bool = False, *, progress: Progress | None = None,
    ) -> dict[str, Any] | SaveHandle:  # fmt: skip
        """All that is given as ``step``, in place of a step of that number. Collective.

        Args:
            step: how many steps were taken.
            model: of any sharding. averages: its EMA. optimizer: of the model's parameters; several by name. scheduler:
                what else has state_dict() and load_state_dict(): a GradScaler; several by name.
            state: values by name, the same on all ranks: numbers, texts, None, lists, tuples, dicts, tensors.
            asynchronous: returns when this rank has copied what it will write. One such save is under way at a time:
                the next save, of either kind, waits for it, and raises its error if nobody has seen it; so do latest()
                and restore().
            progress: called on rank 0 with (bytes done, bytes in all).

        Returns:
            dict: {"files": [path], "bytes_written": by this rank, "seconds": float}; with ``asynchronous`` a
            SaveHandle, whose wait() gives it.

        Raises:
            ValueError: ranks that disagree, what is no plain value, an optimizer of other parameters, weights that are
                averages now, or that a restore() has filled in part;
            OSError: the disk; TimeoutError: a rank is missing. The steps that were there are there then.
        """
        ranks, step = self._ranks(), whole("step", step)
        settle(ranks.process_group)
        asked = {"model": model, "averages": averages, "optimizer": optimizer, "scheduler": scheduler}
        files, texts = Saving(step, asked, state, ranks).files()
        path = self.directory / manifest.directory_of(step)
        committed = functools.partial(retire, self.directory, step, self.keep, self.keep_every)
        prepared = Step(engine.ToSave(files, {"texts": texts, "commit": manifest.NAME}))
        call = engine.SaveCall(lambda: prepared, path, ranks, WHAT, progress, committed)
        return call.write_in_background() if asynchronous else call.write()

    def latest(self) -> int | None:
        """The newest step that is whole, the same on all ranks; None where there is none. Warns of newer ones that are
        damaged.

        Collective.
        """
        ranks = self._ranks()
        settle(ranks.process_group)

        def newest() -> bytes:
            found = restoring.newest(self.directory)
            return b"%d" % found.step if found is not None else b""

        step = ranks.on_first("Checkpoints.latest()", newest)
        return int(step) if step else None

    def restore(
        self, model: nn.Module | Literal["skip"] | None = None,
        averages: EMA | Literal["from_model", "skip"] | None = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Literal["skip"] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | Literal["skip"] | None = None, step: int | None = None, *,
        absent: Mapping[str, str] | None = None, random: bool = True, options: OptionsFrom = "file",
    ) -> dict[str, Any]:  # fmt: skip
        """Fills what is given from ``step``, by default the newest whole one, and returns ``state`` as it was saved.
        Collective.

        Everything is compared on all ranks before anything changes. Where the number of ranks is that of the save,
        training goes on bit for bit. Nothing is left out without a word: a part that is there is given, or named to be
        left.

        Args:
            model, averages, optimizer, scheduler: as save() was given them; "skip" leaves a part there.
                averages="from_model" leaves averages there too, for an EMA that is made of the restored model
                afterwards.
            absent: what happens with parts that are given and are not there, which is an error without it: {"averages":
                "from_model"}, where the EMA begins anew at the restored weights; {"optimizer": "keep", "scheduler":
                "keep"}, which stay as they are.
            random: also the random generators of this rank. Those of another number of ranks are of no use, and a
                warning says so.
            options: of averages, as in EMA.load().

        Raises:
            FileNotFoundError: there is no such step, or none at all; ValueError: something does not fit, or is damaged;
                OSError,
            TimeoutError.
        """
        ranks, step = self._ranks(), None if step is None else whole("step", step)
        asked = {"model": model, "averages": averages, "optimizer": optimizer, "scheduler": scheduler}
        reading = restoring.Restoring(self.directory, step, ranks, asked, absent, random, options)
        state: dict[str, Any] = reading.take()
        return state

    def __repr__(self) -> str:
        return f"Checkpoints('{self.directory}', keep={self.keep}, keep_every={self.keep_every})"
