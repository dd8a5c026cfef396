"""What must be equal on all ranks is asked of all; what differs by nature is summed, or is one rank's; whose call meets
whose.
"""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from outcomes import Outcome, outcome
from own_averages import averages_of
from safetensors import safe_open
from torch.nn.parallel import DistributedDataParallel

import shardow
from shardow import _core
from shardow.distributed.rank_group import RankGroup, Step
from shardow.distributed.store_group import store_group
from shardow.sharding import equal
from shardow.sharding.equal import checksums

# ---- counters of a rank's own part


def held_in_one_shard(path: str) -> list[tuple[int, int]]:
    """(held elements in the file, held by this rank after a load), twice: a shard of rank 1 holds one NaN, then
    three."""
    model = models.build("fsdp2", dist.get_world_size())
    ema, seen = shardow.EMA(model, 0.9), []
    weight = model[0].weight._local_tensor
    for count in (1, 3):
        if dist.get_rank() == 1:
            weight.view(-1)[:count] = torch.nan
        with pytest.warns(RuntimeWarning) if dist.get_rank() == 1 and count == 1 else pytest.MonkeyPatch.context():
            ema.update()
        ema.save(path)
        ema.load(path)
        with safe_open(path, "pt") as file:
            state = json.loads(file.metadata()["shardow.state"])
        seen.append((state["held_non_finite"], int(ema.stats()["held_nonfinite"])))
    return seen


def test_elements_held_on_one_rank_are_summed_in_a_save_and_counted_once_after_a_load(tmp_path: Path) -> None:
    zero, one = ranks.run(2, held_in_one_shard, str(tmp_path / "ema.safetensors"))
    assert zero == [(1, 1), (4, 4)]
    assert one == [(1, 0), (4, 0)]


def metadata_of_one_rank(path: str) -> bool:
    shardow.save(
        models.build("fsdp2", 2),
        path,
        metadata={"by": f"rank {dist.get_rank()}", "long": "x" * (9000 * dist.get_rank())},
    )
    return True


