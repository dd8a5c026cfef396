"""What ranks do together, each call with its preparation, and a way to stop one of them in its midst. Every value tells
the version.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from miniature import tell
from outcomes import Outcome, outcome
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardow
from shardow.averaging import replicas
from shardow.distributed import gather, rank_group, store_group, stream

#: {name: (shape, the axis that ranks share)}: long runs, which each rank writes; short ones, which go through stripes;
#: few bytes.
TENSORS = {"long": ((256, 1024), 0), "across": ((1024, 300), 1), "odd": ((7, 5), 0)}
NAME = "model.safetensors"
_SIZE = 256

Call = Callable[[], object]


def whole(name: str, version: int) -> torch.Tensor:
    shape, _ = TENSORS[name]
    return ((torch.arange(torch.Size(shape).numel()) * 7 + version * 13) % 251).reshape(shape).float()


def sharded(version: int) -> dict[str, torch.Tensor]:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return {
        name: distribute_tensor(whole(name, version), mesh, [Shard(axis)], src_data_rank=None)
        for name, (_, axis) in TENSORS.items()
    }


def version_at(path: Path) -> int:
    """Of the checkpoint there, read by another library, every value."""
    found = load_file(path / NAME if path.is_dir() else path)
    versions = [version for version in range(1, 5) if torch.equal(found["odd"], whole("odd", version))]
    assert len(versions) == 1
    assert all(torch.equal(found[name], whole(name, versions[0])) for name in TENSORS)
    assert found.keys() == TENSORS.keys()
    return versions[0]


def put_first(path: str) -> None:
    shardow.save(sharded(1), path, timeout=30)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(_SIZE, _SIZE) for _ in range(4)))


def _fsdp2(seed: int = 0) -> nn.Module:
    return fully_shard(net(seed))  # type: ignore[return-value]


def _save(path: str, timeout: float) -> Call:
    state = sharded(2)
    return lambda: shardow.save(state, path, timeout=timeout)


def _async_save(path: str, timeout: float) -> Call:
    state = sharded(2)
    return lambda: shardow.async_save(state, path, timeout=timeout).wait()


def _load(path: str, timeout: float) -> Call:
    state = sharded(3)

    def call() -> None:
        shardow.load(state, path, timeout=timeout)
        for name, found in state.items():
            assert isinstance(found, DTensor)
            wanted = distribute_tensor(whole(name, 1), found.device_mesh, found.placements, src_data_rank=None)
            assert torch.equal(found.to_local(), wanted.to_local())

    return call


def _gather(path: str, timeout: float) -> Call:
    model, wanted = _fsdp2(5), net(5).state_dict()

    def call() -> None:
        found = shardow.full_state_dict(model, timeout=timeout)
        assert dist.get_rank() > 0 or all(torch.equal(found[name], one) for name, one in wanted.items())

    return call


def _stream(path: str, timeout: float) -> Call:
    with torch.device("meta"):
        model = _fsdp2()
    source = net(6).state_dict() if dist.get_rank() == 0 else None

    def call() -> None:
        shardow.materialize(model, source, timeout=timeout)
        _check_shards(model, net(6))

    return call


def _wrap(path: str, timeout: float) -> Call:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), net(7 + dist.get_rank())

    def call() -> None:
        _check_shards(shardow.wrap(model, mesh, timeout=timeout)[0], net(7))

    return call


def _check_shards(model: nn.Module, wanted: nn.Module) -> None:
    for found, one in zip(model.parameters(), wanted.parameters(), strict=True):
        assert isinstance(found, DTensor)
        assert torch.equal(found.to_local(), one.detach().chunk(dist.get_world_size())[dist.get_rank()])


def _swap(path: str, timeout: float) -> Call:
    """Replicas on all machines: each averages a part, and a swap sends the parts around."""
    model = nn.parallel.DistributedDataParallel(net(8))
    ema = shardow.EMA(model, decay=0.5, timeout=timeout)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1.0)
    ema.update()

    def call() -> None:
        with ema.swapped():
            pass

    return call


def _agree(path: str, timeout: float) -> Call:
    ema = shardow.EMA(_fsdp2(), decay=0.9, timeout=timeout)
    ema.update()
    return lambda: [ema.distance() for _ in range(3)]


def _averages(path: str, timeout: float) -> Call:
    ema = shardow.EMA(_fsdp2(), decay=0.9, timeout=timeout)
    ema.update()
    return lambda: ema.save(f"{path}.ema.safetensors")


def _checkpoints(path: str, timeout: float) -> Call:
    model = _fsdp2()
    ema, checkpoints = (
        shardow.EMA(model, decay=0.9, timeout=timeout),
        shardow.Checkpoints(f"{path}.run", timeout=timeout),
    )
    return lambda: checkpoints.save(1, model, averages=ema, state={"epoch": 3})


VERBS: dict[str, Callable[[str, float], Call]] = {
    "save": _save, "async_save": _async_save, "load": _load, "gather": _gather, "stream": _stream, "wrap": _wrap,
    "swap": _swap, "agree": _agree, "averages": _averages, "checkpoints": _checkpoints,
}  # fmt: skip


class _Watched:
    """A connection to a store, which tells when a round begins."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if args and isinstance(args[0], str) and re.match(r"-?\d+/", args[0]):
                begins = name == "compare_set" and args[1]  # the words behind the last round's verdict
                number = int(args[0].split("/")[0]) + bool(begins)
                if number > _Watched.last:
                    _Watched.last = number
                    _Watched.step()
            return getattr(self._store, name)(*args)

        return call

    last = -1
    step: Callable[[], None] = staticmethod(lambda: None)


_connected = store_group.connected
store_group.connected = lambda prefix: _Watched(_connected(prefix))


@contextmanager
def counted(at: int | None) -> Iterator[itertools.count[int]]:
    """Steps that this rank takes with others, rounds of the store and transfers: before number ``at`` the test is
    told."""
    steps, begun = itertools.count(), gather.begun
    places: list[Any] = [store_group, gather, stream, rank_group, replicas]

    def step() -> None:
        if next(steps) == at:
            tell("now")

    def counted_begun(*args: Any) -> Any:
        step()
        return begun(*args)

    _Watched.step = staticmethod(step)
    for place in places:
        place.begun = counted_begun
    try:
        yield steps
    finally:
        _Watched.step = staticmethod(lambda: None)
        for place in places:
            place.begun = begun


def played(verb: str, path: str, timeout: float, teller: int = -1, at: int | None = None) -> tuple[Outcome, int]:
    """How the call ended on this rank, and how many steps it took."""
    call = VERBS[verb](path, timeout)
    dist.barrier()
    with counted(at if dist.get_rank() == teller else None) as steps:
        ended = outcome(call)
        return ended, next(steps)


def seconds_of(call: Call) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began
