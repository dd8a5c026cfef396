"""The Frechet distance of two point clouds taken as Gaussians: |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

Heusel et al., arXiv 1706.08500, who take the space from a large classifier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gaussian:
    """mean: (d,), covariance: (d, d), float64."""

    mean: torch.Tensor
    covariance: torch.Tensor


def fit(points: torch.Tensor) -> Gaussian:
    """``points``: (n, d), n > 1."""
    points = points.double()
    return Gaussian(points.mean(0), points.T.cov())


def distance(a: Gaussian, b: Gaussian) -> float:
    """The trace of (C1 C2)^(1/2) is that of the symmetric (C1^(1/2) C2 C1^(1/2))^(1/2), which needs no complex
    arithmetic.
    """
    values, vectors = torch.linalg.eigh(a.covariance)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ b.covariance @ root).clamp(min=0).sqrt().sum()
    shift = (a.mean - b.mean).square().sum()
    return max(0.0, float(shift + a.covariance.trace() + b.covariance.trace() - 2 * cross))
