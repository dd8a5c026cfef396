"""materialize(): a model that was built and sharded on meta gets memory and values, each rank's shards alone. load():
the same from a file, also for a model that has values, or for a mapping's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow.base.checks import instance, invalid, seconds
from shardow.base.progress import Progress
from shardow.distributed.rank_group import Combined, RankGroup, Step
from shardow.files import paths
from shardow.files.paths import StrPath
from shardow.merging.face import Merged
from shardow.sharding import parameter_registry
from shardow.sharding.local import refuse_expanded
from shardow.sharding.local_state import Saveable, group_of, held_by
from shardow.sharding.masters import fill_masters_too
from shardow.sharding.swap_guard import refuse_foreign
from shardow.start import fill, initialise, meta

_RANK_0 = "a mapping on rank 0"
_EMPTY = "an empty mapping"

Source = str | Path | Merged | Mapping[str, torch.Tensor] | Callable[[nn.Module], object] | None


@torch.no_grad()
def materialize(
    model: nn.Module, source: Source = None, optimizer: torch.optim.Optimizer | None = None, *,
    device: torch.device | str | None = None, strict: bool = True, dtype: torch.dtype | None = None,
    progress: Progress | None = None, seed: int = 0, group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Gives what is on meta memory and values, and parameters and persistent buffers that have values already those of
    the source.

    Collective over the ranks that share the model; no rank holds more than its own shards and, of a source in memory, a
    few blocks of 4 MiB.

    Args:
        model: plain, FSDP2, HSDP or TP, sharded while it is on meta; FSDP1 wrapped with
            ``param_init_fn=shardow.to_empty``; for DDP, the plain model before it is wrapped.
        source: a .safetensors file, a Hugging Face directory or what merged() gives, of which each rank reads its own
            bytes; a mapping of full tensors, on every rank, or on rank 0 with None or {} on the others, which are sent
            their own slices of it; or a function that initialises one module's own tensors, called for modules that
            have some without values; by default what meta_init() recorded of the constructors together with the
            modules' ``reset_parameters()``, and for others ``_reset_parameters()``, the model's
            ``_init_weights(module)`` or ``init_weights()``.
        optimizer: one that was made from the model's parameters before they were sharded or had memory: its groups,
            their options and its state are kept, its parameters become the model's.
        device: of what is on meta; by default the mesh's, else the CPU.
        strict: everything without values has its counterpart in the source, and everything in the source in the model.
            Else what the source lacks stays on meta, and is "missing". Of a model that has all its values, everything
            is asked for, as by load().
        dtype: of floating parameters that are on meta; by default their own. Values are cast.
        progress: called on rank 0 with (bytes done, bytes in all).
        seed: of an initialisation; modules are initialised whole, one after another, in the order of named_modules(),
            on the CPU: the values are the same at any world size.
        group: as in EMA: the ranks that share a plain model.
        timeout: seconds or timedelta without a sign of some rank. Past it, the connections of the process group may be
            closed.

    Returns:
        dict: {"missing": [...], "unexpected": [...], "kept": [had values when others had none, and the source has
        none]}, and what load() reports of a file.

    Raises:
        as load(), on every rank. The model is on meta again then, where it was, and the optimizer as it was; a model
        that had values is partly filled where reading itself failed.
    """
    instance("model", model, nn.Module)
    return Request(
        "materialize()", model, source, optimizer, device, dtype, strict, True, progress, seed, group, timeout
    ).run()


