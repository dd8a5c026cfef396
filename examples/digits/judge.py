"""How good are the samples of the weights, and of each average?

A small classifier of the real digits judges. Samples are compared with all real digits in the space of its last hidden
layer, by the Frechet distance of two point clouds taken as Gaussians (Heusel et al., arXiv 1706.08500).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import shardow

from . import averages, data, model
from .averages import RAW
from .options import Options

KEPT = 60  # samples of the last evaluation that the report shows
STRIP = 10  # samples of every evaluation that it shows over training
Gaussian = tuple[torch.Tensor, torch.Tensor]  # mean (d,) and covariance (d, d), float64


class Classifier(nn.Module):
    accuracy = 0.0  # on the fifth of the digits that it was not trained on

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(256, 32), nn.Tanh(),
        )  # fmt: skip
        self.head = nn.Linear(32, data.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def classifier(digits: data.Digits, epochs: int, seed: int, batch: int = 64) -> Classifier:
    """Trains one. The global random state stays as it was."""
    held_out = len(digits) // 5
    test, rest = digits.take(torch.arange(held_out)), digits.take(torch.arange(held_out, len(digits)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(rest), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(network(rest.images[index]), rest.labels[index], label_smoothing=0.1).backward()
            optimizer.step()
    network.eval().requires_grad_(False)
    network.accuracy = float((network(test.images).argmax(1) == test.labels).float().mean())
    return network


def fit(points: torch.Tensor) -> Gaussian:
    """``points``: (n, d), n > 1."""
    return points.double().mean(0), points.double().T.cov()


def frechet(a: Gaussian, b: Gaussian) -> float:
    """|m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)); that root's trace is the one of (C1^(1/2) C2 C1^(1/2))^(1/2)."""
    values, vectors = torch.linalg.eigh(a[1])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ b[1] @ root).clamp(min=0).sqrt().sum()
    return max(0.0, float((a[0] - b[0]).square().sum() + a[1].trace() + b[1].trace() - 2 * cross))


@dataclass
class Evaluation:
    """By name: Frechet distance and samples."""

    step: int
    frechet: dict[str, float] = field(default_factory=dict)
    images: dict[str, torch.Tensor] = field(default_factory=dict)

    def print(self, first: bool) -> None:
        """Adds a row to the terminal's table of rank 0, which alone has judged."""
        if self.frechet and first:
            tqdm.write("  Frechet distance of samples from the real digits (lower is better)")
            tqdm.write(f"  {'step':>6}" + "".join(f"{name:>16}" for name in self.frechet))
        if self.frechet:
            tqdm.write(f"  {self.step:>6}" + "".join(f"{value:>16.3f}" for value in self.frechet.values()))


class Judge:
    """Samples with all ranks, judges on rank 0; from the same noise each time, so that weights alone differ."""

    def __init__(self, classifier: Classifier, digits: data.Digits, options: Options) -> None:
        self.classifier, self.digits, self.options = classifier, digits, options
        self.real = fit(classifier.body(digits.images))
        generator = torch.Generator().manual_seed(options.seed + 77)
        self.noise = torch.randn(options.samples, 1, data.SIDE, data.SIDE, generator=generator)
        self.labels = torch.arange(options.samples) % data.CLASSES

    def evaluate(self, network: nn.Module, ema: shardow.EMA | None, step: int, kept: int = STRIP) -> Evaluation:
        """The raw weights, then each average swapped into the same model. Collective."""
        result = Evaluation(step)
        self._judge(result, RAW, self.sample(network), kept)
        if ema is not None:
            for name, schedule in averages.by_name(self.options).items():
                with ema.swapped(decay=schedule):
                    images = self.sample(network)
                self._judge(result, name, images, kept)
        return result

    def sample(self, network: nn.Module) -> torch.Tensor | None:
        """Every rank makes its part, with as many calls: under FSDP one is collective. Rank 0 gets all."""
        rank, world = dist.get_rank(), dist.get_world_size()
        network.eval()
        noise, labels = self.noise.tensor_split(world)[rank], self.labels.tensor_split(world)[rank]
        part = model.sample(network, noise, labels, self.options.sample_steps)
        network.train()
        parts: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(part, parts)
        return None if parts is None else torch.cat(parts)

    def distance(self, network: nn.Module) -> float:
        """Samples and returns the distance on rank 0; 0 elsewhere. Collective."""
        images = self.sample(network)
        return 0.0 if images is None else self._distance(images)

    def _judge(self, result: Evaluation, name: str, images: torch.Tensor | None, kept: int) -> None:
        if images is None:
            return
        result.frechet[name] = self._distance(images)
        result.images[name] = images[:kept].clone()

    def _distance(self, images: torch.Tensor) -> float:
        return frechet(fit(self.classifier.body(images)), self.real)

    def real_again(self, draws: int = 20) -> list[float]:
        """The scale of the distance: of as many real digits of the same classes, drawn with replacement, from all."""
        generator = torch.Generator().manual_seed(1)
        of_class = [torch.nonzero(self.digits.labels == label).flatten() for label in range(data.CLASSES)]
        distances = []
        for _ in range(draws):
            members = (of_class[label] for label in self.labels.tolist())
            index = torch.stack([m[torch.randint(len(m), (), generator=generator)] for m in members])
            distances.append(self._distance(self.digits.images[index]))
        return distances
