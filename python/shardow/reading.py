"""open(): what a checkpoint holds, read where it is indexed. Needs numpy alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardow import _core, _errors

if TYPE_CHECKING:
    import numpy as np

#: numpy's name of each dtype; bfloat16, which numpy lacks, comes as float32, which holds every value of it.
_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16",
    "BF16": "float32", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip


class Stored:
    """One tensor of a checkpoint. ``stored[2:5, ..., 0]`` reads just that, as a numpy array; ``stored[...]`` all of it."""

    def __init__(self, path: str, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._path, self.name, self.dtype, self.shape = path, name, dtype, shape

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        """Integers and slices with positive steps. Raises IndexError outside of the shape, NotImplementedError for dtypes below 16 bits that numpy lacks."""
        import numpy as np

        if self.dtype not in _NUMPY:
            raise _errors.make(
                "unsupported", f"'{self.name}' is {self.dtype}, which numpy does not have; load it with shardow.load() into a torch tensor"
            )
        ranges = _ranges(self.name, self.shape, index)
        region = _core.Region.grid(list(self.shape), [_intervals(one) for one in ranges])
        result = np.empty([len(one) for one in ranges], dtype=_NUMPY[self.dtype])
        ours = "F32" if self.dtype == "BF16" else self.dtype
        _core.load(_core.solo(), [_core.TensorView(self.name, ours, region, result.ctypes.data)], self._path, strict=False)
        return result.reshape([len(one) for one, kept in zip(ranges, _kept(self.shape, index), strict=True) if kept])

    def __repr__(self) -> str:
        return f"Stored('{self.name}', {self.dtype}, {list(self.shape)})"


class Checkpoint(Mapping[str, Stored]):
    """{name: Stored} of a file or a Hugging Face directory, and its ``metadata``."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        tensors, self.metadata = _core.read_catalog(_core.solo(), self.path)
        self._stored = {name: Stored(self.path, name, dtype, shape) for name, (dtype, shape) in tensors.items()}

    def __getitem__(self, name: str) -> Stored:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __repr__(self) -> str:
        return f"Checkpoint('{self.path}', {len(self)} tensors)"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Reads and checks the headers of a .safetensors file or a Hugging Face directory, and no data.

    Raises FileNotFoundError; ValueError for what is no safetensors file.
    """
    return Checkpoint(path)


def _full(shape: tuple[int, ...], index: Any) -> list[Any]:
    """``index`` with one entry per dimension."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, entry in enumerate(entries) if entry is ...]
    at = dots[0] if dots else len(entries)
    rest = entries[at + 1 :] if dots else []
    missing = len(shape) - at - len(rest)
    if len(dots) > 1 or missing < 0:
        raise IndexError(f"{index} does not fit {len(shape)} dimensions")
    return [*entries[:at], *[slice(None)] * missing, *rest]


def _ranges(name: str, shape: tuple[int, ...], index: Any) -> list[range]:
    ranges = []
    for size, entry in zip(shape, _full(shape, index), strict=True):
        if isinstance(entry, slice):
            chosen = range(*entry.indices(size))
            if chosen.step < 0:
                raise IndexError(f"'{name}': slices of a file have positive steps")
        else:
            at = int(entry)
            if not -size <= at < size:
                raise IndexError(f"'{name}': index {at} is outside of a dimension of {size}")
            chosen = range(at % size, at % size + 1)
        ranges.append(chosen)
    return ranges


def _kept(shape: tuple[int, ...], index: Any) -> list[bool]:
    return [isinstance(entry, slice) for entry in _full(shape, index)]


def _intervals(chosen: range) -> list[tuple[int, int]]:
    if chosen.step == 1:
        return [(chosen.start, chosen.stop)] if len(chosen) else []
    return [(at, at + 1) for at in chosen]
