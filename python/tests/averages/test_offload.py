"""EMA(device="cpu") of weights on a CUDA device, one that is late: the averages of weights whose averages live beside
them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_device
import pytest
import torch
import trainings
from core_modules import FAKE_AND_HOOKS
from fake_device import Device, on_device
from offloading import Training, hold_updates_a_while, late, made
from small import clone
from torch import nn

if TYPE_CHECKING:
    import shardow


ATTACHED, BY_HAND = ("offloaded", 1, trainings.SMALLEST_RING), ("offloaded by hand", 2, 1 << 20)
MATRIX = [(*case, *ATTACHED) for case in trainings.OFFLOADED]
MATRIX += [(*case, *BY_HAND) for case in (trainings.SOME if trainings.ALL else trainings.SOME[:1])]
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
        # Counts copies of weights before any update.
        copies = {name: chosen.get("start_step", 0) for name, chosen in trainings.options().items()}
        assert crossed == {
            name: (copies[name] + stats[name]["updates"]) * stats[name]["elements"] * dtype.itemsize for name in crossed
        }


@FAKE_AND_HOOKS.alone
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


@FAKE_AND_HOOKS.alone
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
            training.models[0],
            [0.5, 0.9],
            device="cpu",
            ring_bytes=2 * trainings.SMALLEST_RING,
            optimizer=training.optimizers[0],
        )
        for number in range(1, 5):
            training.step(number)
        training.check()
        weights = sum(p.nbytes for p in training.models[0].parameters())
        assert training.emas[0].stats()["offload/bytes"] == 4 * weights


READS: dict[str, Callable[[Training, int, Path], Any]] = {
    "state_dict": lambda of, at, path: dict(of.emas[at].state_dict()["averages"]),
    "save": lambda of, at, path: (of.emas[at].save(path / "a.safetensors"), (path / "a.safetensors").read_bytes())[1],
    "async_save": lambda of, at, path: (
        of.emas[at].async_save(path / "b.safetensors").wait(),
        (path / "b.safetensors").read_bytes(),
    )[1],
    "export": lambda of, at, path: (of.emas[at].export(path / "c.safetensors"), (path / "c.safetensors").read_bytes())[
        1
    ],
    "swap_in": lambda of, at, path: (of.emas[at].swap_in(), clone(of.models[at]), of.emas[at].swap_out())[1],
    "copy_to": lambda of, at, path: copied(of.emas[at]),
    "load_state_dict": lambda of, at, path: list(of.emas[at].load_state_dict(of.emas[1 - at].state_dict())),
    "reset": lambda of, at, path: of.emas[at].reset(),
    "stats": lambda of, at, path: of.emas[at].stats()["updates"],
    "step": lambda of, at, path: of.emas[at].step,
    "distance": lambda of, at, path: of.emas[at].distance(),
    "deepcopy": lambda of, at, path: dict(copy.deepcopy((of.models[at], of.emas[at]))[1].state_dict()["averages"]),
    "repr": lambda of, at, path: repr(of.emas[at]),
}


def copied(ema: shardow.EMA) -> dict[str, torch.Tensor]:
    other = made()
    ema.copy_to(other)
    return clone(other)


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
        trainings.same(clone(training.models[0]), clone(training.models[1]))
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
@FAKE_AND_HOOKS.alone
def test_buffers_are_read_before_the_next_forward_writes_them(attached: bool) -> None:
    import shardow

    with Device(2) as device:
        models = [nn.Sequential(nn.Linear(40, 41), nn.BatchNorm1d(41)) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        device.hold(models[0])
        emas, timer = [], None
        for model, options in zip(models, ({"device": "cpu"}, {}), strict=True):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ema = shardow.EMA(model, 0.5, buffers="average", optimizer=optimizer if attached else None, **options)  # type: ignore[arg-type]
            for number in range(4):
                model(torch.arange(80.0).view(2, 40).sin() * number).square().mean().backward()
                if timer is not None:
                    timer.join()
                timer = hold_updates_a_while()
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
                inside = clone(model)
            found.append({**ema.full_state_dict(), **{f"swapped {name}": value for name, value in inside.items()}})
            found[-1] |= {f"back {name}": value for name, value in clone(model).items()}
        trainings.same(*found)


@on_device
def test_a_swap_is_exact_both_ways_for_every_dtype_and_takes_no_second_copy() -> None:
    import shardow

    for dtype in trainings.DTYPES:
        with Device(11) as device:
            models = [made().to(dtype) for _ in range(2)]
            device.hold(models[0])
            emas = [
                shardow.EMA(model, 0.5, **given) for model, given in zip(models, ({"device": "cpu"}, {}), strict=True)
            ]  # type: ignore[arg-type]
            for model, ema in zip(models, emas, strict=True):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.3)
                ema.update()
            before, ring = clone(models[0]), device.fake.allocated()
            with emas[0].swapped(), emas[1].swapped():
                trainings.same(clone(models[0]), clone(models[1]))
                assert device.fake.allocated() == ring
            trainings.same(clone(models[0]), before)
            trainings.same(*(ema.full_state_dict() for ema in emas))


@on_device
@pytest.mark.filterwarnings("ignore:averages in")
def test_16_bits_to_nearest_on_the_host_are_those_of_torchs_operation() -> None:
    """PyTorch makes such updates, on the host, of weights that are copied there."""
    import shardow

    with Device() as device:
        model = nn.Linear(5, 3).bfloat16()
        device.hold(model)
        ema = shardow.EMA(model, 0.9, rule="mul_add", dtype=torch.bfloat16, stochastic=False, device="cpu")
        expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        for _ in range(3):
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    expected[name].mul_(0.9).add_(weight.add_(0.25), alpha=1 - 0.9)
            ema.update()
        averages, stats = ema.full_state_dict(), ema.stats()
    assert stats["by_torch"] == 2
    assert "offload/bytes" not in stats
    assert all(torch.equal(averages[name], expected[name]) for name in expected)
