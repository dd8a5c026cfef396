"""The main job, as each rank runs it: train, average, judge the averages, write a checkpoint; later, in other
processes, go on from it.

What has to do with Shardow: Trainer makes the averages in one line and updates them in one line after the optimizer's
step; judge.py puts them into the model for a block; save() and load() have them in the checkpoint. With --use_ema false
there are none, anywhere.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from tqdm import trange

import shardow

from . import averages, data, judge, model
from .afterwards import Afterwards
from .options import Options

WARMUP = 50
FOLDERS = ("checkpoint", "averages", "exported")
# Nested, FSDP1's param_groups get a key on some ranks that other ranks lack.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Trainer:
    """A sharded model, its optimizer and its averages."""

    def __init__(self, options: Options, digits: data.Digits, seed: int) -> None:
        self.options, self.digits = options, digits
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = model.wrap(model.DiT(options.width, options.depth), options.shard)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, options.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        if switches := options.switches():
            shardow.memory.apply(self.model, **switches)  # for good
        self.ema = averages.make(self.model, options) if options.use_ema else None
        self.afterwards: Afterwards | None = None
        self.steps_done = 0

    def batch(self, step: int) -> data.Batch:
        """This rank's."""
        return data.batch(self.digits, self.options.batch, self.options.seed, step, self.rank, self.world)

    def step(self) -> None:
        """One optimizer step, then one update of all averages."""
        self.steps_done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, self.steps_done / WARMUP)
        batch = self.batch(self.steps_done)
        loss = model.error(self.model(*batch.inputs()), batch, self.world)
        self.optimizer.zero_grad()
        loss.backward()
        model.average_gradients(self.model, self.options.shard)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()

    def train(self, steps: int, jury: judge.Judge, results: list[judge.Evaluation]) -> float:
        """Adds an evaluation soon after the start, every so often, and at the end. A step's median seconds."""
        options, seconds = self.options, []
        quiet = self.rank > 0 or None  # None: a bar on a terminal alone
        for i in trange(1, steps + 1, desc="  Training", leave=False, smoothing=0, disable=quiet):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
            if self.afterwards is not None:
                self.afterwards.step()
            if self.steps_done == options.eval_every // 3 or i % options.eval_every == 0 or i == steps:
                kept = judge.KEPT if i == steps else judge.STRIP
                results.append(jury.evaluate(self.model, self.ema, self.steps_done, kept))
                results[-1].print(first=len(results) == 1)
        return statistics.median(seconds)

    def save(self) -> None:
        """Writes a sharded checkpoint, and the averages as files; without averages the weights are exported.
        Collective."""
        out = self.options.out
        for name in FOLDERS if self.rank == 0 else ():
            shutil.rmtree(out / name, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dcp.save(self._state(), checkpoint_id=out / "checkpoint")
        if self.ema is None:
            shardow.save(self.model, out / "exported", group=model.ema_group(self.options.shard))
        else:
            self.ema.save(averages_path(self.options))
            self.ema.export(out / "exported", decay=averages.schedules(self.options)[-1])

    def load(self) -> None:
        """Collective, at any world size."""
        state = self._state()
        dcp.load(state, checkpoint_id=self.options.out / "checkpoint")
        weights, moments = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments, options=_FLAT)
        self.steps_done = int(state["step"])

    def _state(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer, options=_FLAT)
        parts = {"model": weights, "optimizer": moments, "step": self.steps_done}
        return parts if self.ema is None else {**parts, "ema": self.ema}

    def hashes(self) -> list[str]:
        return averages.hashes(self.ema, self.model, self.options)


