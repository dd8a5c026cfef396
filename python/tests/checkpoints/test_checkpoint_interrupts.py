"""Ctrl-C before any line of shardow's in a save or a restore: steps that were there are there, nothing is left over,
and all goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Run, at, equal, tensors_of
from stopped_swaps import Stop, by_a_signal

import shardow

EVERY = bool(os.environ.get("SHARDOW_ALL"))
STRIDE = 1 if EVERY else 67


@pytest.fixture(autouse=True)
def _ctrl_c() -> Iterator[None]:
    """A job in the background of a shell begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def small() -> Run:
    """Of which no line of training's is shardow's."""
    run = Run("plain")
    run.train(1)
    return run


@pytest.mark.timeout(3000 if EVERY else 300)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_is_interrupted_leaves_steps_whole_and_the_next_one_goes_well(
    asynchronous: bool, tmp_path: Path
) -> None:
    run, checkpoints = small(), shardow.Checkpoints(tmp_path, keep=2)
    run.save(checkpoints)
    points, threads = 0, threading.active_count()
    for where in range(0, 100_000, STRIDE):
        run.train(1)
        stop, handle = Stop(where), None
        try:
            with by_a_signal(stop):
                handle = run.save(checkpoints, asynchronous=asynchronous)
        except KeyboardInterrupt:
            points += 1
        if not stop.where:
            break
        assert checkpoints.latest() in (run.step - 1, run.step), stop
        if handle is not None and asynchronous:
            handle.wait()
        assert [name for name in os.listdir(tmp_path) if not name.startswith("step-")] == [], stop
        run.save(checkpoints)
        assert checkpoints.latest() == run.step, stop
        assert sorted(os.listdir(tmp_path)) == [at(checkpoints, step).name for step in (run.step - 1, run.step)], stop
        assert threading.active_count() == threads, stop
    assert points > (800 if EVERY else 10)


@pytest.mark.timeout(3000 if EVERY else 300)
def test_after_a_restore_that_is_interrupted_another_one_goes_on_bit_for_bit(tmp_path: Path) -> None:
    run, checkpoints = small(), shardow.Checkpoints(tmp_path / "run")
    run.save(checkpoints)
    expected, points, refused = tensors_of(at(checkpoints, run.step)), 0, 0
    other = Run("plain", seed=1)
    for where in range(0, 100_000, STRIDE):
        other.train(1)
        mixed = shardow.Checkpoints(tmp_path / "mixed", keep=1)
        other.save(mixed)
        before = tensors_of(at(mixed, other.step))
        stop = Stop(where)
        try:
            with by_a_signal(stop):
                other.restore(checkpoints)
        except KeyboardInterrupt:
            points += 1
        if not stop.where:
            break
        try:
            other.save(mixed)
            assert any(equal(tensors_of(at(mixed, other.step)), whole) for whole in (before, expected)), stop
        except ValueError as error:
            assert "restore() of this model stopped halfway" in str(error), stop
            refused += 1
        other.restore(checkpoints)
        again = shardow.Checkpoints(tmp_path / "again", keep=1)
        other.save(again)
        assert equal(tensors_of(at(again, other.step)), expected), stop
    assert points > (800 if EVERY else 10)
    assert 0 < refused < points
