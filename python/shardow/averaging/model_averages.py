"""Averages of one model on this rank, and what its ranks agree on before they use the averages of all together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardow import _core, errors
from shardow.averaging.attach import Samples
from shardow.averaging.cuda_streams import Streams, with_memory
from shardow.averaging.history import UpdateHistory
from shardow.averaging.options import make_options
from shardow.averaging.replicas import share_out
from shardow.averaging.swap import Swap
from shardow.averaging.teacher import Teacher, copy_over
from shardow.averaging.torch_rules import OtherMemory
from shardow.averaging.tracked import RequiresGradWatch, Source, Tracked, common_weight, facts_of, track
from shardow.base.checks import invalid, seconds, unsupported, warn
from shardow.distributed.gather import LocalShard
from shardow.distributed.rank_group import Combined, RankGroup, Step, equal_facts, equal_states
from shardow.files.reading import choose
from shardow.sharding import storage
from shardow.sharding.equal import DIFFERENT_WEIGHTS, Common, common_of, equal_copies
from shardow.sharding.local import LocalTensor, oddity
from shardow.sharding.local_state import LocalState
from shardow.sharding.names import unwrapped
from shardow.sharding.partial_tensor import PartialTensor
from shardow.sharding.swap_guard import read, refuse_foreign
from shardow.sharding.view import find

T = TypeVar("T")

_CHUNK = 1 << 20  # elements that distance() converts at a time
_NO_GRAPH = "PyTorch's operations make the updates, which no graph repeats; call update() after each replay"


class ModelAverages:
    """The implementation behind EMA and the compat classes. ``view``: the model as it was at construction; ``ranks``:
    those that share it; ``tracked``: the averaged tensors; ``swap``: the transaction with the weights."""

    def __init__(
        self, model: nn.Module, decay: Any, arguments: Mapping[str, Any], source: Mapping[str, Source] | None,
        group: dist.ProcessGroup | None, timeout: float | timedelta | None,
        teacher: Teacher | None = None,
    ) -> None:  # fmt: skip
        """``arguments``: those of make_options() but for the decay. Collective."""
        self.arguments = {**arguments, "source": source, "timeout": timeout}
        self.view = find(model, group=group, odd=True)
        self.ranks = RankGroup(self.view.process_group, seconds(timeout))
        self.teacher = teacher
        self.ranks.step("EMA(...)", lambda: self._build({"decay": decay, **arguments}, source))
        self.offloaded = any(row.is_offloaded for row in self.tracked)
        devices = {storage.device_of(row.source).type for row in self.tracked}
        own = [average for row in self.tracked for average in row.averages] if teacher is None else []
        #: None where all tensors are on the host.
        self.streams = Streams((row.source for row in self.tracked), own) if "cuda" in devices else None
        frozen = self.view.frozen() if self.options.params == "trainable" else []
        self.unfrozen = RequiresGradWatch(frozen) if frozen else None
        if any(row.stretched for row in self.tracked):
            share_out("EMA(...)", self.tracked, self.ranks)
        self.swap = Swap(self._engine, self.streams, self.tracked, self.view, self.ranks, self.splits)
        #: Has a record once snapshots are taken, or a state was loaded of a run that took some.
        self.history = UpdateHistory()
        # Snapshots by directory; cleared where the counters are replaced.
        self.snapshots: dict[Path, Any] = {}
        self._warned = False
        if teacher is not None:
            self.teach(teacher)

    def teach(self, teacher: Teacher) -> None:
        """Begins with a teacher whose tensors are the averages."""
        self.teacher, self.swap.has_teacher = teacher, True
        teacher.start(self.begin, self.wait if self.options.overlap else None)

    @torch.inference_mode(False)
    def module(self) -> nn.Module:
        """See EMA.module()."""
        if self.teacher is None:
            self.swap.ready("module()")
            made = Teacher(copy_over(unwrapped(self.view.model), self.tracked), None, "teacher")
            made.find(self.view)
            made.take(self.tracked, self.options)
            self.teach(made)
        module = None if self.teacher is None else self.teacher.module
        if not isinstance(module, nn.Module):
            raise invalid("module(): averages= of this EMA are tensors, and no module")
        return module

    @torch.inference_mode(False)  # averages made in inference mode could not be written outside it
    def _build(self, arguments: dict[str, Any], source: Mapping[str, Source] | None) -> Step[None]:
        """Makes the averages and the engine; the step compares what must be equal on all ranks."""
        self.view.reshard()
        give = None
        if self.teacher is not None:
            arguments["dtype"], give = self.teacher.find(self.view), self.teacher.take
        self.options = options = make_options(**arguments)
        _core.decay_keys(options.schedules)  # refuses equal decays
        self.tracked = tracked = track(options.chosen(self.view), options, source, give)
        refuse_foreign("EMA(...)", lambda: [row.local.tensor for row in tracked])
        offloaded = all(row.is_offloaded for row in tracked)
        self.by_torch = sum(row.by_torch for row in tracked)
        chosen = options.engine(self.ranks.size == 1, offloaded, keep_values=give is not None)

        def make() -> _core.Average:  # the views live in this call alone
            averages = [[row.view(row.averages[k]) for row in tracked] for k in range(len(options.schedules))]
            other = OtherMemory(tracked) if self.by_torch else None
            with _disable_current_modes():  # the caller's dispatch modes don't apply
                sources = [row.view(row.sources()) for row in tracked]
            return _core.Average(sources, averages, chosen, other)

        self._engine = with_memory(make)
        own = {"options": self._engine.state(), "replicas": options.replicas}
        facts = {**facts_of(tracked), **own} if self.ranks.size > 1 else {}
        copies = equal_copies("EMA(...)", map(common_weight, self.tracked_weights()), self.ranks)
        return Step(None, [equal_facts("EMA(...)", facts, self.ranks), copies, self.ranks.join("EMA")])

    @property
    def engine(self) -> _core.Average:
        """The engine, on torch's current streams."""
        if self.streams is not None:
            self.streams.follow(self._engine)
        return self._engine

    @property
    def keys(self) -> list[str]:
        """Lists the keys of several averages."""
        return _core.decay_keys(self._engine.schedules)

    @property
    def splits(self) -> bool:
        return self.options.replicas == "split" and any(row.local.replicas for row in self.tracked)

    def ready_to_swap(self, decay: object, what: str, fn: Callable[[int], T]) -> T:
        """Calls fn(k) on every rank before weights are overwritten, or raises on all. It raises too where some ranks
        have made fewer updates, or where replicas that divide the work, and would overwrite each other's weights, have
        different ones. ``k``: the index of the average that ``decay`` names."""

        def prepare() -> Step[T]:
            made = fn(choose(self.keys, decay))
            weights = [common_of(row.local) for row in self.tracked_weights()] if self.splits else []
            remedy = f'{DIFFERENT_WEIGHTS}. With replicas="copy" each rank averages, and swaps, its own'
            return Step(made, [equal_copies(what, weights, self.ranks, remedy), self.states(what, decay=decay)])

        return self.ranks.step(what, prepare)

    def _raise_non_finite(self) -> None:
        """Raises for NaN and Inf that updates met, with several ranks: a rank that raised alone, in update(), would
        leave the others waiting."""
        if self.options.nonfinite != "raise" or self.ranks.size == 1 or (met := self.engine.non_finite()) is None:
            return
        self.engine.forget_non_finite()
        step, elements, name = met
        where = f"at step {step}, {elements} weights on rank {self.ranks.rank}"
        raise invalid(f"{where} were NaN or Inf, first in '{name}' (nonfinite='raise'); their averages were held")

    def states(self, what: str, **facts: Any) -> _core.EqualStates:
        """Returns the comparison of the averages' states on their ranks, and of the call's arguments. May raise."""
        self._raise_non_finite()
        if "decay" in facts:
            facts["decay"] = self.keys[choose(self.keys, facts["decay"])]
        if self.unfrozen is not None:
            self.unfrozen.refresh(everywhere=True)
        return equal_states(what, self.ranks, self.engine.state(), facts)

    def handing_out(
        self, what: str, others: Callable[[], Iterable[LocalTensor]] | None = None, **facts: Any
    ) -> Step[_core.EqualStates]:
        """Returns the step before one rank's bytes are used for all ranks that hold the same; its value has the state
        of all ranks in the end. ``others``: tensors of the model that are handed out too, wherever they lie now. May
        raise."""
        common = self.handed_out(what)
        if others is not None:
            self.swap.ready(what)
            self.view.reshard(refuse_written=True)
            weights = set(self.view.parameters)
            common += [common_of(local) for local in others() if local in weights]
        states = self.states(what, **facts)
        return Step(states, [equal_copies(what, common, self.ranks), states])

    def tracked_weights(self) -> list[Tracked]:
        """Returns the tracked tensors without buffers, of which each rank has its own: batch statistics."""
        weights = set(self.view.parameters)
        return [row for row in self.tracked if row.local in weights]

    def handed_out(self, what: str) -> list[Common | None]:
        """Returns the tensors that other ranks should have too: averages, or where ranks divide them the weights that
        they follow. May raise."""
        self.swap.refuse(what)
        if self.ranks.size == 1:
            return []
        divides, common = self.options.replicas == "split", list[Common | None]()
        for row in self.tracked_weights():
            if divides and row.local.replicas:
                common.append(common_weight(row))
            else:
                common += [common_of(row.local, average) for average in row.averages]
        return common

    # ---- training

    def update(self, step: int | None, samples: float, attached: bool = False) -> None:
        """Makes one update. ``attached``: an optimizer's step follows, which the swap guard holds until the weights are
        read."""
        self._begin_update(lambda: self.engine.update(step, samples)[1], attached)

    def update_attached(self, samples: Samples | None, at_once: bool) -> None:
        """Updates after an optimizer's step, or with ``at_once`` before its next one. ``samples``: see EMA.attach()."""
        if samples is None:
            seen = 0.0
        elif callable(samples):
            seen = float(samples())
        else:
            seen = self.engine.samples_by(float(samples))
        self.update(None, seen, attached=not at_once)

    def _begin_update(self, update: Callable[[], int], attached: bool = False) -> None:
        """Calls ``update()``, which returns how many weights were not finite. The next forward writes buffers, before
        any step."""
        self.ready_to_update()
        if overlapped := self.options.overlap or self.offloaded:
            read(self.swap)
        try:
            self._warn_of(update())
        finally:
            if overlapped and (not attached or self.options.averages_buffers):
                self.swap.finish_reading()
            self._written()

    def prepare_replay(self, step: int | None, samples: float) -> None:
        """See EMA.prepare_replay()."""
        if self.by_torch:
            raise unsupported(_NO_GRAPH)
        if self.engine.swapped or not self.view.unchanged():
            raise invalid(
                "prepare_replay(): weights were swapped, moved or replaced since update() was captured; a replay would "
                "read their old memory. Capture it anew"
            )
        self.engine.prepare_replay(step, samples)

    def wait(self) -> None:
        """Waits until an update in the background has ended."""
        self._engine.wait()

    def __del__(self) -> None:
        """Ends an update in the background before the memory that it reads is given back. At the interpreter's end
        this module's globals are gone."""
        try:  # noqa: SIM105
            self._engine.wait()
        except Exception:
            pass

    @torch.no_grad()
    def update_by(self, decay: float, weight: float) -> None:
        """Updates by the schedule of another library, which its compat class computes."""
        self._begin_update(lambda: self.engine.update_by([(decay, weight)]))

    def _written(self) -> None:
        """Reports to the teacher that the averages were written, or are being written in the background."""
        if self.teacher is not None:
            self.teacher.written()

    def ready_to_update(self) -> None:
        self.swap.ready_to_update()
        if self.by_torch and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise unsupported(f"update() in a capture: {_NO_GRAPH}")
        if self.teacher is not None:
            self.teacher.refuse_moved()
        if self.unfrozen is not None:
            self.unfrozen.refresh()
        self.swap.gather()

    def _warn_of(self, held: int) -> None:
        if not held or self._warned:
            return
        self._warned, nonfinite = True, self.options.nonfinite
        fate = "become so too" if nonfinite == "propagate" else "keep their last values"
        raised = ", and the next collective call raises on every rank" if nonfinite == "raise" else ""
        warn(
            f"{held} weights on this rank are NaN or Inf; their averages {fate}{raised} (nonfinite={nonfinite!r}). "
            "stats()['held_nonfinite'] counts them; this warning is given once",
            RuntimeWarning,
        )

    def reset(self) -> None:
        """See EMA.reset()."""

        def ready() -> Step[None]:
            self.swap.refuse_swapped("reset()")
            try:
                self.wait()
            except errors.Error:
                # All other calls refuse averages that such an update has left half done.
                self._engine.reset()
            self.swap.ready("reset()")
            return Step(None, [self.states("reset()")])

        self.ranks.step("reset()", ready)
        self.swap.gather()
        self.engine.restart()
        self.go_on_from(UpdateHistory())
        self._warned = False

    def go_on_from(self, history: UpdateHistory) -> None:
        """Takes the history of replaced counters; the next snapshot() looks at its directory anew."""
        self.snapshots.clear()
        self.history = history
        self._written()

    # ---- their values

    def averages(self, k: int = 0) -> dict[str, torch.Tensor]:
        """Returns this rank's part of each average by name, the average's own memory: whole tensors, or partial
        tensors."""
        self.swap.refuse("state_dict()")
        return {
            row.name: row.averages[k].view(tuple(row.region.shape))
            if row.is_whole
            else PartialTensor(row.averages[k], row.region)
            for row in self.tracked
        }

    @property
    def step(self) -> int:
        return int(self._engine.progress[0])

    def stats(self) -> dict[str, float]:
        """See EMA.stats()."""
        figures: dict[str, float] = dict(self._engine.stats())
        link, hidden, waited = (figures.pop(name) for name in ("offload_bytes", "hidden_seconds", "waited_seconds"))
        if self.offloaded:
            figures["offload/bytes"] = link
        if self.options.overlap or self.offloaded:
            figures |= {"offload/hidden_seconds": hidden, "offload/waited_seconds": waited}
        if self.by_torch:
            figures["by_torch"] = self.by_torch
        if compiled := _core.cuda_compiler()[2]:
            figures["kernels/compile_seconds"] = compiled
        decays = self._engine.decays
        return {**figures, **{"decay" if len(decays) == 1 else f"decay/{k}": decay for k, decay in enumerate(decays)}}

    def __repr__(self) -> str:
        figures, state = self.engine.stats(), json.loads(self.engine.state())
        usual = {"rounding": "auto", "dtype": "F32", "update_every": 1, "start_step": 0, "seed": "0"}
        options = ", ".join(f"{name}={state[name]}" for name in ("rule", *usual) if state[name] != usual.get(name))
        compiler, device, seconds = _core.cuda_compiler()
        kernels = f", kernels for {device} compiled by {compiler} in {seconds:.1f} s" if compiler else ""
        return (
            f"EMA(decay=[{', '.join(self.keys)}], {options}, {figures['parameters']} tensors, {figures['elements']:,} "
            f"elements on this rank of {self.ranks.size}, {figures['bytes']:,} bytes, step {figures['step']}{kernels})"
        )

    def distance(self, decay: object) -> float:
        """See EMA.distance()."""

        def prepare() -> Step[Combined]:
            self.swap.ready("distance()")
            self.swap.gather()
            squares = _squares(self.tracked, choose(self.keys, decay), self.ranks)
            return Step(squares, [self.states("distance()", decay=decay), squares])

        return float(self.ranks.step("distance()", prepare).total)

    def begin(self) -> None:
        """Copies the weights into the averages; counters stay. Local."""
        self.ready_to_update()
        self.engine.reset()
        self._written()

    @cached_property
    def _parts(self) -> list[list[LocalShard]]:
        ks = range(len(self.keys))
        return [[LocalShard(row.name, row.averages[k], row.region) for row in self.tracked] for k in ks]

    def parts(self, k: int = 0, saving: bool = False) -> list[LocalShard]:
        """Returns this rank's part of each tensor of average ``k``, as files and gatherers take it. ``saving``: only
        those that this rank saves."""
        pairs = zip(self._parts[k], self.tracked, strict=True)
        return [part for part, row in pairs if not saving or row.local.counts_on(self.ranks.rank)]

    def held(self, k: int = 0, complete: bool = False, saving: bool = False) -> LocalState:
        """Returns this rank's part of average ``k``; ``complete``: also of all else that a complete model has.
        ``saving``: as parts()."""
        others = [local for local in self.others() if not oddity(local.tensor)] if complete else []
        counted = (local for local in others if not saving or local.counts_on(self.ranks.rank))
        parts = self.parts(k, saving) + [LocalShard(local.name, local.flat(), local.region) for local in counted]
        names = {local.name: (local.name, *local.aliases) for local in (*(row.local for row in self.tracked), *others)}
        return LocalState(parts, names, self.ranks.process_group)

    def others(self) -> list[LocalTensor]:
        """Returns the tensors that a complete model has beside the averages."""
        self.view.reshard()
        averaged = {row.name for row in self.tracked}
        buffers = self.view.buffers if self.options.buffers != "ignore" else []
        others = [local for local in [*self.view.parameters, *buffers] if local.name not in averaged]
        refuse_foreign("handing out a complete model", lambda: [local.tensor for local in others], self.swap)
        return others

    def to_copy(self, how: str) -> tuple[nn.Module, dict[str, Any]]:
        self.swap.refuse("copying")
        if self.teacher is not None:
            raise unsupported(f"an EMA can't be {how} whose averages are a teacher's; make an EMA of copies of both")
        if self.view.process_group is not None:
            remedy = "Save it with save(), or take its state_dict() and load that into another EMA of such a model"
            raise unsupported(f"an EMA on {self.ranks.size} ranks can't be {how}: each has a part. {remedy}")
        return self.view.model, {**self.arguments, "decay": self.engine.schedules}


def _squares(tracked: Sequence[Tracked], k: int, ranks: RankGroup) -> Combined:
    """Returns the squares from which all ranks compute |average - weights| / |weights|, as text; each element is
    counted on one rank, its owner."""
    apart, length = 0.0, 0.0
    for row in tracked:
        if not _owned(row, ranks):
            continue
        for average, weight in zip(row.averages[k].split(_CHUNK), row.sources().split(_CHUNK), strict=True):
            weight = weight.to(average.device).double()
            apart += float((average.double() - weight).square().sum())
            length += float(weight.square().sum())

    def ratio(texts: list[bytes]) -> bytes:
        apart, length = (math.fsum(squares) for squares in zip(*map(json.loads, texts), strict=True))
        return repr(math.sqrt(apart / length) if length > 0 else 0.0).encode()

    return Combined(json.dumps([apart, length]).encode(), ratio)


def _owned(row: Tracked, ranks: RankGroup) -> bool:
    """Returns False for tensors that another rank counts: copies on all replicas but the first, and whole tensors that
    every rank holds."""
    divided = row.stretched or row.region.size < row.local.region.size
    copied = not divided and any(index > 0 for _, index, _ in row.local.replicas)
    return row.local.counts_on(ranks.rank) and not copied
