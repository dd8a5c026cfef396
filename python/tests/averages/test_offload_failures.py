"""Averages on the host when something goes wrong: copies that fail, NaN, Ctrl-C before any line, a program's end."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from fake_device import Device, on_device
from offloading import Training, made
from own_averages import averages_of
from small import clone


@on_device
def test_a_copy_that_fails_leaves_the_last_whole_averages() -> None:
    """And the next update makes up for it, though some of it was on its way."""

    with Device(12) as device:
        training = Training(device, ring_bytes=1 << 20)
        training.step(1)
        training.emas[0].stats()
        before = training.averages(0)
        trainings.give_gradients(training.models[0], 2)
        device.fake.fail_copy(1)
        training.optimizers[0].step()
        text = (
            "the update of step 2 was not made, since weights did not reach the host; the averages are those of "
            "step 1, and the next update"
        )
        with pytest.raises(Exception, match=f"{text} makes up for it: CUDA: ") as told:
            training.emas[0].state_dict()
        assert isinstance(told.value, type(training.emas[0]).__mro__[0]) or told.type.__name__.endswith("Error")
        trainings.same(training.averages(0), before)
        training.step(3, which=0)
        assert training.emas[0].stats()["updates"] == 2
        assert training.emas[0].step == 3


@on_device
def test_an_update_that_was_not_made_leaves_its_samples_to_the_next_one() -> None:
    """A half-life in samples is of those since the last update that was made."""
    import shardow

    with Device(18) as device:
        schedule = shardow.schedules.half_life_in_samples(100)
        training = Training(device, attached=False, decay=schedule, ring_bytes=1 << 20)
        training.step(1)
        for ema in training.emas:
            ema.update(samples=100)
        training.emas[0].stats()
        training.step(2)
        device.fake.fail_copy(1)
        with pytest.raises(Exception, match="the update of step 2 was not made"):
            training.emas[0].update(samples=200)
        for ema in training.emas:
            ema.update(step=3, samples=300)
        training.check()


@on_device
def test_an_update_that_stops_halfway_is_refused_to_readers_until_it_is_whole() -> None:
    with Device(13) as device:
        training = Training(device)
        training.step(1)
        training.emas[0].stats()
        device.fake.fail_copy(10, -1)
        training.step(2)
        weights = clone(training.models[0])
        for call in (
            training.emas[0].state_dict,
            training.emas[0].stats,
            lambda: training.step(3, which=0),
            training.emas[0].swap_in,
        ):
            with pytest.raises(
                Exception,
                match=r"the update of step 2 stopped after \d of \d blocks: the others did not reach the host",
            ):
                call()
            trainings.same(clone(training.models[0]), weights)  # no step, no swap
        device.fake.fail_copy(0, 0)
        training.check()
        training.step(3)
        training.check()


@on_device
def test_a_swap_of_which_any_copy_fails_leaves_weights_and_averages() -> None:
    failed = 0
    while _fails_at(failed):
        failed += 1
    assert failed > 10


def _fails_at(number: int) -> bool:
    with Device(number) as device:
        training = Training(device)
        training.step(1)
        training.emas[0].stats()
        weights, averages = clone(training.models[0]), training.averages(0)
        device.fake.fail_copy(number)
        with contextlib.suppress(Exception):
            training.emas[0].swap_in()
        device.fake.fail_copy(0, 0)
        failed = not averages_of(training.emas[0]).engine.swapped
        if not failed:
            training.emas[0].swap_out()
        trainings.same(clone(training.models[0]), weights)
        trainings.same(training.averages(0), averages)
        return failed


@on_device
def test_averages_that_are_torn_for_good_begin_again_with_reset() -> None:
    import shardow

    with Device(14) as device:
        training = Training(device)
        training.step(1)
        core = averages_of(training.emas[0])
        core._engine = Torn(core._engine)  # type: ignore[assignment]
        with pytest.raises(shardow.Error, match="torn"):
            training.emas[0].state_dict()
        training.emas[0].reset()
        training.emas[1].reset()
        training.check()


class Torn:
    """An engine of which all calls but reset() raise."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._torn = engine, True

    def __getattr__(self, name: str) -> Any:
        if name == "reset":
            self._torn = False
        if self._torn and name not in ("set_stream", "swapped"):
            from shardow import errors

            raise errors.make("internal", "torn")
        return getattr(self._engine, name)


@on_device
def test_what_is_not_finite_is_told_and_no_update_is_lost() -> None:
    with Device(15) as device:
        training = Training(device, nonfinite="raise")
        training.step(8, which=0)  # its gradients make a weight NaN
        with pytest.raises(
            ValueError, match=r"step 1: 1 elements of the parameters are NaN or Inf, the first in '0.weight'"
        ):
            training.emas[0].stats()
        for _ in range(3):
            with contextlib.suppress(ValueError):
                training.step(2, which=0)
        with contextlib.suppress(ValueError):
            training.emas[0].stats()
        assert training.emas[0].stats()["updates"] == training.emas[0].step


