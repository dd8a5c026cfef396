"""Averages of DeepSpeed's masters, with DeepSpeed itself on gloo ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
import torch.distributed as dist
from engines import KINDS, Net, engine, of_deepspeed, train, whole
from safetensors.torch import load_file

import shardow
from shardow.compat.dist_ema import DistEMA
from shardow.integrations.deepspeed import ema

pytestmark = of_deepspeed
State = dict[str, torch.Tensor]
SOME = ["bf16-optimizer", "zero3"]  # the others with SHARDOW_ALL=1
EVERY = [*KINDS] if os.environ.get("SHARDOW_ALL") else SOME


def equal(one: State, other: State) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def collectives() -> Iterator[dict[str, int]]:
    """What DeepSpeed logs, and what torch's process groups are asked for, in the block."""
    from deepspeed.comm import comm

    def logged() -> int:
        return sum(times[0] for sizes in comm.comms_logger.comms_dict.values() for times in sizes.values())

    before, found = logged(), {"deepspeed": 0, "torch": 0}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield found
    found["deepspeed"] = logged() - before
    found["torch"] = sum(
        event.count for event in profile.key_averages() if "c10d::" in event.key or "gloo:" in event.key
    )


def averaged(kind: str, path: str) -> dict[str, Any]:
    """Steps, and beside them a plain float32 model that AdamW trains with the same data; for weights in bfloat16, whose
    gradients are others, one that is given the masters after each step."""
    made = engine(
        kind, comms_logger={"enabled": True, "prof_all": True, "verbose": False, "debug": False, "prof_ops": []}
    )
    averages = ema(made, decay=[0.9, 0.5])
    plain = Net()
    if bfloat16 := "bf16" in KINDS[kind]:
        plain.load_state_dict(whole(made), strict=False)
    optimizer = engines.adam(plain)
    beside = shardow.EMA(plain, [0.9, 0.5])
    talked = {"deepspeed": 0, "torch": 0}
    for step in range(3):
        with collectives() as worked:
            train(made, step)
        with collectives() as told:
            averages.update()
        talked = {key: talked[key] + told[key] for key in talked}
        with collectives() as control:
            masters = whole(made)
        if bfloat16:
            plain.load_state_dict(masters, strict=False)
        else:
            engines.train_plain(plain, optimizer, step)
        assert all(torch.equal(masters[name], p) for name, p in plain.named_parameters())
        beside.update()
    want = beside.state_dict()["averages"]
    alike = [equal(averages.full_state_dict(decay, complete=False), want[decay]) for decay in ("0.9", "0.5")]
    own, total = averages.stats()["elements"], sum(value.numel() for value in want["0.9"].values())
    averages.save(path)
    averages.export(Path(path).with_name("model"), decay=0.9)
    return {"alike": alike, "talked": talked, "control": control, "trained": worked, "own": own, "total": total,
            "apart": averages.distance(0.9), "expected": beside.distance(0.9), "want": want,
            "evaluated": evaluated(made, averages)}  # fmt: skip


def evaluated(made: Any, averages: shardow.EMA) -> dict[str, bool]:
    made.eval()
    x = torch.linspace(-1, 1, 21).view(3, 7).to(made.get_data_types()[0])
    with torch.no_grad():
        before = made(x).clone()
        with averages.swapped(0.9):
            inside = made(x).clone()
        after = made(x).clone()
    made.train()
    full = averages.full_state_dict(0.9)
    found = {"weights are back": torch.equal(before, after), "averages were there": not torch.equal(before, inside)}
    if full:
        model = Net().to(x.dtype).eval()
        model.load_state_dict(full)
        found["as the complete model"] = torch.equal(model(x), inside)
    return found


def taken_up(kind: str, path: str) -> State:
    made = engine(kind)
    averages = ema(made, decay=[0.9, 0.5])
    averages.load(path)
    return averages.full_state_dict(0.9, complete=False)


