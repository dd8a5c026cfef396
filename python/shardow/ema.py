"""EMA: the averaged weights of a PyTorch model, sharded as the model is."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardow import _core
from shardow.averaging import copies, persistence, state_dict
from shardow.averaging.attach import Attachments, Handle, Samples
from shardow.averaging.model_averages import ModelAverages
from shardow.averaging.options import Buffers, NonFinite, Params, Replicas, Rule, Stochastic
from shardow.averaging.state_dict import Decay, OptionsFrom
from shardow.averaging.swap import Block
from shardow.averaging.teacher import Begin, Names, Teacher
from shardow.averaging.tracked import Source
from shardow.base.checks import number, whole
from shardow.base.progress import Progress
from shardow.files import engine, paths
from shardow.files.background import SaveHandle


class EMA:
    """Exponential moving averages of ``model``'s parameters: e <- decay * e + (1 - decay) * p after every optimizer
    step.

    Each rank averages what it holds, in place, in one pass, with no communication: 4 P / N bytes a rank. The averages
    are bit-identical at any world size, sharding and thread count. Finds plain, DDP, FSDP1, FSDP2, HSDP and TP
    parameters by itself, through torch.compile and checkpoint wrappers.

    Construction is collective over the ranks that share the model, after it has been wrapped and its weights are in
    place; the averages begin equal to the weights.

    Args:
        model: any module. Names are those of the unwrapped model.
        decay: weight kept on the old average per step, in [0, 1]; a Schedule of shardow.schedules; or a list of up to
            8, all averaged in one pass.
        dtype: of the averages; float32 whatever the weights are.
        device: where the averages live; None: with their weights. "cpu" with weights on CUDA devices: in host memory.
            Weights cross the link once per update, in their own dtype, and are averaged in the background. With
            attach() or ``optimizer=`` that optimizer's next step waits for the copies, on the device; else update()
            makes torch's current stream wait for them.
        replicas: "split": ranks that hold the same weights (DDP, HSDP) divide work and memory, and send each other all
            of the weights' bytes once into a swap and once out of it; "copy": each averages everything it holds, and a
            swap moves bytes in its own memory alone, as that of sharded weights does.
        params: "trainable", "all", or a predicate of (name, parameter).
        buffers: float buffers: "copy" exports the model's own, "average" averages them like parameters, "ignore" leaves
            them out; a predicate of (name, buffer): those are averaged, the others copied. Integer buffers are only
            copied.
        rule: "lerp" (torch.lerp, accurate), "mul_add" (e.mul_(d).add_(p, alpha=1-d)), "two_products" (e*d + (1-d)*p),
            "difference" (e.sub_((1-d)*(e-p))), "fused_difference" (e.sub_(e-p, alpha=1-d)) or "quotient" (e + (p-e) /
            (1/(1-d))): bit-equal to those forms.
        stochastic: round the increment stochastically; "auto": where 1 - decay < 5e-5, where rounding to nearest would
            lose it, and all 16-bit averages, which False rounds to nearest, by PyTorch's operations.
        nonfinite: "hold": where a weight is NaN or Inf its average stays and is counted; "propagate"; "raise": held,
            then ValueError, with several ranks at the next collective call of this EMA and on all of them; the update
            is made and counted by then.
        update_every: average every n-th step, with decay^n.
        start_step: an update at a step <= start_step copies the weights, the next one averages.
        seed: of stochastic rounding.
        source: {name: tensor} averaged in a parameter's place (an optimizer's float32 master copy), same local shape.
            Where an optimizer divides its masters among replicas: {name: (tensor, first)}, the parameter's elements
            from ``first`` on, row-major; or (tensor, first, "local") of those that this rank holds. Together ranks have
            each element once; an empty tensor says none.
        group: process group of ranks that hold replicas of a plain model, or share one whose groups can't be derived
            from its meshes.
        threads: CPU threads; 0: what OMP_NUM_THREADS and the affinity mask allow, at most 4.
        overlap: average weights on the CPU in the background, on ``threads`` threads (one by default), while training
            goes on. Needs attach() or ``optimizer=``: the optimizer's next step waits, as do all calls that read
            averages. What else writes into weights meanwhile (``p.data.mul_()``, ``load_state_dict()``) would be
            averaged half old, half new: call stats() first, which waits.
        ring_bytes: pinned host memory through which weights on devices reach averages on the host; shared by this
            rank's devices.
        optimizer: attach() to it.
        averages: a teacher: a module sharded as ``model`` is, or {name: tensor}, whose tensors are the averages, in
            their dtype; there are no others. Call it between updates. With replicas (DDP, HSDP) ``replicas="copy"``;
            not swapped. Buffers as ``buffers`` says, in the teacher's own; frozen weights are the model's, once.
        names: a function, or a mapping, of names in the model to names in the teacher, where they differ.
        begin: "student": the teacher begins as the model; "teacher": it keeps its values.
        timeout: seconds or timedelta, the deadline of every collective call; None: the process group's own.
        momentum: refused: it would be 1 - decay in one library, and decay in another.

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
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        replicas: Replicas = "split",
        params: Params = "trainable",
        buffers: Buffers = "copy",
        rule: Rule = "lerp",
        stochastic: Stochastic = "auto",
        nonfinite: NonFinite = "hold",
        update_every: int = 1,
        start_step: int = 0,
        seed: int = 0,
        source: Mapping[str, Source] | None = None,
        group: dist.ProcessGroup | None = None,
        threads: int = 0,
        overlap: bool = False,
        ring_bytes: int = 128 << 20,
        optimizer: torch.optim.Optimizer | None = None,
        averages: nn.Module | Mapping[str, torch.Tensor] | None = None,
        names: Names | None = None,
        begin: Begin = "student",
        timeout: float | timedelta | None = None,
        momentum: None = None,
    ) -> None:
        options = {
            "dtype": dtype, "device": device, "replicas": replicas, "params": params, "buffers": buffers, "rule": rule,
            "stochastic": stochastic, "nonfinite": nonfinite, "update_every": update_every, "start_step": start_step,
            "seed": seed, "threads": threads, "overlap": overlap, "ring_bytes": ring_bytes, "momentum": momentum,
        }  # fmt: skip
        teacher = None if averages is None else Teacher(averages, names, begin)
        self._averages = ModelAverages(model, decay, options, source, group, timeout, teacher)
        self._attached = Attachments(self._averages.update_attached)
        if optimizer is not None:
            self.attach(optimizer)

    # ---- training

    @torch.no_grad()
    def update(self, step: int | None = None, samples: float = 0.0) -> None:
        """Updates the averages after an optimizer step: one pass over this rank's weights; no communication.

        Args:
            step: optimizer steps taken so far; None: one more than before. A step is counted once; skipped ones are
                made up for by decay^n.
            samples: training samples seen so far, for schedules in samples.
        """
        self._attached.refuse_update(self._averages.options.overlap)
        self._averages.update(None if step is None else whole("step", step), number("samples", samples))

    def set_decay(self, decay: float) -> None:
        """Sets the decay of ``schedules.settable()`` from the next update on: a number in [0, 1], the same on every
        rank. Local. Files have it, and load() takes it from there.

        Raises:
            ValueError: the EMA was made without ``decay=shardow.schedules.settable(...)``.
        """
        self._averages.engine.set_decay(number("decay", decay))

    @torch.no_grad()
    def prepare_replay(self, step: int | None = None, samples: float = 0.0) -> None:
        """Prepares each replay of a CUDA graph that captured update(): counts the step as update() does, and gives the
        replay its numbers. Local; nothing waits.

        An update() that is captured is recorded and not counted. Call this on the stream of the replay; a replay
        without it repeats the step before, and does nothing the first time. Weights that moved need a new capture.

        Args: as update().

        Raises:
            ValueError: the weights are not those of the capture, or the step draws noise that the captured launch
                can't.
        """
        self._averages.prepare_replay(None if step is None else whole("step", step), number("samples", samples))

    def attach(self, optimizer: torch.optim.Optimizer, *, samples: Samples | None = None) -> Handle:
        """Updates after every optimizer.step() from now on, until ``handle.remove()``, ``ema.detach()``, or the EMA is
        dropped. Local.

        Steps that a GradScaler skips are not counted; with a fused optimizer on CUDA, learning that waits for the
        device. Several optimizers of one model are attached one after another, in the order in which they step: one
        update follows when each has stepped.

        Args:
            optimizer: torch's, or a wrapper that has it as ``.optimizer`` (accelerate's).
            samples: for schedules in samples: those of one step on all ranks, or a function that returns how many have
                been seen so far.

        Raises:
            ValueError: attached to this optimizer already. TypeError: no optimizer. And in ``step()``, before it, where
                the weights are swapped.
        """
        if self._averages.teacher is not None:
            self._averages.teacher.refuse_optimizer(optimizer)
        return self._attached.add(optimizer, samples)

    def module(self) -> nn.Module:
        """Returns the teacher: ``averages``, or for a plain or DDP model a copy of it whose parameters are the averages
        themselves, made once, before update() is captured; call it between updates. All of it is in the averages'
        dtype. Local. With replicas ``replicas="copy"``. Buffers as ``buffers`` says; frozen weights are copied once.
        From here on the EMA is not swapped, nor copied or pickled.

        Raises:
            NotImplementedError: the model is sharded: make the teacher as it is made, and pass ``averages=``; several
                decays, averages on another device than the weights; a module that copy.deepcopy() does not copy.
            ValueError: replicas that divide the averages.
        """
        return self._averages.module()

    def detach(self) -> None:
        """Ends every attach() of this EMA, and ``optimizer=``. Local; does nothing where it is not attached."""
        self._attached.remove_all()

    # ---- evaluation

    def swapped(self, decay: Decay | None = None) -> Block:
        """Swaps the averages into the model inside the block; after it, whatever happened, the model holds its weights
        again, bit for bit.

        Collective, both ends, where ranks share the model. In place, without a second copy of the weights: state_dict()
        and the like, and optimizer.step(), wait until the block ends. ``decay`` chooses among several averages. A
        backward through activations from before the block raises, where autograd can see it.

        Weights whose memory moved inside (``model.to()``, ``load_state_dict(assign=True)``) are put where the model has
        them now; with a RuntimeWarning where they were cast.

        An exception of the block is raised on its rank, at once; other ranks get a ConnectionError that names it when
        they leave theirs. Where replicas hold parts of each other's weights (DDP, HSDP with ``replicas="split"``), that
        rank waits for the others first, until the deadline. Past it the model keeps the averages, all other calls say
        so, and restore() on every rank brings the weights back.

        Raises:
            ValueError: nested; the same weights hold another EMA's averages; replicas differ; or, on leaving, with
                nothing lost, the model has no place for its weights any more.
            TimeoutError, ConnectionError: another rank is missing, or failed.
        """
        return Block(self._averages.swap, functools.partial(self._averages.ready_to_swap, decay))

    def swap_in(self, decay: Decay | None = None) -> None:
        """Begins swapped(), for frameworks with callbacks: the same transaction. Collective."""
        self._averages.swap.enter(functools.partial(self._averages.ready_to_swap, decay))

    def swap_out(self) -> None:
        """Ends swapped(), for frameworks with callbacks. Collective. Raises ValueError where nothing is swapped in."""
        self._averages.swap.out()

    def restore(self, strict: bool = True) -> None:
        """Restores the weights after a swap that was interrupted, bit for bit, from whatever point it had reached; does
        nothing where they are back.

        Collective where replicas hold parts of each other's weights: call it on every rank that shares the model.
        ``strict=False``: parameters that are gone from the model are left as they are.

        Raises:
            ValueError: the model has no place for its weights any more; nothing has changed.
            TimeoutError, ConnectionError: another rank is missing; if it died, the weights that it held died with it,
                and the last checkpoint has to be loaded.
        """
        self._averages.swap.restore(strict)

    def copy_to(self, model: nn.Module, decay: Decay | None = None) -> None:
        """Copies the averages, and what belongs to a complete model, into another module with the same names, sharded
        or not. Collective. What has no elements in memory (sparse, quantised) can't be copied; a warning names it."""
        copies.copy_to(self._averages, model, decay)

    def feed_back(self, decay: Decay | None = None) -> None:
        """Makes the averages the model's weights, and training goes on from there (Switch EMA, arXiv 2402.09240: at the
        end of an epoch).

        Collective where ranks share the model. Rounded to the weights' dtype; master copies of ``source=`` get them
        too. The averages, their steps and the optimizer's own state stay. ``decay`` chooses among several averages.

        Raises:
            ValueError: inside swapped(), or the replicas' weights differ; nothing has changed.
            NotImplementedError: whole master copies on replicas that divide the averages.
        """
        copies.feed_back(self._averages, decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Begins the averages again, as if newly made: equal to the weights, at step 0; options stay. Collective."""
        self._averages.reset()

    # ---- files

    def save(
        self, path: paths.StrPath, *, max_shard_size: int | str | None = None, progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Saves all averages with their state into ``path``: a .safetensors file, or with several decays a directory of
        them. Collective.

        load() resumes from it. Every rank writes its own bytes of the final file, which replaces what was there when it
        is whole.

        Args:
            max_shard_size: of a file in a directory, in bytes or like "5GB"; of an EMA with one decay.
            progress: called on rank 0 with (bytes done, bytes in all) about twice a second.
            metadata: texts for the header, beside the state.

        Returns:
            dict: {"files": [path], "bytes_written": by this rank, "seconds": float}.
        """

        find = functools.partial(persistence.to_save, self._averages, "save()", max_shard_size, metadata)
        return engine.SaveCall(find, path, self._averages.ranks, "save()", progress).write()

    def async_save(
        self, path: paths.StrPath, *, max_shard_size: int | str | None = None, progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> SaveHandle:  # fmt: skip
        """Saves as save() does, and returns when this rank's averages are copied, so that training and updates go on;
        see shardow.async_save(). Collective."""

        find = functools.partial(persistence.to_save, self._averages, "async_save()", max_shard_size, metadata)
        call = engine.SaveCall(find, path, self._averages.ranks, "async_save()", progress)
        return call.write_in_background()

    def load(
        self, path: paths.StrPath, strict: bool = True, *, verify: bool = True, options: OptionsFrom = "file",
        progress: Progress | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Loads what save() wrote, at any world size and sharding; each rank reads its own slices. Collective.

        Args:
            strict: every average here is in the file, and every one there is wanted; else the rest is in the report,
                and averages that the file lacks stay as they are.
            verify: compare checksums where the file carries them; no extra reads.
            options: as in load_state_dict(): "file" or "own".
            progress: called on rank 0 with (bytes done, bytes in all) about twice a second.

        Returns:
            dict: {"missing": [name], "unexpected": [name], "bytes_read": by this rank, "seconds": float}.

        Raises:
            ValueError: something does not fit, or the file is corrupt; FileNotFoundError, OSError, TimeoutError.
        """
        return persistence.load(self._averages, path, strict, verify, options, progress)

    def export(
        self,
        path: paths.StrPath,
        dtype: torch.dtype | str | None = None,
        *,
        max_shard_size: int | str | None = None,
        decay: Decay | None = None,
        progress: Progress | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Exports a complete model with averaged weights for inference: a directory in the Hugging Face layout, or one
        .safetensors file.

        Collective.

        Args:
            dtype: of all floating tensors, "bfloat16", torch.float8_e4m3fn, ...; None: each weight's own. float8, and
                weights of several dtypes, take a copy of this rank's part in memory.
            max_shard_size: of a file in the directory, in bytes or like "5GB".
            decay: which of several averages.
            progress: called on rank 0 with (bytes done, bytes in all) about twice a second.
            metadata: texts for the header.

        Returns:
            dict: {"files": [path], "bytes_written": by this rank, "seconds": float}.
        """
        return persistence.export(self._averages, path, dtype, max_shard_size, decay, progress, metadata)

    def snapshot(
        self, directory: paths.StrPath, every: int, *, dtype: torch.dtype | str | None = None,
        asynchronous: bool = False, progress: Progress | None = None,
    ) -> dict[str, Any] | SaveHandle | None:  # fmt: skip
        """Saves all averages into ``directory/snapshot-000001000`` where a snapshot is due, for shardow.posthoc; called
        after each step. Collective then, and at the first call; else it costs nothing.

        A resumed run goes on where its snapshots are, without a gap: call it with the same directory. Each is whole or
        not there; other files stay. Their metadata say which updates the run made, so that any schedule, and any
        spacing, is exact later.

        Args:
            every: steps between snapshots, counted from step 0.
            dtype: as they are stored: torch.bfloat16 takes half of the space, and rounds to 8 bits; None: the averages'
                own.
            asynchronous: returns when this rank has copied what it will write, as async_save() does.
            progress: called on rank 0 with (bytes done, bytes in all).

        Returns:
            None where nothing was due; else as save(): {"files": [path], ...}, or with ``asynchronous`` a SaveHandle.

        Raises:
            ValueError: an option out of range; snapshots of other averages are there; inside swapped(). OSError,
                TimeoutError.
        """
        return persistence.snapshot(self._averages, directory, every, dtype, asynchronous, progress)

    # ---- state dicts

    def state_dict(self) -> dict[str, Any]:
        """Returns sharded averages and plain values, without a copy: {"averages": {name: tensor}, "state": str}; for
        torch.distributed.checkpoint.

        Local.

        With several decays the averages are keyed by decay: {"averages": {"0.999": {...}, ...}}. The tensors are this
        EMA's own memory: what changes them changes it. What other ranks hold a part of is a PartialTensor, whose
        pickling warns: torch.save() on rank 0 would keep rank 0's.
        """
        return state_dict.make(self._averages)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, *, options: OptionsFrom = "file"
    ) -> dict[str, list[str]]:
        """Loads what state_dict() returned: partial tensors of the same sharding, or full tensors of the global shape.
        Collective.

        Everything is checked on every rank first, and everything that does not fit is listed; then averages and
        counters are replaced.

        Args:
            strict: False takes what fits: averages that the state lacks, or has in another shape, stay as they are
                (those of a new EMA are its model's weights), those that are not wanted are left out. So weights that
                were added, replaced or unfrozen are taken in by a new EMA: ``new.load_state_dict(old.state_dict(),
                strict=False)``.
            options: decays, rule, rounding, update_every, start_step and seed from now on: "file": the state's, with a
                warning where this EMA was made with others; "own": those that it was made with. Several averages are
                taken in the order of their decays there.

        Returns:
            dict: {"missing": [name], "unexpected": [name]}.

        Raises:
            ValueError: what does not fit, or another number of averages.
        """
        return state_dict.load(self._averages, state, strict, options)

    def full_state_dict(self, decay: Decay | None = None, complete: bool = True) -> dict[str, torch.Tensor]:
        """Returns the model with averaged weights on rank 0, {} elsewhere: fresh, full CPU tensors by name.

        Collective; one tensor at a time travels.

        Args:
            decay: which of several averages.
            complete: with frozen weights, buffers and every tied name, ready for load_state_dict(strict=True) of the
                unwrapped model; False: the averages alone, each once.
        """
        return state_dict.gather(self._averages, decay, complete)

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> EMA:
        """Copies an EMA of a plain model that no other ranks share: with a copy of the model, or with its copy that is
        made in the same deepcopy()."""
        model, arguments = copy.deepcopy(self._averages.to_copy("copied"), memo)
        memo[id(self)] = made = _remade(model, arguments, self.state_dict())
        return made

    def __reduce__(self) -> Any:
        """Pickles as __deepcopy__ copies: with the model, once where both are pickled."""
        return _remade, (*self._averages.to_copy("pickled"), self.state_dict())

    # ---- figures

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the averaged tensors, in the model's order; each tensor once."""
        return tuple(row.name for row in self._averages.tracked)

    @property
    def step(self) -> int:
        """Optimizer steps counted so far; any thread may ask, and waits for no update."""
        return self._averages.step

    @property
    def decays(self) -> tuple[str, ...]:
        """Keys that ``decay=`` chooses among, as in state dicts and file names: "0.9999", "power(sigma_rel=0.1)"."""
        return tuple(self._averages.keys)

    def stats(self) -> dict[str, float]:
        """Returns what this rank holds and did, a flat dict of numbers for a logger.

        step, updates (averages applied), decay of the next step (decay/0, decay/1, ... with several), parameters,
        elements and bytes of the averages on this rank, bytes_moved and seconds of the last update, held_nonfinite:
        elements kept because their weight was NaN or Inf, since the start, table_bytes: memory of the lists that an
        update goes through. Any thread may ask; it waits for an update under way.

        With overlap=True, or averages on the host of weights on a device, also, since the start: offload/hidden_seconds
        of averaging while no call waited, offload/waited_seconds; in the second case offload/bytes that updates copied
        from devices. kernels/compile_seconds, where this process compiled kernels for CUDA devices.
        """
        return self._averages.stats()

    @torch.no_grad()
    def distance(self, decay: Decay | None = None) -> float:
        """Returns ``|averages - weights| / |weights|`` over the whole model, in the Euclidean norm, computed in
        float64. Collective."""
        return self._averages.distance(decay)

    def __repr__(self) -> str:
        return repr(self._averages)


def model_averages(ema: EMA) -> ModelAverages:
    """Returns the implementation behind ``ema``, which the compat classes compose."""
    return ema._averages


def _remade(model: nn.Module, arguments: Mapping[str, Any], state: Mapping[str, Any]) -> EMA:
    made = EMA(model, **arguments)
    made.load_state_dict(state)
    return made
