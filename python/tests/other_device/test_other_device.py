"""Averages of weights on a device that the engine has no kernels for: bit for bit those of a CPU, by PyTorch's
operations, through swaps, files, states and checkpoints, under every sharding. On "shim" (shim.cc), in processes of
their own, since it is the whole process's device.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import rules
import torch
from torch import nn

import shardow

ALL = bool(os.environ.get("SHARDOW_ALL"))
SHARDINGS = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("hsdp", 4)]
if ALL:
    SHARDINGS += [("fsdp1-flat", 2), ("fsdp1-hybrid", 4), ("fsdp2", 3), ("tp+fsdp2", 4)]
STEPS = 4
RULES: dict[str, dict[str, Any]] = {
    "lerp": {"decay": 0.9},
    "from the weights": {"decay": 0.3},
    "several": {"decay": [0.9, 0.99, 0.3]},
    "noise": {"decay": 0.999999, "seed": 7},
    "stochastic": {"decay": 0.9, "stochastic": True},
    **rules.RULES,
    "averaged buffers": {"decay": 0.9, "buffers": "average"},
    "every second step": {"decay": 0.9, "update_every": 2, "start_step": 1},
    "on the host": {"decay": [0.9, 0.99], "device": "cpu"},
}
SHARDED = {
    "split": {"decay": [0.9, 0.999999]},
    "copy": {"decay": [0.9, 0.999999], "replicas": "copy"},
    "on the host": {"decay": 0.9, "device": "cpu"},
}


def _serve(pipe: Connection, port: int) -> None:
    import shim

    from shardow.averaging import torch_rules

    assert shim.DEVICES == 2
    torch_rules._AT_ONCE = 40  # elements, fewer than some tensors have, and more than others
    warnings.filterwarnings("ignore", message="averages on shim")
    ranks._serve(pipe, port)


_pool = ranks.Pool(serve=_serve)
atexit.register(_pool.stop)


@contextlib.contextmanager
def models_on(device: str) -> Iterator[None]:
    before, models.DEVICE = models.DEVICE, device
    try:
        yield
    finally:
        models.DEVICE = before


def build(kind: str, dtype: torch.dtype, device: str) -> nn.Module:
    with models_on(device):
        return models.build(kind, torch.distributed.get_world_size(), dtype)


def train(model: nn.Module, step: int) -> None:
    """The same change wherever the weights are, of replicas too; one element of them was Inf for a step."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            local = getattr(parameter, "_local_tensor", parameter)
            change = torch.randn(local.shape, generator=generator).to(local.dtype) * 0.01
            local.add_(change.to(local.device))
        if local.numel():
            local.view(-1)[0] = float("inf") if step == 2 else 0.25


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor.cpu(), second[name].cpu()) for name, tensor in first.items()
    )


def contents(path: Path) -> list[bytes]:
    """Returns the bytes of a file, or of a directory's files, one for each decay."""
    return [file.read_bytes() for file in ([path] if path.is_file() else sorted(path.rglob("*"))) if file.is_file()]


def averages_on(kind: str, dtype: torch.dtype, options: dict[str, Any], folder: str) -> dict[str, bool]:
    """Trains on a CPU and on the shim. Returns what holds, by what it is, on this rank."""
    import shim

    where = {"cpu": {**options, "device": None}, "shim": options}
    trained = {device: build(kind, dtype, device) for device in where}
    emas = {device: shardow.EMA(trained[device], **where[device]) for device in where}
    held = {}
    for step in range(STEPS):
        for device, ema in emas.items():
            train(trained[device], step)
            shim.counts()
            ema.update()
            if device == "shim":
                held[f"nothing waits in update {step}"] = "aten::_local_scalar_dense" not in shim.counts()
    on_cpu, on_shim = emas["cpu"], emas["shim"]
    decays = on_cpu.decays if len(on_cpu.decays) > 1 else [None]
    for decay in decays:
        held[f"averages {decay}"] = same(on_cpu.full_state_dict(decay), on_shim.full_state_dict(decay))
        before = models.whole_weights(trained["shim"])
        with on_cpu.swapped(decay), on_shim.swapped(decay):
            shown = [models.whole_weights(trained[device]) for device in where]
            held[f"swapped in {decay}"] = all(
                torch.allclose(shown[0][name], shown[1][name].cpu(), rtol=2**-7, atol=0) for name in shown[0]
            )
            held[f"not the weights {decay}"] = not same(before, shown[1])
        held[f"swapped back {decay}"] = same(before, models.whole_weights(trained["shim"]))
    figures = [ema.stats() for ema in emas.values()]
    held["counted"] = figures[0]["held_nonfinite"] == figures[1]["held_nonfinite"]
    held["counted by_torch"] = bool(figures[1].get("by_torch")) == ("device" not in options)
    files = {device: Path(folder, f"{device}.safetensors") for device in emas}
    for device, ema in emas.items():
        ema.save(files[device])
    held["files"] = contents(files["cpu"]) == contents(files["shim"])
    state = copy.deepcopy(on_shim.state_dict())
    for name, take in (("load", lambda: on_shim.load(files["cpu"])), ("state", lambda: on_shim.load_state_dict(state))):
        on_shim.reset()
        take()
        held[name] = all(same(on_cpu.full_state_dict(key), on_shim.full_state_dict(key)) for key in decays)
    return held


