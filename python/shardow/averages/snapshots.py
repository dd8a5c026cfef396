"""Snapshots of averages while a model trains: when one is due in a directory, and what else is there
(docs/posthoc.md)."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardow import _core, errors
from shardow.averages.core import Averages
from shardow.averages.lineage import WHAT, Lineage
from shardow.base.checks import invalid
from shardow.model import dtypes

_DIRECTORY = re.compile(r"snapshot-(\d{9,})")


class Found(NamedTuple):
    """A snapshot that is there."""

    step: int
    record: str
    keys: list[str]

    @property
    def run(self) -> str:
        """Of the process that took it."""
        segments = json.loads(self.record)["segments"]
        return str(segments[-1]["run"]) if segments else ""


def directory_of(step: int) -> str:
    return f"snapshot-{step:09}"


def stored_as(dtype: torch.dtype | str | None) -> str | None:
    """The engine's name of a snapshot's dtype."""
    found = dtypes.floating(dtype)
    if found is not None and found.itemsize < 2:
        raise invalid(
            f"{WHAT}: dtype={dtype}; averages after the fact are made of float32, bfloat16, float16 or float64"
        )
    return None if found is None else dtypes.NAMES[found]


class Snapshots:
    """Those of one EMA in one directory, from here on. Construction is collective."""

    def __init__(self, directory: Path, core: Averages, step: int) -> None:
        self._directory, self._core = directory, core
        lineage = core.lineage or Lineage()
        look = core.team.agree(WHAT, lambda: self._look(lineage, step) if core.team.rank == 0 else {})
        told = json.loads(core.team.first(WHAT, json.dumps({"run": secrets.token_hex(8), **look}).encode()))
        self.last: int = told["last"]  # what comes next is due after this
        # Snapshots of other runs, which this one replaces as it comes to their steps.
        self._strange = {(at, run) for at, run in told["strange"]}
        if not lineage.begun:
            core.team.agree(WHAT, lambda: lineage.begin(core.engine.state(), core.keys, told["run"]))
        lineage.replace({run for _, run in self._strange if run})
        core.lineage = lineage

    def is_due(self, step: int, every: int) -> bool:
        return step > 0 and step // every > self.last // every

    def check(self, step: int) -> None:
        """Raises where somebody else has come to write here. Of one rank."""
        for at in (self.last, step):
            found = _found(self._directory, at)
            mine = found is None or not found.run or found.run in self._core.lineage.runs()  # type: ignore[union-attr]
            if found is not None and not mine and (at, found.run) not in self._strange:
                raise invalid(
                    f"{WHAT}: {self._directory / directory_of(at)} was written by another EMA, or another job, since "
                    "this one began: give each a directory of its own"
                )

    def _look(self, lineage: Lineage, step: int) -> dict[str, Any]:
        """What is there, as JSON; of one rank."""
        record = lineage.record()
        there = [found for at in steps_in(self._directory) if (found := _found(self._directory, at))]
        mine = [one.step for one in there if one.step <= step and _core.is_past(one.record, record, one.step)]
        strange = [one for one in there if one.step not in mine]
        # Those of its own run, after the state that it goes on from, may be of decays that it had then.
        others = [one for one in strange if one.run not in lineage.runs()]
        if other := [one for one in others if set(one.keys) != set(self._core.keys)]:
            names, keys = ", ".join(other[0].keys), ", ".join(self._core.keys)
            raise invalid(
                f"{WHAT}: {self._directory} has snapshots of averages {names}, this EMA keeps {keys}; give another "
                "directory"
            )
        return {"last": max(mine, default=step - 1), "strange": [(one.step, one.run) for one in strange]}


def _found(directory: Path, step: int) -> Found | None:
    at = directory / directory_of(step)
    try:
        files = _core.ema_files_in(at)
        record = _core.Checkpoint.open(at / next(iter(files.values()))).metadata.get(_core.RECORD_KEY)
        return None if record is None else Found(step, record, list(files))
    except (StopIteration, errors.Error):
        # Neither ours nor whole: it is replaced where this run comes to its step.
        return None


def steps_in(directory: Path) -> list[int]:
    try:
        found = [_DIRECTORY.fullmatch(name) for name in os.listdir(directory)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise errors.make("io", f"{directory}: {error.strerror}") from None
    return [int(one[1]) for one in found if one and one[0] == directory_of(int(one[1]))]
