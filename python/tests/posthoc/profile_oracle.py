"""Profiles of averages and their least squares, written from EDM2 (Karras et al., arXiv 2312.02696) and from what an
average is, with dense matrices: what shardow.posthoc is held against. Knows none of our code."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def gamma(sigma_rel: float) -> float:
    """Algorithm 2: sigma_rel^-2 = (g + 2)^2 (g + 3) / (g + 1)."""
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def power_decay(sigma_rel: float) -> Callable[[int], float]:
    """Equation 127: beta(t) = (1 - 1/t)^(gamma + 1)."""
    return lambda t: (1 - 1 / t) ** (gamma(sigma_rel) + 1)


def profile(decays: Mapping[int, float], steps: int) -> Vector:
    """Of an average that was updated at the steps of ``decays``: the share of the weights of step 0, 1, ..., ``steps``
    in it.
    """
    shares = np.zeros(steps + 1)
    shares[0] = 1
    for step, decay in sorted(decays.items()):
        if step <= steps:
            shares *= decay
            shares[step] += 1 - decay
    return shares


def composed(decay: Callable[[int], float], updates: Iterable[int]) -> dict[int, float]:
    """Updates that make up for skipped steps: the product of the decays of all steps since the last one."""
    ordered = sorted(updates)
    return {
        now: float(np.prod([decay(n) for n in range(before + 1, now + 1)]))
        for before, now in itertools.pairwise([0, *ordered])
    }


def nearest(columns: Sequence[Vector], target: Vector) -> Vector:
    """min |A x - t| with sum(x) = 1: as x = 1/n + Z y, Z a basis of what sums to 0."""
    a = np.stack(columns, axis=1)
    n = a.shape[1]
    if n == 1:
        return np.ones(1)
    z = np.linalg.svd(np.ones((1, n)))[2][1:].T
    x0 = np.full(n, 1 / n)
    y = np.linalg.lstsq(a @ z, target - a @ x0, rcond=1e-14)[0]
    return x0 + z @ y


def edm2_profile(g: float, t: float, s: Vector) -> Vector:
    """Equation 2: p(s) = (g + 1) s^g / t^(g + 1) from 0 to t, 0 after it."""
    return np.asarray(np.where(s <= t, (g + 1) * s**g / t ** (g + 1), 0.0))


def edm2_product(ga: float, ta: float, gb: float, tb: float) -> float:
    """Their inner product, as the integral that it is, by Gauss's rule; in s = least x^4, so that no power is steep at
    0.
    """
    least = min(ta, tb)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    x = (nodes + 1) / 2
    s = least * x**4
    return float(np.sum(weights / 2 * 4 * least * x**3 * edm2_profile(ga, ta, s) * edm2_profile(gb, tb, s)))


def edm2_nearest(points: Sequence[tuple[float, float]], target: tuple[float, float]) -> Vector:
    """Appendix C's system, with the constraint as a Lagrange multiplier; ``points``: (gamma, t)."""
    n = len(points)
    system, right = np.zeros((n + 1, n + 1)), np.ones(n + 1)
    system[n, :n] = system[:n, n] = 1
    for i, a in enumerate(points):
        system[i, :n] = [edm2_product(*a, *b) for b in points]
        right[i] = edm2_product(*a, *target)
    return np.linalg.solve(system, right)[:n]
