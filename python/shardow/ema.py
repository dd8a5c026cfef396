"""EMA: the averaged weights of a PyTorch model, sharded as the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardow import _core, _counters, _errors, _files, _state, _tracked, _warnings
from shardow._attached import Attachments, Handle, Samples
from shardow._background import SaveHandle
from shardow._equal import DIFFERENT_WEIGHTS, Common, check_equal, common_of
from shardow._gather import Gatherer, Part
from shardow._keys import choose, keys_of
from shardow._options import Options, Params, invalid, make_options, seconds
from shardow._streams import Streams, with_memory
from shardow._swap import Block, Swap
from shardow._swap_guard import refuse_foreign
from shardow._team import Team
from shardow._unfrozen import Unfrozen
from shardow.torch.find import find
from shardow.torch.local import LocalTensor, oddity, refuse_all_odd

T = TypeVar("T")


class EMA:
    """Exponential moving averages of ``model``'s parameters: e <- decay * e + (1 - decay) * p after every optimizer step.

    Each rank averages what it holds, in place, in one pass, with no communication: 4 P / N bytes a rank. The averages are bit-identical at any world size, sharding
    and thread count. Finds plain, DDP, FSDP1, FSDP2, HSDP and TP parameters by itself, through torch.compile and checkpoint wrappers.

    Construction is collective over the ranks that share the model, after it has been wrapped and its weights are in place; the averages begin equal to the weights.

    Args:
        model: any module. Names are those of the unwrapped model.
        decay: weight kept on the old average per step, in [0, 1]; a Schedule of shardow.schedules; or a list of up to 8, all averaged in one pass.
        dtype: of the averages; float32 whatever the weights are.
        device: where the averages live; None: with their weights.
        replicas: "split": ranks that hold the same weights (DDP, HSDP) divide the work and the memory; "copy": each averages everything it holds.
        params: "trainable", "all", or a predicate of (name, parameter).
        buffers: float buffers: "copy" exports the model's own, "average" averages them like parameters, "ignore" leaves them out. Integer buffers are only copied.
        rule: "lerp" (torch.lerp, accurate), "mul_add" (e.mul_(d).add_(p, alpha=1-d)), "two_products" (e*d + (1-d)*p), "difference" (e.sub_((1-d)*(e-p))), "fused_difference" (e.sub_(e-p, alpha=1-d)) or
            "quotient" (e + (p-e) / (1/(1-d))):
            bit-equal to those forms.
        stochastic: round the increment stochastically; "auto": where 1 - decay < 5e-5, where rounding to nearest would lose it.
        nonfinite: "hold": where a weight is NaN or Inf its average stays and is counted; "propagate"; "raise": held, then ValueError, with
            several ranks at the next collective call of this EMA and on all of them.
        update_every: average every n-th step, with decay^n.
        start_step: an update at a step <= start_step copies the weights, the next one averages.
        seed: of stochastic rounding.
        source: {name: tensor} averaged in a parameter's place (an optimizer's float32 master copy), same local shape.
        group: process group of ranks that hold replicas of a plain model, or the ranks of a model whose groups cannot be told from its meshes.
        threads: CPU threads; 0: what OMP_NUM_THREADS and the affinity mask allow, at most 4.
        overlap: not built yet.
        timeout: seconds or timedelta, the deadline of every collective call; None: the process group's own.

    Raises:
        ValueError: an option out of range, ranks that disagree, weights on meta.
        NotImplementedError: what this build or placement cannot do.
        TimeoutError, ConnectionError: another rank is missing or failed.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | _core.Schedule | Sequence[float | _core.Schedule] = 0.9999,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        replicas: str = "split",
        params: Params = "trainable",
        buffers: str = "copy",
        rule: str = "lerp",
        stochastic: bool | str = "auto",
        nonfinite: str = "hold",
        update_every: int = 1,
        start_step: int = 0,
        seed: int = 0,
        source: Mapping[str, torch.Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
        threads: int = 0,
        overlap: bool = False,
        timeout: float | timedelta | None = None,
        **unknown: Any,
    ) -> None:
        self._view = find(model, group=group, odd=True)
        self._team = Team(self._view.process_group, seconds(timeout))

        def build() -> tuple[Options, list[str], list[_tracked.Tracked], _core.Average]:
            _refuse(unknown)
            options = make_options(
                decay=decay, dtype=dtype, device=device, replicas=replicas, params=params, buffers=buffers, rule=rule, stochastic=stochastic,
                nonfinite=nonfinite, update_every=update_every, start_step=start_step, seed=seed, threads=threads, overlap=overlap,
            )  # fmt: skip
            return options, keys_of(options.schedules), *self._build(options, source)

        self._options, self._keys, self._tracked, self._engine = self._team.agree("EMA(...)", build)
        self._streams = Streams(average for one in self._tracked for average in one.averages)
        self._unfrozen = Unfrozen(self._view.frozen() if self._options.params == "trainable" else ())
        self._team.same("EMA(...)", self._facts(), "EMA")
        check_equal("EMA(...)", lambda: map(_common_weight, self._tracked_weights()), self._team, DIFFERENT_WEIGHTS)
        self._attached = Attachments(self._update_attached, lambda: self._not_swapped("optimizer.step()"))
        self._swap = Swap(self._engine, self._streams, self._tracked, self._view, self._team, self._splits())
        self._warned = False

    def _build(self, options: Options, source: Mapping[str, torch.Tensor] | None) -> tuple[list[_tracked.Tracked], _core.Average]:
        self._view.reshard()
        tracked = _tracked.track(self._chosen(options), options, source)
        refuse_foreign("EMA(...)", lambda: [one.local.tensor for one in tracked])
        averages = [_tracked.average_views(tracked, k) for k in range(len(options.schedules))]
        sources, chosen = _tracked.source_views(tracked), options.engine(alone=self._team.size == 1)
        return tracked, with_memory(lambda: _core.Average(sources, averages, chosen))

    @property
    def _average(self) -> _core.Average:
        """The engine, on torch's current streams."""
        self._streams.follow(self._engine)
        return self._engine

    def _chosen(self, options: Options) -> list[LocalTensor]:
        """Parameters, and buffers where they are averaged, in the model's order."""
        chosen = [one for one in self._view.parameters if _wants(options.params, one)]
        if not chosen:
            raise invalid(f"no parameter is averaged: params={options.params!r} chose none of {len(self._view.parameters)}")
        if options.buffers == "average":
            self._view.watch_buffers = True
            chosen += [one for one in self._view.buffers if one.tensor.is_floating_point()]
        return chosen

    def _facts(self) -> dict[str, Any]:
        tensors = {one.name: f"{one.local.region.shape} {one.source.dtype}" for one in self._tracked}
        return {"tensors": tensors, "options": self._average.state(), "order": list(tensors), "replicas": self._options.replicas}

    # ---- training

    @torch.no_grad()
    def update(self, step: int | None = None, samples: float = 0.0) -> None:
        """After an optimizer step: one pass over this rank's weights; no communication.

        Args:
            step: optimizer steps taken so far; None: one more than before. A step is counted once; skipped ones are made up for by decay^n.
            samples: training samples seen so far, for schedules in samples.
        """
        if self._attached:
            raise invalid("update() while attached to an optimizer would count each step twice; call neither, or handle.remove() first")
        self._update(step, samples)

    def _update(self, step: int | None, samples: float) -> None:
        self._ready_to_update()
        _, held = self._average.update(step, samples)
        self._warn_of(held)

    @torch.no_grad()
    def _update_by(self, decay: float, weight: float) -> None:
        """update() by somebody else's schedule: the surfaces of other libraries have their own."""
        self._ready_to_update()
        self._warn_of(self._average.update_by([(decay, weight)]))

    @torch.no_grad()
    def prepare_replay(self, step: int | None = None, samples: float = 0.0) -> None:
        """Before each replay of a CUDA graph that captured update(): counts the step as update() does, and gives the replay its numbers. Local; nothing waits.

        An update() that is captured is recorded and not counted. Call this on the stream of the replay; a replay without it repeats the step before, and does nothing the
        first time. Weights that moved need a new capture.

        Args: as update().

        Raises:
            ValueError: the weights are not those of the capture, or the step draws noise that the captured launch can't.
        """
        if self._average.swapped or not self._view.unchanged():
            raise invalid(
                "prepare_replay(): weights were swapped, moved or replaced since update() was captured; a replay would read their old memory. Capture it anew"
            )
        self._average.prepare_replay(step, samples)

    def _ready_to_update(self) -> None:
        self._swap.ready("update()")
        self._unfrozen.look()
        _tracked.gather(self._swap.strided)

    def _warn_of(self, held: int) -> None:
        if held and not self._warned:
            self._warned = True
            _warnings.warn(
                f"{held} weights on this rank are NaN or Inf; their averages {self._fate()} (nonfinite={self._options.nonfinite!r}). "
                "stats()['held_nonfinite'] counts them; this warning is given once",
                RuntimeWarning,
            )

    def _fate(self) -> str:
        if self._options.nonfinite == "propagate":
            return "become so too"
        return "keep their last values" + (
            ", and the next collective call raises on every rank" if self._options.nonfinite == "raise" else ""
        )

    def _rebind(self) -> None:
        """A changed parameter is an error; one that is merely unsharded for a while, or whose memory moved, is not."""
        self._swap.rebind()

    def _follow_moves(self) -> bool:
        """The engine reads where the weights lie now. False where more than their memory has changed; nothing has then."""
        return self._swap.follow_moves()

    def attach(self, optimizer: torch.optim.Optimizer, *, samples: Samples | None = None) -> Handle:
        """Updates after every optimizer.step() from now on; ``handle.remove()`` ends it. Local.

        Steps that a GradScaler skips are not counted; with a fused optimizer on CUDA, learning that waits for the device. Several optimizers
        of one model are attached one after another, in the order in which they step: one update follows when each has stepped.

        Args:
            optimizer: torch's, or a wrapper that has it as ``.optimizer`` (accelerate's).
            samples: for schedules in samples: those of one step on all ranks, or a function that returns how many have been seen so far.

        Raises:
            ValueError: attached to this optimizer already. TypeError: no optimizer. And in ``step()``, before it, where the weights are swapped.
        """
        return self._attached.add(optimizer, samples)

    def _update_attached(self, samples: Samples | None) -> None:
        if samples is None:
            seen = 0.0
        elif callable(samples):
            seen = float(samples())
        else:
            seen = _state.samples_by(self._average.state(), float(samples))
        self._update(None, seen)

    # ---- evaluation

    def swapped(self, decay: float | str | _core.Schedule | None = None) -> Block:
        """Inside the block the model holds the averages; after it, whatever happened, its weights again, bit for bit.

        Collective, both ends, where ranks share the model. In place, without a second copy of the weights: state_dict() and the like, and optimizer.step(), wait until the block ends. ``decay`` chooses
        among several averages. A backward through activations from before the block raises, where autograd can see it.

        Weights whose memory moved inside (``model.to()``, ``load_state_dict(assign=True)``) are put where the model has them now; with a RuntimeWarning where they were cast.

        An exception of the block is raised at once, on its rank. Other ranks get a ConnectionError that names it when they leave theirs. Where replicas hold parts of each other's weights (DDP, HSDP with
        ``replicas="split"``) and some ranks were still inside, the model keeps the averages, all other calls say so, and restore() on every rank brings the weights back.

        Raises:
            ValueError: nested, the same weights hold another EMA's averages, or (on leaving, with nothing lost) the model has no place for its weights any more.
            TimeoutError, ConnectionError: another rank is missing, or failed.
        """
        return self._swap.block(choose(self._keys, decay), self._ready_to_swap)

    def swap_in(self, decay: float | str | _core.Schedule | None = None) -> None:
        """The beginning of swapped(), for frameworks with callbacks: the same transaction. Collective."""
        self._swap.enter(choose(self._keys, decay), self._ready_to_swap)

    def swap_out(self) -> None:
        """The end of swapped(), for frameworks with callbacks. Collective. Raises ValueError where nothing is swapped in."""
        self._swap.out()

    def restore(self, strict: bool = True) -> None:
        """The weights back after a swap that was interrupted, bit for bit, from whatever point it had reached; does nothing where they are where they belong.

        Collective where replicas hold parts of each other's weights: call it on every rank that shares the model. ``strict=False``: parameters that are gone from the model are left as they are.

        Raises:
            ValueError: the model has no place for its weights any more; nothing has changed.
            TimeoutError, ConnectionError: another rank is missing; if it died, the weights that it held died with it, and the last checkpoint has to be loaded.
        """
        self._swap.restore(strict)

    def _splits(self) -> bool:
        return self._options.replicas == "split" and any(one.local.replicas for one in self._tracked)

    @torch.no_grad()
    def copy_to(self, model: nn.Module, decay: float | str | _core.Schedule | None = None) -> None:
        """The averages, and what belongs to a complete model, into another module with the same names, sharded or not. Collective."""
        k = choose(self._keys, decay)
        target = find(model, group=self._view.process_group, odd=True)
        names = {one.name for one in self._tracked}
        self._ready_to_hand_out("copy_to()", self._others, lambda: self._check_copy(target.parameters, names))
        _state.copy_streamed(self._gatherer(k, complete=True), target, self._team)
        target.bump_versions()

    def _check_copy(self, parameters: Sequence[LocalTensor], names: set[str]) -> None:
        self._swap.ready("copy_to()")
        shapes = {one.name: tuple(one.local.region.shape) for one in self._tracked}
        theirs = {one.name: tuple(one.region.shape) for one in parameters}
        wrong = [f"'{n}': {theirs.get(n, 'missing')} there, {s} here" for n, s in shapes.items() if theirs.get(n) != s]
        if wrong:
            raise invalid(f"copy_to(): the other model does not fit: {'; '.join(wrong)}")

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Sharded averages and plain values, without a copy: {"averages": {name: tensor}, "state": str}; ready for torch.distributed.checkpoint.

        With several decays the averages are keyed by decay: {"averages": {"0.999": {...}, ...}}. The tensors are this EMA's own memory: what changes them changes it.
        """
        self._not_swapped("state_dict()")
        return _state.make(self._tracked, self._keys, self._average.state())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> dict[str, list[str]]:
        """Takes what state_dict() gave: pieces of the same sharding, or full tensors of the global shape. Collective.

        Everything is checked on every rank first, and everything that does not fit is listed; then averages, counters and schedules are replaced.

        ``strict=False`` takes what there is: averages that the state lacks stay as they are (those of a new EMA are its model's weights), those that are not wanted are left out. So weights that were
        added or unfrozen are taken in by a new EMA: ``new.load_state_dict(old.state_dict(), strict=False)``.

        Returns:
            {"missing": [name], "unexpected": [name]}.
        """

        before = self._average.state()

        def check() -> tuple[list[_state.Copy], dict[str, list[str]]]:
            self._not_swapped("load_state_dict()")
            found = _state.check(state, self._tracked, self._keys, strict)
            self._average.set_state(_state.engine_state(state))
            return found

        try:
            copies, report = self._team.agree("load_state_dict()", check)
        except BaseException:
            if not self._average.swapped:  # this rank's was good, another's was not
                self._average.set_state(before)
            raise
        for target, value, region in copies:
            _state.copy(target, value, region)
        return report

    def _averages(self) -> dict[str, torch.Tensor]:
        """This rank's part of each average by name, its own memory: whole tensors, or pieces."""
        self._not_swapped("state_dict()")
        return {one.name: _state.as_tensor(one, 0) for one in self._tracked}

    @torch.no_grad()
    def _load_averages(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Pieces of the same sharding, DTensors, or full tensors; counters stay. Collective."""

        def check() -> list[_state.Copy]:
            self._not_swapped("load_state_dict()")
            return _state.check({"averages": averages}, self._tracked, self._keys[:1])[0]

        for target, value, region in self._team.agree("load_state_dict()", check):
            _state.copy(target, value, region)

    def full_state_dict(self, decay: float | str | _core.Schedule | None = None, complete: bool = False) -> dict[str, torch.Tensor]:
        """Full averages by name, fresh CPU tensors, on rank 0; {} elsewhere. Collective; one tensor at a time travels.

        ``complete=True`` adds frozen weights, buffers and every tied name: a dict for load_state_dict(strict=True) of the unwrapped model.
        """
        k = choose(self._keys, decay)
        self._ready_to_hand_out("full_state_dict()", self._others if complete else None)
        aliases = {one.name: one.aliases for one in [*self._view.parameters, *self._view.buffers]} if complete else {}
        odd = self._odd("full_state_dict()") if complete else {}
        return {**self._gatherer(k, complete).whole(aliases), **odd}

    def _odd(self, what: str) -> dict[str, torch.Tensor]:
        """On rank 0, copies of what has no elements in memory (sparse, quantised): they can't be put together from parts, and no file holds them. Collective."""

        def copies() -> dict[str, torch.Tensor]:
            odd = [one for one in self._others() if oddity(one.tensor)]
            refuse_all_odd(one for one in odd if one.sharded and not one.replicas)
            return {name: one.tensor.clone() for one in odd for name in (one.name, *one.aliases)}

        found = self._team.agree(what, copies)
        return found if self._team.rank == 0 else {}

    def _gatherer(self, k: int, complete: bool) -> Gatherer:
        parts = [Part(one.name, one.averages[k], one.region) for one in self._tracked]
        if complete:
            parts += [Part(one.name, one.flat(), one.region) for one in self._others() if not oddity(one.tensor)]
        return Gatherer(parts, self._team.process_group, self._team.timeout)

    def _others(self) -> list[LocalTensor]:
        """What a complete model has beside the averages."""
        self._view.reshard()
        averaged = {one.name for one in self._tracked}
        buffers = self._view.buffers if self._options.buffers != "ignore" else []
        others = [one for one in [*self._view.parameters, *buffers] if one.name not in averaged]
        refuse_foreign("handing out a complete model", lambda: [one.tensor for one in others], self._swap)
        return others

    # ---- files

    def save(self, path: str | Path) -> None:
        """All averages with their state into ``path``: a .safetensors file, or with several decays a directory of them. Collective; resumable by load().

        Every rank writes its own bytes of the final file, which replaces what was there when it is whole.
        """
        state = self._ready_to_hand_out("save()")
        _files.write(self._files_to_save(state), path, self._team)

    def async_save(self, path: str | Path) -> SaveHandle:
        """save() that returns when this rank's averages are copied, so that training and updates go on; see shardow.async_save(). Collective."""
        state = self._ready_to_hand_out("async_save()")
        return _files.write_in_background(self._files_to_save(state), path, self._team)

    def _files_to_save(self, state: str) -> list[_files.FileParts]:
        return _files.with_state(self._parts_by_key(saving=True), state)

    @torch.no_grad()
    def load(self, path: str | Path) -> None:
        """Takes what save() wrote, at any world size and sharding; each rank reads its own slices. Collective."""
        self._team.agree("load()", lambda: self._not_swapped("load()"))
        found, parts = _files.catalogs(path, self._keys, self._team), self._parts_by_key(saving=False)
        for key in self._keys:  # whatever does not fit is listed before anything changes
            _files.read_into(parts[key], found[key], self._team, check_only=True)
        before = self._average.state()
        self._team.agree("load()", lambda: self._average.set_state(self._state_in(path, found)))
        try:
            for key in self._keys:
                _files.read_into(parts[key], found[key], self._team)
        except BaseException:
            self._average.set_state(before)
            raise

    def _state_in(self, path: str | Path, found: Mapping[str, _core.Catalog]) -> str:
        return _counters.own_part(_files.state_in(path, found[self._keys[0]]), self._team.rank)

    def _parts_by_key(self, saving: bool) -> dict[str, list[Part]]:
        tracked = [one for one in self._tracked if not saving or one.local.counts_on(self._team.rank)]
        return {key: [Part(one.name, one.averages[k], one.region) for one in tracked] for k, key in enumerate(self._keys)}

    def export(
        self,
        path: str | Path,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str | None = None,
        decay: float | str | _core.Schedule | None = None,
    ) -> None:
        """A complete model with averaged weights for inference: a directory in the Hugging Face layout, or one .safetensors file. Collective.

        ``dtype`` casts floating tensors ("bfloat16" or torch.bfloat16); ``max_shard_size`` in bytes or like "5GB".
        """
        k = choose(self._keys, decay)
        self._ready_to_hand_out("export()", self._others)
        parts = [Part(one.name, one.averages[k], one.region) for one in self._tracked if one.local.counts_on(self._team.rank)]
        others = self._others()
        self._team.agree("export()", lambda: refuse_all_odd(others))
        parts += [Part(one.name, one.flat(), one.region) for one in others if one.counts_on(self._team.rank)]
        options = self._team.agree("export()", lambda: _files.dtype_and_limit(dtype, max_shard_size))
        _files.write([_files.FileParts("", parts)], path, self._team, **options)

    # ---- figures

    def stats(self) -> dict[str, float]:
        """What this rank holds and did, a flat dict of numbers for a logger.

        step, updates (averages applied), decay of the next step (decay/0, decay/1, ... with several), parameters, elements and bytes of the averages on this rank, bytes_moved and
        seconds of the last update, held_nonfinite: elements kept because their weight was NaN or Inf, since the start,
        table_bytes: memory of the lists that an update goes through.
        """
        stats: dict[str, float] = dict(self._average.stats())
        for k, decay in enumerate(self._decays()):
            stats["decay" if len(self._keys) == 1 else f"decay/{k}"] = decay
        return stats

    def _decays(self) -> list[float]:
        return _state.current_decays(self._average.state())

    @torch.no_grad()
    def distance(self, decay: float | str | _core.Schedule | None = None) -> float:
        """|averages - weights| / |weights| over the whole model, in the Euclidean norm, computed in float64. Collective."""
        k = choose(self._keys, decay)
        self._together("distance()", lambda: self._swap.ready("distance()"))
        _tracked.gather(self._swap.strided)
        return _state.distance(self._tracked, k, self._team)

    def __repr__(self) -> str:
        stats = self._average.stats()
        return (
            f"EMA(decay=[{', '.join(self._keys)}], {stats['parameters']} tensors, {stats['elements']:,} elements on this rank of {self._team.size}, "
            f"{stats['bytes']:,} bytes, step {stats['step']})"
        )

    def _together(self, what: str, fn: Callable[[], T]) -> T:
        """fn() on every rank before the averages of all are used, or an error on all: also where some have made fewer updates."""

        def check() -> T:
            self._raise_non_finite()
            return fn()

        result = self._team.agree(what, check)
        self._agreed_state(what)
        return result

    def _raise_non_finite(self) -> None:
        """nonfinite="raise" with several ranks: one that raised alone, in update(), would leave the others waiting."""
        met = self._average.non_finite() if self._options.nonfinite == "raise" and self._team.size > 1 else None
        if met is not None:
            self._average.forget_non_finite()
            step, elements, name = met
            raise invalid(
                f"at step {step}, {elements} weights on rank {self._team.rank} were NaN or Inf, first in '{name}' (nonfinite='raise'); their averages were held"
            )

    def _ready_to_swap(self, what: str, fn: Callable[[], None]) -> None:
        """_together(), and replicas hold the same weights: they are about to overwrite each other's."""

        def find() -> list[Common | None]:
            self._raise_non_finite()
            fn()
            return [common_of(one.local) for one in self._tracked_weights()] if self._splits() else []

        check_equal(what, find, self._team, f'{DIFFERENT_WEIGHTS}. With replicas="copy" each rank averages, and swaps, its own')
        self._agreed_state(what)

    def _agreed_state(self, what: str) -> str:
        state = _counters.agreed(what, self._average.state(), self._team)
        self._unfrozen.look(everywhere=True)
        return state

    def _ready_to_hand_out(
        self, what: str, others: Callable[[], Iterable[LocalTensor]] | None = None, check: Callable[[], None] = lambda: None
    ) -> str:
        """Before one rank's bytes stand for all that hold the same: raises on every rank where those differ. ``others``: what of the model is handed out too, wherever it lies now. Returns the
        state of all ranks."""

        def find() -> list[Common | None]:
            self._raise_non_finite()
            self._not_swapped(what)
            check()
            if others is None:
                return list(self._common())
            self._swap.refuse_foreign(what)
            self._rebind()
            weights = set(self._view.parameters)
            return [*self._common(), *(common_of(one) for one in others() if one in weights)]

        check_equal(what, find, self._team, DIFFERENT_WEIGHTS)
        return self._agreed_state(what)

    def _tracked_weights(self) -> list[_tracked.Tracked]:
        """Without buffers, of which each rank has its own: batch statistics."""
        weights = set(self._view.parameters)
        return [one for one in self._tracked if one.local in weights]

    def _common(self) -> Iterator[Common | None]:
        """What other ranks should have too: averages, or where ranks divide them the weights that they follow."""
        for one in self._tracked_weights():
            if self._options.replicas == "split" and one.local.replicas:
                yield _common_weight(one)
            else:
                for average in one.averages:
                    yield common_of(one.local, average)

    def _not_swapped(self, what: str) -> None:
        self._swap.refuse(what)


def _common_weight(one: _tracked.Tracked) -> Common | None:
    return common_of(one.local, one.source if one.mastered else one.local.tensor)


def _wants(params: Params, local: LocalTensor) -> bool:
    if callable(params):
        return bool(params(local.name, local.tensor))
    return params == "all" or local.requires_grad


def _refuse(unknown: Mapping[str, Any]) -> None:
    if not unknown:
        return
    if "momentum" in unknown:
        value = unknown["momentum"]
        hint = f" (momentum={value} as a weight of the new value is decay={1 - value})" if isinstance(value, float) else ""
        raise _errors.UnknownOptionError(f"EMA() takes decay=, the weight kept on the old average, not momentum={hint}")
    raise _errors.UnknownOptionError(f"EMA() got unknown option(s) {', '.join(sorted(unknown))}; see help(shardow.EMA)")


__all__ = ["EMA"]
