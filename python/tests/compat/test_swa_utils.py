"""compat.swa_utils: AveragedModel beside torch's, bit for bit, with its functions, ours and users' own; sharded;
update_bn.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import walks
from swa_models import ALL, CASES, own_avg_fn, own_multi_avg_fn
from torch import nn
from torch.optim import swa_utils as origin

from shardow.compat import swa_utils as ours


def same(theirs: nn.Module, mine: nn.Module, model: nn.Module) -> None:
    """Equal in all floating tensors, order and dtypes; counters are the model's, which torch truncates with
    use_buffers.
    """
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
    made = [
        [cls.AveragedModel(model, **case(fns)) for cls, fns in ((origin, origin), (origin, ours), (ours, origin))]
        for case in CASES
    ]
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
        results = [
            getattr(module, get)(*arguments)(torch.arange(5.0), torch.full((5,), 2.0), 3) for module in (origin, ours)
        ]
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


def test_tied_weights_stay_tied() -> None:
    model = walks.Tied()
    theirs, mine = origin.AveragedModel(model), ours.AveragedModel(model)
    for _ in range(3):
        with torch.no_grad():
            model.embed.weight.add_(1)
        theirs.update_parameters(model)
        mine.update_parameters(model)
    same(theirs, mine, model)


def test_names_and_signatures_are_the_origin_s() -> None:
    assert set(ours.__all__) == set(origin.__all__)
    assert ours.SWALR is origin.SWALR
    for name in origin.__all__:
        theirs, mine = (list(inspect.signature(getattr(module, name)).parameters.values()) for module in (origin, ours))
        assert [(p.name, p.default) for p in mine if p.name != "replicas"] == [(p.name, p.default) for p in theirs], (
            name
        )
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
        with pytest.raises(kind, match=r"'5\.weight' has shape \[4, 19\] in the model and \[3, 19\] in its average"):
            average.update_parameters(wider)
    with pytest.raises(RuntimeError, match=r"missing in the model: 5\.weight"):
        average.update_parameters(nn.Sequential(*list(model)[:-1]))
    assert int(average.n_averaged) == 0
    with pytest.raises(RuntimeError, match="missing in the state: "):
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
