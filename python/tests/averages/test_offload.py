"""EMA(device="cpu") of weights on a CUDA device, one that is late: the averages of weights whose averages live beside them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_device
import pytest
import torch
import trainings
from fake_device import Device, on_device
from torch import nn

if TYPE_CHECKING:
    import shardow


ATTACHED, BY_HAND = ("offloaded", 1, trainings.SMALLEST_RING), ("offloaded by hand", 2, 1 << 20)
MATRIX = [(*case, *ATTACHED) for case in trainings.SOME]
MATRIX += [(*case, *BY_HAND) for case in (trainings.SOME if os.environ.get("SHARDOW_ALL") else trainings.SOME[:2])]

MATRIX += [(*trainings.SOME[-1], "offloaded, overlap=True", 3, trainings.SMALLEST_RING)]


@pytest.mark.parametrize(("kind", "world", "dtype", "how", "seed", "ring_bytes"), MATRIX, ids=str)
def test_no_rule_dtype_or_decay_shows_how_averages_are_kept(
    kind: str, world: int, dtype: torch.dtype, how: str, seed: int, ring_bytes: int, tmp_path: Path
) -> None:
    (resident, _), *_ = fake_device.run(world, trainings.everything, kind, dtype, "resident", str(tmp_path))
    found = fake_device.run(world, trainings.everything, kind, dtype, how, str(tmp_path), seed, ring_bytes)
    trainings.same(resident, found[0][0])
    for _, stats in found:  # what crosses the link: each weight once, in its own dtype
        crossed = {name: one["offload/bytes"] for name, one in stats.items() if name not in trainings.IN_BETWEEN}
        copies = {name: chosen.get("start_step", 0) for name, chosen in trainings.options().items()}  # of weights, before any update
        assert crossed == {name: (copies[name] + stats[name]["updates"]) * stats[name]["elements"] * dtype.itemsize for name in crossed}


class Training:
    """A model on the device, and its twin on the CPU that does the same."""

    def __init__(self, device: Device, attached: bool = True, decay: Any = 0.5, **options: Any) -> None:
        import shardow

        self.device = device
        self.models = [made(), made()]
        device.hold(self.models[0])
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        how = {"ring_bytes": trainings.SMALLEST_RING, "device": "cpu", **options}
        resident = {name: value for name, value in options.items() if name != "ring_bytes"}
        self.emas = [
            shardow.EMA(model, decay, **given, optimizer=optimizer if attached else None)
            for model, optimizer, given in zip(self.models, self.optimizers, (how, resident), strict=True)
        ]

    def step(self, number: int, which: int | None = None) -> None:
        for at in (0, 1) if which is None else (which,):
            trainings.give_gradients(self.models[at], number)
            self.optimizers[at].step()

    def averages(self, which: int) -> dict[str, torch.Tensor]:
        ema = self.emas[which]
        return {f"{decay}/{name}": value for decay in ema.decays for name, value in ema.full_state_dict(decay).items()}

    def check(self) -> None:
        trainings.same(self.averages(0), self.averages(1))


def made() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 41), nn.Linear(41, 2))


@contextlib.contextmanager
def late(ema: shardow.EMA) -> Iterator[None]:
    """Nothing waits for updates, which begin some time after the next step: what hooks are there for."""
    from shardow import _core

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ema._core.swap, "finish_reading", lambda: None)
        patch.setattr(ema._core.swap, "ready_to_update", lambda: (_core.hold_updates(False), ema._core.wait(), _core.hold_updates(True)))
        yield
    _core.hold_updates(False)


@on_device
def test_an_optimizer_waits_until_its_weights_are_copied_which_would_tear_averages_else() -> None:
    for hooked in (True, False):
        with Device(4) as device:
            training = Training(device)
            with contextlib.nullcontext() if hooked else late(training.emas[0]):
                for number in range(1, 6):
                    training.step(number)
            found, wanted = training.averages(0), training.averages(1)
        torn = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert bool(torn) != hooked, (hooked, torn)


@on_device
def test_without_an_optimizer_update_orders_what_comes_next_behind_its_copies() -> None:
    for hooked in (True, False):
        with Device(4) as device:
            training = Training(device, attached=False)
            with contextlib.nullcontext() if hooked else late(training.emas[0]), torch.no_grad():
                for _ in range(5):
                    for model, ema in zip(training.models, training.emas, strict=True):
                        ema.update()
                        for p in model.parameters():
                            p.mul_(1.5)  # nobody can intercept that
            found, wanted = training.averages(0), training.averages(1)
        assert hooked == all(torch.equal(found[name], wanted[name]) for name in wanted), hooked


@on_device
def test_a_step_on_another_stream_waits_too() -> None:
    with Device(5) as device:
        training = Training(device)
        for number in range(1, 100):
            device.stream = number % 3
            training.step(number % 7)
        training.check()


@on_device
def test_two_devices_have_a_ring_and_streams_of_their_own() -> None:
    with Device(6, num_devices=2) as device:
        training = Training(device, decay=[0.5, 0.9])
        device.hold_first(training.models[0][1], 1)
        training.emas[0] = type(training.emas[0])(
            training.models[0], [0.5, 0.9], device="cpu", ring_bytes=2 * trainings.SMALLEST_RING, optimizer=training.optimizers[0]
        )
        for number in range(1, 5):
            training.step(number)
        training.check()
        weights = sum(p.nbytes for p in training.models[0].parameters())
        assert training.emas[0].stats()["offload/bytes"] == 4 * weights


READS: dict[str, Callable[[Training, int, Path], Any]] = {
    "state_dict": lambda of, at, path: dict(of.emas[at].state_dict()["averages"]),
    "save": lambda of, at, path: (of.emas[at].save(path / "a.safetensors"), (path / "a.safetensors").read_bytes())[1],
    "async_save": lambda of, at, path: (of.emas[at].async_save(path / "b.safetensors").wait(), (path / "b.safetensors").read_bytes())[1],
    "export": lambda of, at, path: (of.emas[at].export(path / "c.safetensors"), (path / "c.safetensors").read_bytes())[1],
    "swap_in": lambda of, at, path: (of.emas[at].swap_in(), weights_of(of.models[at]), of.emas[at].swap_out())[1],
    "copy_to": lambda of, at, path: copied(of.emas[at]),
    "load_state_dict": lambda of, at, path: list(of.emas[at].load_state_dict(of.emas[1 - at].state_dict())),
    "reset": lambda of, at, path: of.emas[at].reset(),
    "stats": lambda of, at, path: of.emas[at].stats()["updates"],
    "step": lambda of, at, path: of.emas[at].step,
    "distance": lambda of, at, path: of.emas[at].distance(),
    "deepcopy": lambda of, at, path: dict(copy.deepcopy((of.models[at], of.emas[at]))[1].state_dict()["averages"]),
    "repr": lambda of, at, path: repr(of.emas[at]),
}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def copied(ema: shardow.EMA) -> dict[str, torch.Tensor]:
    other = made()
    ema.copy_to(other)
    return weights_of(other)


@pytest.mark.parametrize("name", READS)
@on_device
def test_everything_that_reads_averages_reads_whole_ones(name: str, tmp_path: Path) -> None:
    with Device(7) as device:
        training = Training(device)
        answers = []
        for number in (1, 2):
            training.step(number)
            answers += [READS[name](training, at, tmp_path) for at in (0, 1)]
        for found, wanted in zip(answers[::2], answers[1::2], strict=True):
            trainings.same(found, wanted) if isinstance(found, dict) else None
            assert isinstance(found, dict) or found == wanted
        trainings.same(weights_of(training.models[0]), weights_of(training.models[1]))
        training.step(3)
        training.check()


@on_device
def test_memory_that_is_read_stays() -> None:
    """Of weights that move while they are copied, and of a model and an EMA that are gone before."""
    with Device(8) as device:
        training = Training(device)
        for number in range(1, 5):
            training.step(number)
            for p in training.models[0].parameters():
                p.data = p.data.clone()
            gc.collect()
            _ = [torch.full((41, 40), float("nan")) for _ in range(8)]  # into memory that was given back
        training.check()
        training.step(5)
        del training
        gc.collect()
        assert device.fake.allocated() == 0


@pytest.mark.parametrize("attached", [True, False])
@on_device
def test_buffers_are_read_before_the_next_forward_writes_them(attached: bool) -> None:
    import shardow

    with Device(9) as device:
        models = [nn.Sequential(nn.Linear(40, 41), nn.BatchNorm1d(41)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        device.hold(models[0])
        emas = []
        for model, options in zip(models, ({"device": "cpu"}, {}), strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ema = shardow.EMA(model, 0.5, buffers="average", optimizer=optimizer if attached else None, **options)  # type: ignore[arg-type]
            for number in range(4):
                model(torch.arange(80.0).view(2, 40).sin() * number).square().mean().backward()
                optimizer.step()
                if not attached:
                    ema.update()
            emas.append(ema)
        trainings.same(*(ema.full_state_dict() for ema in emas))


@on_device
def test_strided_weights_and_masters() -> None:
    import shardow

    with Device(10) as device:
        found = []
        for options in ({"device": "cpu"}, {}):
            torch.manual_seed(1)
            model = nn.Conv2d(8, 6, 3).to(memory_format=torch.channels_last).to(torch.bfloat16)
            master = model.bias.detach().float().mul_(1.001)
            if options:
                device.hold(model)
                device.hold(master)
            ema = shardow.EMA(model, 0.5, source={"bias": master}, **options)
            for number in range(4):
                with torch.no_grad():
                    model.weight.add_(0.01 * number)
                    master.add_(0.0001)
                    model.bias.copy_(master)
                ema.update()
            with ema.swapped():
                inside = weights_of(model)
            found.append({**ema.full_state_dict(), **{f"swapped {name}": value for name, value in inside.items()}})
            found[-1] |= {f"back {name}": value for name, value in weights_of(model).items()}
        trainings.same(*found)


@on_device
def test_a_swap_is_exact_both_ways_for_every_dtype_and_takes_no_second_copy() -> None:
    import shardow

    for dtype in trainings.DTYPES:
        with Device(11) as device:
            models = [made().to(dtype) for _ in range(2)]
            device.hold(models[0])
            emas = [shardow.EMA(model, 0.5, **given) for model, given in zip(models, ({"device": "cpu"}, {}), strict=True)]  # type: ignore[arg-type]
            for model, ema in zip(models, emas, strict=True):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.3)
                ema.update()
            before, ring = weights_of(models[0]), device.fake.allocated()
            with emas[0].swapped(), emas[1].swapped():
                trainings.same(weights_of(models[0]), weights_of(models[1]))
                assert device.fake.allocated() == ring
            trainings.same(weights_of(models[0]), before)
            trainings.same(*(ema.full_state_dict() for ema in emas))


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
            "the update of step 2 was not made, since weights did not reach the host; the averages are those of step 1, and the next update"
        )
        with pytest.raises(Exception, match=f"{text} makes up for it: CUDA: ") as told:
            training.emas[0].state_dict()
        assert isinstance(told.value, type(training.emas[0]).__mro__[0]) or told.type.__name__.endswith("Error")
        trainings.same(training.averages(0), before)
        training.step(3, which=0)
        assert training.emas[0].stats()["updates"] == 2
        assert training.emas[0].step == 3


@on_device
def test_an_update_that_stops_halfway_is_refused_to_readers_until_it_is_whole() -> None:
    with Device(13) as device:
        training = Training(device)
        training.step(1)
        training.emas[0].stats()
        device.fake.fail_copy(4, -1)
        training.step(2)
        weights = weights_of(training.models[0])
        for call in (training.emas[0].state_dict, training.emas[0].stats, lambda: training.step(3, which=0), training.emas[0].swap_in):
            with pytest.raises(Exception, match=r"the update of step 2 stopped after \d of \d blocks: the others did not reach the host"):
                call()
            trainings.same(weights_of(training.models[0]), weights)  # no step, no swap
        device.fake.fail_copy(0, 0)
        training.check()
        training.step(3)
        training.check()


@on_device
def test_averages_that_are_torn_for_good_begin_again_with_reset() -> None:
    import shardow

    with Device(14) as device:
        training = Training(device)
        training.step(1)
        core = training.emas[0]._core
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
        with pytest.raises(ValueError, match=r"step 1: 1 elements of the parameters are NaN or Inf, the first in '0.weight'"):
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
        r"device='cuda': '0.weight' is on cpu, and averages live with their weights \(leave device= out\) or on the host \(device='cpu'\)"
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
        device.fake.fail_allocation()
        ema = shardow.EMA(model, device="cpu")  # once more, without what torch's allocator keeps
        ema.update()
        ema.stats()


HOOKED = tuple(f"shardow/{name}.py" for name in ("averages/attach", "averages/core", "averages/swap", "model/swap_guard"))


def stopped(before: int, fn: Callable[[], None]) -> bool:
    """Ctrl-C before a line of HOOKED, counted from 0. False where fn() was over by then."""
    left = before

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
        for number in range(10_000):
            trainings.give_gradients(training.models[0], 2 + number % 5)
            training.optimizers[0].step()
        assert device.fake.allocated() == pinned
        after = trainings.process()
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 2 << 20, "resident memory"


PROGRAM = """
import faulthandler, os, signal, sys, threading, time
faulthandler.dump_traceback_later(60, exit=True)  # a program that hangs tells where
sys.path.insert(0, {tests!r})
import fake_device
fake_device.install()
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
    "an interrupt": "caught = threading.Event()\n"
    "def press():  # again, like anybody whose Ctrl-C fell where Python drops it: into a finalizer\n"
    "    while not caught.wait(0.5): os.kill(os.getpid(), signal.SIGINT)\n"
    "threading.Thread(target=press, daemon=True).start()\n"
    "try:\n    while True: step()\nexcept KeyboardInterrupt: caught.set()\n"
    "step(); updates = ema.stats()['updates']; step(); assert ema.stats()['updates'] == updates + 1",
    "a fork": "after = model.weight.detach().clone()\n"
    "averages = ema.state_dict()['averages']['weight'].numpy()\n"
    "step()\n"
    "wanted = torch.lerp(torch.lerp(before, after, 0.5), model.weight.detach(), 0.5).numpy().tobytes()\n"
    "if (child := os.fork()) == 0: os._exit(0 if averages.tobytes() == wanted else 1)\n"
    "assert os.waitpid(child, 0)[1] == 0\n"
    "step(); assert ema.stats()['updates'] == 3",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_whatever_is_under_way(name: str) -> None:
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), end=ENDS[name])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120)
    raised = name == "a backward that raises"
    assert done.returncode == int(raised), done.stderr
    assert ("ZeroDivisionError" in done.stderr) == raised
    assert raised or not done.stderr, done.stderr
