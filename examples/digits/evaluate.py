"""How good are the samples of the weights, and of each average? And are two states bit for bit the same?"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import shardow

from . import data, diffusion, frechet, shard
from .classifier import Classifier
from .options import Options

if TYPE_CHECKING:
    from .train import Trainer

RAW = "raw weights"
KEPT = 60  # samples of the last evaluation that the report shows
STRIP = 10  # samples of every evaluation that it shows over training


def name_of(decay: float) -> str:
    return f"average {decay:g}"


@dataclass
class Evaluation:
    """By name: Frechet distance; share of samples that the classifier names as asked; distance of an average from the weights; samples."""

    step: int
    frechet: dict[str, float] = field(default_factory=dict)
    named: dict[str, float] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    images: dict[str, torch.Tensor] = field(default_factory=dict)


class Judge:
    """Samples with all ranks, judges on rank 0. The same noise each time, so that differences come from the weights alone."""

    def __init__(self, classifier: Classifier, accuracy: float, digits: data.Digits, options: Options) -> None:
        self.classifier, self.accuracy, self.options = classifier, accuracy, options
        self.real = frechet.fit(classifier.body(digits.images))
        generator = torch.Generator().manual_seed(options.seed + 77)
        self.noise = torch.randn(options.samples, 1, data.SIDE, data.SIDE, generator=generator)
        self.labels = torch.arange(options.samples) % data.CLASSES

    def evaluate(self, trainer: Trainer, keep: bool) -> Evaluation:
        """Collective. The raw weights, then each average swapped into the same model."""
        from .train import schedules

        found = Evaluation(trainer.step_count)
        for decay, schedule in zip((None, *self.options.decays), (None, *schedules(self.options.decays)), strict=True):
            name = RAW if decay is None else name_of(decay)
            with contextlib.nullcontext() if schedule is None else trainer.ema.swapped(decay=schedule):
                images = self.sample(trainer.model)
            if schedule is not None:
                found.apart[name] = trainer.ema.distance(schedule)
            if images is not None:
                self._judge(found, name, images, KEPT if keep else STRIP)
        return found

    def sample(self, model: torch.nn.Module) -> torch.Tensor | None:
        """Every rank makes its part; rank 0 gets all. Each rank calls the model equally often: under FSDP a call is collective."""
        rank, world = dist.get_rank(), dist.get_world_size()
        model.eval()
        noise, labels = self.noise.tensor_split(world)[rank], self.labels.tensor_split(world)[rank]
        mine = diffusion.sample(model, noise, labels, self.options.sample_steps)
        model.train()
        parts: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(mine, parts)
        return torch.cat(parts) if parts is not None else None

    def _judge(self, found: Evaluation, name: str, images: torch.Tensor, kept: int) -> None:
        features = self.classifier.body(images)
        found.frechet[name] = frechet.distance(frechet.fit(features), self.real)
        found.named[name] = float((self.classifier.head(features).argmax(1) == self.labels).float().mean())
        found.images[name] = images[:kept].clone()


def real_against_real(judge: Judge, digits: data.Digits, samples: int) -> dict[str, float]:
    """The scale of the distance: as many real digits as samples, drawn with replacement as a sampler draws them, against all."""
    generator = torch.Generator().manual_seed(1)
    distances = []
    for _ in range(20):
        index = torch.randint(len(digits), (samples,), generator=generator)
        distances.append(frechet.distance(frechet.fit(judge.classifier.body(digits.images[index])), judge.real))
    return {"mean": sum(distances) / len(distances), "least": min(distances), "most": max(distances)}


def hashes(ema: shardow.EMA, schedules: list[shardow.Schedule]) -> list[str]:
    """One for each average, of the full average on rank 0; of nothing elsewhere. Collective."""
    return [_hash(ema.full_state_dict(schedule)) for schedule in schedules]


def weights_hash(model: torch.nn.Module, how: str) -> str:
    """Of the full weights, however they are shared: new averages begin equal to the weights and can be gathered. Collective."""
    return _hash(shardow.EMA(model, 0.5, group=shard.ema_group(how)).full_state_dict())


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