def test_metadata_come_from_rank_0(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    assert ranks.run(2, metadata_of_one_rank, str(path)) == [True, True]
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert (metadata["by"], metadata["long"]) == ("rank 0", "")


# ---- facts that differ are named


def other_facts(path: str) -> list[Outcome]:
    model, rank = models.build("fsdp2", dist.get_world_size()), dist.get_rank()
    limit = [5 * 10**9, None, 5 * 10**9][rank]
    return [
        outcome(lambda: shardow.save(model, path, max_shard_size=limit, timeout=60)),
        outcome(lambda: shardow.save(model, path, dtype=[None, None, "bfloat16"][rank], timeout=60)),
        outcome(lambda: shardow.save(model, f"{path}-{min(rank, 1)}", timeout=60)),
    ]


def test_a_fact_of_a_save_that_differs_is_named_with_what_each_rank_has(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for limit, dtype, name in ranks.run(3, other_facts, str(path)):
        assert {limit[0], dtype[0], name[0]} == {"InvalidArgumentError"}
        assert "max_shard_size is 5 GB on rank 0 and none on rank 1" in limit[1]
        assert "dtype is none on rank 0 and BF16 on rank 2" in dtype[1]
        assert f"path is {path}-0 on rank 0 and {path}-1 on rank 1" in name[1]
    assert not list(tmp_path.iterdir())


def asked_of_several(kind: str, folder: str) -> dict[str, list[Outcome]]:
    """Of an EMA with two decays, ranks ask for different ones; then one rank for one that there is not."""
    rank, model = dist.get_rank(), models.build(kind, dist.get_world_size())
    ema = shardow.EMA(model, [0.5, 0.9], timeout=60)
    other, found = models.build(kind, dist.get_world_size(), seed=3), {}
    for one in averages_of(ema).view.parameters:
        one.tensor.add_(1)
    ema.update()
    weights = {one.name: one.tensor.clone() for one in averages_of(ema).view.as_it_is_now()}
    for what, decays in (("other", [0.5, 0.9]), ("none", [0.5, 0.7])):
        mine = decays[rank]
        calls = [
            lambda mine=mine: ema.swap_in(mine),
            lambda mine=mine: ema.swapped(mine).__enter__(),
            lambda mine=mine: ema.full_state_dict(mine),
            lambda mine=mine: ema.export(f"{folder}/a.safetensors", decay=mine),
            lambda mine=mine: ema.distance(mine),
            lambda mine=mine: ema.copy_to(other, mine),
        ]
        found[what] = [outcome(call) for call in calls]
    found["complete"] = [outcome(lambda: ema.full_state_dict(0.5, complete=bool(rank)))]
    assert all(torch.equal(one.tensor, weights[one.name]) for one in averages_of(ema).view.as_it_is_now())
    with ema.swapped(0.9 if rank else "0.9"):  # the same in other words
        pass
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_which_of_several_averages_is_meant_is_asked_of_all_ranks(kind: str, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.run(2, asked_of_several, kind, str(tmp_path))):
        for error, message, seconds in found["other"]:
            assert error == "InvalidArgumentError", message
            assert "decay is '0.5' on rank 0 and '0.9' on rank 1" in message
            assert seconds < 20
        for error, message, seconds in found["none"]:
            assert error == ("PeerFailedError", "InvalidArgumentError")[rank], message
            assert "decay=0.7; this EMA keeps 0.5, 0.9" in message
            assert seconds < 20
        assert "complete is False on rank 0 and True on rank 1" in found["complete"][0][1]
    assert not list(tmp_path.iterdir())


def asked_of_a_load(path: str) -> list[Outcome]:
    """Ranks ask for different ones; then one of them for what there is not."""
    rank = dist.get_rank()
    made, ema = (shardow.EMA(models.build("ddp", dist.get_world_size()), decay, timeout=60) for decay in (0.5, 0.7))
    made.save(path)
    state, which = made.state_dict(), ("file", "own")[rank]
    return [
        outcome(lambda: ema.load(path, options=which)),
        outcome(lambda: ema.load_state_dict(state, options=which)),
        outcome(lambda: ema.load(path, strict=bool(rank))),
        outcome(lambda: ema.load_state_dict(state, strict=bool(rank))),
        outcome(lambda: ema.load(5 if rank else path)),
        outcome(ema.distance),
    ]


def test_what_a_load_takes_is_asked_of_all_ranks(tmp_path: Path) -> None:
    for by_file, by_state, strict, strict_state, no_path, after in ranks.run(
        2, asked_of_a_load, str(tmp_path / "ema.safetensors")
    ):
        for error, message, _ in (by_file, by_state):
            assert error == "InvalidArgumentError", message
            assert "options is 'file' on rank 0 and 'own' on rank 1" in message
        for error, message, _ in (strict, strict_state):
            assert error == "InvalidArgumentError", message
            assert "strict is false on rank 0 and true on rank 1" in message.lower()
        assert "5 is a int, not a path" in no_path[1]
        assert no_path[2] < 20
        assert after[0] == "none", after


# ---- whose call


def crossed() -> tuple[Outcome, Outcome, float]:
    """Two EMAs of two models; the ranks call distance() of them in opposite orders, then in one."""
    world, rank = dist.get_world_size(), dist.get_rank()
    first, second = (models.build("fsdp2", world, seed=seed) for seed in (1, 2))
    emas = [shardow.EMA(first, 0.5), shardow.EMA(second, 0.5)]
    with torch.no_grad():
        for weight in [*first.parameters(), *second.parameters()]:
            weight.add_(1)
    crossing = [outcome(lambda which=which: emas[which ^ rank].distance()) for which in (0, 1)]
    return crossing[0], crossing[1], emas[0].distance()


def test_a_call_of_one_ema_that_meets_anothers_is_an_error_on_all_ranks_at_once() -> None:
    answers = ranks.run(2, crossed, timeout=60)
    for one, other, apart in answers:
        for kind, message, seconds in (one, other):
            assert kind == "InvalidArgumentError"
            assert "distance() of EMA 1" in message
            assert "distance() of EMA 2" in message
            assert seconds < 20
        assert apart == answers[0][2] > 0


def other_call() -> Outcome:
    ema = shardow.EMA(models.build("ddp", 2), 0.5)
    return outcome(ema.full_state_dict if dist.get_rank() else ema.distance)


def test_another_call_of_the_same_ema_is_an_error_that_names_both() -> None:
    for kind, message, _ in ranks.run(2, other_call, timeout=60):
        assert kind == "InvalidArgumentError"
        assert "rank 1 calls full_state_dict() of EMA 1 where rank 0 calls distance() of EMA 1" in message


# ---- weights that differ under one name


class WithExpert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = models.make(), torch.nn.Linear(models.INPUTS, 3, bias=False)


def with_expert() -> DistributedDataParallel:
    model = WithExpert()
    with torch.no_grad():
        model.expert.weight[1, 2] += dist.get_rank()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["expert.weight"])
    return DistributedDataParallel(model)


def local_expert(path: str) -> list[Outcome]:
    model = with_expert()
    left_out = shardow.EMA(model, 0.9, params=lambda name, _: "expert" not in name)
    return [
        outcome(lambda: shardow.EMA(model, 0.9)),
        outcome(lambda: shardow.save(model, path)),
        outcome(lambda: left_out.export(path)),
        outcome(lambda: left_out.full_state_dict(complete=False)),
        outcome(lambda: left_out.save(path)),
    ]


def test_an_expert_of_each_ranks_own_is_refused_before_it_would_be_dropped(tmp_path: Path) -> None:
    for made, saved, exported, read, kept in ranks.run(2, local_expert, str(tmp_path / "a.safetensors")):
        for kind, message, _ in (made, saved, exported):
            assert kind == "InvalidArgumentError"
            assert "'expert.weight' has other values on rank 0 than on rank 1" in message
            assert "params=" in message
        assert read[0] == kept[0] == "none", "without it the rest is averaged and saved"


def other_seeds(path: str) -> list[Outcome]:
    """Ranks that begin with other weights; ranks that drift apart after they have begun with the same."""
    rank = dist.get_rank()
    apart = outcome(lambda: shardow.EMA(models.make(seed=rank), 0.9, group=dist.group.WORLD))
    model = models.make()
    divided, copied = (shardow.EMA(model, 0.9, group=dist.group.WORLD, replicas=how) for how in ("split", "copy"))
    with torch.no_grad():
        model[3].bias[4] += 0.25 * rank
    for ema in (divided, copied):
        ema.update()
    return [
        apart,
        *(outcome(lambda ema=ema: ema.save(path)) for ema in (divided, copied)),
        outcome(copied.full_state_dict),
    ]


def test_replicas_that_differ_are_refused_at_construction_and_at_a_save(tmp_path: Path) -> None:
    for apart, *drifted in ranks.run(3, other_seeds, str(tmp_path / "a.safetensors")):
        assert apart[0] == "InvalidArgumentError"
        assert "'0.weight' (and" in apart[1]
        for kind, message, _ in drifted:
            assert kind == "InvalidArgumentError"
            assert "'3.bias' has other values on rank 0 than on rank 1" in message
    assert not list(tmp_path.iterdir())


def own_batch_statistics(path: str) -> bool:
    model = models.build("ddp", 2)
    model.module[7].running_mean += dist.get_rank()
    ema = shardow.EMA(model, 0.9, buffers="average")
    ema.save(path)
    ema.export(path)
    shardow.save(model, path)
    return True


def test_batch_statistics_of_each_ranks_own_are_rank_0s(tmp_path: Path) -> None:
    assert ranks.run(2, own_batch_statistics, str(tmp_path / "a.safetensors")) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_is_of_values_in_their_order(dtype: torch.dtype) -> None:
    one = torch.arange(15).view(3, 5).to(dtype)
    moved, changed, strided = one.clone(), one.clone(), one.t().contiguous().t()
    moved[0, 0], moved[0, 1] = one[0, 1].item(), one[0, 0].item()
    changed[2, 4] = 0
    assert checksums([one]) == checksums([strided]) == checksums([torch.cat([one, one])[3:]])
    assert len({*checksums([one, moved, changed])}) == 3


class OnDevice(torch.Tensor):
    """Has the host's memory, whose checksum is made as on a device."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_checksum_of_a_device_is_of_values_in_their_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal, "_WORDS", 4)  # elements of a part
    whole = torch.arange(16).view(4, 4).to(dtype)
    moved, strided, behind = (
        torch.cat([whole[2:], whole[:2]]),
        whole.t().contiguous().t(),
        torch.cat([whole[:1], whole])[1:],
    )
    sums = checksums([tensor.as_subclass(OnDevice) for tensor in (whole, strided, behind, moved)])
    assert sums[0] == sums[1] == sums[2] != sums[3]


def counted_apart() -> Outcome:
    """Counts as after a construction in which a rank was interrupted."""
    store_group(dist.group.WORLD).joined += dist.get_rank()
    return outcome(shardow.EMA(models.build("ddp", 2), 0.5).distance)


def test_ranks_that_counted_their_emas_apart_call_the_next_one_alike() -> None:
    assert [kind for kind, *_ in ranks.run(2, counted_apart, timeout=60)] == ["none", "none"]


def shared_with_others() -> Outcome:
    """A weight of each pair of ranks, other on the other pair, and one that all ranks should hold alike."""
    rank, region = dist.get_rank(), _core.Region.whole([2])
    pair = rank // 2
    held = [
        equal.Common("pair", torch.full((2,), float(pair)), region, f"[{2 * pair}, {2 * pair + 1}]"),
        equal.Common("all", torch.full((2,), float(pair)), region, "[0, 1, 2, 3]"),
    ]
    group = RankGroup(dist.group.WORLD, 60.0)
    return outcome(
        lambda: group.step("call()", lambda: Step(None, [equal.equal_copies("call()", held, group, "hint")]))
    )


def test_weights_are_compared_between_ranks_that_share_others_with_others() -> None:
    for kind, message, _ in ranks.run(4, shared_with_others):
        assert (kind, message) == (
            "InvalidArgumentError",
            "call(): 'all' has other values on rank 0 than on rank 2; hint",
        )


def averages_apart(path: str) -> Outcome:
    """Weights are equal again when their averages are saved."""
    model = models.make()
    ema = shardow.EMA(model, 0.5, group=dist.group.WORLD, replicas="copy")
    bias = model[3].bias.detach()
    kept = bias.clone()
    bias[4] += dist.get_rank()
    ema.update()
    bias.copy_(kept)
    return outcome(lambda: ema.save(path))


def test_averages_that_differ_are_refused_though_weights_do_not(tmp_path: Path) -> None:
    for kind, message, _ in ranks.run(2, averages_apart, str(tmp_path / "a.safetensors")):
        assert kind == "InvalidArgumentError"
        assert "'3.bias' has other values on rank 0 than on rank 1" in message
