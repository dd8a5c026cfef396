"""Averages on the host of weights on a CUDA device: the bits of a CPU, weights that nobody changes too early, and what
crosses the link.

Skipped, with the reason, where no device answers; `make gpu` runs it where one does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_device import KINDS, STEPS, model_of, pytestmark, same, train

import shardow

__all__ = ["pytestmark"]


class Steps(torch.optim.Optimizer):
    """train(), so that what is attached to an optimizer waits and updates."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.model, self.number = model, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        train(self.model, self.number)
        self.number += 1


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "by hand"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_averages_on_the_host_have_the_bits_of_the_cpu(kind: str, dtype: torch.dtype, attached: bool) -> None:
    models = [model_of(dtype), model_of(dtype).cuda()]
    emas = []
    for model, where in zip(models, ({}, {"device": "cpu", "ring_bytes": 1 << 16}), strict=True):
        optimizer = Steps(model)
        emas.append(shardow.EMA(model, **KINDS[kind], **where, optimizer=optimizer if attached else None))  # type: ignore[arg-type]
        for _ in range(STEPS):
            optimizer.step()
            if not attached:
                emas[-1].update()
    decays = KINDS[kind]["decay"]
    for decay in decays if isinstance(decays, list) else [None]:
        same(*(ema.full_state_dict(decay) for ema in emas))
    assert emas[0].distance(emas[0].decays[0]) == emas[1].distance(emas[1].decays[0])
    if kind == "lerp":
        assert emas[1].stats()["offload/bytes"] == STEPS * sum(p.nbytes for p in models[1].parameters())


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])
def test_a_step_would_tear_averages_if_it_did_not_wait(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream sleeps once, so that the host is ahead of both steps: the second one begins within the copies that
    follow the first, and copies of 64 MB take longer than a step."""
    model = torch.nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = shardow.EMA(model, decay=0.5, device="cpu", optimizer=optimizer)
    expected = model.weight.detach().clone()
    if not waits:
        monkeypatch.setattr(ema._averages.swap, "finish_reading", lambda: None)
    model.weight.grad = torch.ones_like(model.weight)
    torch.cuda._sleep(100_000_000)
    for _ in range(2):
        optimizer.step()
        expected.lerp_(model.weight.detach(), 0.5)
    assert torch.equal(ema.state_dict()["averages"]["weight"], expected.cpu()) == waits


def test_steps_on_other_streams_wait_too() -> None:
    models = [model_of(torch.float32), model_of(torch.float32).cuda()]
    optimizers = [Steps(model) for model in models]
    emas = [
        shardow.EMA(models[0], 0.9, optimizer=optimizers[0]),
        shardow.EMA(models[1], 0.9, device="cpu", optimizer=optimizers[1]),
    ]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(20):
        optimizers[0].step()
        streams[step % 2].wait_stream(streams[1 - step % 2])
        with torch.cuda.stream(streams[step % 2]):
            torch.cuda._sleep(2_000_000)
            optimizers[1].step()
    torch.cuda.synchronize()
    same(*(ema.full_state_dict() for ema in emas))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_swapped_in_and_back_without_a_second_copy(dtype: torch.dtype) -> None:
    models = [model_of(dtype), model_of(dtype).cuda()]
    emas = [shardow.EMA(models[0], 0.5), shardow.EMA(models[1], 0.5, device="cpu")]
    for model, ema in zip(models, emas, strict=True):
        train(model, 1)
        ema.update()
    before, held = {name: p.clone() for name, p in models[1].state_dict().items()}, torch.cuda.memory_allocated()
    with emas[0].swapped(), emas[1].swapped():
        same(*(model.state_dict() for model in models))
        assert torch.cuda.memory_allocated() <= held
    same(before, models[1].state_dict())
    same(*(ema.full_state_dict() for ema in emas))


def test_files_of_averages_on_the_host(tmp_path: Path) -> None:
    models = [model_of(torch.bfloat16), model_of(torch.bfloat16).cuda()]
    emas = [shardow.EMA(models[0], 0.9), shardow.EMA(models[1], 0.9, device="cpu")]
    for model, ema in zip(models, emas, strict=True):
        train(model, 3)
        ema.update()
    files = [tmp_path / "resident.safetensors", tmp_path / "host.safetensors"]
    emas[0].save(files[0])
    emas[1].async_save(files[1]).wait()
    assert files[0].read_bytes() == files[1].read_bytes()
    emas[1].reset()
    emas[1].load(files[0])
    emas[1].export(tmp_path / "export.safetensors")
    same(*(ema.full_state_dict() for ema in emas))


def test_a_capture_is_refused() -> None:
    ema = shardow.EMA(model_of(torch.float32).cuda(), 0.9, device="cpu")
    ema.update()
    ema.stats()
    with pytest.raises(shardow.Error, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ema.update()


def test_a_process_group_that_moves_no_tensors_of_the_cpu() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29502")
    dist.init_process_group("nccl", rank=0, world_size=1)
    try:
        whole, sharded = model_of(torch.float32), model_of(torch.float32).cuda()
        fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)))
        emas = [shardow.EMA(whole, 0.9), shardow.EMA(sharded, 0.9, device="cpu")]
        for ema in emas:
            ema.update()
        same(*(ema.full_state_dict() for ema in emas))
        other = model_of(torch.float32)
        emas[1].copy_to(other)
        same(dict(other.state_dict()), emas[0].full_state_dict())
    finally:
        dist.destroy_process_group()
