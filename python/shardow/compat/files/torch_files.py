"""Files of torch.save(), for surfaces whose origins write them: whole or not at all, and read without running what is
in them.

torch.save() wants everything at once. Its files are plain zip archives (docs.pytorch.org, "Serialization semantics":
data.pkl with the structure, data/0, data/1, ... with the storages in the order of their first use), so write_gathered()
holds one tensor at a time:

1. rank 0 has torch pickle the structure of a template without data
2. tensor by tensor, rank 0 receives the whole and writes the next record, aligned to 64 bytes as torch does, for
   mapping
3. the file is synced and renamed
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardow import errors
from shardow.compat.files.published import new_file
from shardow.distributed.gather import Gatherer
from shardow.distributed.rank_group import RankGroup
from shardow.distributed.transfers import empty
from shardow.model.parts import Held


def write(content: Any, path: str | Path) -> None:
    """torch.save(); what was at ``path`` stays until the new file is on the disk."""
    with new_file(Path(path)) as file:
        torch.save(content, file)


def read(path: str | Path) -> Any:
    """Tensors on the CPU, mapped: what is not used is not read. Raises ValueError for other files, and for objects in
    them.
    """
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


def write_gathered(what: str, path: Path, held: Held, ranks: RankGroup, dtype: torch.dtype | None = None) -> None:
    """The tensors of which ``held.parts`` are this rank's, each under all its names, into ``path``; floating ones as
    ``dtype``. Collective; ``what`` is for messages. A failure on rank 0 is an error on all ranks."""
    failed: list[Exception] = []
    with contextlib.ExitStack() as stack:
        add = ranks.agree(what, lambda: stack.enter_context(_archive(path, held, dtype)) if ranks.rank == 0 else None)
        for _, tensor in Gatherer(what, held.parts, ranks).stream():  # to the end in any case: the others send
            if add is not None and tensor is not None and not failed:
                try:
                    add(tensor)
                except Exception as error:
                    failed.append(error)

        def publish() -> None:
            if failed:
                raise failed[0]
            stack.close()

        ranks.agree(what, publish)


@contextlib.contextmanager
def _archive(path: Path, held: Held, dtype: torch.dtype | None) -> Iterator[Callable[[torch.Tensor], None]]:
    """A new file, and what adds whole tensors to it, in the order of ``held.parts``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    template: dict[str, torch.Tensor] = {}
    for part in held.parts:
        kept = part.flat.dtype
        # Nothing touches this memory.
        like = empty(part.region.shape, dtype if dtype and kept.is_floating_point else kept)
        template.update(dict.fromkeys(held.names[part.name], like))
    structure, numbers = _structure(template, path.parent), itertools.count()
    with new_file(path) as file, _zip(file) as archive:
        archive.writestr("archive/data.pkl", structure)
        archive.writestr("archive/byteorder", sys.byteorder)
        yield lambda tensor: _add(
            archive, next(numbers), tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        )
        archive.writestr("archive/version", "3\n")


@contextlib.contextmanager
def _zip(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
    try:
        yield archive
        archive.close()
    finally:
        with contextlib.suppress(OSError, ValueError):  # it writes its end, also of what has failed
            archive.close()


def _add(archive: zipfile.ZipFile, number: int, tensor: torch.Tensor) -> None:
    info = zipfile.ZipInfo(f"archive/data/{number}")
    info.file_size = tensor.nbytes
    field = _ZIP64_FIELD if tensor.nbytes * 1.05 > zipfile.ZIP64_LIMIT else 0  # where zipfile decides so
    assert archive.fp is not None
    padding = -(archive.fp.tell() + 30 + len(info.filename) + 4 + field) % _ALIGN
    info.extra = struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    with archive.open(info, "w") as record:
        record.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _structure(template: Mapping[str, torch.Tensor], directory: Path) -> bytes:
    """What torch.save() writes beside the data; in the file that it makes for that the data are holes."""
    with tempfile.TemporaryDirectory(dir=directory) as place:
        skeleton = Path(place) / "archive.pt"
        with torch.serialization.skip_data():
            torch.save(dict(template), skeleton)
        with zipfile.ZipFile(skeleton) as archive:
            return archive.read("archive/data.pkl")
