"""source= of stretches: masters that an optimizer divides among replicas as it likes, or a rank's own of a shard."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import models
import outcomes
import pytest
import ranks
import torch
import torch.distributed as dist
from own_averages import averages_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import shardow
from shardow.averaging import replicas
from shardow.integrations.common import MastersEMA

Cut = dict[str, tuple[int, int]]


def masters_of(step: int) -> dict[str, torch.Tensor]:
    """Float32 values that bfloat16 does not have."""
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=draw) for name, p in models.make().named_parameters()}


def cut(rank: int, world: int) -> Cut:
    """Parameters one after another, cut in unequal parts: (begin, end) within each parameter."""
    total = sum(p.numel() for p in models.make().parameters())
    ends = [0, *(total * (i + 1) ** 2 // world**2 for i in range(world))]
    found, at = {}, 0
    for name, p in models.make().named_parameters():
        begin, end = (min(max(ends[rank + i] - at, 0), p.numel()) for i in (0, 1))
        found[name] = (begin, end)
        at += p.numel()
    return found


def build(of: str, **options: Any) -> tuple[nn.Module, dict[str, torch.Tensor], shardow.EMA]:
    """(bfloat16 model, this rank's masters, EMA of them)."""
    model = models.make(torch.bfloat16)
    parts = cut(dist.get_rank(), dist.get_world_size())
    own = {name: value.flatten()[slice(*parts[name])].clone() for name, value in masters_of(0).items()}
    source = {name: (own[name], parts[name][0], of) if of else (own[name], parts[name][0]) for name in own}
    return model, own, shardow.EMA(model, 0.9, group=dist.group.WORLD, source=source, **options)


def step(model: nn.Module, own: dict[str, torch.Tensor], number: int) -> None:
    parts = cut(dist.get_rank(), dist.get_world_size())
    for name, value in masters_of(number).items():
        own[name].copy_(value.flatten()[slice(*parts[name])])
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(masters_of(number)[name])


def expected(steps: int) -> dict[str, torch.Tensor]:
    """Of a plain float32 model with the masters as its weights."""
    model = models.make()
    ema = None
    for number in range(steps + 1):
        model.load_state_dict(masters_of(number), strict=False)
        if ema is None:
            ema = shardow.EMA(model, 0.9)
        else:
            ema.update()
    assert ema is not None
    return {name: average.clone() for name, average in ema.state_dict()["averages"].items()}


def run(of: str, path: str, exchanged: int) -> tuple[dict[str, torch.Tensor], list[bool], float, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "EXCHANGED", exchanged)
        model, own, ema = build(of)
        for number in (1, 2, 3):
            step(model, own, number)
            ema.update()
        before = [p.clone() for p in model.parameters()]
        with ema.swapped():
            inside = {name: p.detach().clone() for name, p in model.named_parameters()}
        same = [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
        same += [torch.equal(inside[name], value.bfloat16()) for name, value in expected(3).items()]
        ema.save(path)
        return ema.full_state_dict(complete=False), same, ema.distance(), int(ema.stats()["elements"])


def load(path: str) -> dict[str, torch.Tensor]:
    _, _, ema = build("")
    ema.load(path)
    return ema.full_state_dict(complete=False)


@pytest.mark.parametrize(("world", "of", "exchanged"), [(2, "", 32 << 20), (3, "local", 60), (4, "global", 64)])
def test_stretches_are_averaged_as_whole_masters_are(world: int, of: str, exchanged: int, tmp_path: Path) -> None:
    """``exchanged`` bytes a round: also many small ones."""
    path = str(tmp_path / "ema.safetensors")
    answers = ranks.run(world, run, of, path, exchanged)
    here, want = answers[0][0], expected(3)
    assert list(here) == list(want)
    assert all(torch.equal(here[name], want[name]) for name in want)
    assert all(all(same) for _, same, _, _ in answers)
    assert sum(elements for *_, elements in answers) == sum(value.numel() for value in want.values())
    weights = masters_of(3)
    apart = sum(float((want[name].double() - weights[name].double()).square().sum()) for name in want) ** 0.5
    length = sum(float(weights[name].double().square().sum()) for name in want) ** 0.5
    assert answers[0][2] == pytest.approx(apart / length)
    for other in (1, 2):
        again = ranks.run(other, load, path)[0]
        assert all(torch.equal(again[name], want[name]) for name in want)


def wrong(how: str) -> outcomes.Outcome:
    rank = dist.get_rank()
    parts = cut(rank, dist.get_world_size())
    model, values = models.make(torch.bfloat16), masters_of(0)
    source: dict[str, Any] = {
        name: (value.flatten()[slice(*parts[name])].clone(), parts[name][0]) for name, value in values.items()
    }
    options: dict[str, Any] = {}
    if how == "hole" and rank == 1:
        source["6.bias"] = (torch.zeros(3), 1)
    if how == "twice":
        source["6.bias"] = (torch.zeros(4), 0)
    if how == "outside" and rank == 0:
        source["6.bias"] = (torch.zeros(3), 2)
    if how == "copies":
        options["replicas"] = "copy"
    if how == "whole on one" and rank == 0:
        source["6.bias"] = values["6.bias"]
    if how == "strided":
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return outcomes.outcome(lambda: shardow.EMA(model, 0.9, group=dist.group.WORLD, source=source, **options))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("hole", r"source= of '6.bias': ranks have \[1, 4\) of its 4 elements"),
        ("twice", r"\[0, 4\), \[0, 4\) of its 4 elements; each is in one"),
        ("outside", r"'6.bias': elements \[2, 5\), counted global, are not all on this rank"),
        ("copies", "replicas='split'"),
        ("whole on one", "stretches in source="),
        ("strided", "'0.weight' has strides"),
    ],
)
def test_what_does_not_cover_is_refused_on_every_rank(how: str, says: str) -> None:
    for kind, message, _ in ranks.run(2, wrong, how):
        assert kind in ("InvalidArgumentError", "PeerFailedError", "UnsupportedError"), message
        assert re.search(says, message), message


