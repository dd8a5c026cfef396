"""``_extra_state``: what modules put into a state_dict() beside their tensors, by get_extra_state(). In files, tensors
are tensors, and what JSON can say is in the header; a warning names the rest."""

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
METADATA = "shardow.extra_state"  # of a header: {name: value} in JSON


def extra_states(model: nn.Module) -> dict[str, Any]:
    """By clean name, as the modules give them."""
    return {name: module.get_extra_state() for name, module in _modules(model)}


def restore(model: nn.Module, values: Mapping[str, Any]) -> None:
    for name, module in _modules(model) if values else ():
        if name in values:
            module.set_extra_state(copy.deepcopy(values[name]))


def for_file(values: Mapping[str, Any]) -> tuple[list[LocalShard], dict[str, str]]:
    """(tensors, metadata) of rank 0's values. Warns of what is neither."""
    parts, said, lost = [], {}, []
    for name, value in values.items():
        if type(value) is torch.Tensor and value.layout is torch.strided:
            region = _core.Region.whole(list(value.shape))
            parts.append(LocalShard(name, value.detach().cpu().clone().contiguous().view(-1), region))
        elif _survives_json(value):
            said[name] = value
        else:
            lost.append(f"'{name}' ({type(value).__name__})")
    if lost:
        way_out = "keep it beside, or let get_extra_state() return a tensor"
        warn(f"{', '.join(lost[:8])}: not in the file, which holds tensors and what JSON says; {way_out}")
    return parts, {METADATA: json.dumps(said)} if said else {}


def extra_in(there: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """{key there: name here} of extra states that are ``wanted``."""
    by_clean = {clean_file_key(name): name for name in wanted}
    cleaned = {key: clean_file_key(key) for key in there if key.endswith(KEY)}
    return {key: by_clean[clean] for key, clean in cleaned.items() if clean in by_clean}


class FromFile:
    """The values in a file for ``wanted`` names: those of tensors are there when ``parts`` have been read. ``keys``:
    theirs in the file; ``unexpected``: nobody here has them."""

    def __init__(self, wanted: Collection[str], catalog: Any) -> None:
        there = catalog.tensors  # made anew each time
        self.keys = extra_in(there, wanted)
        said = json.loads(catalog.metadata.get(METADATA, "{}"))
        told = extra_in(said, wanted)
        self.unexpected = [key for key in said if key not in told]
        self.values: dict[str, Any] = {name: said[key] for key, name in told.items()}
        self.parts: list[LocalShard] = []
        for key, name in self.keys.items():
            dtype, shape = there[key]
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