def all_hold(by_rank: list[dict[str, bool]]) -> None:
    for held in by_rank:
        assert {what for what, holds in held.items() if not holds} == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_of_a_cpu_by_every_rule(rule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    all_hold(_pool.run(1, averages_on, "plain", dtype, RULES[rule], str(tmp_path)))


@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.parametrize(("kind", "world"), SHARDINGS[1:])
def test_the_bits_of_a_cpu_under_every_sharding(kind: str, world: int, how: str, tmp_path: Path) -> None:
    all_hold(_pool.run(world, averages_on, kind, torch.bfloat16 if ALL else torch.float32, SHARDED[how], str(tmp_path)))


def go_on(kind: str, folder: str) -> dict[str, bool]:
    """A run with AdamW, saved and resumed in another model, beside one that goes on."""
    held = {}
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    inputs = [models.batch(generator).to("shim") for _ in range(4)]

    def run(steps: int, begin: int = 0, restore: bool = False) -> tuple[shardow.EMA, nn.Module]:
        model = build(kind, torch.float32, "shim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ema = shardow.EMA(model, 0.9, optimizer=optimizer)
        checkpoints = shardow.Checkpoints(folder)
        parts = {"model": model, "optimizer": optimizer, "averages": ema}
        if restore:
            held["restored"] = checkpoints.restore(**parts) is not None
        for step in range(begin, steps):
            model(inputs[step]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and not restore:
                checkpoints.save(step, **parts)
        return ema, model

    straight, resumed = run(4), run(4, 2, restore=True)
    held["averages"] = same(straight[0].full_state_dict(), resumed[0].full_state_dict())
    held["weights"] = same(models.whole_weights(straight[1]), models.whole_weights(resumed[1]))
    held["step"] = resumed[0].step == 4
    return held


@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("fsdp2", 2)])
def test_a_run_goes_on_from_its_checkpoint(kind: str, world: int, tmp_path: Path) -> None:
    all_hold(_pool.run(world, go_on, kind, str(tmp_path)))


def with_teacher(kind: str) -> dict[str, bool]:
    student, teacher = build(kind, torch.float32, "shim"), None
    with models_on("shim"):
        twin = models.plain_twin(kind).to("shim").requires_grad_(False)
        teacher = models.PARALLEL[kind](twin, torch.distributed.get_world_size())
    ema, ordinary = shardow.EMA(student, 0.9, averages=teacher), shardow.EMA(student, 0.9)
    for step in range(STEPS):
        train(student, step)
        ema.update(), ordinary.update()
    return {"averages": same(ema.full_state_dict(), ordinary.full_state_dict())}


@pytest.mark.parametrize(("kind", "world"), [("plain", 1), ("fsdp2", 2)])
def test_a_teacher_there_has_the_averages_of_an_ordinary_ema(kind: str, world: int) -> None:
    all_hold(_pool.run(world, with_teacher, kind))


def without_elements() -> dict[str, bool]:
    """Under FSDP2 rank 1 has none of a tensor of one row."""
    with models_on("shim"):
        model = models.PARALLEL["fsdp2"](nn.Sequential(nn.Linear(3, 1, bias=False)).to("shim"), 2)
    ema = shardow.EMA(model, 0.9)
    for step in range(STEPS):
        train(model, step)
        ema.update()
    with ema.swapped():
        pass
    return {"counted": ema.stats()["held_nonfinite"] == (1 if torch.distributed.get_rank() == 0 else 0)}


def test_a_rank_may_have_no_elements() -> None:
    all_hold(_pool.run(2, without_elements))


def refusals() -> dict[str, bool]:
    model = models.make().to("shim")
    held = {}
    for name, options in {
        "stochastically": {"dtype": torch.bfloat16},
        "overlap": {"overlap": True},
    }.items():
        try:
            shardow.EMA(model, 0.9, **options)
            held[name] = False
        except shardow.errors.UnsupportedError as error:
            held[name] = "on shim:0: 16-bit averages take" in str(error) or "on a device" in str(error)
    try:
        shardow.EMA(models.make().to("shim"), 0.9).prepare_replay()
        held["no graph"] = False
    except shardow.Error as error:
        held["no graph"] = "which no graph repeats" in str(error)
    moved = models.make().to("shim")
    ema = shardow.EMA(moved, 0.9)
    for device in ("shim:1", "cpu"):
        try:
            moved.to(device)
            ema.update()
            held[f"moved to {device}"] = False
        except shardow.Error as error:
            held[f"moved to {device}"] = "it was shim:0 when this EMA was made" in str(error)
    moved.to("shim:0")
    ema.update()
    ema = shardow.EMA(model, 0.9, nonfinite="raise")
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    try:
        ema.update()
        held["raises"] = False
    except shardow.Error as error:
        held["raises"] = "first in '0.weight'" in str(error) and ema.step == 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardow.EMA(models.make().to("shim:1"), 0.9)
        shardow.EMA(models.make().to("shim:1"), 0.9)
    held["warned once"] = [str(warning.message) for warning in caught] == [
        "averages on shim:1 are updated by PyTorch's own operations: the engine has kernels for CPUs and CUDA devices"
    ]
    return held


def test_what_is_refused_and_what_is_said() -> None:
    all_hold(_pool.run(1, refusals))


def interrupted() -> dict[str, bool]:
    """An operation fails in the middle of an update: the averages say so, until they begin again."""
    from shardow.averaging import torch_rules

    model = models.make().to("shim")
    ema, apply = shardow.EMA(model, 0.9), torch_rules.apply

    def fail(*arguments: Any) -> None:
        raise RuntimeError("the device is out of memory")

    torch_rules.apply = fail  # type: ignore[assignment]
    refusals = []
    for call in (ema.update, ema.update, ema.full_state_dict):
        try:
            call()
        except shardow.Error as error:
            refusals.append("of step 1 stopped" in str(error) and "out of memory" in str(error))
    torch_rules.apply = apply
    ema.reset()
    ema.update()
    return {"refused": refusals == [True] * 3, "begins again": ema.step == 1}


def swap_stopped() -> dict[str, bool]:
    """An operation fails when two tensors have their averages, and a third one some of them."""
    from shardow.averaging.torch_rules import OtherMemory

    model = models.make().to("shim")
    ema, show, shown = shardow.EMA(model, 0.9), OtherMemory.show, list[str]()
    train(model, 0)
    ema.update()
    before = {name: p.clone() for name, p in model.state_dict().items()}

    def show_two(self: OtherMemory, name: str, index: int) -> None:
        show(self, name, index)
        shown.append(name)
        if len(shown) == 3:
            raise RuntimeError("the device is out of memory")

    OtherMemory.show = show_two  # type: ignore[method-assign]
    held = {}
    try:
        with ema.swapped():
            held["raises"] = False
    except RuntimeError as error:
        held["raises"] = "out of memory" in str(error)
    OtherMemory.show = show  # type: ignore[method-assign]
    held["weights are back"] = same(before, model.state_dict())
    with ema.swapped():
        held["swapped"] = not same(before, model.state_dict())
    held["back again"] = same(before, model.state_dict())
    return held


@pytest.mark.parametrize("stopped", [interrupted, swap_stopped])
def test_an_operation_that_fails_tears_nothing_unsaid(stopped: Any) -> None:
    all_hold(_pool.run(1, stopped))
