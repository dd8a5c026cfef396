"""open(): what a checkpoint holds, read where it is indexed. Without torch it gives numpy arrays."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from shardow import _core, errors
from shardow.base.checks import invalid, number, one_of, unsupported
from shardow.files import paths
from shardow.files.paths import StrPath

#: numpy's name of each dtype; bfloat16, which numpy lacks, comes as float32, which holds every value of it.
_NUMPY = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64",
    "I64": "int64", "F16": "float16", "BF16": "float32", "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip

Framework = Literal["torch", "numpy"]


def choose(keys: Sequence[str], decay: object) -> int:
    """Returns the index that ``decay`` names: a number, a key or a Schedule; None where there is but one. What averages
    are called is the engine's to say: include/shardow/ema_file.h."""
    if decay is None:
        if len(keys) == 1:
            return 0
        raise invalid(f"this EMA keeps {len(keys)} averages; say which with decay=, one of {', '.join(keys)}")
    if isinstance(decay, _core.Schedule):
        key = decay.key()
    else:
        key = decay if isinstance(decay, str) else repr(number("decay", decay)).removesuffix(".0")
    if key not in keys:
        raise invalid(f"decay={decay!r}; this EMA keeps {', '.join(keys)}")
    return list(keys).index(key)


class Slice:
    """One tensor of a checkpoint, not read yet. ``one[2:5, ..., 0]`` reads just that."""

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._checkpoint = checkpoint
        self.name, self.dtype, self.shape = name, dtype, shape

    def get_shape(self) -> list[int]:
        """As safetensors' slices have it: of F4, in elements, of which torch packs two into one."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors' slices have it."""
        return self.dtype

    def __getitem__(self, index: Any) -> Any:
        """Integers and slices with positive steps.

        Raises IndexError outside of the shape, NotImplementedError for a dtype that the framework lacks or a slice
        inside of its packed elements, ValueError where a whole tensor's checksum differs, OSError where the file was
        written over."""
        entries = _full(self.shape, index)
        ranges = [_range(self.name, size, entry) for size, entry in zip(self.shape, entries, strict=True)]
        region = _core.Region.grid(list(self.shape), [_intervals(one) for one in ranges])
        sizes = [len(one) for one in ranges]
        kept = [isinstance(entry, slice) for entry in entries]
        result, dtype, address = self._empty(sizes, ranges, kept)
        self._checkpoint._opened().read(_core.TensorView(self.name, dtype, region, address))
        return result.reshape([size for size, keep in zip(result.shape, kept, strict=True) if keep])

    def _empty(self, sizes: list[int], ranges: list[range], kept: list[bool]) -> tuple[Any, str, int]:
        """Memory for the result, its dtype in the engine's words, and its address."""
        if self._checkpoint._framework == "torch":
            from shardow.distributed.transfers import empty
            from shardow.sharding.dtypes import PACKED, dtype_of

            found = dtype_of(self.name, self.dtype)
            if (packed := PACKED.get(self.dtype, 1)) > 1:
                sizes = [*sizes[:-1], _packed(self.name, self.dtype, ranges, kept, packed)]
            tensor = empty(sizes, found)
            return tensor, self.dtype, tensor.data_ptr()
        import numpy as np

        if self.dtype not in _NUMPY:
            raise unsupported(f"'{self.name}' is {self.dtype}, which numpy has not; open it with framework='torch'")
        array = np.empty(sizes, dtype=_NUMPY[self.dtype])
        return array, "F32" if self.dtype == "BF16" else self.dtype, array.ctypes.data

    def __repr__(self) -> str:
        return f"Slice('{self.name}', {self.dtype}, {list(self.shape)})"


class Checkpoint(Mapping[str, Any]):
    """{name: tensor} of a file or a Hugging Face directory, each read when it is asked for; and its ``metadata``.

    What is read is what was opened, also when the path is replaced: the files stay open until close(), the end of a
    ``with`` block, or the last reference. A file whose bytes are written over meanwhile is an OSError.
    """

    def __init__(self, catalog: _core.Checkpoint, path: str, framework: Framework) -> None:
        self.path = path
        self._engine: _core.Checkpoint | None = catalog
        self._tensors = catalog.tensors
        self._framework: Framework = framework
        self.metadata = catalog.metadata

    def __getitem__(self, name: str) -> Any:
        """The whole tensor, compared with its checksum where the file carries one."""
        return self.get_slice(name)[...]

    def get_slice(self, name: str) -> Slice:
        """One tensor for reading parts of it. Raises KeyError."""
        if name not in self._tensors:
            raise errors.make("not_found", f"{self.path} has no tensor '{name}'")
        dtype, shape = self._tensors[name]
        return Slice(self, name, dtype, shape)

    def close(self) -> None:
        """Closes the files; what was read stays. Names, shapes and metadata can still be asked for."""
        self._engine = None

    def _opened(self) -> _core.Checkpoint:
        if self._engine is None:
            raise invalid(f"{self.path} was closed; open it again")
        return self._engine

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:  # without reading it
        return name in self._tensors

    def __repr__(self) -> str:
        return f"Checkpoint('{self.path}', {len(self)} tensors{', closed' if self._engine is None else ''})"


