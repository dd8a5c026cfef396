"""States that are no tensors of their parameter's shape, schedulers of every kind, parameters without a state."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from runs import Run, equal, tensors_of
from torch import nn
from torch.distributed.tensor import DTensor

import shardow

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def walk(where: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[where] = value.detach().clone()
        elif isinstance(value, (list, dict)):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                walk(f"{where}.{key}", one)
        else:
            found[f"{where}={value!r}"] = torch.empty(0)

    walk("", optimizer.state_dict()["state"])
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


class Sign(torch.optim.Optimizer):
    """Somebody's own: numbers, texts, lists and half precision among its states."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "schedule": {"warm": [1, 2], 3: "three"}})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["kind"] = "sign"
                state["seen"] = [*state.get("seen", []), (state["count"], 0.5)]
                state["past"] = [*state.get("past", []), p.grad.detach().clone()][-2:]
                state["half"] = p.grad.detach().bfloat16()
                p.data.sub_(group["lr"] * state["past"][0].sign())


OPTIMIZERS: dict[str, Make] = {
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    "adafactor": lambda params: torch.optim.Adafactor(params),
    "rprop": lambda params: torch.optim.Rprop(params),
    "asgd": lambda params: torch.optim.ASGD(params),
    "own": Sign,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_any_form_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for i in range(3):
        step(model, optimizer, i)
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(3, model=model, optimizer=optimizer)
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    again = OPTIMIZERS[name](list(other.parameters()))
    checkpoints.restore(other, optimizer=again)
    assert state_of(optimizer).keys() == state_of(again).keys()
    assert equal(state_of(optimizer), state_of(again))
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in again.param_groups
    ]
    for i in range(3, 6):
        step(model, optimizer, i)
        step(other, again, i)
    assert equal(model.state_dict(), other.state_dict())
    assert equal(state_of(optimizer), state_of(again))


