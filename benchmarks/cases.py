"""The models that are averaged, of realistic and of awkward sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

DECAYS = (0.999, 0.9995, 0.9999, 0.9998)


@dataclass(frozen=True)
class Case:
    """One column of a table. ``num_decays`` averages of each parameter at once, on ``threads`` threads."""

    name: str
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype
    num_decays: int = 1
    threads: int = 1

    @property
    def decays(self) -> tuple[float, ...]:
        return DECAYS[: self.num_decays]

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def rounds(self, rounds: int) -> int:
        """Returns ten times as many where a round is short."""
        return rounds * (10 if self.elements < 10_000_000 else 1)

    def model(self) -> nn.Module:
        generator = torch.Generator().manual_seed(0)
        return nn.ParameterList(
            [nn.Parameter(torch.randn(shape, generator=generator).mul_(0.02).to(self.dtype)) for shape in self.shapes]
        )


def transformer(layers: int = 12, width: int = 768) -> list[tuple[int, ...]]:
    """The blocks of GPT-2 small: 85 M elements in 146 tensors."""
    vector: tuple[int, ...] = (width,)
    attention = [vector, vector, (3 * width, width), (3 * width,), (width, width), vector]
    mlp = [vector, vector, (4 * width, width), (4 * width,), (width, 4 * width), vector]
    return (attention + mlp) * layers + [vector, vector]


def many_small(count: int = 2000) -> list[tuple[int, ...]]:
    """Sizes from 64 to 2000 elements, log-uniform."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(count, generator=generator).mul(torch.tensor(2000 / 64).log()).exp().mul(64).long()
    return [(int(size),) for size in sizes]


def all_cases(quick: bool) -> list[Case]:
    large = transformer(2, 128) if quick else transformer()
    small = many_small(200 if quick else 2000)
    return [
        Case("fp32 <- fp32", large, torch.float32),
        Case("fp32 <- fp32, 2 threads", large, torch.float32, threads=2),
        Case("fp32 <- bf16", large, torch.bfloat16),
        Case("4 decays, fp32", large, torch.float32, num_decays=4),
        Case("4 decays, bf16", large, torch.bfloat16, num_decays=4),
        Case("2000 small tensors", small, torch.float32),
    ]
