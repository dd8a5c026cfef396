"""The real data: scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, and the batches that are drawn from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIDE = 8
CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """images: (n, 1, 8, 8) float32 in [-1, 1]; labels: (n,) int64."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: torch.Tensor) -> Digits:
        return Digits(self.images[index], self.labels[index])

    def of_each_class(self, count: int) -> torch.Tensor:
        """``count`` images, of class 0, 1, ... 9, 0, 1, ..."""
        rows = [torch.nonzero(self.labels == label).flatten()[: count // CLASSES] for label in range(CLASSES)]
        return self.images[torch.stack(rows, dim=1).flatten()]


def load() -> Digits:
    """Loads all digits in a shuffled order: the file lists them by writer, and a split of it would not be fair."""
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.tensor(source.images, dtype=torch.float32).div(8).sub(1).unsqueeze(1)
    labels = torch.tensor(source.target, dtype=torch.int64)
    return Digits(images, labels).take(torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)))


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch. ``size`` is the global one."""

    images: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor
    time: torch.Tensor
    size: int

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the model's: points on the paths from images to noise, their times, the labels."""
        t = self.time[:, None, None, None]
        return (1 - t) * self.images + t * self.noise, self.time, self.labels


def batch(digits: Digits, size: int, seed: int, step: int, rank: int, world: int) -> Batch:
    """The global batch depends on seed and step alone, so that training takes the same course at any world size."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    index = torch.randint(len(digits), (size,), generator=generator)
    noise = torch.randn(size, 1, SIDE, SIDE, generator=generator)
    time = torch.randn(size, generator=generator).sigmoid()
    rows = torch.arange(size).tensor_split(world)[rank]
    part = digits.take(index[rows])
    return Batch(part.images, part.labels, noise[rows], time[rows], size)