@pytest.mark.parametrize("kind", EVERY)
def test_averages_are_those_of_a_plain_model_in_float32(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "averages")
    zero, one = engines.run(2, averaged, kind, path)
    assert zero["alike"][:1] == [True]
    assert zero["alike"] == [True, True]
    assert zero["talked"] == one["talked"] == {"deepspeed": 0, "torch": 0}
    assert min(zero["trained"].values()) > 0  # a step's own collectives are seen by both
    if kind != "zero0":
        assert zero["control"]["torch"] > 0  # to look at whole masters DeepSpeed gathers, which is seen
    assert zero["own"] + one["own"] == zero["total"]
    assert zero["apart"] == one["apart"] == pytest.approx(zero["expected"], rel=1e-12)
    assert all(zero["evaluated"].values()), zero["evaluated"]
    assert all(one["evaluated"].values()), one["evaluated"]
    assert {*load_file(tmp_path / "model" / "model.safetensors")} >= {
        "first.weight",
        "second.weight",
        "frozen.weight",
        "seen",
    }
    others = {"zero1": (1, "zero3"), "zero3": (3, "zero2"), "bf16-optimizer": (1, "zero1")}
    if kind in others:
        assert equal(engines.run(others[kind][0], taken_up, others[kind][1], path)[0], zero["want"]["0.9"])


def trained(kind: str, home: str, first: int, last: int, swaps: bool, kill: int | None) -> State:
    """Steps ``first`` to ``last``; saves after step 1; ``kill``: -9 after that step."""
    made = engine(kind, gradient_clipping=1.0)
    averages = ema(made, decay=0.9)
    if first:
        made.load_checkpoint(home, tag="run")
        averages.load(f"{home}/averages.safetensors")
    for step in range(first, last):
        train(made, step)
        averages.update()
        if swaps:
            evaluated_as(made, averages)
        if step == 1:
            made.save_checkpoint(home, tag="run")
            averages.save(f"{home}/averages.safetensors")
        if step == kill:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    return averages.full_state_dict(complete=False)


def evaluated_as(made: Any, averages: shardow.EMA) -> None:
    with averages.swapped(), torch.no_grad():
        made(torch.ones(2, 7).to(made.get_data_types()[0]))