@torch.no_grad()
def load(
    target: Saveable, path: StrPath | Merged, strict: bool = True, verify: bool = True, *,
    group: dist.ProcessGroup | None = None, progress: Progress | None = None, timeout: float | timedelta | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fills a module, or a mapping's tensors, from a file or a Hugging Face directory, whatever sharding saved it.

    A module that is on meta gets memory, as by materialize(). Collective over the ranks that share them.

    Each rank reads the bytes of its own regions, and casts floating tensors to the dtype here. Names are matched as
    they are, under a tied tensor's other names, and without what wrappers, DDP and PEFT put into them; of a model of
    transformers also as its save_pretrained() writes them, with experts apart. Everything that does not fit is listed
    before anything changes.

    Args:
        path: also what merged() gives: the average of several checkpoints, of which each rank reads its own bytes.
        strict: every tensor here is in the file, and every one there is wanted; else the rest is in the report.
        verify: compare checksums where the file carries them; no extra reads.
        optimizer: of a module, as in materialize().

    Returns:
        dict: {"missing": [name], "unexpected": [name], "kept": [name; see materialize()], "metadata": {str: str},
        "bytes_read": by this rank, "seconds": float}.

    Raises:
        ValueError: something does not fit, or the file is corrupt, or has different tensors under the names of a tied
            one; NotImplementedError: save_pretrained() has reordered a tensor's elements; FileNotFoundError, OSError,
            TimeoutError.
    """
    if optimizer is not None and not isinstance(target, nn.Module):
        raise invalid("load(): optimizer= goes with a module; a mapping does not tell whose parameters its tensors are")
    if isinstance(path, Mapping):
        raise invalid("load() reads files; materialize() takes a mapping of tensors: materialize(model, mapping)")
    source = path if isinstance(path, Merged) else Path(paths.to_read(path))
    return Request(
        "load()", target, source, optimizer, strict=strict, verify=verify, progress=progress, group=group,
        timeout=timeout,
    ).run()  # fmt: skip


@dataclass
class Request:
    """A call of materialize() or load() on this rank. ``what`` is for messages."""

    what: str
    target: Any  # a Saveable
    source: Any
    optimizer: torch.optim.Optimizer | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    strict: bool = True
    verify: bool = True
    progress: Progress | None = None
    seed: int = 0
    group: dist.ProcessGroup | None = None
    timeout: float | timedelta | None = None

    def run(self) -> dict[str, Any]:
        """Fills the model and returns the report. Collective."""
        self._ranks = RankGroup(group_of(self.target, self.group), seconds(self.timeout))
        self._given: dict[str, torch.Tensor] = {}
        try:
            report = self._filled()
        except BaseException:
            meta.take_memory(self.target, self._given.values())
            raise
        if isinstance(self.target, nn.Module):
            meta.have_values(self.target)
        if self.optimizer is not None:
            parameter_registry.bind(self.optimizer, self._bindings)
        return report

    def _filled(self) -> dict[str, Any]:
        options: dict[str, Any] = {"verify": bool(self.verify), "progress": self.progress}
        if isinstance(self.source, (str, Path)):
            return fill.FileLoad(self.source, self._look, self._finish).fill(self._ranks, self.what, **options)
        job = self._ranks.step(self.what, self._look)
        kind = self._kind.total.decode()
        if kind in ("nothing", "a function"):
            report = initialise.by_init(job, self.target, self.source, self.seed)
        elif kind in ("a mapping", _EMPTY, _RANK_0):
            report = fill.from_mapping(job, self.source, kind == _RANK_0, self.progress)
        else:
            report = fill.from_merged(job, self.source, **options)

        def finish() -> None:
            job.held.put_back()
            self._finish(report)

        self._ranks.agree(self.what, finish)
        return report

    def _look(self) -> Step[fill.Job]:
        if isinstance(self.target, nn.Module):
            refuse_foreign(self.what, self.target.parameters, writes=True)
            if self.optimizer is not None:
                self._bindings = parameter_registry.bindings(self.optimizer, self.target)
            meta.give_memory(self.target, self.device, self.dtype, self._given)
            essential = meta.valueless(self.target)
            held = held_by(self.target, self.group, saving=False)
        else:
            essential, held = set[str](), held_by(self.target, self._ranks.process_group, saving=False)
            refuse_foreign(self.what, held.memory, writes=True)
        fill_masters_too(held)
        for one in [*held.view.parameters, *held.view.buffers] if held.view is not None else []:
            refuse_expanded(one.name, one.tensor)
        without = self._given.keys() | essential
        parts = (part for part in held.parts if not without or not without.isdisjoint(held.names[part.name]))
        wanted = dict.fromkeys(part.name for part in parts)
        self._kind = common_kind(self.what, self.source)
        job = fill.Job(self.what, held, self._ranks, wanted, essential, self.strict, wanted if without else ())
        return Step(job, [self._kind])

    def _finish(self, report: dict[str, Any]) -> None:
        given = self._given
        if given and self.device is not None:
            meta.move_tables(self.target, self.device)
        meta.take_memory(self.target, [given[name] for name in set(report["missing"]) if name in given])
        tie = getattr(self.target, "tie_weights", None)
        if given and callable(tie):
            tie()


def common_kind(what: str, source: Source) -> Combined:
    """Compares what ranks are given to fill a model from. Raises where they have different things, unless rank 0 alone
    has a mapping. The words of a load of files, which ranks may meet that have none, are these alone."""

    def common(by_rank: list[bytes]) -> bytes:
        if len(set(by_rank)) == 1:
            return by_rank[0]
        kinds = ", ".join(kind.decode() for kind in by_rank)
        if by_rank[0] == b"a mapping" and {*by_rank[1:]} <= {b"nothing", _EMPTY.encode()}:
            return _RANK_0.encode()
        way_out = "the same on all, or a mapping on rank 0 and None or {} elsewhere"
        raise invalid(f"{what}: ranks have different sources: {kinds}; {way_out}")

    return Combined(kind_of(source).encode(errors="backslashreplace"), common)


def kind_of(source: object) -> str:
    if source is None:
        return "nothing"
    if isinstance(source, (str, Path, Merged)):
        return f"the file {source}"
    if isinstance(source, Mapping):
        for name in source:
            instance("a name in source", name, str)
        return "a mapping" if source else _EMPTY
    if callable(source):
        return "a function"
    raise invalid(f"source is a {type(source).__name__}; give a path, a mapping of tensors or a function of a module")