@on_device
def test_refusals_say_where_averages_can_live() -> None:
    import shardow

    model = made()
    text = (
        r"device='cuda': '0.weight' is on cpu, and averages live with their weights \(leave device= out\) or "
        r"on the host \(device='cpu'\)"
    )
    with pytest.raises(NotImplementedError, match=text):
        shardow.EMA(model, device="cuda")
    with Device(16, num_devices=2) as device:
        device.hold(model)
        with pytest.raises(NotImplementedError, match=r"device='cuda:1': '0.weight' is on cuda:0"):
            shardow.EMA(model, device="cuda:1")
        with pytest.raises(ValueError, match="ring_bytes=0; it must be a whole number of at least 1"):
            shardow.EMA(model, device="cpu", ring_bytes=0)
        with pytest.raises(ValueError, match="ring_bytes is 100; it must be at least 4096"):
            shardow.EMA(model, device="cpu", ring_bytes=100)
        device.fake.fail_allocation(0)
        ema = shardow.EMA(model, device="cpu")  # once more, without what torch's allocator keeps
        ema.update()
        ema.stats()


HOOKED = tuple(
    f"shardow/{name}.py"
    for name in ("averaging/attach", "averaging/model_averages", "averaging/swap", "sharding/swap_guard")
)


def stopped(before: int, fn: Callable[[], None]) -> bool:
    """Ctrl-C before a line of HOOKED, counted from 0. False where fn() was over by then. Nothing is collected
    meanwhile: Python drops what a __del__ raises, the Ctrl-C too."""
    left = before
    gc.collect()
    gc.disable()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(HOOKED):
            return None
        if event == "line":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


@pytest.mark.parametrize("attached", [True, False])
@on_device
def test_ctrl_c_before_any_line_tears_nothing(attached: bool) -> None:
    """A step was made or not, and so was its update: what is counted is in the averages."""
    line = 0
    while _stopped_at(line, attached):
        line += 1
    assert line > 10


def _stopped_at(line: int, attached: bool) -> bool:
    with Device(line) as device:
        training = Training(device, attached, decay=0.5)
        model, optimizer, ema = training.models[0], training.optimizers[0], training.emas[0]
        seen = [model[0].weight.detach().clone()]

        def step() -> None:
            trainings.give_gradients(model, 2)
            optimizer.step()
            if not attached:
                ema.update()

        before = False
        for number in range(4):
            if number == 1:
                before = stopped(line, step)
            else:
                step()
            seen.append(model[0].weight.detach().clone())
        updates = ema.stats()["updates"]
        read = seen[1:] if updates == 4 else [seen[1], *seen[3:]]
        assert updates == len(read), line
        expected = seen[0]
        for weight in read:
            expected = torch.lerp(expected, weight, 0.5)
        assert torch.equal(ema.state_dict()["averages"]["0.weight"], expected), line
    return before


@on_device
def test_memory_threads_and_descriptors_are_flat() -> None:
    with Device(None) as device:
        training = Training(device, decay=[0.5, 0.9])
        training.step(1)
        training.emas[0].stats()
        pinned = device.fake.allocated()
        assert pinned <= trainings.SMALLEST_RING
        stats = training.emas[0].stats()
        assert stats["bytes"] == 2 * 4 * stats["elements"]
        before = trainings.process()
        for number in range(10_000 if os.environ.get("SHARDOW_ALL") else 1_000):
            trainings.give_gradients(training.models[0], 2 + number % 5)
            training.optimizers[0].step()
        assert device.fake.allocated() == pinned
        after = trainings.process()
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 2 << 20, "resident memory"


PROGRAM = """
import faulthandler, os, signal, sys, threading
faulthandler.dump_traceback_later(60, exit=True)  # a program that hangs tells where
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job begins without
sys.path.insert(0, {tests!r})
from core_modules import FAKE
FAKE.install()
import torch, shardow
from fake_device import Device
from torch import nn

torch.manual_seed(3)
device = Device(3).__enter__()
model = nn.Linear(300, 300)
device.hold(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ema = shardow.EMA(model, 0.5, device="cpu", ring_bytes=65536, optimizer=optimizer)

def step():
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()

before = model.weight.detach().clone()
step()
{end}
"""
ENDS = {
    "exit": "",
    "a backward that raises": "model(torch.ones(3, 300)).sum().backward(); 1 / 0",
    "sys.exit in between": "sys.exit(0)",
    "an interrupt": "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
    "try:\n    while True: step()\nexcept KeyboardInterrupt: pass\n"
    "step(); updates = ema.stats()['updates']; step(); assert ema.stats()['updates'] == updates + 1",
    "a fork": "after = model.weight.detach().clone()\n"
    "averages = ema.state_dict()['averages']['weight'].numpy()\n"
    "step()\n"
    "wanted = torch.lerp(torch.lerp(before, after, 0.5), model.weight.detach(), 0.5).numpy().tobytes()\n"
    "if (child := os.fork()) == 0: os._exit(0 if averages.tobytes() == wanted else 1)\n"
    "assert os.waitpid(child, 0)[1] == 0\n"
    "step(); assert ema.stats()['updates'] == 3",
}


SOME_ENDS = ENDS if os.environ.get("SHARDOW_ALL") else ["an interrupt", "a fork"]


@pytest.mark.parametrize("name", SOME_ENDS)
def test_a_program_ends_whatever_is_under_way(name: str) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), end=ENDS[name])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    raised = name == "a backward that raises"
    assert done.returncode == int(raised), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == raised
    assert raised or not done.stderr, done.stderr
