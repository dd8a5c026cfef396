"""A torch.distributed.checkpoint directory of averages: {"<name>": tensor}, sharded, and beside it the decay and the
number of updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from shardow.compat.files.published import publish
from shardow.distributed.rank_group import RankGroup
from shardow.model.match import Fit, Form, fit
from shardow.model.parts import Held

_DECAY, _UPDATES = "shardow.decay", "shardow.updates"


class EmaSavePlanner(DefaultSavePlanner):
    """Torch keys its cache of plans by the planner's class, for the whole process: our own meets no others' plans.
    Nothing is cached.
    """

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=False)


@dataclass(frozen=True)
class Plan:
    """What will be read."""

    directory: Path
    fit: Fit[Form | None]
    has_counters: bool


def save(state: Mapping[str, torch.Tensor], decay: float, updates: int, directory: Path, ranks: RankGroup) -> None:
    """Every rank writes its own shards; the directory is there whole, or as before. Collective."""
    entries = {**state, _DECAY: _number(float(decay)), _UPDATES: _number(updates)}

    def write(partial: Path) -> None:
        with _quiet_alone():
            dcp_save(entries, checkpoint_id=str(partial), planner=EmaSavePlanner(), process_group=ranks.process_group)

    publish("save()", directory, directory.with_name(f".{directory.name}.partial"), ranks, write)


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64, device="cpu")


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Torch warns at each save and load of a process without a group; one process is no mistake here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield


def plan(held: Held, directory: Path) -> Plan | None:
    """Compares names, shapes and dtypes with the directory's; nothing is changed. None: there is no checkpoint."""
    if not (directory / ".metadata").exists():
        return None
    stored = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    tensors = {
        key: Form(tuple(one.size), one.properties.dtype)
        for key, one in stored.items()
        if isinstance(one, TensorStorageMetadata) and key not in (_DECAY, _UPDATES)
    }
    found = fit(held, tensors, str(directory))
    found.only_different().refuse("load()", str(directory), RuntimeError)
    return Plan(directory, found, {_DECAY, _UPDATES} <= stored.keys())


def read(found: Plan, state: Mapping[str, torch.Tensor], ranks: RankGroup) -> tuple[float, int] | None:
    """Into ``state``'s tensors, cast, whatever sharding wrote them; (decay, updates) where they were saved.
    Collective."""
    entries = {key: state[name] for name, key in found.fit.keys.items()}
    counters = {_DECAY: _number(0.0), _UPDATES: _number(0)}
    if found.has_counters:
        entries.update(counters)
    with _quiet_alone():
        dcp_load(entries, checkpoint_id=str(found.directory), process_group=ranks.process_group)
    return (float(counters[_DECAY]), int(counters[_UPDATES])) if found.has_counters else None