def run(options: Options) -> dict[str, Any]:
    """Trains from scratch to the checkpoint. Rank 0's result has all figures of the report."""
    digits = data.load()
    trainer = Trainer(options, digits, options.seed)  # first, since it refuses options
    jury = judge.Judge(judge.classifier(digits, options.epochs, options.seed), digits, options)
    if trainer.rank == 0:
        print(f"  The judge, a small classifier, names {jury.classifier.accuracy:.1%} of held-out digits rightly.")
    trainer.afterwards = Afterwards(trainer.model, options) if options.use_ema else None
    result: dict[str, Any] = {"classifier": jury.classifier, "evaluations": [], "real": jury.real_again()}
    result["step_seconds"] = trainer.train(options.steps, jury, result["evaluations"])
    result["afterwards"] = None if trainer.afterwards is None else trainer.afterwards.compare(jury)
    trainer.afterwards = None
    result["memory"] = planned_and_measured(trainer)
    result["swap"] = swap_is_exact(trainer)
    result["hashes"] = trainer.hashes()
    trainer.save()
    return result | bytes_of_averages(trainer)


def resume(options: Options, classifier: judge.Classifier) -> dict[str, Any]:
    """In fresh processes, at another world size: load, compare, train on.

    The model begins from other weights, so that nothing but the checkpoint can make the averages equal.
    """
    digits = data.load()
    jury = judge.Judge(classifier, digits, options)
    trainer = Trainer(options, digits, options.seed + 1)
    result: dict[str, Any] = {"before": trainer.hashes()}
    trainer.load()
    result |= {"hashes": trainer.hashes(), "step": trainer.steps_done, "file_hashes": [], **bytes_of_averages(trainer)}
    if options.use_ema:
        ema = averages.make(trainer.model, options)
        ema.load(averages_path(options))
        result["file_hashes"] = averages.hashes(ema, trainer.model, options)[:-1]
    result["evaluations"] = [jury.evaluate(trainer.model, trainer.ema, trainer.steps_done)]
    result["evaluations"][0].print(first=True)
    result["step_seconds"] = trainer.train(options.resume_steps, jury, result["evaluations"])
    return result


def averages_path(options: Options) -> Path:
    """A directory; with one decay a file in it."""
    return options.out / "averages" / "ema.safetensors" if len(options.decays) == 1 else options.out / "averages"


def bytes_of_averages(trainer: Trainer) -> dict[str, Any]:
    """Of every rank, as stats() has them; and of a full float32 copy for every decay. Collective."""
    own = 0 if trainer.ema is None else int(trainer.ema.stats()["bytes"])
    count = sum(p.numel() for p in _on_meta(trainer.options).parameters())
    return {"bytes": _from_all(own), "parameters": count, "full_copy": 4 * count * len(trainer.options.decays)}


def planned_and_measured(trainer: Trainer) -> dict[str, dict[str, int]]:
    """Bytes on the fullest rank by their use: memory.plan()'s of a model that is on meta, and memory.measure()'s after
    a step. Collective."""
    options, world, batch = trainer.options, trainer.world, trainer.batch(trainer.steps_done)

    def loss(velocity: torch.Tensor) -> torch.Tensor:
        return model.error(velocity, batch, world)

    plan = shardow.memory.plan(
        _on_meta(options),
        world,
        options.shard,
        optimizer=type(trainer.optimizer),
        batch=batch.inputs(),
        switches=options.switches(),
        averages=len(options.decays),
        loss=loss,
        shards=model.shards(options.shard, world) if options.shard == "hsdp" else None,
    )
    measure = shardow.memory.measure(trainer.model, trainer.optimizer, batch.inputs(), ema=trainer.ema, loss=loss)
    measured, first = _from_all(measure), _from_all(plan)[0]  # whose batch is the largest
    keys = [key for key in first if key != "saves"]
    return {key: {"planned": first[key], "measured": max(rank[key] for rank in measured)} for key in keys}


def _on_meta(options: Options) -> model.DiT:
    with torch.device("meta"):
        return model.DiT(options.width, options.depth)


def _from_all(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def swap_is_exact(trainer: Trainer) -> bool | None:
    """Whether the weights are, bit for bit, what they were before a swap. None: there are no averages."""
    if trainer.ema is None:
        return None
    before = averages.weights_hash(trainer.model, trainer.options)
    with trainer.ema.swapped(decay=averages.schedules(trainer.options)[0]):
        inside = averages.memory_hash(trainer.model)
    outside = averages.memory_hash(trainer.model)
    return before == averages.weights_hash(trainer.model, trainer.options) and inside != outside
