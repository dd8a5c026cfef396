"""Files and directories that are there whole or not at all: made under another name, published by one rename."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from shardow.base.checks import first_of, invalid
from shardow.distributed.rank_group import RankGroup

#: Matches what torch.distributed.checkpoint and BAGEL's checkpoints have.
_OWN = re.compile(
    r"\.metadata|__\d+_\d+\.distcp|(ema|model)\.safetensors|(optimizer\.\d+-of-\d+|scheduler|data_status)\.pt"
).fullmatch


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """To be written: at ``path``, and on the disk, when the block has ended. Where it raises, what was there stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def publish(what: str, directory: Path, partial: Path, ranks: RankGroup, fill: Callable[[Path], None]) -> None:
    """``fill(partial)`` on every rank, maybe collective; then ``partial``, on the same file system, becomes
    ``directory``. Collective. Whatever fails on one rank is an error on all, and leaves nothing behind. A directory
    that was there is replaced, or refused where it has what such saves do not write: that would be lost."""
    ranks.agree(what, lambda: _make(partial, directory) if ranks.rank == 0 else None)
    try:
        fill(partial)
        ranks.agree(what, lambda: _rename(partial, directory) if ranks.rank == 0 else None)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _make(partial: Path, directory: Path) -> None:
    entries = os.scandir(directory) if directory.is_dir() else ()
    if others := [entry.name for entry in entries if not (entry.is_file(follow_symlinks=False) and _OWN(entry.name))]:
        way_out = "save to another one, or move it"
        raise invalid(f"{directory} would be replaced, and has {first_of(others)}, which no such save wrote; {way_out}")
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
