"""shardow.EMA on one process: what it computes, keeps, refuses."""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import DECAY, clone, equal, make_model, train
from torch import nn

import shardow


def test_every_verb_is_defined_in_ema_py_in_four_lines_at_most() -> None:
    assert shardow.EMA.__bases__ == (object,)
    assert {name for name in dir(shardow.EMA) if not name.startswith("_")} <= vars(shardow.EMA).keys()
    home = Path(shardow.__file__).with_name("ema.py")
    for name, member in vars(shardow.EMA).items():
        verb: Any = inspect.unwrap(member.fget if isinstance(member, property) else member)  # type: ignore[arg-type]
        if name == "__init__" or not inspect.isfunction(verb):
            continue
        assert inspect.getsourcefile(verb) == str(home), name
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(verb))).body
        assert isinstance(function, ast.FunctionDef)
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = body[-1].end_lineno - body[0].lineno + 1  # type: ignore[operator]
        assert lines <= 4, name


def test_attach_updates_after_every_step_until_removed() -> None:
    model, by_hand = make_model(), make_model()
    ema, reference = shardow.EMA(model, DECAY), shardow.EMA(by_hand, DECAY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = ema.attach(optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(ValueError, match="twice"):
        ema.update()
    handle.remove()
    handle.remove()
    optimizer.step()
    assert ema.stats()["step"] == 1
    ema.update()
    with torch.no_grad():
        for _ in range(1):
            for p in by_hand.parameters():
                p.sub_(0.1)
            reference.update()
            for p in by_hand.parameters():
                p.sub_(0.1)
            reference.update()
    assert equal(ema.full_state_dict(complete=False), reference.full_state_dict(complete=False))


class TestSwapped:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_restores_weights_and_averages_bit_for_bit(self, dtype: torch.dtype) -> None:
        model = make_model(dtype=dtype if dtype != torch.float16 else torch.float32).to(dtype)
        ema = shardow.EMA(model, DECAY)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update()
        weights, averages = clone(model), ema.full_state_dict(complete=False)
        with ema.swapped():
            inside = clone(model)
        assert equal(clone(model), weights)
        assert equal(ema.full_state_dict(complete=False), averages)
        assert all(
            (inside[n].double() - averages[n].double()).abs().max() <= averages[n].abs().max() * torch.finfo(dtype).eps
            for n in inside
        )

    def test_also_when_the_body_raises(self) -> None:
        model = make_model()
        ema = shardow.EMA(model, DECAY)
        train(model, 3, ema.update)
        weights = clone(model)
        with pytest.raises(ZeroDivisionError), ema.swapped():
            raise ZeroDivisionError
        assert equal(clone(model), weights)
        train(model, 1, ema.update)

    def test_chooses_among_several(self) -> None:
        model = make_model()
        ema = shardow.EMA(model, [0.5, 0.9])
        train(model, 3, ema.update)
        for decay in (0.5, "0.9"):
            with ema.swapped(decay=decay):
                inside = clone(model)
            assert equal(inside, ema.full_state_dict(decay=decay, complete=False))
        with pytest.raises(ValueError, match=r"0\.5, 0\.9"), ema.swapped():
            pass

    def test_moves_version_counters(self) -> None:
        model = nn.Linear(4, 4)
        ema = shardow.EMA(model, DECAY)
        loss = model(model(torch.ones(1, 4))).sum()
        with ema.swapped():
            pass
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize(
        "call", ["update", "state_dict", "full_state_dict", "distance", "save", "swapped", "copy_to"]
    )
    def test_refuses_what_would_read_or_write_the_averages(self, call: str, tmp_path: Path) -> None:
        model = make_model()
        ema = shardow.EMA(model, DECAY)
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: ema.save(tmp_path / "x.safetensors"),
            "swapped": lambda: ema.swapped().__enter__(),
            "copy_to": lambda: ema.copy_to(copy.deepcopy(model)),
        }
        with ema.swapped(), pytest.raises(ValueError, match="leave the"):
            calls.get(call, getattr(ema, call))()
        ema.update()


class TestState:
    @pytest.mark.parametrize("decay", [0.9, [0.9, 0.99999]])
    def test_a_resumed_run_is_bit_identical(self, decay: Any) -> None:
        model = make_model()
        straight = shardow.EMA(model, decay, update_every=2)
        half = shardow.EMA(model, decay, update_every=2)
        train(model, 5, lambda: (straight.update(), half.update()))
        resumed = shardow.EMA(make_model(3), decay, update_every=2)
        resumed.load_state_dict(copy.deepcopy(half.state_dict()))
        assert resumed.stats()["step"] == 5
        other = shardow.EMA(model, decay, update_every=2)
        other.load_state_dict(half.state_dict())
        train(model, 5, lambda: (straight.update(), other.update()))
        for key in straight.decays:
            assert equal(straight.full_state_dict(key, complete=False), other.full_state_dict(key, complete=False))

    def test_saves_and_loads_files(self, tmp_path: Path) -> None:
        model = make_model()
        ema = shardow.EMA(model, [0.5, 0.99])
        train(model, 3, ema.update)
        ema.save(tmp_path / "ema")
        other = shardow.EMA(make_model(9), [0.5, 0.99])
        other.load(tmp_path / "ema")
        for key in (0.5, 0.99):
            assert equal(other.full_state_dict(key, complete=False), ema.full_state_dict(key, complete=False))
        assert other.stats() | {"seconds": 0, "bytes_moved": 0} == ema.stats() | {"seconds": 0, "bytes_moved": 0}

    def test_exports_a_complete_model(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        model = make_model()
        model[0].weight.requires_grad_(False)
        ema = shardow.EMA(model, 0.5)
        train(model, 3, ema.update)
        ema.export(tmp_path / "out", dtype="bfloat16")
        loaded = load_file(tmp_path / "out" / "model.safetensors")
        assert loaded.keys() == model.state_dict().keys()
        fresh = make_model(5).to(torch.bfloat16)
        fresh.load_state_dict(loaded, strict=True)
        assert loaded["3.weight"].dtype == torch.bfloat16
        assert loaded["1.num_batches_tracked"].dtype == torch.int64

    def test_names_are_those_of_parameters_whatever_hooks_of_state_dict_rename(self) -> None:
        def renaming() -> nn.Module:
            def renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
                state[prefix + "kernel"] = state.pop(prefix + "weight")

            def back(state: dict[str, Any], prefix: str, *others: Any) -> None:
                if prefix + "kernel" in state:
                    state[prefix + "weight"] = state.pop(prefix + "kernel")

            module = nn.Linear(3, 2)
            module._register_state_dict_hook(renamed)
            module._register_load_state_dict_pre_hook(back)
            return module

        module = renaming()
        assert module.state_dict().keys() == {"kernel", "bias"}
        for state in (shardow.EMA(module, 0.5).full_state_dict(), shardow.full_state_dict(module)):
            assert state.keys() == {"weight", "bias"}
            other = renaming()
            other.load_state_dict(state, strict=True)
            assert equal(dict(other.named_parameters()), dict(module.named_parameters()))

    def test_everything_that_does_not_fit_is_listed_and_nothing_loaded(self) -> None:
        model = make_model()
        ema = shardow.EMA(model, DECAY)
        before = {n: t.clone() for n, t in ema.full_state_dict(complete=False).items()}
        state = ema.state_dict()
        averages = {n: t.clone() + 1 for n, t in state["averages"].items()}
        averages["extra"] = averages.pop("0.weight")
        averages["0.bias"] = torch.zeros(99)
        with pytest.raises(
            ValueError,
            match=r"'0.bias' has shape \[99\] in the state and \[13\] here; missing in the state: 0.weight; "
            r"unexpected in the state: extra",
        ):
            ema.load_state_dict({**state, "averages": averages})
        assert equal(ema.full_state_dict(complete=False), before)

    def test_tied_weights_are_averaged_once_and_exported_under_every_name(self) -> None:
        model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
        model["b"].weight = model["a"].weight
        ema = shardow.EMA(model, DECAY)
        assert list(ema.full_state_dict(complete=False)) == ["a.weight"]
        assert sorted(ema.full_state_dict()) == ["a.weight", "b.weight"]

    def test_copy_to_fills_another_module(self) -> None:
        model = make_model()
        ema = shardow.EMA(model, 0.5)
        train(model, 3, ema.update)
        other = make_model(4)
        ema.copy_to(other)
        full = ema.full_state_dict()
        assert all(torch.equal(t, full[n]) for n, t in other.state_dict().items())


class TestBuffers:
    def test_average_follows_float_buffers_and_copies_integers(self) -> None:
        model = make_model()
        ema = shardow.EMA(model, 0.5, buffers="average")
        expected = model[1].running_mean.clone()

        def step() -> None:
            ema.update()
            expected.lerp_(model[1].running_mean, 0.5) if 0.5 < 0.5 else expected.copy_(
                torch.lerp(expected, model[1].running_mean, 0.5)
            )

        train(model, 3, step)
        full = ema.full_state_dict()
        assert torch.equal(full["1.running_mean"], expected)
        assert full["1.num_batches_tracked"] == 3

    def test_predicate_chooses_which_are_averaged(self) -> None:
        model = make_model()
        ema = shardow.EMA(model, 0.5, buffers=lambda name, buffer: name.endswith("mean") and buffer.ndim == 1)
        assert [name for name in ema.names if "running" in name] == ["1.running_mean"]
        train(model, 3, ema.update)
        full = ema.full_state_dict()
        assert not torch.equal(full["1.running_mean"], model[1].running_mean)
        assert torch.equal(full["1.running_var"], model[1].running_var)

    def test_ignore_leaves_them_out(self) -> None:
        ema = shardow.EMA(make_model(), 0.5, buffers="ignore")
        assert "1.running_mean" not in ema.full_state_dict()


def test_frozen_parameters_are_not_averaged_unless_asked() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in shardow.EMA(model, DECAY).full_state_dict(complete=False)
    assert "0.weight" in shardow.EMA(model, DECAY, params="all").full_state_dict(complete=False)
    assert list(
        shardow.EMA(model, DECAY, params=lambda name, _: name == "3.weight").full_state_dict(complete=False)
    ) == ["3.weight"]


def test_source_is_averaged_in_place_of_the_weight_and_the_weight_is_swapped() -> None:
    model = make_model(dtype=torch.bfloat16)
    master = {name: p.float() + 1e-4 for name, p in clone(model).items()}
    ema = shardow.EMA(model, 0.5, source=master)
    expected = {name: p.clone() for name, p in master.items()}
    for p in master.values():
        p.mul_(1.01)
    ema.update()
    for name in expected:
        expected[name] = torch.lerp(expected[name], master[name], 0.5)
    assert equal(ema.full_state_dict(complete=False), expected)
    weights = clone(model)
    with ema.swapped():
        assert all((p.float() - expected[n]).abs().max() < 0.01 for n, p in model.named_parameters())
    assert equal(clone(model), weights)
    assert equal(ema.full_state_dict(complete=False), expected)


def test_stats_is_a_flat_dict_of_numbers() -> None:
    model = make_model()
    ema = shardow.EMA(model, [0.5, shardow.schedules.half_life(100)])
    train(model, 2, ema.update)
    stats = ema.stats()
    assert all(isinstance(value, (int, float)) for value in stats.values())
    elements = sum(p.numel() for p in model.parameters())
    assert stats["elements"] == elements
    assert stats["bytes"] == 2 * 4 * elements
    assert stats["bytes_moved"] == (4 + 2 * 8) * elements
    assert stats["decay/0"] == 0.5
    assert stats["decay/1"] == pytest.approx(0.5**0.01)
    assert 0 < stats["seconds"] < 10


def test_distance_is_the_relative_euclidean_norm() -> None:
    model = make_model()
    ema = shardow.EMA(model, 0.9)
    assert ema.distance() == 0
    train(model, 3, ema.update)
    full = ema.full_state_dict(complete=False)
    apart = math.fsum(
        float((full[n].double() - p.detach().double()).square().sum()) for n, p in model.named_parameters()
    )
    length = math.fsum(float(p.detach().double().square().sum()) for p in model.parameters())
    assert ema.distance() == pytest.approx(math.sqrt(apart / length), rel=1e-12)


def test_a_step_is_counted_once_and_gaps_are_made_up_for() -> None:
    model = nn.Linear(3, 3)
    ema = shardow.EMA(model, 0.9)
    start = clone(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    ema.update(step=7)
    w = -math.expm1(7 * math.log(0.9))
    assert equal(
        ema.full_state_dict(complete=False),
        {n: torch.lerp(start[n], p.detach(), w) for n, p in model.named_parameters()},
    )
    with pytest.raises(ValueError, match="7"):
        ema.update(step=7)


def test_an_update_allocates_nothing_in_python() -> None:
    import tracemalloc

    model = nn.ModuleList([nn.Linear(16, 16) for _ in range(50)])
    ema = shardow.EMA(model, DECAY)
    for _ in range(3):
        ema.update()
    tracemalloc.start()
    ema.update()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(20):
        ema.update()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1024
