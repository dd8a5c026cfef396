"""open(): what a checkpoint holds, read where it is indexed. Without torch it gives numpy arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from shardow import _core, _errors

#: numpy's name of each dtype; bfloat16, which numpy lacks, comes as float32, which holds every value of it.
_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16",
    "BF16": "float32", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip

Framework = Literal["torch", "numpy"]


class Slice:
    """One tensor of a checkpoint, not read yet. ``one[2:5, ..., 0]`` reads just that."""

    def __init__(self, catalog: _core.Catalog, name: str, dtype: str, shape: tuple[int, ...], framework: Framework) -> None:
        self._catalog, self._framework = catalog, framework
        self.name, self.dtype, self.shape = name, dtype, shape

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors' slices have it."""
        return self.dtype

    def __getitem__(self, index: Any) -> Any:
        """Integers and slices with positive steps. Raises IndexError outside of the shape, NotImplementedError for a dtype that the framework lacks."""
        ranges = _ranges(self.name, self.shape, index)
        region = _core.Region.grid(list(self.shape), [_intervals(one) for one in ranges])
        result, dtype, address = self._empty([len(one) for one in ranges])
        _core.load(_core.solo(), [_core.TensorView(self.name, dtype, region, address)], self._catalog, strict=False)
        return result.reshape([len(one) for one, kept in zip(ranges, _kept(self.shape, index), strict=True) if kept])

    def _empty(self, shape: list[int]) -> tuple[Any, str, int]:
        """Memory for the result, its dtype in the engine's words, and its address."""
        if self._framework == "torch":
            import torch

            from shardow._files import DTYPES

            found = next((ours for ours, name in DTYPES.items() if name == self.dtype), None)
            if found is None:
                raise _errors.make("unsupported", f"'{self.name}' is {self.dtype}, which torch does not have")
            tensor = torch.empty(shape, dtype=found)
            return tensor, self.dtype, tensor.data_ptr()
        import numpy as np

        if self.dtype not in _NUMPY:
            raise _errors.make("unsupported", f"'{self.name}' is {self.dtype}, which numpy does not have; open it with framework='torch'")
        array = np.empty(shape, dtype=_NUMPY[self.dtype])
        return array, "F32" if self.dtype == "BF16" else self.dtype, array.ctypes.data

    def __repr__(self) -> str:
        return f"Slice('{self.name}', {self.dtype}, {list(self.shape)})"


class Checkpoint(Mapping[str, Any]):
    """{name: tensor} of a file or a Hugging Face directory, each read when it is asked for; and its ``metadata``."""

    def __init__(self, path: str | Path, framework: Framework) -> None:
        self.path = str(path)
        self._catalog = _core.read_catalog(_core.solo(), self.path)
        self._tensors = self._catalog.tensors
        self._framework: Framework = framework
        self.metadata = self._catalog.metadata

    def __getitem__(self, name: str) -> Any:
        """The whole tensor."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> Slice:
        """One tensor for reading parts of it. Raises KeyError."""
        if name not in self._tensors:
            raise _errors.make("not_found", f"{self.path} has no tensor '{name}'")
        dtype, shape = self._tensors[name]
        return Slice(self._catalog, name, dtype, shape, self._framework)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._tensors

    def __repr__(self) -> str:
        return f"Checkpoint('{self.path}', {len(self)} tensors)"


def open_checkpoint(path: str | Path, framework: Framework | None = None) -> Checkpoint:
    """Reads and checks the headers of a .safetensors file or a Hugging Face directory, and no data.

    Args:
        framework: "torch" or "numpy", of what it gives; default: torch where that is installed. numpy has no bfloat16: such tensors come as float32.

    Raises:
        FileNotFoundError; ValueError for what is no safetensors file.
    """
    if framework not in (None, "torch", "numpy"):
        raise _errors.make("invalid_argument", f"framework={framework!r}; it must be 'torch' or 'numpy'")
    return Checkpoint(path, framework or ("torch" if importlib.util.find_spec("torch") else "numpy"))


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
