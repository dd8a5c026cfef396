"""Files of torch.save(), for surfaces whose origins write them: whole or not at all, and read without running what is in them.

torch.save() wants everything at once. Its files are plain zip archives (docs.pytorch.org, "Serialization semantics": data.pkl with the
structure, data/0, data/1, ... with the storages in the order of their first use), so write_gathered() holds one tensor at a time:

1. rank 0 has torch pickle the structure of a template without data
2. tensor by tensor, rank 0 receives the whole and writes the next record, aligned to 64 bytes as torch does, for mapping
3. the file is synced and renamed
"""

from __future__ import annotations

import contextlib
import struct
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardow import errors
from shardow.compat.files.published import NewFile
from shardow.ranks.gather import Gatherer, Part
from shardow.ranks.team import Team


def write(content: Any, path: str | Path) -> None:
    """torch.save(); what was at ``path`` stays until the new file is on the disk."""
    with contextlib.closing(NewFile(Path(path))) as new:
        torch.save(content, new.file)
        new.publish()


def read(path: str | Path) -> Any:
    """Tensors on the CPU, mapped: what is not used is not read. Raises ValueError for other files, and for objects in them."""
    try:
        with open(path, "rb") as file:
            mapped = file.read(2) == b"PK"  # older files are no archives, and can't be
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise errors.make("not_found", f"there is no file {path}") from None
    except OSError:
        raise
    except Exception as error:  # the unpickler fails in many ways over what is no pickle
        raise errors.make("corrupt", f"{path} is not a whole file of tensors by torch.save(): {error}") from error


_ALIGN = 64
_ZIP64_FIELD = 20  # bytes that zipfile adds to a large record's header
_PADDING = 0x4246  # id of a header field that readers skip; torch's own files have it


def write_gathered(
    what: str, path: Path, parts: Sequence[Part], names: Mapping[str, tuple[str, ...]], team: Team, dtype: torch.dtype | None = None
) -> None:
    """The tensors of which ``parts`` are this rank's, each under all its ``names``, into ``path``; floating ones as ``dtype``. Collective;
    ``what`` is for messages. A failure on rank 0 is an error on all ranks."""
    file = team.agree(what, lambda: _File(path, parts, names, dtype) if team.rank == 0 else None)
    failed: list[Exception] = []
    try:
        for _, tensor in Gatherer(what, parts, team).stream():  # to the end in any case: the others send
            if file is not None and tensor is not None and not failed:
                try:
                    file.add(tensor)
                except Exception as error:
                    failed.append(error)
        team.agree(what, lambda: _finish(file, failed))
    finally:
        if file is not None:
            file.close()


def _finish(file: _File | None, failed: list[Exception]) -> None:
    if failed:
        raise failed[0]
    if file is not None:
        file.publish()


class _File:
    """On rank 0: a temporary file beside ``path``, into which whole tensors go in the order of ``parts``."""

    def __init__(self, path: Path, parts: Sequence[Part], names: Mapping[str, tuple[str, ...]], dtype: torch.dtype | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._dtype, self._count = dtype, 0
        template: dict[str, torch.Tensor] = {}
        for part in parts:
            kept = part.flat.dtype
            like = torch.empty(part.region.shape, dtype=dtype if dtype and kept.is_floating_point else kept)  # memory that nobody touches
            template.update(dict.fromkeys(names[part.name], like))
        structure = _structure(template, path.parent)
        self._new = NewFile(path)
        self._zip = zipfile.ZipFile(self._new.file, "w", zipfile.ZIP_STORED)
        self._zip.writestr("archive/data.pkl", structure)
        self._zip.writestr("archive/byteorder", sys.byteorder)

    def add(self, tensor: torch.Tensor) -> None:
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        info = zipfile.ZipInfo(f"archive/data/{self._count}")
        info.file_size = tensor.nbytes
        header = (
            30 + len(info.filename) + 4 + (_ZIP64_FIELD if tensor.nbytes * 1.05 > zipfile.ZIP64_LIMIT else 0)
        )  # where zipfile decides so
        padding = -(self._new.file.tell() + header) % _ALIGN
        info.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
        with self._zip.open(info, "w") as record:
            record.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._count += 1

    def publish(self) -> None:
        self._zip.writestr("archive/version", "3\n")
        self._zip.close()
        self._new.publish()

    def close(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._zip.close()
        self._new.close()


def _structure(template: Mapping[str, torch.Tensor], directory: Path) -> bytes:
    """What torch.save() writes beside the data; in the file that it makes for that the data are holes."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        skeleton = Path(place) / "archive.pt"
        with torch.serialization.skip_data():
            torch.save(dict(template), skeleton)
        with zipfile.ZipFile(skeleton) as archive:
            return archive.read("archive/data.pkl")
