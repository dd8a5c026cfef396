"""overlap=True: averages in the background are those of updates that are waited for, and nobody changes weights under
them.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import trainings
from core_modules import HOOKS
from torch import nn

import shardow
from shardow.compat.causal_forcing import EMA_FSDP


def make(
    overlap: bool = True, decay: Any = 0.5, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, shardow.EMA]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, shardow.EMA(model, decay, overlap=overlap, optimizer=optimizer, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.1 * step - 0.05 * i)
    optimizer.step()


@contextlib.contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Updates in the background stand still until the function is called."""
    from shardow._core import hooks  # type: ignore[attr-defined]

    hooks.hold_updates(True)
    try:
        yield lambda: hooks.hold_updates(False)
    finally:
        hooks.hold_updates(False)


def released_soon(go_on: Callable[[], None]) -> threading.Event:
    """Set when they go on."""
    released = threading.Event()
    threading.Timer(0.2, lambda: (released.set(), go_on())).start()
    return released


@pytest.mark.parametrize(("kind", "world", "dtype"), trainings.OVERLAPPED, ids=str)
def test_no_rule_dtype_or_decay_shows_how_averages_are_kept(
    kind: str, world: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    (waited, _), *_ = ranks.run(world, trainings.everything, kind, dtype, "resident", str(tmp_path))
    (overlapped, _), *_ = ranks.run(world, trainings.everything, kind, dtype, "overlapped", str(tmp_path))
    trainings.same(waited, overlapped)


@HOOKS.alone
@pytest.mark.parametrize("part", [False, True], ids=["the whole", "a part"])
def test_a_teachers_forward_waits_for_an_update(part: bool) -> None:
    model, optimizer, _ = make()
    teacher = copy.deepcopy(model).requires_grad_(False)
    ema = shardow.EMA(model, 0.5, averages=teacher, overlap=True)
    ema.attach(optimizer)
    before = teacher[0].weight.clone()
    with held() as go_on:
        train(model, optimizer, 1)
        assert torch.equal(teacher[0].weight, before)
        released = released_soon(go_on)
        (teacher[0] if part else teacher)(torch.ones(1, 4))
        assert released.is_set()
    assert torch.equal(teacher[0].weight, torch.lerp(before, model[0].weight, 0.5))


@HOOKS.alone
def test_an_update_goes_on_while_python_does_and_the_next_step_waits() -> None:
    with held() as go_on:
        model, optimizer, ema = make()
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 1)
        after = [p.detach().clone() for p in model.parameters()]
        released = released_soon(go_on)
        train(model, optimizer, 2)  # waits for the first update
        assert released.is_set()
        go_on()
        ema.stats()
        expected = [
            torch.lerp(torch.lerp(a, b, 0.5), p.detach(), 0.5)
            for a, b, p in zip(before, after, model.parameters(), strict=True)
        ]
        assert all(
            torch.equal(one, other) for one, other in zip(ema.state_dict()["averages"].values(), expected, strict=True)
        )


READS: dict[str, Callable[[nn.Module, shardow.EMA, Path], Any]] = {
    "state_dict": lambda model, ema, path: ema.state_dict(),
    "full_state_dict": lambda model, ema, path: ema.full_state_dict(),
    "save": lambda model, ema, path: ema.save(path / "ema.safetensors"),
    "async_save": lambda model, ema, path: ema.async_save(path / "ema.safetensors").wait(),
    "export": lambda model, ema, path: ema.export(path / "export"),
    "swap_in": lambda model, ema, path: (ema.swap_in(), ema.swap_out()),
    "copy_to": lambda model, ema, path: ema.copy_to(copy.deepcopy(model)),
    "load_state_dict": lambda model, ema, path: ema.load_state_dict(make()[2].state_dict()),
    "reset": lambda model, ema, path: ema.reset(),
    "stats": lambda model, ema, path: ema.stats(),
    "distance": lambda model, ema, path: ema.distance(),
    "deepcopy": lambda model, ema, path: copy.deepcopy((model, ema)),
    "repr": lambda model, ema, path: repr(ema),
}


@pytest.mark.parametrize("name", READS)
@HOOKS.alone
def test_everything_that_reads_averages_waits(name: str, tmp_path: Path) -> None:
    with held() as go_on:
        model, optimizer, ema = make()
        train(model, optimizer, 1)
        released = released_soon(go_on)
        READS[name](model, ema, tmp_path)
        assert released.is_set()


@pytest.mark.parametrize("same", ["parameters", "memory"])
@HOOKS.alone
def test_any_optimizer_of_the_same_weights_waits(same: str) -> None:
    with held() as go_on:
        model, optimizer, ema = make()
        weights = (
            list(model.parameters()) if same == "parameters" else [nn.Parameter(p.detach()) for p in model.parameters()]
        )
        other = torch.optim.SGD(weights, lr=0.1)
        train(model, optimizer, 1)
        after = [p.detach().clone() for p in model.parameters()]
        released = released_soon(go_on)
        for p in weights:
            p.grad = torch.ones_like(p)
        other.step()
        assert released.is_set()
        assert all(
            torch.equal(a, b) for a, b in zip(ema.state_dict()["averages"].values(), halfway(after), strict=True)
        )


def swap_in_of_another(model: nn.Module, path: Path) -> None:
    with shardow.EMA(model, 0.9).swapped():
        pass


WRITERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "another EMA's swapped()": swap_in_of_another,
    "load()": lambda model, path: shardow.load(model, path),
    "materialize()": lambda model, path: shardow.materialize(model, path),
    "copy_to()": lambda model, path: shardow.EMA(make()[0], 0.9).copy_to(model),
    "copy_to() of EMA_FSDP": lambda model, path: EMA_FSDP(make()[0]).copy_to(model),
}


@pytest.mark.parametrize("name", WRITERS)
@HOOKS.alone
def test_what_else_writes_weights_waits(name: str, tmp_path: Path) -> None:
    with held() as go_on:
        path = tmp_path / "other.safetensors"
        shardow.save(make()[0], path)
        model, optimizer, ema = make()
        train(model, optimizer, 1)
        after = [p.detach().clone() for p in model.parameters()]
        released = released_soon(go_on)
        WRITERS[name](model, path)
        assert released.is_set()
        assert all(
            torch.equal(a, b) for a, b in zip(ema.state_dict()["averages"].values(), halfway(after), strict=True)
        )


def test_what_the_next_forward_writes_is_not_averaged_in_the_background() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(
        ValueError,
        match=r"keep the next forward from writing '1.running_mean' while it is averaged; take buffers='copy'",
    ):
        shardow.EMA(model, overlap=True, buffers="average")


def halfway(after: list[torch.Tensor]) -> list[torch.Tensor]:
    before = [p.detach() for p in make()[0].parameters()]
    return [torch.lerp(a, b, 0.5) for a, b in zip(before, after, strict=True)]


@HOOKS.alone
def test_an_update_that_a_skipped_step_delayed_is_waited_for() -> None:
    """It comes before the next round, in the very step that changes weights next."""
    with held() as go_on:
        model, optimizer, ema = make()
        other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        ema.attach(other)
        train(model, optimizer, 1)  # the other one's step is skipped
        after = [p.detach().clone() for p in model.parameters()]
        released = released_soon(go_on)
        train(model, optimizer, 2)
        assert released.is_set()
        assert all(
            torch.equal(a, b) for a, b in zip(ema.state_dict()["averages"].values(), halfway(after), strict=True)
        )


@pytest.mark.parametrize("gone", ["model and EMA", "memory"])
@HOOKS.alone
def test_memory_that_is_read_stays(gone: str) -> None:
    """Of a model that is gone before its update has ended, and of weights that moved."""
    with held() as go_on:
        model, optimizer, ema = make()
        train(model, optimizer, 1)
        after = [p.detach().clone() for p in model.parameters()]
        released = released_soon(go_on)
        if gone == "memory":
            for p in model.parameters():
                p.data = torch.full_like(p, 7.0)
            gc.collect()
            averages = ema.state_dict()["averages"].values()
            assert all(torch.equal(a, b) for a, b in zip(averages, halfway(after), strict=True))
            train(model, optimizer, 2)  # follows
            assert ema.stats()["updates"] == 2
        else:
            del model, optimizer, ema
            gc.collect()
            assert released.is_set()


def test_update_without_attach_is_refused() -> None:
    ema = shardow.EMA(nn.Linear(2, 2), overlap=True)
    with pytest.raises(ValueError, match=r"update\(\) with overlap=True: .*attach\(optimizer\), whose"):
        ema.update()
    assert ema.step == 0


def test_what_is_not_finite_is_told_at_the_next_call() -> None:
    model, optimizer, ema = make(nonfinite="raise")
    next(model.parameters()).data[0, 0] = float("nan")
    train(model, optimizer, 1)
    with pytest.raises(
        ValueError, match=r"step 1: 1 elements of the parameters are NaN or Inf, the first in '0.weight'"
    ):
        train(model, optimizer, 2)
    assert ema.stats()["updates"] == 1

    model, optimizer, ema = make()
    next(model.parameters()).data[0, 0] = float("nan")
    train(model, optimizer, 1)
    with pytest.warns(RuntimeWarning, match="1 weights on this rank are NaN or Inf"):
        train(model, optimizer, 2)
    assert ema.stats()["held_nonfinite"] == 2


def test_stats_tell_what_was_hidden_and_what_was_waited_for() -> None:
    model, optimizer, ema = make()
    for step in range(5):
        train(model, optimizer, step)
    stats = ema.stats()
    assert stats["offload/hidden_seconds"] >= 0
    assert stats["offload/hidden_seconds"] + stats["offload/waited_seconds"] > 0
    assert not any(name.startswith("offload/") for name in make(overlap=False)[2].stats())


def test_threads_descriptors_and_memory_stay_as_they_are() -> None:
    model, optimizer, ema = make()
    train(model, optimizer, 1)
    ema.stats()
    gc.collect()  # what other tests left has threads
    before = trainings.process()
    for step in range(10_000 if os.environ.get("SHARDOW_ALL") else 2_000):
        train(model, optimizer, step)
    after = trainings.process()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 2 << 20


def test_a_fork_finds_whole_averages() -> None:
    """As a DataLoader's workers are made. (src/average/overlap_test.cc holds up what the fork waits for; here it would
    wait for itself.)
    """
    torch.manual_seed(3)
    model = nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = shardow.EMA(model, 0.5, overlap=True, optimizer=optimizer)
    before = model.weight.detach().clone()
    averages = ema.state_dict()["averages"]["weight"].numpy()
    train(model, optimizer, 1)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        child = os.fork()
    if child == 0:  # where torch's threads are gone
        os.write(writing, hashlib.sha256(averages.tobytes()).digest())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    expected = torch.lerp(before, model.weight.detach(), 0.5)
    assert os.read(reading, 64) == hashlib.sha256(expected.numpy().tobytes()).digest()
