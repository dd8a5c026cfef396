"""compat.swa_utils: AveragedModel beside torch's, bit for bit, with its functions, ours and users' own; sharded; update_bn."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.optim import swa_utils as origin

from shardow.compat import swa_utils as ours
from shardow.compat._stand_in import StandIn

ALL = bool(os.environ.get("SHARDOW_ALL"))


def own_multi_avg_fn(averages: Any, weights: Any, num_averaged: Any) -> None:
    """A user's: the maximum of both, and a little of the count."""
    assert len({(tensor.device, tensor.dtype) for tensor in averages}) == 1
    torch._foreach_maximum_(averages, weights)
    torch._foreach_mul_(averages, 1 - 1e-3 / (float(num_averaged) + 1))


def own_avg_fn(average: torch.Tensor, weight: torch.Tensor, num_averaged: Any) -> torch.Tensor:
    return average * 0.5 + weight.abs().sqrt() / (num_averaged + 2)


#: What a user gives to AveragedModel, from functions of torch's module or of ours.
CASES: list[Callable[[Any], dict[str, Any]]] = [
    lambda f: {},
    lambda f: {"multi_avg_fn": f.get_swa_multi_avg_fn()},
    lambda f: {"avg_fn": f.get_swa_avg_fn()},
    lambda f: {"multi_avg_fn": f.get_ema_multi_avg_fn(0.99)},
    lambda f: {"multi_avg_fn": f.get_ema_multi_avg_fn(0.3), "use_buffers": True},
    lambda f: {"avg_fn": f.get_ema_avg_fn(0.99), "use_buffers": True},
    lambda f: {"multi_avg_fn": own_multi_avg_fn},
    lambda f: {"avg_fn": own_avg_fn},
]
if ALL:
    CASES += [lambda f, d=d: {"multi_avg_fn": f.get_ema_multi_avg_fn(d), "use_buffers": True} for d in (0.0, 0.5, 1.0)]  # type: ignore[misc]
    CASES += [lambda f, d=d: {"avg_fn": f.get_ema_avg_fn(d)} for d in (0.0, 0.5, 1.0)]  # type: ignore[misc]


