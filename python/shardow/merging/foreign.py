"""Checkpoints that the engine does not read itself, a tensor or a band of its rows at a time:
torch.distributed.checkpoint's directories, through torch's own reader, and what torch.save() wrote, without running
what is in it."""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardow import _core, errors
from shardow.base.checks import invalid
from shardow.distributed.transfers import empty
from shardow.sharding import dtypes
from shardow.sharding.local import oddity

_PICKLES = {".pt", ".pth", ".bin", ".ckpt"}


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()


def is_foreign(path: Path) -> bool:
    return is_dcp(path) or path.suffix.lower() in _PICKLES


@contextlib.contextmanager
def _gate(path: str | Path) -> Iterator[None]:
    """Whatever torch raises within the block, and it raises anything where a file is damaged, is an error of Shardow's
    that names the path."""
    try:
        yield
    except errors.Error:
        raise
    except FileNotFoundError as error:
        raise errors.make("not_found", f"there is no file {error.filename or path}") from None
    except OSError as error:
        raise errors.make("io", f"{path}: {error.strerror or error}", error.errno or 0) from None
    except Exception as error:
        why = "it is damaged, or has more in it than tensors, which would have to be run"
        raise errors.make("corrupt", f"{path} is not a whole file of tensors of torch's: {why}: {error!r}") from error


def parts_of(path: Path, key: str | None) -> _core.InParts:
    """Raises ValueError for what has no tensors, none under ``key``, or is damaged; FileNotFoundError, OSError."""
    with _gate(path):
        forms, read = _dcp(path, key) if is_dcp(path) else _pickled(path, key)
    if not forms:
        raise invalid(f"{path} has no tensors{'' if key is None else f' under {key!r}'}")
    if odd := [name for name in forms if not isinstance(name, str) or "\0" in name]:
        raise invalid(f"{path}: {odd[0]!r} is no name of a tensor; say where the weights are: key=")
    named = {name: (dtypes.name_of(name, dtype), tuple(size)) for name, (dtype, size) in forms.items()}
    latest = torch.empty(0, device="cpu")  # asked for last: the engine copies from it until it asks again

    def memory(name: str, element: int) -> tuple[int, int, int]:
        """(address, first element, the one after the last)."""
        nonlocal latest
        latest = torch.empty(0, device="cpu")  # not both at once
        with _gate(path):
            tensor, begin = read(name, element)
            latest = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return latest.data_ptr(), begin, begin + latest.numel()

    return _core.InParts(named, memory)


Forms = dict[str, tuple[torch.dtype, torch.Size]]
#: (name, an element) -> (a packed tensor that has it, the element that it begins with)
Read = Callable[[str, int], tuple[torch.Tensor, int]]


def _band(element: int, size: Sequence[int], chunks: Sequence[Any]) -> tuple[int, int]:
    """The rows between two borders of stored chunks, where the element is."""
    row = element // max(1, math.prod(size[1:]))
    borders = sorted({0, size[0]}.union(*((one.offsets[0], one.offsets[0] + one.sizes[0]) for one in chunks)))
    after = bisect.bisect_right(borders, row)
    return borders[after - 1], borders[after]


def _dcp(path: Path, key: str | None) -> tuple[Forms, Read]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from shardow.sharding.partial_tensor import PartialTensor

    prefix = "" if key is None else f"{key}."
    metadata = FileSystemReader(path).read_metadata()
    stored = {
        name.removeprefix(prefix): one
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata) and name.startswith(prefix)
    }

    for name, tensor in stored.items():
        shape = list(tensor.size)
        chunks = [[[(at, at + size)] for at, size in zip(c.offsets, c.sizes, strict=True)] for c in tensor.chunks]
        if not _core.covers_once([_core.Region.grid(shape, intervals) for intervals in chunks]):
            raise errors.make("corrupt", f"{path}: the stored chunks of '{name}' overlap or leave a hole")

    def read(name: str, element: int) -> tuple[torch.Tensor, int]:
        """The steps of torch's load(), which is collective where there is a process group, and would read whole
        tensors.
        """
        entry = stored[name]
        shape = list(entry.size)
        region, first = _core.Region.whole(shape), 0
        if shape and entry.size.numel():
            first, last = _band(element, shape, entry.chunks)
            region = _core.Region.grid(shape, [[(first, last)], *([(0, size)] for size in shape[1:])])
        band = PartialTensor(empty([region.size], entry.properties.dtype), region)
        planner, reader = DefaultLoadPlanner(), FileSystemReader(path)
        planner.set_up_planner({prefix + name: band}, metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        return band.local, first * math.prod(shape[1:])

    return {name: (one.properties.dtype, one.size) for name, one in stored.items()}, read


def _pickled(path: Path, key: str | None) -> tuple[Forms, Read]:
    state = loaded(path)
    if key is not None:
        if not isinstance(state, Mapping) or key not in state:
            raise invalid(f"{path} has nothing under {key!r}")
        state = state[key]
    entries = state if isinstance(state, Mapping) else {}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, torch.Tensor)}
    leaves = {name: tree_leaves(entry) for name, entry in entries.items() if name not in tensors}
    if inner := [name for name in leaves if any(isinstance(leaf, torch.Tensor) for leaf in leaves[name])]:
        where = f"{', '.join(map(repr, inner))}{f' beside {next(iter(tensors))!r}' if tensors else ''}"
        raise invalid(f"{path} has tensors under {where}; say where the weights are: key={inner[0]!r}")
    for name, tensor in tensors.items():
        if odd := "is on meta, without values" if tensor.is_meta else oddity(tensor):
            raise invalid(f"{path}: '{name}' {odd}; leave it out")
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}, lambda name, _: (tensors[name], 0)


def loaded(path: str | Path) -> Any:
    """Returns what torch.save() wrote, on the CPU, mapped where it can be: what is not used is not read. Raises
    FileNotFoundError, OSError, and ValueError for other files, and for what would have to be run."""
    load = functools.partial(torch.load, path, map_location="cpu", weights_only=True)
    with _gate(path):
        try:
            return load(mmap=True)
        except (RuntimeError, UnicodeEncodeError):  # of before torch 1.6, or of a path that is no UTF-8
            return load(mmap=False)
