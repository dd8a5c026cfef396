"""Writes files and directories as upstreams do. Each appears whole or not at all: it is made under another name and
published by one rename."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from shardow.base.checks import first_of, invalid
from shardow.distributed.gather import Gatherer
from shardow.distributed.rank_group import RankGroup
from shardow.sharding.local_state import LocalState


def write(content: Any, path: str | Path) -> None:
    """Writes by torch.save(); the file that was at ``path`` stays until the new one is on the disk."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_gathered(what: str, path: Path, held: LocalState, ranks: RankGroup, dtype: torch.dtype | None = None) -> None:
    """Writes whole tensors, of which ``held.parts`` are this rank's parts, into ``path``, each under all its names and
    floating ones as ``dtype``. Collective; ``what`` is for messages. A failure on rank 0 is an error on all ranks."""
    stream = Gatherer(what, held.parts, ranks).stream()

    def write_all() -> None:
        try:
            if ranks.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
                    write(_mapped(stream, held.names, Path(folder), dtype), path)
        finally:
            for _ in stream:  # to the end in any case, since the other ranks send all
                pass

    ranks.agree(what, write_all)


def _mapped(
    stream: Iterator[tuple[str, torch.Tensor | None]], names: Mapping[str, tuple[str, ...]], folder: Path,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Returns the whole tensors of ``stream``, each mapped from a file in ``folder``, since torch.save() wants all at
    once."""
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(stream):
        assert tensor is not None  # on rank 0
        tensor = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        if tensor.numel():
            file = str(folder / str(number))
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
            tensor = torch.from_file(file, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
        tensors.update(dict.fromkeys(names[name], tensor))
    return tensors


# ---- directories

#: Matches the file names of torch.distributed.checkpoint and of BAGEL's checkpoints.
_OWN = re.compile(
    r"\.metadata|__\d+_\d+\.distcp|(ema|model)\.safetensors|(optimizer\.\d+-of-\d+|scheduler|data_status)\.pt"
).fullmatch


def publish(what: str, directory: Path, ranks: RankGroup, fill: Callable[[Path], None]) -> None:
    """Calls ``fill(partial)`` on every rank, maybe collective; then ``partial``, on the same file system, becomes
    ``directory``. Collective. A failure on one rank is an error on all, and leaves nothing behind. A directory that
    exists is replaced. It is refused where it has files that such saves do not write, since they would be lost.

    ``partial`` lies beside the directory's parent, where no search for checkpoints looks. It lies inside the parent
    where another file system begins there.
    """
    partial = Path(os.fsdecode(ranks.on_first(what, lambda: os.fsencode(_make_partial(directory.resolve())))))
    try:
        fill(partial)
        ranks.agree(what, lambda: _rename(partial, directory.resolve()) if ranks.rank == 0 else None)
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


def _make_partial(directory: Path) -> Path:
    entries = os.scandir(directory) if directory.is_dir() else ()
    if others := [entry.name for entry in entries if not (entry.is_file(follow_symlinks=False) and _OWN(entry.name))]:
        way_out = "save to another one, or move it"
        raise invalid(f"{directory} would be replaced, and has {first_of(others)}, which no such save wrote; {way_out}")
    parent = directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    partial = parent / f".{directory.name}.partial"
    if parent.stat().st_dev == parent.parent.stat().st_dev and os.access(parent.parent, os.W_OK):
        partial = parent.parent / f".{parent.name}-{directory.name}.partial"
    if partial.exists():  # of a run that was killed
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def _rename(partial: Path, directory: Path) -> None:
    sync_directory(partial)
    replaced = partial.with_name(partial.name + ".replaced")
    if directory.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        directory.rename(replaced)
    partial.rename(directory)
    sync_directory(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)