class SeveralAverages(Checkpoint):
    """{decay: Checkpoint} of an EMA that was saved with several decays, all of one save:
    ``opened["0.999"]["weight"]``."""

    def __init__(self, by_decay: dict[str, Checkpoint], path: str) -> None:
        self.path = path
        self._tensors: Any = by_decay
        self.metadata = next(iter(by_decay.values())).metadata

    def __getitem__(self, decay: str | float) -> Checkpoint:
        chosen: Checkpoint = list(self._tensors.values())[choose(list(self), decay)]
        return chosen

    def get_slice(self, name: str) -> Slice:
        raise invalid(f"{self.path} has averages of several decays; first say which: {', '.join(self)}")

    def close(self) -> None:
        for one in self._tensors.values():
            one.close()

    def __repr__(self) -> str:
        return f"SeveralAverages('{self.path}', decays {', '.join(self)})"


def open_checkpoint(
    path: StrPath, framework: Framework | None = None, *, decay: float | str | _core.Schedule | None = None
) -> Checkpoint:
    """Opens a .safetensors file, a Hugging Face directory or a saved EMA, reads and checks the headers, and no data.
    Not collective.

    Args:
        framework: "torch" or "numpy", of what it gives; default: torch where that is installed. numpy has no bfloat16:
            such tensors come as float32.
        decay: of an EMA that was saved with several, which one; without it, their mapping {decay: Checkpoint}.

    Raises:
        FileNotFoundError; ValueError for what is no safetensors file, or a decay that is not there; OSError.
    """
    one_of("framework", framework, (None, "torch", "numpy"))
    chosen: Framework = framework or ("torch" if importlib.util.find_spec("torch") else "numpy")
    where = paths.to_read(path)
    if files := _core.ema_files_in(where, beside_a_model=decay is not None):
        found = _core.Checkpoint.open_files(where, list(files.values()))
        opened = {
            key: Checkpoint(one, os.path.join(where, files[key]), chosen) for key, one in zip(files, found, strict=True)
        }
        return SeveralAverages(opened, where) if decay is None else list(opened.values())[choose(list(opened), decay)]
    checkpoint = Checkpoint(_core.Checkpoint.open(where), where, chosen)
    if decay is not None:
        keys = _core.decay_keys_in(checkpoint.metadata)
        if not keys:
            raise invalid(f"{where} is no saved EMA, so decay={decay} chooses nothing")
        choose(keys, decay)
    return checkpoint


def _packed(name: str, dtype: str, ranges: list[range], kept: list[bool], packed: int) -> int:
    """How many of torch's packed elements the last dimension has."""
    last = ranges[-1]
    if last.step != 1 or last.start % packed or len(last) % packed or not kept[-1]:
        raise unsupported(
            f"'{name}' is {dtype}, of which torch packs {packed} into one; slice its last dimension at multiples of "
            f"{packed}"
        )
    return len(last) // packed


def _full(shape: tuple[int, ...], index: Any) -> list[Any]:
    """``index`` with one entry per dimension."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, entry in enumerate(entries) if entry is ...]
    at = dots[0] if dots else len(entries)
    rest = entries[at + 1 :] if dots else []
    missing = len(shape) - at - len(rest)
    if len(dots) > 1 or missing < 0:
        raise invalid(f"{index} does not fit {len(shape)} dimensions", IndexError)
    return [*entries[:at], *[slice(None)] * missing, *rest]


def _range(name: str, size: int, entry: Any) -> range:
    """Of one dimension."""
    try:
        chosen: int | range = range(size)[entry]
    except TypeError:
        raise invalid(f"'{name}': {entry!r} is no index; give whole numbers and slices", IndexError) from None
    except IndexError:
        raise invalid(f"'{name}': index {entry} is outside of a dimension of {size}", IndexError) from None
    if isinstance(chosen, int):
        return range(chosen, chosen + 1)
    if chosen.step < 0:
        raise invalid(f"'{name}': slices of a file have positive steps", IndexError)
    return chosen


def _intervals(chosen: range) -> list[tuple[int, int]]:
    if chosen.step == 1:
        return [(chosen.start, chosen.stop)] if len(chosen) else []
    return [(at, at + 1) for at in chosen]
