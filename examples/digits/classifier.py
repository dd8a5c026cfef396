"""The judge: a small convolutional classifier of the real digits. Samples are compared with them in the space of its
last hidden layer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from . import data

FEATURES = 32


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(256, FEATURES), nn.Tanh(),
        )  # fmt: skip
        self.head = nn.Linear(FEATURES, data.CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def train(digits: data.Digits, epochs: int, seed: int, batch: int = 64) -> tuple[Classifier, float]:
    """(classifier, its accuracy on the fifth of the digits that it was not trained on). The global random state stays
    as it was.
    """
    held_out = len(digits) // 5
    test, rest = digits.take(torch.arange(held_out)), digits.take(torch.arange(held_out, len(digits)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for index in torch.randperm(len(rest), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(rest.images[index]), rest.labels[index], label_smoothing=0.1).backward()
            optimizer.step()
    model.eval().requires_grad_(False)
    return model, float((model(test.images).argmax(1) == test.labels).float().mean())
