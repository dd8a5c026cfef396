"""A directory of a checkpoint that is there whole or not at all: filled under another name, published by one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardow._team import Team


def publish(what: str, directory: Path, partial: Path, team: Team, fill: Callable[[Path], None]) -> None:
    """``fill(partial)`` on every rank, which may be collective; then ``partial``, on the same file system, becomes ``directory``. Collective; ``what`` is for messages.

    Whatever fails on one rank is an error on all, and leaves nothing behind. A directory that was there before is replaced: it is moved away first.
    """
    team.agree(what, lambda: _make(partial) if team.rank == 0 else None)
    try:
        fill(partial)
        team.agree(what, lambda: _rename(partial, directory) if team.rank == 0 else None)
    except BaseException:
        if team.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def write_object(value: Any, path: Path) -> None:
    """torch.save() whose bytes are on the disk when it returns."""
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(partial: Path) -> None:
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _rename(partial: Path, directory: Path) -> None:
    sync_directory(partial)
    directory.parent.mkdir(parents=True, exist_ok=True)
    replaced = partial.with_name(partial.name + ".replaced")
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)
