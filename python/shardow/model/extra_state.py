"""``_extra_state``: what modules put into a state_dict() beside their tensors, by get_extra_state().

In files, tensors are tensors, and what JSON can say is in the header; a warning names the rest.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardow import _core
from shardow.base.warnings import warn
from shardow.model.dtypes import dtype_of
from shardow.model.names import clean_file_key, join, walk
from shardow.ranks.gather import Part

KEY = "_extra_state"
METADATA = "shardow.extra_state"  # of a header: {name: value} in JSON


def extra_states(model: nn.Module) -> dict[str, Any]:
    """By clean name, as the modules give them."""
    return {name: module.get_extra_state() for name, module in _modules(model)}


def give(model: nn.Module, values: Mapping[str, Any]) -> None:
    for name, module in _modules(model):
        if name in values:
            module.set_extra_state(copy.deepcopy(values[name]))


def for_file(values: Mapping[str, Any]) -> tuple[list[Part], dict[str, str]]:
    """(tensors, metadata) of rank 0's values. Warns of what is neither."""
    parts, said, lost = [], {}, []
    for name, value in values.items():
        if type(value) is torch.Tensor and value.layout is torch.strided:
            parts.append(Part(name, value.detach().cpu().clone().contiguous().view(-1), _core.Region.whole(list(value.shape))))
        elif _survives_json(value):
            said[name] = value
        else:
            lost.append(f"'{name}' ({type(value).__name__})")
    if lost:
        warn(
            f"{', '.join(lost[:8])}: not in the file, which holds tensors and what JSON says; keep it beside, or let get_extra_state() "
            "return a tensor"
        )
    return parts, {METADATA: json.dumps(said)} if said else {}


class FromFile:
    """The values in a file for ``wanted`` names: those of tensors are there when ``parts`` have been read.

    ``keys``: theirs in the file; ``unexpected``: nobody here has them.
    """

    def __init__(self, wanted: Iterable[str], catalog: Any) -> None:
        by_clean = {clean_file_key(name): name for name in wanted}
        self.values: dict[str, Any] = {}
        self.parts: list[Part] = []
        self.keys: set[str] = set()
        self.unexpected: list[str] = []
        for key, (dtype, shape) in catalog.tensors.items():
            name = by_clean.get(clean_file_key(key)) if key.endswith(KEY) else None
            if name is not None:
                self.values[name] = torch.empty(tuple(shape), dtype=dtype_of(key, dtype))
                self.parts.append(Part(key, self.values[name].view(-1), _core.Region.whole(list(shape))))
                self.keys.add(key)
        for key, value in json.loads(catalog.metadata.get(METADATA, "{}")).items():
            name = by_clean.get(clean_file_key(key))
            if name is None:
                self.unexpected.append(key)
            else:
                self.values[name] = value


class _Without(Mapping[str, torch.Tensor]):
    """A mapping without some of its keys; its values, which may be read from elsewhere, are not touched."""

    def __init__(self, state: Mapping[str, Any], without: Collection[str]) -> None:
        self._state, self._without = state, without

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self._without:
            raise KeyError(key)
        found: torch.Tensor = self._state[key]
        return found

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._state if key not in self._without)

    def __len__(self) -> int:
        return len(self._state) - len(self._without)


def split(state: Mapping[str, Any] | None, wanted: Iterable[str]) -> tuple[Mapping[str, torch.Tensor] | None, dict[str, Any]]:
    """(tensors, extra states by the names that are wanted) of a mapping like a state_dict().

    What is no tensor and not wanted stays among the tensors, to be found out.
    """
    if state is None:
        return None, {}
    by_clean = {clean_file_key(name): name for name in wanted}
    extra = {key: by_clean[clean_file_key(key)] for key in state if key.endswith(KEY) and clean_file_key(key) in by_clean}
    return _Without(state, extra) if extra else state, {name: state[key] for key, name in extra.items()}


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in walk(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield join(name, KEY), module


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
