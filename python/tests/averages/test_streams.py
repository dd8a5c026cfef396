"""Averages on a device follow torch's current stream, through stand-ins: no device is needed to see who is asked what,
and when.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_averages import averages_of

import shardow
from shardow import errors
from shardow.averaging.cuda_streams import Streams, with_memory


class _Tensor:
    is_cuda = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.recorded: list[int] = []

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.cuda_stream)


def test_the_engine_is_told_of_another_stream_once(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {0: 10, 1: 20}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=current[device.index]))
    tensors = [_Tensor(0), _Tensor(0), _Tensor(1)]
    told: list[tuple[int, int]] = []
    average: Any = SimpleNamespace(set_stream=lambda index, stream: told.append((index, stream)))
    streams = Streams(tensors, tensors)  # type: ignore[arg-type]
    streams.follow(average)
    assert told == []
    current[1] = 21
    streams.follow(average)
    streams.follow(average)
    assert told == [(1, 21)]
    current.update({0: 11, 1: 20})
    streams.follow(average)
    assert told == [(1, 21), (0, 11), (1, 20)]
    # One tensor represents a device's memory.
    assert [sorted(tensor.recorded) for tensor in tensors[1:]] == [[11], [20, 21]]


def test_averages_on_the_host_follow_the_streams_of_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    current = {0: 10, 1: 20}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=current[device.index]))
    told: list[tuple[int, int]] = []
    average: Any = SimpleNamespace(set_stream=lambda index, stream: told.append((index, stream)))
    weights = [_Tensor(0), _Tensor(1)]
    streams = Streams(weights, [torch.zeros(2), torch.zeros(3)])  # type: ignore[arg-type]
    current[1] = 21
    streams.follow(average)
    assert told == [(1, 21)]
    assert [tensor.recorded for tensor in weights] == [[], []]  # they are kept alive until the copies have ended


def test_every_call_follows_the_stream_first(tmp_path: Any) -> None:
    model = torch.nn.Linear(3, 2)
    ema = shardow.EMA(model)
    followed: list[object] = []
    averages_of(ema).streams = averages_of(ema).swap._streams = SimpleNamespace(follow=followed.append)  # type: ignore[assignment]
    path = tmp_path / "a.safetensors"
    calls: dict[str, Any] = {
        "update": ema.update,
        "a step of an optimizer": averages_of(ema).swap.finish_reading,
        "prepare_replay": ema.prepare_replay,
        "state_dict": ema.state_dict,
        "full_state_dict": ema.full_state_dict,
        "save": lambda: ema.save(path),
        "load": lambda: ema.load(path),
        "export": lambda: ema.export(tmp_path / "b"),
        "copy_to": lambda: ema.copy_to(torch.nn.Linear(3, 2)),
        "distance": ema.distance,
        "swapped": lambda: ema.swapped().__enter__(),
    }
    for name, call in calls.items():
        followed.clear()
        call()
        assert followed, name


def test_a_device_without_memory_is_asked_again_without_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    answers = iter([errors.make("out_of_memory", "CUDA: cudaMalloc: out of memory"), None])

    def make() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "made"

    assert with_memory(make) == "made"
    assert emptied == [True]


def test_out_of_memory_is_a_memory_error_too() -> None:
    error = errors.make("out_of_memory", "CUDA: cudaMalloc: out of memory")
    assert isinstance(error, MemoryError)
    assert isinstance(error, shardow.Error)
