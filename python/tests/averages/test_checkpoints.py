"""Averages travel: through torch.distributed.checkpoint and our files, from any sharding to any, and go on
bit-identically.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from own_averages import averages_of
from small import equal

import shardow
from shardow.distributed import gather

DECAYS = [0.9, 0.99999]
Full = dict[str, dict[str, torch.Tensor]]


def make(kind: str) -> tuple[torch.nn.Module, shardow.EMA]:
    model = models.build(kind, dist.get_world_size())
    return model, shardow.EMA(model, DECAYS, update_every=2, seed=5)


def step(model: torch.nn.Module, ema: shardow.EMA, steps: int, seed: int) -> None:
    """The same change of the whole weights however they are shared: each element moves by its own global noise."""
    for i in range(steps):
        for local in averages_of(ema).view.parameters:
            generator = torch.Generator().manual_seed(hash((seed, i)) % 2**31)
            full = torch.randn(tuple(local.region.shape), generator=generator)
            gather.extract_region(full, local.region, local.tensor.view(-1))
        ema.update()


def full_of(ema: shardow.EMA) -> Full:
    return {key: ema.full_state_dict(key, complete=False) for key in averages_of(ema).keys}


def save(kind: str, how: str, path: str) -> tuple[Full, Full]:
    model, ema = make(kind)
    step(model, ema, 5, seed=1)
    if how == "dcp":
        dcp.save({"ema": ema}, checkpoint_id=path)
    else:
        ema.save(path)
    saved = full_of(ema)
    step(model, ema, 5, seed=2)
    return saved, full_of(ema)


def load(kind: str, how: str, path: str) -> tuple[Full, Full, float]:
    model, ema = make(kind)
    step(model, ema, 1, seed=9)
    if how == "dcp":
        state: dict[str, Any] = {"ema": ema}
        dcp.load(state, checkpoint_id=path)
    else:
        ema.load(path)
    loaded = full_of(ema)
    steps = ema.stats()["step"]
    step(model, ema, 5, seed=2)
    return loaded, full_of(ema), steps


def same(a: Full, b: Full) -> bool:
    return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)


PLACES = [("plain", 1), ("ddp", 2), ("fsdp1", 2), ("fsdp1-flat", 4), ("fsdp2", 3), ("fsdp2", 4), ("hsdp", 4)]


@pytest.mark.parametrize("how", ["dcp", "files"])
@pytest.mark.parametrize(("kind", "world"), PLACES)
def test_saved_averages_load_anywhere_and_go_on_bit_identically(
    how: str, kind: str, world: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    saved, later = ranks.run(world, save, kind, how, path)[0]
    for other, size in [("fsdp2", 2), ("plain", 1), ("ddp", 3)]:
        loaded, resumed, steps = ranks.run(size, load, other, how, path)[0]
        assert steps == 5
        assert same(loaded, saved), (other, size)
        assert same(resumed, later), (other, size)


def save_while_training(kind: str, path: str) -> tuple[Full, Full]:
    """Through both of torch's stagers; the averages go on before what was staged is written."""
    model, ema = make(kind)
    step(model, ema, 3, seed=4)
    first = full_of(ema)
    saving = dcp.async_save({"ema": ema}, checkpoint_id=f"{path}-default")
    step(model, ema, 2, seed=6)
    saving.result()
    second = full_of(ema)
    saving = dcp.async_save({"ema": ema}, storage_writer=dcp.FileSystemWriter(f"{path}-blocking"))
    step(model, ema, 2, seed=7)
    saving.result()
    return first, second


def load_as_a_dict(kind: str, path: str) -> tuple[Full, Full]:
    """Not through Stateful: the tensors of state_dict() are the EMA's memory, and load_state_dict() takes their
    copies."""
    model, ema = make(kind)
    step(model, ema, 1, seed=9)
    state = {"ema": {**ema.state_dict(), "averages": copy.deepcopy(ema.state_dict()["averages"])}}
    dcp.load(state, checkpoint_id=f"{path}-blocking")
    ema.load_state_dict(state["ema"])
    blocking = full_of(ema)
    step(model, ema, 1, seed=8)
    dcp.load({"ema": ema}, checkpoint_id=f"{path}-default")
    return blocking, full_of(ema)


