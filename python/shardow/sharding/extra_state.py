"""Writes and reads ``_extra_state``, which modules add to a state_dict() by get_extra_state(). In files, tensors of it
are tensors, and values that JSON can express are in the header; a warning names the rest."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardow import _core
from shardow.base.checks import warn
from shardow.distributed.gather import LocalShard
from shardow.distributed.transfers import empty
from shardow.sharding.dtypes import dtype_of
from shardow.sharding.names import clean_file_key, join, walk

KEY = "_extra_state"
METADATA = "shardow.extra_state"  # a header's key, for {name: value} in JSON


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Returns the extra states of the modules by clean name, as these give them."""
    return {name: module.get_extra_state() for name, module in _modules(model)}


def restore(model: nn.Module, values: Mapping[str, Any]) -> None:
    for name, module in _modules(model) if values else ():
        if name in values:
            module.set_extra_state(copy.deepcopy(values[name]))


def for_file(values: Mapping[str, Any]) -> tuple[list[LocalShard], dict[str, str]]:
    """Returns (tensors, metadata) of rank 0's values. Warns of values that are neither."""
    parts, header_values, lost = [], {}, []
    for name, value in values.items():
        if type(value) is torch.Tensor and value.layout is torch.strided:
            region = _core.Region.whole(list(value.shape))
            parts.append(LocalShard(name, value.detach().cpu().clone().contiguous().view(-1), region))
        elif _survives_json(value):
            header_values[name] = value
        else:
            lost.append(f"'{name}' ({type(value).__name__})")
    if lost:
        hint = "keep it beside, or let get_extra_state() return a tensor"
        warn(f"{', '.join(lost[:8])}: not in the file, which holds tensors and what JSON says; {hint}")
    return parts, {METADATA: json.dumps(header_values)} if header_values else {}


def extra_in(keys: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Returns {key: wanted name} of the extra states among a file's ``keys``."""
    by_clean = {clean_file_key(name): name for name in wanted}
    cleaned = {key: clean_file_key(key) for key in keys if key.endswith(KEY)}
    return {key: by_clean[clean] for key, clean in cleaned.items() if clean in by_clean}


class FromFile:
    """Extra states of ``wanted`` names in a file; tensors among ``values`` are filled by reading ``parts``. ``keys``:
    {key in the file: name} of these tensors; ``unexpected``: names in the header that no module has."""

    def __init__(self, wanted: Collection[str], catalog: Any) -> None:
        tensors = catalog.tensors  # a property that makes a new mapping
        self.keys = extra_in(tensors, wanted)
        header_values = json.loads(catalog.metadata.get(METADATA, "{}"))
        names = extra_in(header_values, wanted)
        self.unexpected = [key for key in header_values if key not in names]
        self.values: dict[str, Any] = {name: header_values[key] for key, name in names.items()}
        self.parts: list[LocalShard] = []
        for key, name in self.keys.items():
            dtype, shape = tensors[key]
            self.values[name] = empty(shape, dtype_of(key, dtype))
            self.parts.append(LocalShard(key, self.values[name].view(-1), _core.Region.whole(list(shape))))


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in walk(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield join(name, KEY), module


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
