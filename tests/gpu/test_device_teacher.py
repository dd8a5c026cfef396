"""Averages in a teacher's parameters on a CUDA device: the bits of an ordinary EMA there, in steps, graphs and files.

Skipped, with the reason, where no device answers; `make gpu` runs it where one does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_device import model_of, one_rank, pytestmark, same, train

import shardow

__all__ = ["pytestmark"]

STEPS = 6
KINDS: dict[str, dict[str, Any]] = {
    "lerp": {"decay": 0.9},
    "noise": {"decay": 0.999999, "stochastic": True},
    "every second": {"decay": 0.9, "update_every": 2},
}


def pair(student: torch.dtype, teacher: torch.dtype) -> tuple[Any, Any]:
    """The teacher begins with other values."""
    twin = model_of(teacher).cuda().requires_grad_(False)
    for parameter in twin.parameters():
        parameter.add_(1)
    return model_of(student).cuda(), twin


@pytest.mark.parametrize(
    ("weights", "averages"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["fp32", "fp32 of bf16", "bf16"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_on_the_device_has_the_averages_of_an_ordinary_ema(
    kind: str, weights: torch.dtype, averages: torch.dtype, tmp_path: Path
) -> None:
    student, teacher = pair(weights, averages)
    ema = shardow.EMA(student, averages=teacher, **KINDS[kind])
    ordinary = shardow.EMA(student, dtype=averages, **KINDS[kind])
    teacher[0](torch.randn(4, 257, device="cuda", dtype=averages))  # cuBLAS keeps some memory
    before = torch.cuda.memory_allocated()
    for step in range(STEPS):
        train(student, step)
        ema.update()
        ordinary.update()
        teacher[0](torch.randn(4, 257, device="cuda", dtype=averages))
        assert torch.equal(teacher[0].weight, ordinary.state_dict()["averages"]["0.weight"].view(131, 257))
    assert torch.cuda.memory_allocated() == before
    same(ema.full_state_dict(), ordinary.full_state_dict())
    assert ema.stats()["bytes_moved"] == ordinary.stats()["bytes_moved"]
    ema.save(tmp_path / "averages.safetensors")
    ema.reset()
    ema.load(tmp_path / "averages.safetensors")
    same(ema.full_state_dict(), ordinary.full_state_dict())


def test_a_graph_with_student_and_teacher_replays() -> None:
    student, teacher = pair(torch.float32, torch.float32)
    ema, ordinary = (shardow.EMA(student, 0.9, **where) for where in ({"averages": teacher}, {}))
    side = torch.cuda.Stream()
    answers = torch.zeros(4, 131, device="cuda")
    inputs = torch.randn(4, 257, device="cuda")
    with torch.no_grad(), torch.cuda.stream(side):
        ema.update(), ordinary.update()
        answers.copy_(teacher[0](inputs))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for parameter in student.parameters():
                parameter.mul_(0.5)
            ema.update(), ordinary.update()
            answers.copy_(teacher[0](inputs))
        for _ in range(10):
            ema.prepare_replay(), ordinary.prepare_replay()
            graph.replay()
            expected = teacher[0](inputs)
    torch.cuda.synchronize()
    same(ema.full_state_dict(), ordinary.full_state_dict())
    assert torch.equal(answers, expected)


def test_a_sharded_teacher_on_the_device() -> None:
    from torch.distributed.fsdp import fully_shard

    student, teacher = pair(torch.float32, torch.float32)
    with one_rank() as mesh:
        for layer in (*student, *teacher):
            fully_shard(layer, mesh=mesh)
        ema, ordinary = shardow.EMA(student, 0.9, averages=teacher), shardow.EMA(student, 0.9)
        for step in range(STEPS):
            with torch.no_grad():
                for parameter in student.parameters():
                    parameter.to_local().mul_(1 + 0.01 * step)
            ema.update(), ordinary.update()
            teacher[0](torch.randn(4, 257, device="cuda"))  # leaves an unsharded copy behind
        same(ema.full_state_dict(), ordinary.full_state_dict())
        inputs = torch.randn(4, 257, device="cuda")
        with torch.no_grad(), ordinary.swapped():
            expected = student[0](inputs)
        with torch.no_grad():
            assert torch.equal(teacher[0](inputs), expected)
