"""Checkpoints that the engine does not read itself, one whole tensor at a time: torch.distributed.checkpoint's directories, through torch's
own reader, and what torch.save() wrote, without running what is in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardow import _core, errors
from shardow.base.checks import invalid
from shardow.model import dtypes

_PICKLES = {".pt", ".pth", ".bin", ".ckpt"}


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()


def is_foreign(path: Path) -> bool:
    return is_dcp(path) or path.suffix.lower() in _PICKLES


def whole_tensors(path: Path, key: str | None) -> _core.WholeTensors:
    """Raises ValueError for what has no tensors, or none under ``key``; FileNotFoundError, OSError."""
    forms, read = _dcp(path, key) if is_dcp(path) else _pickled(path, key)
    if not forms:
        raise invalid(f"{path} has no tensors{'' if key is None else f' under {key!r}'}")
    named = {name: (dtypes.name_of(name, dtype), list(size)) for name, (dtype, size) in forms.items()}
    return _core.WholeTensors(named, _Latest(read))


Forms = dict[str, tuple[torch.dtype, torch.Size]]


class _Latest:
    """The tensor that was asked for last stays, since it is asked for chunk by chunk."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._name: str | None = None
        self._tensor = torch.empty(0)

    def __call__(self, name: str) -> torch.Tensor:
        if name != self._name:
            self._name, self._tensor = None, torch.empty(0)  # not both at once
            self._tensor = self._read(name).detach().contiguous()
            self._name = name
        return self._tensor


def _dcp(path: Path, key: str | None) -> tuple[Forms, Callable[[str], torch.Tensor]]:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    prefix = "" if key is None else f"{key}."
    metadata = FileSystemReader(path).read_metadata()
    forms = {
        name.removeprefix(prefix): (one.properties.dtype, one.size)
        for name, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata) and name.startswith(prefix)
    }

    def read(name: str) -> torch.Tensor:
        """The steps of torch's load(), which is collective where there is a process group."""
        dtype, size = forms[name]
        tensor = torch.empty(size, dtype=dtype)
        reader, planner = FileSystemReader(path), DefaultLoadPlanner()
        planner.set_up_planner({prefix + name: tensor}, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
        return tensor

    return forms, read


def _pickled(path: Path, key: str | None) -> tuple[Forms, Callable[[str], torch.Tensor]]:
    state = _loaded(path)
    if key is not None:
        if not isinstance(state, Mapping) or key not in state:
            raise invalid(f"{path} has nothing under {key!r}")
        state = state[key]
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)} if isinstance(state, Mapping) else {}
    inner = [name for name, one in state.items() if isinstance(one, Mapping)] if isinstance(state, Mapping) else []
    if not tensors and inner:
        raise invalid(f"{path} has no tensors at its top; say where the weights are: key={inner[0]!r}, of {', '.join(map(str, inner))}")
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}, tensors.__getitem__


def _loaded(path: Path) -> Any:
    for mapped in (True, False):  # files of before torch 1.6 can't be mapped
        try:
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
        except pickle.UnpicklingError as error:
            raise errors.make("corrupt", f"{path} has more in it than tensors, which would have to be run to be read: {error}") from None
        except RuntimeError as error:
            if not mapped:
                raise errors.make("corrupt", f"{path} is no file of torch.save(): {error}") from None
    raise AssertionError
