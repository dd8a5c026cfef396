"""A swap is a transaction: it is interrupted before every line of it, in one process, and afterwards the weights are
back or can be brought back, and nothing hands out the one for the other."""

from __future__ import annotations

import gc
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from own_averages import averages_of
from small import equal
from torch import nn

import shardow
from shardow.averaging.swap import Swap
from shardow.base import signals
from shardow.compat.causal_forcing import fsdp_state_dict
from shardow.sharding import swap_guard

Weights = dict[str, torch.Tensor]
PARTS = (
    "averaging/swap.py",
    "sharding/swap_guard.py",
    "base/signals.py",
)


@pytest.fixture(autouse=True)
def signals_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An interruption before a line of Held leaves it in force, and later tests of this process with held signals."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    monkeypatch.setattr(signals, "_holding", [])
    yield
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, handler)


def build(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def trained(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Sequential, shardow.EMA]:
    model = build(dtype)
    ema = shardow.EMA(model, 0.5, **options)
    with torch.no_grad():
        for at, p in enumerate(model.parameters()):
            p.add_(torch.linspace(-1, 2 + at, p.numel()).view(p.shape).to(p.dtype))
    ema.update()
    return model, ema


def bits(tensors: Any) -> Weights:
    return {name: tensor.detach().clone().view(torch.uint8) for name, tensor in dict(tensors).items()}


@contextmanager
def interrupted(at: int) -> Iterator[list[int]]:
    """KeyboardInterrupt before the ``at``-th line of the transaction's own modules. Yields the number of lines that
    were run.
    """
    lines = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(PARTS) or "shardow" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == at + 1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def run(ema: shardow.EMA, inside: list[Weights], model: nn.Module) -> None:
    with ema.swapped():
        inside.append(bits(model.named_parameters()))


def by_callbacks(ema: shardow.EMA, inside: list[Weights], model: nn.Module) -> None:
    ema.swap_in()
    inside.append(bits(model.named_parameters()))
    ema.swap_out()


@pytest.mark.parametrize("call", [run, by_callbacks])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_interrupted_before_any_line_it_is_undone_or_says_so_and_can_be_undone(
    call: Callable[..., None], dtype: torch.dtype
) -> None:
    model, ema = trained(dtype)
    weights, averages = bits(model.named_parameters()), bits(ema.full_state_dict(complete=False))
    at, left = 0, 0
    while True:
        inside: list[Weights] = []
        with interrupted(at):
            try:
                call(ema, inside, model)
            except KeyboardInterrupt:
                finished = False
            else:
                finished = True
        if averages_of(ema).engine.swapped:
            left += 1
            for refused in (ema.update, ema.full_state_dict, ema.state_dict, ema.distance, ema.swap_in):
                with pytest.raises(ValueError, match=r"restore\(\)"):
                    refused()
        ema.restore()
        assert equal(bits(model.named_parameters()), weights), at
        assert equal(bits(ema.full_state_dict(complete=False)), averages), at
        assert not inside or not equal(inside[0], weights)
        if finished:
            break
        at += 1
    assert at > 60
    assert left > 5
    ema.update()


def test_interrupted_twice_in_a_row_it_can_be_undone() -> None:
    model, ema = trained()
    weights, averages = bits(model.named_parameters()), bits(ema.full_state_dict(complete=False))
    for first in range(0, 120, 3):
        for second in range(0, 40, 5):
            with interrupted(first), suppress(KeyboardInterrupt):
                run(ema, [], model)
            with interrupted(second), suppress(KeyboardInterrupt):
                ema.restore()
            ema.restore()
            assert equal(bits(model.named_parameters()), weights)
            assert equal(bits(ema.full_state_dict(complete=False)), averages)


def test_out_of_memory_on_the_way_in_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ema = trained()
    weights = bits(model.named_parameters())

    def fail() -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(averages_of(ema).view, "written", fail)
    with pytest.raises(MemoryError), ema.swapped():
        raise AssertionError("inside")
    monkeypatch.undo()
    ema.restore()
    assert equal(bits(model.named_parameters()), weights)


def test_the_blocks_exception_is_raised_as_it_is() -> None:
    model, ema = trained()
    weights = bits(model.named_parameters())
    error = LookupError("mine")
    with pytest.raises(LookupError) as caught, ema.swapped():
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert equal(bits(model.named_parameters()), weights)


def test_an_optimizers_step_inside_is_refused_before_it_changes_anything() -> None:
    model, ema = trained()
    other = build(seed=5)
    optimizer, unrelated = torch.optim.Adam(model.parameters()), torch.optim.SGD(other.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    weights, averages = bits(model.named_parameters()), bits(ema.full_state_dict(complete=False))
    with ema.swapped():
        with pytest.raises(ValueError, match=r"optimizer\.step\(\) inside swapped"):
            optimizer.step()
        unrelated.step()
    assert equal(bits(model.named_parameters()), weights)
    assert equal(bits(ema.full_state_dict(complete=False)), averages)
    optimizer.step()


@pytest.mark.parametrize("call", ["update", "distance", "swap_in"])
def test_another_ema_of_the_model_takes_no_averages_for_weights(call: str) -> None:
    model, ema = trained()
    other = shardow.EMA(model, 0.9)
    weights, averages = bits(model.named_parameters()), bits(other.full_state_dict(complete=False))
    with ema.swapped():
        with pytest.raises(ValueError, match="an EMA has its averages in this model"):
            getattr(other, call)()
        with pytest.raises(ValueError, match="an EMA has"):
            shardow.EMA(model, 0.9)
        apart = shardow.EMA(build(seed=7), 0.9)
        apart.update()
    assert equal(bits(model.named_parameters()), weights)
    assert equal(bits(other.full_state_dict(complete=False)), averages)
    getattr(other, call)()


def test_a_model_that_holds_its_emas_averages_is_not_copied_to() -> None:
    (_, ema), (other, holding) = trained(), trained()
    weights, averages = bits(other.named_parameters()), bits(holding.full_state_dict(complete=False))
    with holding.swapped(), pytest.raises(ValueError, match="an EMA has its averages in this model"):
        ema.copy_to(other)
    assert equal(bits(other.named_parameters()), weights)
    assert equal(bits(holding.full_state_dict(complete=False)), averages)
    ema.copy_to(other)


def test_averages_stay_known_as_such_when_their_ema_is_dropped() -> None:
    model, ema = trained()
    averages = bits(ema.full_state_dict(complete=False))
    ema.swap_in()
    del ema
    gc.collect()
    assert equal(bits(model.named_parameters()), averages)
    for refused in (lambda: shardow.full_state_dict(model), lambda: shardow.EMA(model)):
        with pytest.raises(ValueError, match="an EMA has its averages in this model"):
            refused()
    dropped = next(one for one in swap_guard._entered if one.parameters()[0] is model[0].weight)
    dropped.restore()
    assert dropped not in swap_guard._entered
    shardow.EMA(model)


@pytest.mark.parametrize("fill", ["load", "materialize"])
def test_a_model_that_holds_averages_is_not_filled(fill: str, tmp_path: Path) -> None:
    model, ema = trained()
    shardow.save(build(seed=9), tmp_path / "other.safetensors")
    weights, averages = bits(model.named_parameters()), bits(ema.full_state_dict(complete=False))
    with ema.swapped(), pytest.raises(ValueError, match="an EMA has its averages in this model"):
        getattr(shardow, fill)(model, tmp_path / "other.safetensors")
    assert equal(bits(model.named_parameters()), weights)
    assert equal(bits(ema.full_state_dict(complete=False)), averages)


@pytest.mark.parametrize("call", ["save", "async_save", "full_state_dict"])
def test_averages_in_the_model_are_not_handed_out_as_its_weights(call: str, tmp_path: Path) -> None:
    model, ema = trained()
    before, path = ema.state_dict()["averages"], tmp_path / "a.safetensors"
    give = getattr(shardow, call)
    with ema.swapped():
        states: list[Any] = [model] if call == "full_state_dict" else [model, model.state_dict(), before]
        for state in states:
            with pytest.raises(ValueError, match=r"an EMA has its averages.*leave its swapped\(\).*export\(\)"):
                give(state) if call == "full_state_dict" else give(state, path)
        if call == "full_state_dict":
            with pytest.raises(ValueError, match="an EMA has its averages in this model"):
                fsdp_state_dict(model)  # of other libraries' surfaces
        apart = shardow.full_state_dict(build(seed=7))
        assert apart.keys() == dict(model.named_parameters()).keys()
        if call == "save":
            with pytest.raises(ValueError, match="an EMA has its averages in this model"):
                shardow.load(model.state_dict(), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
    found = give(model) if call == "full_state_dict" else give(model, path)
    if call == "async_save":
        found.wait()
    now = found if call == "full_state_dict" else shardow.open(path)
    assert all(torch.equal(now[name], p) for name, p in model.named_parameters())


def write(model: nn.Sequential) -> None:
    model[2].load_state_dict({"weight": torch.ones(3, 7), "bias": torch.ones(3)})


def compute(model: nn.Sequential) -> None:
    model(torch.ones(2, 6)).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("body", [write, compute])
def test_what_is_written_inside_is_said_and_is_not_in_the_weights(body: Callable[[nn.Sequential], None]) -> None:
    model, ema = trained()
    weights = bits(model.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ema.swapped():
            body(model)
    said = [str(one.message) for one in caught if "were written inside swapped()" in str(one.message)]
    assert [("'2.weight'" in text, "1 more" in text) for text in said] == ([(True, True)] if body is write else [])
    assert equal(bits(model.named_parameters()), weights)


def test_swap_out_without_swap_in_says_so() -> None:
    _, ema = trained()
    with pytest.raises(ValueError, match="nothing is swapped in"):
        ema.swap_out()
    ema.restore()


def test_callbacks_and_blocks_are_one_transaction() -> None:
    model, ema = trained()
    weights = bits(model.named_parameters())
    ema.swap_in()
    with pytest.raises(ValueError, match="inside swapped"), ema.swapped():
        pass
    ema.swap_out()
    assert equal(bits(model.named_parameters()), weights)
    with ema.swapped():
        ema.swap_out()
    assert equal(bits(model.named_parameters()), weights)


def test_a_swap_that_fails_on_its_way_in_tells_of_no_writes_from_before_it(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    model, ema = trained()
    with ema.swapped():
        pass
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    weights = bits(model.named_parameters())
    scatter = Swap.scatter

    def fails(self: Swap) -> None:
        monkeypatch.setattr(Swap, "scatter", scatter)
        raise MemoryError

    monkeypatch.setattr(Swap, "scatter", fails)
    with pytest.raises(MemoryError), ema.swapped():
        pass
    assert equal(bits(model.named_parameters()), weights)
    assert not recwarn.list
