"""Which snapshots, and how near their sum comes: against dense matrices of the papers' formulas."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import profile_oracle as oracle
import pytest
import snapshot_runs as runs

import shardow
from shardow import posthoc, schedules

T = 240
Decays = dict[int, float]


def check(found: posthoc.Plan, of_key: dict[str, Decays], target: Decays, nearest: bool = True) -> None:
    """Residual and bound are those of the coefficients; and no others come nearer, but for what rounding is spared."""
    columns = [oracle.profile(of_key[one.key], one.step) for one in found.terms]
    made = np.zeros(found.step + 1)
    for one, column in zip(found.terms, columns, strict=True):
        made[: one.step + 1] += one.coefficient * column
    wanted = oracle.profile(target, found.step)
    off = made - wanted
    norm = float(np.linalg.norm(wanted))
    assert sum(one.coefficient for one in found.terms) == pytest.approx(1, abs=1e-12)
    assert found.residual == pytest.approx(float(np.linalg.norm(off)) / norm, rel=1e-6, abs=1e-12)
    assert found.variation == pytest.approx(float(np.abs(off).sum()) / 2, rel=1e-6, abs=1e-12)
    if nearest:
        padded = [np.pad(one, (0, found.step + 1 - len(one))) for one in columns]
        best = np.stack(padded, axis=1) @ oracle.nearest(padded, wanted)
        assert float(np.linalg.norm(made - best)) <= 1e-6 * norm


def powers_of(*sigma_rels: float) -> dict[str, Decays]:
    return {schedules.power(one).key(): {n: oracle.power_decay(one)(n) for n in range(1, T + 1)} for one in sigma_rels}


@pytest.mark.parametrize("target", [0.03, 0.06, 0.12, 0.21])
@pytest.mark.parametrize("tracked", [(0.05, 0.1), (0.08,), (0.05, 0.1, 0.2)])
def test_power_profiles_are_the_nearest_of_the_paper(tmp_path: Path, tracked: tuple[float, ...], target: float) -> None:
    runs.run(tmp_path, runs.powers(*tracked))
    found = posthoc.plan(tmp_path, target)
    assert (found.step, found.snapshots) == (T, 8 * len(tracked))
    check(found, powers_of(*tracked), powers_of(target)[f"power(sigma_rel={target})"])


def test_two_profiles_come_nearer_than_one_and_more_snapshots_than_few(tmp_path: Path) -> None:
    runs.run(tmp_path / "two", runs.powers(0.05, 0.1), every=15)
    runs.run(tmp_path / "one", runs.powers(0.05), every=15)
    runs.run(tmp_path / "few", runs.powers(0.05), every=60)
    two, one, few = (posthoc.plan(tmp_path / name, 0.14).residual for name in ("two", "one", "few"))
    assert two < one / 10 < few / 10


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (range(1, T + 1), {"update_every": 3}),
        (range(5, T + 1, 5), {}),
        ([n for n in range(1, T + 1) if n % 7 and n % 11 != 5], {}),
        (range(1, T + 1), {"start_step": 40}),
    ],
    ids=["every third", "fives", "uneven", "start_step"],
)
def test_updates_that_skip_steps(tmp_path: Path, steps: Any, options: dict[str, int]) -> None:
    runs.run(tmp_path, runs.powers(0.06, 0.15), steps, **options)
    start, every = options.get("start_step", 0), options.get("update_every", 1)
    made = [n - start for n in steps if n > start and n % every == 0]

    def decays(sigma_rel: float) -> Decays:
        found = {start + n: d for n, d in oracle.composed(oracle.power_decay(sigma_rel), made).items()}
        return {**found, **({start: 0.0} if start else {})}

    check(posthoc.plan(tmp_path, 0.1), {one.key(): decays(s) for s, one in zip((0.06, 0.15), runs.powers(0.06, 0.15),
     strict=True)},
          decays(0.1))  # fmt: skip


def by_decay(decay: Callable[[int], float]) -> Decays:
    return {n: decay(n) for n in range(1, T + 1)}


SCHEDULES = {
    "constant": (schedules.constant(0.98), by_decay(lambda n: 0.98)),
    "warmup": (schedules.warmup(0.97), by_decay(lambda n: min(0.97, (1 + n) / (10 + n)))),
    "debiased": (schedules.debiased(0.99), by_decay(lambda n: 1 - 0.01 / (1 - 0.99**n))),
    "mean": (schedules.mean(), by_decay(lambda n: 1 - 1 / n)),
    "half-life": (schedules.half_life(25), by_decay(lambda n: 2 ** (-1 / 25))),
    "samples": (schedules.half_life_in_samples(400), by_decay(lambda n: 2 ** (-16 / 400))),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_is_tracked_and_asked_for(tmp_path: Path, name: str) -> None:
    tracked = [schedules.constant(0.9), SCHEDULES[name][0]]
    runs.run(tmp_path, tracked, samples=16)
    known = {tracked[0].key(): by_decay(lambda n: 0.9), tracked[1].key(): SCHEDULES[name][1]}
    for asked, (target, decays) in SCHEDULES.items():
        if asked == "samples" and name != "samples":  # they were not recorded
            with pytest.raises(ValueError, match="half-life in samples"):
                posthoc.plan(tmp_path, schedule=target)
            continue
        check(posthoc.plan(tmp_path, schedule=target), known, decays)


@pytest.mark.parametrize("step", [30, 120, 135, 239])
def test_a_step_before_the_end_leaves_out_later_snapshots(tmp_path: Path, step: int) -> None:
    runs.run(tmp_path, runs.powers(0.05, 0.1))
    found = posthoc.plan(tmp_path, 0.08, step=step)
    assert found.step == step
    assert all(one.step <= step for one in found.terms)
    check(found, powers_of(0.05, 0.1), powers_of(0.08)["power(sigma_rel=0.08)"])


def test_a_target_that_is_a_snapshot_is_that_one(tmp_path: Path) -> None:
    runs.run(tmp_path, [*runs.powers(0.05, 0.1), 0.95], every=10)
    for step in (10, 130, 240):
        for asked in ({"sigma_rel": 0.1}, {"schedule": 0.95}):
            found = posthoc.plan(tmp_path, step=step, **asked)  # type: ignore[arg-type]
            assert [(one.step, one.coefficient) for one in found.terms] == [(step, 1.0)]
            assert found.residual < 1e-9
            assert found.terms[0].key == found.target.key()


def test_snapshots_that_are_missing(tmp_path: Path) -> None:
    runs.run(tmp_path, runs.powers(0.05, 0.1))
    whole = posthoc.plan(tmp_path, 0.12).residual
    for step in (60, 90, 210):
        shutil.rmtree(tmp_path / f"snapshot-{step:09}")
    found = posthoc.plan(tmp_path, 0.12)
    assert found.snapshots == 10
    assert found.residual > whole
    check(found, powers_of(0.05, 0.1), powers_of(0.12)["power(sigma_rel=0.12)"])


def test_the_continuous_formula_is_the_papers(tmp_path: Path) -> None:
    runs.run(tmp_path, runs.powers(0.05, 0.1), every=60)
    found = posthoc.plan(tmp_path, 0.13, formula="continuous")
    points = [(oracle.gamma(float(one.key[16:-1])), float(one.step)) for one in found.terms]
    expected = oracle.edm2_nearest(points, (oracle.gamma(0.13), float(T)))
    assert [one.coefficient for one in found.terms] == pytest.approx(list(expected), rel=1e-6)
    check(found, powers_of(0.05, 0.1), powers_of(0.13)["power(sigma_rel=0.13)"], nearest=False)
    assert found.residual >= posthoc.plan(tmp_path, 0.13).residual


def test_the_sweep_is_what_plans_say(tmp_path: Path) -> None:
    runs.run(tmp_path / "run", runs.powers(0.05, 0.1))
    asked = [0.04, 0.05, 0.077, 0.1, 0.28]
    found = posthoc.sweep(tmp_path / "run", tmp_path / "sweep.svg", sigma_rels=asked)
    assert found.tracked == [0.05, 0.1]
    plans = [posthoc.plan(tmp_path / "run", one) for one in asked]
    assert [one.sigma_rel for one in found.points] == asked
    assert [one.residual for one in found.points] == pytest.approx([one.residual for one in plans], rel=1e-6, abs=1e-9)
    assert [one.rounding for one in found.points] == pytest.approx([one.rounding for one in plans], rel=1e-9)
    assert len(posthoc.sweep(tmp_path / "run", step=100).points) == 46
    assert "<svg" in (tmp_path / "sweep.svg").read_text()


def test_bfloat16_rounds_and_says_how_much(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(0.05, 0.1))
    runs.go_on(model, ema, range(1, T + 1), tmp_path / "half", 10, dtype="bfloat16")
    runs.run(tmp_path / "full", runs.powers(0.05, 0.1), every=10)
    half, full = (posthoc.plan(tmp_path / name, 0.2) for name in ("half", "full"))
    assert half.rounding == pytest.approx(half.size * 2.0**-8)
    assert full.rounding == pytest.approx(full.size * 2.0**-53)
    assert half.size < full.size  # what it gives up of the residual, it saves of the rounding
    assert half.residual + half.rounding <= full.residual + full.size * 2.0**-8


def test_what_is_asked_wrongly(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no snapshots"):
        posthoc.plan(tmp_path, 0.1)
    runs.run(tmp_path, runs.powers(0.05), range(1, 61))
    with pytest.raises(ValueError, match="steps 30 to 60"):
        posthoc.plan(tmp_path, 0.1, step=61)
    with pytest.raises(ValueError, match="steps 30 to 60"):
        posthoc.plan(tmp_path, 0.1, step=29)
    with pytest.raises(ValueError, match="sigma_rel"):
        posthoc.plan(tmp_path, 0.3)
    with pytest.raises(ValueError, match="which average"):
        posthoc.plan(tmp_path)
    with pytest.raises(ValueError, match="is none"):
        posthoc.plan(tmp_path, schedule=0.9, formula="continuous")


def test_whole_checkpoints_are_snapshots_too(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(0.05, 0.1))
    checkpoints = shardow.Checkpoints(tmp_path, keep=None)
    for step in range(1, T + 1):
        runs.put(model, step)
        ema.update()
        if step % 40 == 0:
            checkpoints.save(step, model, ema)
    check(posthoc.plan(tmp_path, 0.08), powers_of(0.05, 0.1), powers_of(0.08)["power(sigma_rel=0.08)"])
