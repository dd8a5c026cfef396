"""The main job, as each rank runs it: train, average, judge the averages, write a checkpoint; later, in other
processes, go on from it.

What has to do with Shardow: Trainer makes the averages in one line and updates them in one line after the optimizer's
step; evaluate.py puts them into the model for a block; checkpoint.py saves and loads them. With --use_ema false there
are none, anywhere.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tqdm import trange

import shardow

from . import averages, checkpoint, classifier, data, diffusion, measure, shard
from .afterwards import Afterwards
from .evaluate import KEPT, STRIP, Evaluation, Judge
from .model import DiT
from .options import Options

WARMUP = 50


class Trainer:
    """A sharded model, its optimizer and its averages."""

    def __init__(self, options: Options, digits: data.Digits, seed: int) -> None:
        self.options, self.digits = options, digits
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = shard.wrap(DiT(options.width, options.depth), options.shard)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True
        )
        if switches := options.switches():
            shardow.memory.apply(self.model, **switches)  # for good
        self.ema = averages.make(self.model, options) if options.use_ema else None
        self.afterwards: Afterwards | None = None
        self.steps_done = 0

    def batch(self, step: int) -> data.Batch:
        """This rank's."""
        return data.batch(self.digits, self.options.batch, self.options.seed, step, self.rank, self.world)

    def step(self) -> torch.Tensor:
        """One optimizer step, then one update of all averages. This rank's loss."""
        step = self.steps_done + 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, step / WARMUP)
        loss = diffusion.loss(self.model, self.batch(step), self.world)
        self.optimizer.zero_grad()
        loss.backward()
        shard.average_gradients(self.model, self.options.shard)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        self.steps_done = step
        return loss.detach()


def run(options: Options) -> dict[str, Any]:
    """Training from scratch to the checkpoint. Rank 0's result has all figures of the report."""
    digits = data.load()
    trainer = Trainer(options, digits, options.seed)  # first, since it refuses options
    judge = Judge(*classifier.train(digits, options.epochs, options.seed), digits, options)
    if trainer.rank == 0:
        print(f"The judge, a small classifier, names {judge.accuracy:.1%} of the held-out digits rightly.", flush=True)
    trainer.afterwards = Afterwards(trainer.model, options) if options.use_ema else None
    result = _train(trainer, judge, options.steps)
    result["afterwards"] = None if trainer.afterwards is None else trainer.afterwards.compare(judge)
    trainer.afterwards = None
    memory = (trainer.model, trainer.optimizer, trainer.ema, trainer.batch(options.steps), options)
    result["memory"] = measure.planned_and_measured(*memory)
    result |= {"judge": judge.accuracy, "real": judge.real_against_real(), "classifier": judge.classifier.state_dict()}
    result["costs"] = measure.costs(trainer.model, trainer.ema, options)
    result["swap"] = swap_is_exact(trainer)
    result |= {
        "hashes": averages.hashes(trainer.ema, options),
        "weights": averages.weights_hash(trainer.model, options),
    }
    result["files"] = checkpoint.save(trainer.model, trainer.optimizer, trainer.ema, trainer.steps_done, options)
    del trainer
    gc.collect()
    return result


def resume(options: Options, judge_state: dict[str, torch.Tensor], accuracy: float) -> dict[str, Any]:
    """In fresh processes, at another world size: load, compare, train on.

    The model begins from other weights, so that nothing but the checkpoint can make the averages equal.
    """
    digits = data.load()
    model = classifier.Classifier().eval().requires_grad_(False)
    model.load_state_dict(judge_state)
    judge = Judge(model, accuracy, digits, options)
    trainer = Trainer(options, digits, options.seed + 1)
    result: dict[str, Any] = {
        "before": [*averages.hashes(trainer.ema, options), averages.weights_hash(trainer.model, options)]
    }
    trainer.steps_done = checkpoint.load(trainer.model, trainer.optimizer, trainer.ema, options)
    result |= {
        "hashes": averages.hashes(trainer.ema, options),
        "weights": averages.weights_hash(trainer.model, options),
    }
    result |= {"step": trainer.steps_done, "bytes": measure.bytes_per_rank(trainer.ema)}
    result["file_hashes"] = checkpoint.hashes_of_files(trainer.model, options)
    first = judge.evaluate(trainer.model, trainer.ema, trainer.steps_done)
    first.say(first=True)
    result |= _train(trainer, judge, options.resume_steps, [first])
    del trainer
    gc.collect()
    return result


def _train(trainer: Trainer, judge: Judge, steps: int, evaluations: Sequence[Evaluation] = ()) -> dict[str, Any]:
    """``steps`` steps with an evaluation soon after the start, every so often, and at the end. The curves of the
    report.
    """
    options = trainer.options
    curves: dict[str, list[Any]] = {"evaluations": [*evaluations], "loss": [], "decay": [], "step_seconds": []}
    for i in trange(1, steps + 1, desc="  Training", leave=False, disable=None if trainer.rank == 0 else True):
        decays = averages.current_decays(trainer.ema, options)
        begin = time.perf_counter()
        loss = trainer.step()
        curves["step_seconds"].append(time.perf_counter() - begin)
        if trainer.afterwards is not None:
            trainer.afterwards.step()
        curves["decay"].append((trainer.steps_done, *decays))
        if i % 10 == 0 or i == steps:
            dist.all_reduce(loss)
            curves["loss"].append((trainer.steps_done, float(loss) / trainer.world))
        if trainer.steps_done == options.eval_every // 3 or i % options.eval_every == 0 or i == steps:
            found = judge.evaluate(trainer.model, trainer.ema, trainer.steps_done, KEPT if i == steps else STRIP)
            found.say(first=not curves["evaluations"])
            curves["evaluations"].append(found)
    return dict(curves)


def swap_is_exact(trainer: Trainer) -> bool | None:
    """True if the weights are, bit for bit, what they were before a swap. Known on rank 0; None where there are no
    averages.
    """
    if trainer.ema is None:
        return None
    before = averages.weights_hash(trainer.model, trainer.options)
    with trainer.ema.swapped(decay=averages.schedules(trainer.options)[0]):
        inside = averages.memory_hash(trainer.model)
    outside = averages.memory_hash(trainer.model)
    return before == averages.weights_hash(trainer.model, trainer.options) and inside != outside
