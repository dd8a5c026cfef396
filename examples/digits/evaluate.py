"""How good are the samples of the weights, and of each average?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import shardow

from . import averages, data, diffusion, frechet
from .averages import RAW
from .classifier import Classifier
from .options import Options

KEPT = 60  # samples of the last evaluation that the report shows
STRIP = 10  # samples of every evaluation that it shows over training


@dataclass
class Evaluation:
    """By name: Frechet distance; share of samples that the classifier names as asked; distance of an average from the
    weights; samples.
    """

    step: int
    frechet: dict[str, float] = field(default_factory=dict)
    named: dict[str, float] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    images: dict[str, torch.Tensor] = field(default_factory=dict)

    def say(self, first: bool) -> None:
        """A row of a table that grows on the terminal while training goes on; of rank 0's, which alone knows."""
        if self.frechet and first:
            tqdm.write("  Frechet distance of samples from the real digits (lower is better)")
            tqdm.write(f"  {'step':>6}" + "".join(f"{name:>16}" for name in self.frechet))
        if self.frechet:
            tqdm.write(f"  {self.step:>6}" + "".join(f"{value:>16.3f}" for value in self.frechet.values()))


class Judge:
    """Samples with all ranks, judges on rank 0. The same noise each time, so that differences come from the weights
    alone.
    """

    def __init__(self, classifier: Classifier, accuracy: float, digits: data.Digits, options: Options) -> None:
        self.classifier, self.accuracy, self.digits, self.options = classifier, accuracy, digits, options
        self.real = frechet.fit(classifier.body(digits.images))
        generator = torch.Generator().manual_seed(options.seed + 77)
        self.noise = torch.randn(options.samples, 1, data.SIDE, data.SIDE, generator=generator)
        self.labels = torch.arange(options.samples) % data.CLASSES

    def evaluate(self, model: torch.nn.Module, ema: shardow.EMA | None, step: int, kept: int = STRIP) -> Evaluation:
        """Collective. The raw weights, then each average swapped into the same model."""
        found = Evaluation(step)
        self._judge(found, RAW, self.sample(model), kept)
        if ema is not None:
            for name, schedule in averages.by_name(self.options).items():
                with ema.swapped(decay=schedule):
                    images = self.sample(model)
                found.apart[name] = ema.distance(schedule)
                self._judge(found, name, images, kept)
        return found

    def sample(self, model: torch.nn.Module) -> torch.Tensor | None:
        """Every rank makes its part; rank 0 gets all. Each rank calls the model equally often: under FSDP a call is
        collective.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        model.eval()
        noise, labels = self.noise.tensor_split(world)[rank], self.labels.tensor_split(world)[rank]
        mine = diffusion.sample(model, noise, labels, self.options.sample_steps)
        model.train()
        parts: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(mine, parts)
        return torch.cat(parts) if parts is not None else None

    def distance(self, images: torch.Tensor | None) -> float:
        """Frechet, of rank 0's images; 0 elsewhere."""
        return 0.0 if images is None else frechet.distance(frechet.fit(self.classifier.body(images)), self.real)

    def _judge(self, found: Evaluation, name: str, images: torch.Tensor | None, kept: int) -> None:
        """On rank 0, which has the images."""
        if images is None:
            return
        features = self.classifier.body(images)
        found.frechet[name] = frechet.distance(frechet.fit(features), self.real)
        found.named[name] = float((self.classifier.head(features).argmax(1) == self.labels).float().mean())
        found.images[name] = images[:kept].clone()

    def real_against_real(self, draws: int = 20) -> dict[str, float]:
        """The scale of the distance: as many real digits of the same classes, drawn as a sampler draws them, against
        all.
        """
        generator = torch.Generator().manual_seed(1)
        of_class = [torch.nonzero(self.digits.labels == c).flatten() for c in range(data.CLASSES)]
        members = [of_class[label] for label in self.labels.tolist()]
        distances = []
        for _ in range(draws):
            index = torch.stack([ones[torch.randint(len(ones), (), generator=generator)] for ones in members])
            distances.append(frechet.distance(frechet.fit(self.classifier.body(self.digits.images[index])), self.real))
        return {"mean": sum(distances) / draws, "least": min(distances), "most": max(distances), "draws": draws}