@pytest.mark.parametrize(("kind", "world"), [*PLACES, ("tp+fsdp2", 4)])
def test_dcp_saves_in_the_background_under_every_sharding(kind: str, world: int, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    first, second = ranks.run(world, save_while_training, kind, path)[0]
    other, size = ("tp+fsdp2", 2) if kind == "tp+fsdp2" else ("fsdp2", 2)
    blocking, default = ranks.run(size, load_as_a_dict, other, path)[0]
    assert same(blocking, second)
    assert same(default, first)


def copy_across() -> list[bool]:
    model, ema = make("fsdp2")
    step(model, ema, 3, seed=1)
    full = ema.full_state_dict(0.9, complete=True)
    checks = []
    for kind in ("plain", "ddp", "fsdp1", "fsdp2"):
        other = models.build(kind, dist.get_world_size(), seed=7)
        ema.copy_to(other, decay=0.9)
        weights = models.whole_weights(other)
        if dist.get_rank() == 0:
            checks.append(all(torch.equal(weights[n], full[n]) for n in weights))
    return checks


def test_copy_to_fills_modules_of_any_sharding() -> None:
    assert ranks.run(2, copy_across)[0] == [True] * 4


def distances(kind: str) -> float:
    model, ema = make(kind)
    step(model, ema, 3, seed=1)
    return ema.distance(0.9)


def test_distance_is_the_same_on_any_ranks() -> None:
    expected = ranks.run(1, distances, "plain")[0]
    for kind, world in PLACES:
        assert ranks.run(world, distances, kind) == pytest.approx([expected] * world, rel=1e-12)


def full_of_a_large_one() -> tuple[int, int, int]:
    """(grown resident memory of full_state_dict beyond the result, the largest tensor, the model) in bytes; the result
    is thrown away.
    """
    import psutil

    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)])
    for layer in model:
        torch.distributed.fsdp.fully_shard(layer)
    torch.distributed.fsdp.fully_shard(model)
    ema = shardow.EMA(model, 0.9)
    largest, whole = 0, 0
    process = psutil.Process()
    averages = averages_of(ema)
    gatherer = gather.Gatherer("full_state_dict()", averages.parts(0), averages.ranks)
    start = process.memory_info().rss
    peak = start
    for _, tensor in gatherer.stream():
        whole += 0 if tensor is None else tensor.nbytes
        largest = max(largest, 0 if tensor is None else tensor.nbytes)
        del tensor
        peak = max(peak, process.memory_info().rss)
    return peak - start, largest, whole


def test_streaming_holds_one_tensor_at_a_time() -> None:
    (grown, largest, whole), (elsewhere, none, nothing) = ranks.run(2, full_of_a_large_one)
    assert largest == 4 << 20
    assert whole > 24 * largest
    assert (none, nothing) == (0, 0)
    assert grown < whole / 2  # 16 to 40 MiB: what is on the way, and what malloc keeps of what was freed
    assert elsewhere < 32 << 20


def pickled(kind: str) -> bool:
    import io

    model, ema = make(kind)
    step(model, ema, 2, seed=1)
    saved = full_of(ema)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match="on rank 0 alone the other parts are lost"):
        torch.save(ema.state_dict(), file)
    step(model, ema, 2, seed=3)
    file.seek(0)
    ema.load_state_dict(torch.load(file, weights_only=False))
    return same(full_of(ema), saved) and copy.deepcopy(ema.state_dict()) is not None


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_state_dict_survives_torch_save_rank_by_rank_and_warns_that_it_is_a_part(kind: str) -> None:
    assert ranks.run(2, pickled, kind) == [True, True]
