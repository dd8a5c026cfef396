"""The main job, as each rank runs it: train, average, judge the averages, write a checkpoint; later, in other processes, go on from it.

What has to do with Shardow is in Trainer: one line makes the averages, one line after the optimizer's step updates them. In evaluate.py
one block puts them into the model.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist

import shardow

from . import checkpoint, classifier, data, diffusion, measure, shard
from .evaluate import Judge, hashes, real_against_real, weights_hash
from .model import DiT
from .options import Options
from .show import Show

WARMUP = 50


class Trainer:
    """A sharded model, its optimizer and its averages."""

    def __init__(self, options: Options, digits: data.Digits, seed: int) -> None:
        self.options, self.digits = options, digits
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = shard.wrap(DiT(options.width, options.depth), options.shard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        self.ema = shardow.EMA(self.model, decay=schedules(options.decays), group=shard.ema_group(options.shard))

    @property
    def step_count(self) -> int:
        """Counted by the averages, whose state is in the checkpoint."""
        return int(self.ema.stats()["step"])

    def step(self) -> torch.Tensor:
        """One optimizer step, then one update of all averages. This rank's loss."""
        step = self.step_count + 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, step / WARMUP)
        batch = data.batch(self.digits, self.options.batch, self.options.seed, step, self.rank, self.world)
        loss = diffusion.loss(self.model, batch, self.world)
        self.optimizer.zero_grad()
        loss.backward()
        shard.average_gradients(self.model, self.options.shard)
        self.optimizer.step()
        self.ema.update()
        return loss.detach()


def schedules(decays: tuple[float, ...]) -> list[shardow.Schedule]:
    """Debiased: the first weights count no more than any other, so that long averages are of use from the start of a short training."""
    return [shardow.schedules.debiased(decay) for decay in decays]


def run(options: Options) -> dict[str, Any]:
    """Training from scratch to the checkpoint. Rank 0's result has all figures of the report."""
    show = Show(enabled=dist.get_rank() == 0)
    digits = data.load()
    judge = Judge(*classifier.train(digits, options.epochs, options.seed), digits, options)
    show.line(f"The judge, a small classifier, names {judge.accuracy:.1%} of the held-out digits rightly.")
    trainer = Trainer(options, digits, options.seed)
    result: dict[str, Any] = {
        "judge": judge.accuracy,
        "real": real_against_real(judge, digits, options.samples),
        "classifier": judge.classifier.state_dict(),
    }
    result |= _train(trainer, judge, show, options.steps)
    result["costs"] = measure.costs(trainer.model, trainer.ema, options)
    result["swap"] = swap_is_exact(trainer)
    result["hashes"] = hashes(trainer.ema, schedules(options.decays))
    result["files"] = checkpoint.save(trainer, options)
    del trainer
    gc.collect()
    return result


def resume(options: Options, judge_state: dict[str, torch.Tensor], accuracy: float) -> dict[str, Any]:
    """In fresh processes, at another world size: load, compare, train on.

    The model begins from other weights, so that nothing but the checkpoint can make the averages equal.
    """
    show = Show(enabled=dist.get_rank() == 0)
    digits = data.load()
    model = classifier.Classifier().eval().requires_grad_(False)
    model.load_state_dict(judge_state)
    judge = Judge(model, accuracy, digits, options)
    trainer = Trainer(options, digits, options.seed + 1)
    result: dict[str, Any] = {"before": hashes(trainer.ema, schedules(options.decays))}
    checkpoint.load(trainer, options)
    result["step"] = trainer.step_count
    result["hashes"] = hashes(trainer.ema, schedules(options.decays))
    result["bytes"] = measure.bytes_per_rank(trainer.ema)
    result["file_hashes"] = checkpoint.hashes_of_files(trainer, options)
    result |= _train(trainer, judge, show, options.resume_steps, evaluate_first=True)
    del trainer
    gc.collect()
    return result


def _train(trainer: Trainer, judge: Judge, show: Show, steps: int, evaluate_first: bool = False) -> dict[str, Any]:
    """``steps`` steps with an evaluation every so often and at the end."""
    every = trainer.options.eval_every
    curves: dict[str, list[Any]] = {"evaluations": [], "loss": [], "decay": []}
    seconds: list[float] = []
    if evaluate_first:
        curves["evaluations"].append(judge.evaluate(trainer, keep=False))
    with show.progress("Training" if not evaluate_first else "Going on", steps) as bar:
        for i in range(1, steps + 1):
            decays = [trainer.ema.stats()[name] for name in _decay_names(trainer.options)]
            begin = time.perf_counter()
            loss = trainer.step()
            seconds.append(time.perf_counter() - begin)
            step = trainer.step_count
            curves["decay"].append((step, *decays))
            if i % 10 == 0 or i == steps:
                dist.all_reduce(loss)
                curves["loss"].append((step, float(loss) / trainer.world))
            bar(loss=curves["loss"][-1][1] if curves["loss"] else None)
            if i % every == 0 or i == steps:
                curves["evaluations"].append(judge.evaluate(trainer, keep=i == steps))
                show.evaluation(curves["evaluations"][-1])
    return {**curves, "step_seconds": seconds}


def _decay_names(options: Options) -> list[str]:
    return ["decay"] if len(options.decays) == 1 else [f"decay/{k}" for k in range(len(options.decays))]


def swap_is_exact(trainer: Trainer) -> bool:
    """True if the weights are, bit for bit, what they were before a swap."""
    before = weights_hash(trainer.model, trainer.options.shard)
    with trainer.ema.swapped(decay=schedules(trainer.options.decays)[0]):
        inside = weights_hash(trainer.model, trainer.options.shard)
    after = weights_hash(trainer.model, trainer.options.shard)
    return before == after != inside if dist.get_rank() == 0 else True