@pytest.mark.parametrize("kind", ["zero2", "zero3"] if os.environ.get("SHARDOW_ALL") else ["zero3"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    """Evaluation under averages leaves no trace either."""
    whole_run = engines.run(2, trained, kind, str(tmp_path / "one"), 0, 4, False, None)[0]
    killed = engines.run(2, trained, kind, str(tmp_path / "two"), 0, 4, True, 2, may_die=True)
    assert killed == [None, None]
    assert equal(engines.run(2, trained, kind, str(tmp_path / "two"), 2, 4, True, None)[0], whole_run)


def counted() -> tuple[list[int], list[str]]:
    """ema.step after each engine.step(), of which some change nothing."""
    made = engine("zero2", gradient_accumulation_steps=2, bf16={"enabled": True, "check_grad_overflow": True})
    averages = ema(made, decay=0.9)
    steps = []
    for step in range(6):
        if step == 3 and dist.get_rank() == 0:
            handle = next(iter(made.module.last.parameters())).register_hook(lambda grad: grad * torch.inf)
            train(made, step)
            handle.remove()
        else:
            train(made, step)
        averages.update()
        steps.append(averages.step)
    said = []
    for call in (
        lambda: averages.attach(made.optimizer),
        lambda: copy.deepcopy(averages),
        lambda: ema(made, overlap=True),
    ):
        try:
            call()
        except shardow.Error as error:
            said.append(str(error))
    return steps, said


def test_steps_that_were_not_applied_are_not_counted() -> None:
    for steps, said in engines.run(2, counted):
        assert steps == [0, 1, 1, 1, 1, 2]  # boundaries at 1, 3 and 5; overflow at 3
        for text, pattern in zip(
            said, ["update\\(\\) after its steps", "can't be copied", "overlap=.*leave it out"], strict=True
        ):
            assert re.search(pattern, text)


def gathered() -> tuple[str, bool, bool, bool, list[State]]:
    """What else may happen to ZeRO-3's weights."""
    from deepspeed import zero

    made = engine("zero3")
    averages, origin = (
        ema(made, decay=0.9, params="all"),
        DistEMA(made.module, dist.get_world_size(), dist.get_rank(), decay=0.9),
    )
    with zero.GatheredParameters(list(made.module.parameters()), modifier_rank=0):
        before = {name: p.detach().clone() for name, p in made.module.named_parameters()}
        if dist.get_rank() == 0:
            made.module.first.weight.data += 1
        try:
            with averages.swapped():
                said = ""
        except shardow.Error as error:
            said = str(error)
    train(made, 0)
    averages.update()
    origin.update(made.module)
    frozen = equal({"w": averages.full_state_dict(complete=False).get("frozen.weight", torch.zeros(0))},
                   {"w": before["frozen.weight"] if dist.get_rank() == 0 else torch.zeros(0)})  # fmt: skip
    # Moves them as offload_states() and reload_states() do, which want a device's optimizer.
    for flat in made.optimizer.fp32_partitioned_groups_flat:
        flat.data = flat.data.clone()
    train(made, 1)
    averages.update()
    origin.update(made.module)
    mine, theirs = averages.full_state_dict(complete=False), origin.state_dict()
    model = Net()
    moved = bool(averages.distance() > 0)
    averages.copy_to(model)
    averages.copy_to(made.module)
    full = averages.full_state_dict()
    return (
        said,
        frozen,
        moved,
        all(torch.equal(p, full[n]) for n, p in model.state_dict().items()) if full else True,
        [mine, theirs],
    )


def test_zero3_beside_other_things_that_happen_to_weights() -> None:
    zero, one = engines.run(2, gathered)
    for said, frozen, moved, copied, _ in (zero, one):
        assert "leave that block first" in said
        assert frozen
        assert moved
        assert copied
    mine, theirs = zero[4]
    assert list(mine) == list(theirs)
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-6) for name in mine)


def _engine(**odd: Any) -> Any:
    """What ema() looks at first."""
    optimizer = SimpleNamespace(param_groups=[], **odd.pop("optimizer", {}))
    plain = {
        "pipeline_parallelism": False,
        "has_moe_layers": False,
        "mp_world_size": 1,
        "was_step_applied": bool,
        "optimizer": optimizer,
    }
    return SimpleNamespace(**{**plain, **odd})


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"optimizer": {"swap_optimizer": True}}, "NVMe"),
        ({"optimizer": {"params_in_nvme_and_cpu": True}}, "NVMe"),
        ({"optimizer": {"round_robin_gradients": True}}, "round_robin_gradients.*leave that out"),
        ({"pipeline_parallelism": True}, "pipeline"),
        ({"has_moe_layers": True}, "experts"),
        ({"mp_world_size": 2}, "tensor parallel"),
        ({"zenflow": object()}, "ZenFlow"),
    ],
)
def test_what_is_not_averaged_is_refused_before_anything_else(odd: dict[str, Any], says: str) -> None:
    with pytest.raises(NotImplementedError, match=says):
        ema(_engine(**odd))


def test_other_things_than_engines_are_refused() -> None:
    for wrong in (torch.nn.Linear(2, 2), _engine(optimizer={}).optimizer, None):
        with pytest.raises(ValueError, match=re.escape("the engine that deepspeed.initialize() returns")):
            ema(wrong)


def looped(steps: int, stage: int, out: Path) -> tuple[dict[str, float], State]:
    engines.deepspeed()
    from examples import deepspeed_loop

    found = deepspeed_loop.train(steps, stage, out, save_every=10)
    with shardow.open(out / "model") as model:
        return found, {name: model[name] for name in model}


def test_the_example_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    engines.run(2, looped, 10, 2, tmp_path)
    (found, model), (again, _) = engines.run(2, looped, 20, 2, tmp_path)
    assert found == again
    assert {*found} == {"weights", "averages"}
    assert sum(value.numel() for value in model.values()) == 24_586
