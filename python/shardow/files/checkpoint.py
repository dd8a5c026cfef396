"""save(), full_state_dict(): sharded modules and mappings of tensors as ordinary safetensors checkpoints. Every rank
moves its own bytes alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.base.checks import seconds
from shardow.base.progress import Progress
from shardow.distributed.gather import Gatherer
from shardow.distributed.rank_group import Comparison, RankGroup, Step
from shardow.files import engine
from shardow.files.background import SaveHandle
from shardow.files.paths import StrPath
from shardow.sharding.equal import common_of, equal_copies
from shardow.sharding.local_state import LocalState, Saveable, group_of, held_by, values_for_file
from shardow.sharding.swap_guard import refuse_foreign

_INSTEAD = (
    "for the weights; the averages are written by export() or save() of the EMA, and whole in its full_state_dict()"
)


def save(
    state: Saveable, path: StrPath, dtype: torch.dtype | str | None = None, max_shard_size: int | str | None = None, *,
    metadata: Mapping[str, str] | None = None, group: dist.ProcessGroup | None = None, progress: Progress | None = None,
    timeout: float | timedelta | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A module's parameters and persistent buffers, or a mapping's tensors, into ``path``. Collective over the ranks
    that share them.

    Every rank writes its own bytes of the final file, once: no gather, no second copy. ``path`` names the old
    checkpoint or the new one, whole, at every instant.

    Args:
        state: a module of any sharding, under its unwrapped names, each tied tensor once; or {name: tensor, DTensor or
            piece of an EMA's state_dict(), or plain value: number, text, None, list, tuple, dict}. Of plain tensors and
            values, rank 0's are written.
        path: a .safetensors file, or a directory in the Hugging Face layout, whose other files stay.
        dtype: casts floating tensors on the way out.
        max_shard_size: of a file in a directory, in bytes or like "5GB".
        metadata: texts for the header, rank 0's.
        group: the ranks, where the tensors don't tell.
        progress: called on rank 0 with (bytes done, bytes in all) about twice a second.
        timeout: seconds or timedelta without a sign of progress of some rank.

    Returns:
        dict: {"files": [path], "bytes_written": by this rank, "seconds": float}.

    Raises:
        ValueError: ranks that disagree, regions that overlap or leave a hole, weights that are an EMA's averages now,
            inside of its swapped(); OSError: the disk; TimeoutError: a rank is missing. Nothing is published then.
    """
    looking = Looking("save()", state, group, timeout)
    find = functools.partial(_to_save, looking, dtype, max_shard_size, metadata)
    return engine.SaveCall(find, path, looking.ranks, "save()", progress).write()


@torch.no_grad()
def async_save(
    state: Saveable, path: StrPath, dtype: torch.dtype | str | None = None, max_shard_size: int | str | None = None, *,
    metadata: Mapping[str, str] | None = None, group: dist.ProcessGroup | None = None, progress: Progress | None = None,
    timeout: float | timedelta | None = None,
) -> SaveHandle:  # fmt: skip
    """save() that returns when this rank has copied what it will write: training goes on while the rest is done.
    Collective.

    The copy, in the file's dtype, lies in host memory that the next such save of the same ranks uses again: on each
    rank as many bytes as it writes, once. A second save, of either kind, waits for the first one; its error is raised
    by ``wait()``, or by the next save. When the interpreter ends, it waits for the save first; an error that nobody has
    seen is told on stderr then, and the exit status is not 0. A process that is killed leaves what was there before.

    Args: as save(); ``progress`` is called from another thread.

    Returns:
        a handle: ``wait()`` for the report, ``done()``.

    Raises:
        what save() finds out before it writes; everything else comes from ``wait()``.
    """
    looking = Looking("async_save()", state, group, timeout)
    find = functools.partial(_to_save, looking, dtype, max_shard_size, metadata)
    return engine.SaveCall(find, path, looking.ranks, "async_save()", progress).write_in_background()


@torch.no_grad()
def full_state_dict(
    model: nn.Module, *, group: dist.ProcessGroup | None = None, timeout: float | timedelta | None = None
) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers on rank 0, {} elsewhere: fresh, full CPU tensors.

    Collective; one tensor at a time travels.

    Names are those of the unwrapped module, with every tied name: ready for load_state_dict(strict=True) of one that is
    not sharded.

    Args:
        model: of any sharding.
        group: the ranks, where the module doesn't tell.
        timeout: seconds or timedelta, how long to wait for the other ranks.

    Raises:
        ValueError: ranks that disagree, weights that are an EMA's averages now, inside of its swapped();
            NotImplementedError: a tensor without elements in memory (sparse, quantised); TimeoutError.
    """
    looking = Looking("full_state_dict()", model, group, timeout)
    ranks = looking.ranks
    held = ranks.step("full_state_dict()", lambda: Step(looking.look(), [looking.copies()]))
    found = Gatherer("full_state_dict()", held.parts, ranks).whole(held.names)
    return {**found, **copy.deepcopy(held.extra)} if ranks.rank == 0 else found


class Looking:
    """Looks at what this rank holds of ``state``."""

    def __init__(
        self, what: str, state: Saveable, group: dist.ProcessGroup | None, timeout: float | timedelta | None
    ) -> None:
        self.ranks = RankGroup(group_of(state, group), seconds(timeout))
        self._what, self._state = what, state
        self._group = group if isinstance(state, nn.Module) else self.ranks.process_group

    def look(self) -> LocalState:
        """May raise."""
        self.held = held_by(self._state, self._group, saving=self._what.endswith("save()"))
        refuse_foreign(self._what, self.held.memory, instead=_INSTEAD)
        return self.held

    def copies(self) -> Comparison:
        """Returns the comparison of what ranks hold alike, once this one has looked."""
        view = self.held.view
        return equal_copies(self._what, () if view is None else map(common_of, view.parameters), self.ranks)


def _to_save(
    looking: Looking, dtype: torch.dtype | str | None, max_shard_size: int | str | None,
    metadata: Mapping[str, str] | None,
) -> engine.SaveStep:  # fmt: skip
    held = looking.look()
    texts = {**values_for_file(held.values), **engine.texts(metadata)}
    file = engine.with_extra("", held.parts, held.extra if looking.ranks.rank == 0 else {}, texts)
    return Step(engine.ToSave([file], engine.dtype_and_limit(dtype, max_shard_size)), [looking.copies()])