def same(theirs: nn.Module, mine: nn.Module, model: nn.Module) -> None:
    """Equal in all floating tensors, order and dtypes; counters are the model's, which torch truncates with use_buffers."""
    expected, found, now = theirs.state_dict(), mine.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        counter = not tensor.is_floating_point() and name != "n_averaged"
        assert torch.equal(tensor, now[name.removeprefix("module.")] if counter else expected[name]), name
    for (name, buffer), other in zip(theirs.named_buffers(), mine.buffers(), strict=True):
        assert torch.equal(buffer, other) or not buffer.is_floating_point(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", walks.NAMES)
@pytest.mark.filterwarnings("ignore:averages in:RuntimeWarning")
def test_a_thousand_steps_are_bit_equal_and_states_cross(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if dtype != torch.float32 and name != "mlp" and not ALL:
        pytest.skip("of the wider matrix: SHARDOW_ALL=1, as make test-all sets it")
    model = walks.model(name, dtype)
    made = [(origin.AveragedModel(model, **case(origin)), ours.AveragedModel(model, **case(ours))) for case in CASES]
    for step in walks.walk(model, name, walks.STEPS if dtype == torch.float32 or ALL else 120):
        for theirs, mine in made:
            theirs.update_parameters(model)
            mine.update_parameters(model)
            if step in (1, 2, 100):
                same(theirs, mine, model)
            if step == 100:
                torch.save([theirs.state_dict(), mine.state_dict()], tmp_path / "state.pt")
                for average in (theirs, mine):
                    for tensor in average.state_dict().values():
                        tensor.zero_()
                before, after = torch.load(tmp_path / "state.pt")
                mine.load_state_dict(before)
                theirs.load_state_dict(after)
    for theirs, mine in made:
        same(theirs, mine, model)


def test_functions_of_either_module_work_in_either_class_and_alone() -> None:
    model = walks.model("blocks")
    made = [[cls.AveragedModel(model, **case(fns)) for cls, fns in ((origin, origin), (origin, ours), (ours, origin))] for case in CASES]
    for _ in walks.walk(model, "blocks", 20):
        for averages in made:
            for average in averages:
                average.update_parameters(model)
    for first, *others in made:
        for other in others:
            assert all(torch.equal(tensor, first.state_dict()[name]) for name, tensor in other.state_dict().items())
    for get, arguments in (("get_swa_multi_avg_fn", ()), ("get_ema_multi_avg_fn", (0.9,))):
        lists = [[torch.arange(5.0), torch.ones(3)] for _ in range(2)]
        weights = [torch.full((5,), 2.0), torch.zeros(3)]
        for module, averages in zip((origin, ours), lists, strict=True):
            getattr(module, get)(*arguments)(averages, weights, torch.tensor(3))
        assert all(map(torch.equal, *lists))
    for get, arguments in (("get_swa_avg_fn", ()), ("get_ema_avg_fn", (0.9,))):
        results = [getattr(module, get)(*arguments)(torch.arange(5.0), torch.full((5,), 2.0), 3) for module in (origin, ours)]
        assert torch.equal(*results)


def test_functions_may_be_replaced_at_any_time() -> None:
    model = walks.model("mlp")
    theirs, mine = origin.AveragedModel(model), ours.AveragedModel(model)
    for step in walks.walk(model, "mlp", 30):
        if step == 10:
            theirs.multi_avg_fn, mine.multi_avg_fn = origin.get_ema_multi_avg_fn(0.9), ours.get_ema_multi_avg_fn(0.9)
        if step == 20:
            theirs.multi_avg_fn, mine.multi_avg_fn = None, None
            theirs.avg_fn, mine.avg_fn = origin.get_ema_avg_fn(0.9), ours.get_ema_avg_fn(0.9)
        theirs.update_parameters(model)
        mine.update_parameters(model)
    same(theirs, mine, model)


def test_counters_are_copied_where_torch_fails() -> None:
    """Averaged buffers, integers among them: RuntimeError from addcdiv there."""
    model = walks.model("mlp")
    given = {"use_buffers": True, "multi_avg_fn": origin.get_swa_multi_avg_fn()}
    theirs, mine = origin.AveragedModel(model, **given), ours.AveragedModel(model, **given)
    for step in walks.walk(model, "mlp", 4):
        mine.update_parameters(model)
        if step == 1:
            theirs.update_parameters(model)
            continue
        with pytest.raises(RuntimeError, match="addcdiv"):
            theirs.update_parameters(model)
    assert int(mine.module[1].num_batches_tracked) == 4  # type: ignore[index, union-attr, operator, arg-type]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_stay_tied() -> None:
    model = Tied()
    theirs, mine = origin.AveragedModel(model), ours.AveragedModel(model)
    for _ in range(3):
        with torch.no_grad():
            model.embed.weight.add_(1)
        theirs.update_parameters(model)
        mine.update_parameters(model)
    same(theirs, mine, model)


# ---- many ranks


def _shared(kind: str, replicas: str) -> None:
    plain, model = sharded.pair(kind)
    made = [(origin.AveragedModel(plain, **case(origin)), ours.AveragedModel(model, **case(ours), replicas=replicas)) for case in CASES[1:]]
    for _ in sharded.walk(plain, model, 12):
        for theirs, mine in made:
            theirs.update_parameters(plain)
            mine.update_parameters(model)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    for number, (theirs, mine) in enumerate(made):
        assert isinstance(mine.module, StandIn) == (kind != "ddp" or replicas == "split")
        full, expected = mine.full_state_dict(), theirs.state_dict()
        if dist.get_rank() == 0:
            full = {name.replace("module.module.", "module."): tensor for name, tensor in full.items()}
            assert set(full) == set(expected)
            wrong = [name for name, tensor in full.items() if tensor.is_floating_point() and not torch.equal(tensor, expected[name])]
            assert not wrong, (number, wrong)
            assert int(full["n_averaged"]) == 12
            origin.AveragedModel(plain).load_state_dict(full)
        torch.testing.assert_close(mine(x), theirs(x))
    theirs, mine = made[-1][0], made[2][1]
    if isinstance(mine.module, StandIn):
        state = theirs.state_dict()
        state["n_averaged"] = torch.tensor(77)
        mine.load_state_dict({name.replace("module.", "module.module."): tensor for name, tensor in state.items()})
        torch.testing.assert_close(mine(x), theirs(x))
        assert int(mine.n_averaged) == 77
        mine.load_state_dict(made[3][1].state_dict())
        torch.testing.assert_close(mine(x), made[3][0](x))
        lacking = {name: tensor for name, tensor in state.items() if dist.get_rank() != 1 or name != "n_averaged"}
        with pytest.raises((RuntimeError, ConnectionError), match="n_averaged"):
            mine.load_state_dict(lacking)
        torch.testing.assert_close(mine(x), made[3][0](x))
        with pytest.raises(RuntimeError, match="this is another"):
            mine.update_parameters(plain)
    _statistics(plain, model, kind, replicas)


def _statistics(plain: nn.Module, model: nn.Module, kind: str, replicas: str) -> None:
    """update_bn() of the averages leaves the trained model as it was."""
    theirs, mine = origin.AveragedModel(plain), ours.AveragedModel(model, replicas=replicas)
    for _ in sharded.walk(plain, model, 3):
        theirs.update_parameters(plain)
        mine.update_parameters(model)
    next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d)).eval()
    before = [*(buffer.clone() for buffer in model.buffers()), *(torch.tensor(module.training) for module in model.modules())]
    loader = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)), None) for seed in range(3)]
    origin.update_bn(loader, theirs)
    ours.update_bn(loader, mine)
    after = [*model.buffers(), *(torch.tensor(module.training) for module in model.modules())]
    assert all(map(torch.equal, before, after))
    full = mine.full_state_dict()
    if full:
        full = {name.replace("module.module.", "module."): tensor for name, tensor in full.items()}
        torch.testing.assert_close(full["module.7.running_mean"], theirs.state_dict()["module.7.running_mean"])
        torch.testing.assert_close(full["module.7.running_var"], theirs.state_dict()["module.7.running_var"])
    x = loader[0][0]
    torch.testing.assert_close(mine.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kind", "replicas"), [*((kind, "copy") for kind in sharded.KINDS), ("hsdp", "split"), ("ddp", "split")])
def test_sharded_averages_are_the_plain_ones(world: int, kind: str, replicas: str) -> None:
    if not ALL and (world, kind, replicas) not in {
        (2, "fsdp2", "copy"), (2, "ddp", "copy"), (4, "ddp", "split"), (4, "fsdp2", "copy"), (2, "fsdp1", "copy"), (4, "hsdp", "split"),
    }:  # fmt: skip
        pytest.skip("of the wider matrix: SHARDOW_ALL=1, as make test-all sets it")
    ranks.run(world, _shared, kind, replicas)


# ---- the surface itself


def test_names_and_signatures_are_the_origin_s() -> None:
    assert set(ours.__all__) == set(origin.__all__)
    assert ours.SWALR is origin.SWALR
    for name in origin.__all__:
        theirs, mine = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (origin, ours))
        assert [(p.name, p.default) for p in mine if p.name != "replicas"] == [(p.name, p.default) for p in theirs], name
    model = walks.model("mlp")
    theirs, mine = origin.AveragedModel(model), ours.AveragedModel(model)
    for name in ("avg_fn", "multi_avg_fn", "use_buffers", "training"):
        assert getattr(mine, name) == getattr(theirs, name)