def test_a_stretch_of_one_process_is_the_whole() -> None:
    model = nn.Linear(3, 2)
    master = torch.randn(6)
    ema = shardow.EMA(model, 0.5, source={"weight": (master, 0)})
    was = master.clone()
    master.add_(1)
    ema.update()
    assert torch.equal(ema.state_dict()["averages"]["weight"].flatten(), torch.lerp(was, master, 0.5))
    with pytest.raises(ValueError, match=r"have \[0, 4\) of its 6 elements"):
        shardow.EMA(model, 0.5, source={"weight": (master[:4], 0)})
    with pytest.raises(ValueError, match="counted 'global' or 'local'"):
        shardow.EMA(model, 0.5, source={"weight": (master, 0, "mine")})


def test_a_source_that_is_of_another_dtype_by_now_is_refused_and_the_old_one_is_averaged_on() -> None:
    model, master = nn.Linear(2, 1, bias=False).bfloat16(), torch.zeros(1, 2)
    ema = shardow.EMA(model, 0.5, source={"weight": master})
    with pytest.raises(ValueError, match=r"source= of 'weight' was .* in torch.float32, and is no more"):
        averages_of(ema).swap.follow_sources({"weight": torch.ones(1, 2, dtype=torch.float64)})
    master.fill_(4)
    ema.update()
    assert ema.full_state_dict(complete=False)["weight"].tolist() == [[2.0, 2.0]]


def test_masters_that_an_optimizer_has_put_elsewhere_are_found_by_every_call() -> None:
    model, masters = nn.Linear(2, 1, bias=False).bfloat16(), {"weight": torch.zeros(1, 2)}

    def addresses() -> list[int]:
        return [master.data_ptr() for master in masters.values()]

    ema = MastersEMA(model, 0.5, lambda: dict(masters), addresses, {})
    kept = masters["weight"]
    masters["weight"] = torch.full((1, 2), 4.0)
    ema.update()
    assert ema.full_state_dict(complete=False)["weight"].tolist() == [[2.0, 2.0]]
    masters["weight"] = torch.full((1, 2), 8.0)
    assert ema.distance() == 0.75
    masters["weight"] = torch.full((1, 2), 6.0)
    ema.reset()
    assert ema.full_state_dict(complete=False)["weight"].tolist() == [[6.0, 6.0]]
    masters["weight"] = torch.zeros(1, 2)
    ema.feed_back()
    assert masters["weight"].tolist() == model.weight.tolist() == [[6.0, 6.0]]
    assert kept.tolist() == [[0.0, 0.0]]


def test_rounds_send_each_element_once_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "EXCHANGED", 240)  # bytes: 20 elements of each of 3 members
    draw = random.Random(0)
    tensors, wanted = [], []
    for i in range(50):
        ends = sorted(draw.randrange(0, draw.choice((3, 90))) for _ in range(4))
        tensors.append({member: (ends[member], ends[member + 1]) for member in range(3)})
        wanted += [(member, i, at) for member, (begin, end) in tensors[-1].items() for at in range(begin, end)]
    sent, rounds = [], [*replicas.rounds(tensors, 3, 4)]
    for members in rounds:
        for member, pieces in enumerate(members):
            assert pieces
            assert sum(end - begin for _, begin, end in pieces) <= 20
            sent += [(member, i, at) for i, begin, end in pieces for at in range(begin, end)]
    assert sorted(sent) == sorted(wanted)
    most = max(sum(member == which for member, _, _ in wanted) for which in range(3))
    assert len(rounds) == -(-most // 20)


def replicated_twice() -> list[bool]:
    """A weight on a mesh of two dimensions, which both replicate; the parts of replicas nest."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(45.0).view(9, 5)
    weight = distribute_tensor(full.clone(), mesh, [Replicate(), Replicate()])
    model = nn.ParameterDict({"w": nn.Parameter(weight)})
    ema = shardow.EMA(model, 0.5)
    weight = model["w"]._local_tensor
    weight += 2
    ema.update()
    with ema.swapped():
        inside = torch.equal(weight, full + 1)
    return [inside, torch.equal(weight, full + 2), int(ema.stats()["elements"]) < 45 // 2]


def test_replicas_of_replicas_have_the_whole_average_in_a_swap() -> None:
    assert ranks.run(4, replicated_twice) == [[True] * 3] * 4