def own_on_ranks(kind: str, out: Path) -> None:
    run = Run(kind)
    run.optimizer = Sign(run.model.parameters())
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    for _ in range(2):
        run.optimizer.step(lambda: run.model(torch.ones(8, 6)).square().sum().backward())
    checkpoints = shardow.Checkpoints(out)
    run.save(checkpoints)
    before = state_of(run.optimizer)
    run.optimizer.step(lambda: run.model(torch.ones(8, 6)).square().sum().backward())
    run.restore(checkpoints)
    after = state_of(run.optimizer)
    assert before.keys() == after.keys()
    local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in after.items()}
    assert equal({name: one.to_local() if isinstance(one, DTensor) else one for name, one in before.items()}, local)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_lists_of_sharded_tensors_go_on_too(kind: str, tmp_path: Path) -> None:
    ranks.run(2, own_on_ranks, kind, tmp_path)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplied": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chain": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.PolynomialLR(o, 9)]
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
def test_every_scheduler_goes_on(name: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        found = []
        for i in range(steps):
            optimizer.step()
            scheduler.step(*([1.0 + i] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = make()
    if any(map(callable, scheduler.state_dict().values())):
        pytest.skip("this torch keeps a function in the state")  # 2.6 in SWALR's, which is refused
    rates(optimizer, scheduler, 3)
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(3, model=model, optimizer=optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler, 6)
    other, other_optimizer, other_scheduler = make()
    checkpoints.restore(other, optimizer=other_optimizer, scheduler=other_scheduler)
    assert rates(other_optimizer, other_scheduler, 6) == expected


def test_a_scaler_is_saved_beside_the_scheduler(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    checkpoints = shardow.Checkpoints(tmp_path)
    parts = {"lr": torch.optim.lr_scheduler.StepLR(optimizer, 2), "scaler": scaler}
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    checkpoints.save(1, model=model, scheduler=parts)
    other = {"lr": torch.optim.lr_scheduler.StepLR(optimizer, 2), "scaler": torch.amp.GradScaler("cpu")}
    checkpoints.restore(model, scheduler=other)
    assert other["scaler"].get_scale() == 8.0


def test_parameters_without_a_state_have_none_afterwards(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer)
    other = copy.deepcopy(model)
    again = torch.optim.AdamW(other.parameters())
    step(other, again, 1)
    checkpoints.restore(other, optimizer=again)
    assert len(again.state) == 3
    assert equal(state_of(optimizer), state_of(again))


def test_memory_of_a_state_that_fits_is_used_again(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer)
    addresses = [optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()]
    expected = state_of(optimizer)
    step(model, optimizer, 1)
    checkpoints.restore(model, optimizer=optimizer)
    assert [optimizer.state[p]["exp_avg"].data_ptr() for p in model.parameters()] == addresses
    assert equal(state_of(optimizer), expected)


def test_states_lie_as_their_parameter_does(tmp_path: Path) -> None:
    """With and without memory from before; torch's fused steps want that."""
    models = [torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.arange(150.0).view(2, 3, 5, 5)).square().sum().backward()
        optimizer.step()
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model=models[0], optimizer=optimizers[0])
    for optimizer in (optimizers[1], torch.optim.Adam(models[1].parameters())):
        checkpoints.restore(model=models[1], optimizer=optimizer)
        for saved, weight in zip(models[0].parameters(), models[1].parameters(), strict=True):
            expected, average = optimizers[0].state[saved]["exp_avg"], optimizer.state[weight]["exp_avg"]
            assert torch.equal(expected, average)
            assert average.stride() == weight.stride()


def test_states_in_another_dtype_than_their_parameter_keep_it(tmp_path: Path) -> None:
    """torch's load_state_dict() would round them."""
    model = nn.Linear(4, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.rand(p.shape),
            "exp_avg_sq": torch.rand(p.shape),
        }
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer)
    again, stepped = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    stepped.step()  # its states are in the weights' dtype
    for other in (again, stepped):
        checkpoints.restore(model, optimizer=other)
        assert equal(state_of(optimizer), state_of(other))


def test_options_that_the_saved_optimizer_did_not_have_stay(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model=model, optimizer=optimizer)
    again = torch.optim.SGD([{"params": list(model.parameters()), "of a later version": 7}], lr=0.5)
    checkpoints.restore(model, optimizer=again)
    assert (again.param_groups[0]["lr"], again.param_groups[0]["of a later version"]) == (0.25, 7)


def steps_differ(out: Path) -> str:
    """Parameters with other numbers of steps become one flat parameter."""
    run = Run("fsdp2", "adamw-one")
    run.train(1)
    run.optimizer.state[run.model[1].weight]["step"] += 1
    checkpoints = shardow.Checkpoints(out)
    run.save(checkpoints)
    other = Run("fsdp1-flat", "adamw-one")
    with pytest.raises(ValueError, match="use_orig_params") as error:
        other.restore(checkpoints)
    return str(error.value)


def test_states_that_one_flat_parameter_cannot_have_are_refused(tmp_path: Path) -> None:
    for says in ranks.run(2, steps_differ, tmp_path):
        assert "'step' differed" in says


def test_averages_of_other_decays_follow_the_option(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    ema = shardow.EMA(model, decay=0.9)
    ema.update()
    checkpoints = shardow.Checkpoints(tmp_path)
    checkpoints.save(1, model=model, averages=ema)
    other = shardow.EMA(model, decay=0.99)
    with pytest.warns(UserWarning, match="options='own'"):
        checkpoints.restore(model, other)
    assert list(other.decays) == ["0.9"]
    own = shardow.EMA(model, decay=0.99)
    checkpoints.restore(model, own, options="own")
    assert list(own.decays) == ["0.99"]
    with pytest.raises(ValueError, match="the averages of 2 decays"):
        checkpoints.restore(model, shardow.EMA(model, decay=[0.9, 0.99]))
    assert tensors_of(tmp_path / "step-000000001")


def stage(out: Path) -> tuple[list[str], bool]:
    """Each rank has layers of its own, and an optimizer of these."""

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(4, 3 + dist.get_rank())})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make(0)
    next(iter(model.values()))(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    checkpoints = shardow.Checkpoints(out)
    checkpoints.save(1, model=model, optimizer=optimizer)
    other, again = make(1)
    checkpoints.restore(other, optimizer=again)
    names = json.loads((out / "step-000000001" / "checkpoint.json").read_text())["optimizer"][""]["groups"][0]["params"]
    return names, equal(model.state_dict(), other.state_dict()) and equal(state_of(optimizer), state_of(again))


def test_stages_of_a_pipeline_are_one_checkpoint(tmp_path: Path) -> None:
    names = [f"layer{rank}.{kind}" for rank in (0, 1) for kind in ("weight", "bias")]
    assert ranks.run(2, stage, tmp_path) == [(names, True)] * 2