def test_misuse_is_the_origin_s_error_and_changes_nothing() -> None:
    for module in (origin, ours):
        with pytest.raises(AssertionError):
            module.AveragedModel(nn.Linear(2, 2), avg_fn=own_avg_fn, multi_avg_fn=own_multi_avg_fn)
        for get in (module.get_ema_avg_fn, module.get_ema_multi_avg_fn):
            for decay in (-0.1, 1.1):
                with pytest.raises(ValueError, match=str(decay)):
                    get(decay)
    with pytest.raises(ValueError, match="decay=nan"):
        ours.get_ema_avg_fn(float("nan"))
    with pytest.raises(ValueError, match="replicas='all'"):
        ours.AveragedModel(nn.Linear(2, 2), replicas="all")
    model = walks.model("mlp")
    average = ours.AveragedModel(model)
    wider = nn.Sequential(*list(model)[:-1], nn.Linear(19, 4, bias=False))
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=r"'5\.weight' is \(3, 19\) in the average and \(4, 19\)"):
            average.update_parameters(wider)
    with pytest.raises(RuntimeError, match=r"'5\.weight' is averaged, but"):
        average.update_parameters(nn.Sequential(*list(model)[:-1]))
    assert int(average.n_averaged) == 0
    with pytest.raises(RuntimeError, match="Missing key"):
        average.load_state_dict({"n_averaged": torch.tensor(3)})


def test_a_copy_and_a_pickle_go_on_by_themselves() -> None:
    model = walks.model("mlp")
    first, theirs = ours.AveragedModel(model), origin.AveragedModel(model)
    for step in walks.walk(model, "mlp", 20):
        if step == 7:
            first = copy.deepcopy(first)
        if step == 14:
            first = pickle.loads(pickle.dumps(first))
        first.update_parameters(model)
        theirs.update_parameters(model)
    same(theirs, first, model)


def test_update_bn_of_whole_models_is_torch_s() -> None:
    model = walks.model("mlp")
    theirs, mine = origin.AveragedModel(model), ours.AveragedModel(model)
    for average in (theirs, mine):
        average.update_parameters(model)
    loader = [torch.randn(4, 6), torch.randn(4, 6)]
    origin.update_bn(loader, theirs)
    ours.update_bn(loader, mine)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in mine.state_dict().items())


@pytest.mark.parametrize("given", [{}, {"multi_avg_fn": ours.get_ema_multi_avg_fn(0.5)}])
def test_what_is_not_finite_is_held(given: dict[str, Any]) -> None:
    model = nn.Linear(2, 1, bias=False)
    average = ours.AveragedModel(model, **given)
    average.update_parameters(model)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), 3.0]]))
    with pytest.warns(RuntimeWarning, match="1 weights are NaN or Inf"):
        average.update_parameters(model)
    weight: Any = average.module.weight
    assert weight[0, 0] == before[0, 0]
    assert weight[0, 1] == before[0, 1] + (3 - before[0, 1]) / 2
