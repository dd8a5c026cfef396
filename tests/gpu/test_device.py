"""Averages on a CUDA device: the same bits as on a CPU, on any stream, through swaps, files and graphs.

Skipped, with the reason, where no device answers; `make gpu` runs it where one does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rules import RULES

import shardow
from shardow import _core

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and _core.cuda_available()),
    reason="no CUDA device answers: make gpu, where one does",
)

STEPS = 6
KINDS: dict[str, dict[str, Any]] = {
    "lerp": {"decay": 0.9},
    "several": {"decay": [0.9, 0.99, 0.9999]},
    "noise": {"decay": 0.999999, "seed": 7},
    **RULES,
    "bfloat16": {"decay": 0.99, "dtype": torch.bfloat16},
    "every third": {"decay": 0.9, "update_every": 3, "start_step": 2},
}


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(257, 131), torch.nn.Linear(131, 3, bias=False), torch.nn.LayerNorm(7))
    return layers.to(dtype)


def train(model: torch.nn.Module, step: int) -> None:
    """The same change wherever the weights are."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            change = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.copy_((p.cpu() + change * 0.01).to(p.device))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name].cpu().view(torch.uint8), b[name].cpu().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_device_computes_the_bits_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    here, there = model_of(dtype), model_of(dtype).cuda()
    on_cpu, on_device = shardow.EMA(here, **KINDS[kind]), shardow.EMA(there, **KINDS[kind])
    for step in range(STEPS):
        for model, ema in ((here, on_cpu), (there, on_device)):
            train(model, step)
            ema.update()
    for decay in [None] if not isinstance(KINDS[kind]["decay"], list) else KINDS[kind]["decay"]:
        same(on_cpu.full_state_dict(decay), on_device.full_state_dict(decay))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_swapped_in_and_back(dtype: torch.dtype) -> None:
    here, there = model_of(dtype), model_of(dtype).cuda()
    emas = [shardow.EMA(here, decay=0.5), shardow.EMA(there, decay=0.5)]
    for model, ema in zip((here, there), emas, strict=True):
        train(model, 1)
        ema.update()
    before = {name: p.clone() for name, p in there.state_dict().items()}
    with emas[0].swapped(), emas[1].swapped():
        same(here.state_dict(), there.state_dict())
    same(before, there.state_dict())
    same(emas[0].full_state_dict(), emas[1].full_state_dict())


def test_what_is_held_is_counted() -> None:
    model = model_of(torch.float32).cuda()
    ema = shardow.EMA(model, decay=0.9)
    with torch.no_grad():
        model[0].weight[0, :5] = float("nan")
    ema.update()
    assert ema.stats()["held_nonfinite"] == 5
    assert all(bool(tensor.isfinite().all()) for tensor in ema.full_state_dict().values() if tensor.is_floating_point())


def test_an_update_on_another_stream_waits_for_the_one_before() -> None:
    here, there = model_of(torch.float32), model_of(torch.float32).cuda()
    on_cpu, on_device = shardow.EMA(here, decay=0.9), shardow.EMA(there, decay=0.9)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(20):
        train(here, step)
        on_cpu.update()
        train(there, step)
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[step % 2]):
            # The update is behind this sleep, and the next one, on the other stream, behind the update.
            torch.cuda._sleep(2_000_000)
            on_device.update()
        torch.cuda.current_stream().wait_stream(streams[step % 2])  # the weights change next
    same(on_cpu.full_state_dict(), on_device.full_state_dict())


@pytest.mark.parametrize("decay", [0.9, 0.999999])
def test_a_captured_update_replays_with_the_step_that_is_due(decay: float) -> None:
    here, there = model_of(torch.float32), model_of(torch.float32).cuda()
    schedule = shardow.schedules.inverse_gamma() if decay == 0.9 else decay
    on_cpu, on_device = shardow.EMA(here, decay=schedule), shardow.EMA(there, decay=schedule)
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for model, ema in ((here, on_cpu), (there, on_device)):
            for p in model.parameters():
                p.mul_(1.25)
            ema.update()  # outside of the capture: everything is made that a launch needs
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for p in there.parameters():
                p.mul_(0.5)
            on_device.update()
        assert on_device.stats()["step"] == 1
        for _ in range(30):
            for p in here.parameters():
                p.mul_(0.5)
            on_cpu.update()
            on_device.prepare_replay()
            graph.replay()
    torch.cuda.synchronize()
    same(on_cpu.full_state_dict(), on_device.full_state_dict())
    assert on_device.stats()["step"] == 31


def test_an_update_is_one_launch_and_no_wait() -> None:
    model = model_of(torch.float32).cuda()
    ema = shardow.EMA(model, decay=0.9)
    ema.update()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        for _ in range(10):
            ema.update()
        torch.cuda.synchronize()
    kernels = [
        one
        for one in profile.events()
        if "update_kernel" in one.name and one.device_type == torch.autograd.DeviceType.CUDA
    ]
    waits = [one for one in profile.events() if "EventSynchronize" in one.name or "StreamSynchronize" in one.name]
    assert len(kernels) == 10
    assert waits == []


@pytest.mark.parametrize("of_device", [True, False], ids=["saved from the device", "saved from the CPU"])
def test_files_are_the_same_and_load_on_either_side(of_device: bool, tmp_path: Path) -> None:
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16).cuda()]
    emas = [shardow.EMA(model, decay=0.9) for model in models]
    for model, ema in zip(models, emas, strict=True):
        train(model, 3)
        ema.update()
    files = [tmp_path / "cpu.safetensors", tmp_path / "cuda.safetensors"]
    for ema, file in zip(emas, files, strict=True):
        ema.save(file)
    assert files[0].read_bytes() == files[1].read_bytes()
    target = shardow.EMA(model_of(torch.bfloat16).to("cpu" if of_device else "cuda"), decay=0.9)
    target.load(files[of_device])
    same(target.full_state_dict(), emas[0].full_state_dict())
    shardow.save(models[1], tmp_path / "model.safetensors")
    other = model_of(torch.float32).cuda()
    shardow.load(other, tmp_path / "model.safetensors")
    same(other.state_dict(), {name: tensor.float() for name, tensor in models[1].state_dict().items()})


def test_a_background_save_is_of_the_moment_it_began(tmp_path: Path) -> None:
    model = model_of(torch.float32).cuda()
    before = {name: p.cpu() for name, p in model.state_dict().items()}
    handle = shardow.async_save(model, tmp_path / "model.safetensors")
    train(model, 1)
    handle.wait()
    with shardow.open(tmp_path / "model.safetensors") as opened:
        same({name: opened[name] for name in before}, before)


@contextlib.contextmanager
def one_rank() -> Iterator[Any]:
    """A process group of this process alone, and its mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29501")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


def test_a_sharded_model_on_the_device(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    with one_rank() as mesh:
        whole, sharded = model_of(torch.float32), model_of(torch.float32).cuda()
        fully_shard(sharded, mesh=mesh)
        emas = [shardow.EMA(whole, decay=0.9), shardow.EMA(sharded, decay=0.9)]
        for ema in emas:
            ema.update()
        same(*(ema.full_state_dict() for ema in emas))
        emas[1].save(tmp_path / "ema.safetensors")
        emas[1].load(tmp_path / "ema.safetensors")
        before = sharded[0].weight.to_local().clone()
        with emas[1].swapped():
            pass
        assert torch.equal(sharded[0].weight.to_local(), before)
