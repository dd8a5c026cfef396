"""compat.timm: ModelEma, ModelEmaV2 and ModelEmaV3 beside timm's own, bit for bit; sharded; and what timm and its users got wrong."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import ranks
import sharded
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow.compat import timm as ours
from shardow.compat._stand_in import StandIn


def _origin() -> Any:
    """timm's file by itself: the package wants torchvision."""
    package = importlib.util.find_spec("timm")
    assert package is not None
    assert package.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location("timm_model_ema", Path(package.submodule_search_locations[0]) / "utils" / "model_ema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


origin = _origin()
ALL = bool(os.environ.get("SHARDOW_ALL"))

#: (class, its options, whether update() is given the step)
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("ModelEma", {}, False),
    ("ModelEma", {"decay": 0.3, "device": "cpu"}, False),
    ("ModelEmaV2", {"decay": 0.99}, False),
    ("ModelEmaV3", {}, False),
    ("ModelEmaV3", {"decay": 0.99, "foreach": False}, True),
    ("ModelEmaV3", {"exclude_buffers": True, "update_after_step": 20}, True),
    ("ModelEmaV3", {"use_warmup": True, "min_decay": 0.1, "dtype": torch.float64}, True),
    ("ModelEmaV3", {"use_warmup": True, "warmup_gamma": 10.0, "warmup_power": 0.75, "exclude_buffers": True, "device": "cpu"}, True),
]
if ALL:
    CASES += [("ModelEmaV2", {"decay": d, "device": torch.device("cpu")}, False) for d in (0.0, 0.5, 1.0)]
    CASES += [
        ("ModelEmaV3", {"decay": d, "foreach": f, "exclude_buffers": e, "use_warmup": w, "dtype": t, "stochastic_rounding": False}, True)
        for d in (0.4, 0.999) for f in (True, False) for e in (True, False) for w in (True, False) for t in (None, torch.float64)
    ]  # fmt: skip


def state_of(average: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = (average.ema if hasattr(average, "ema") else average).state_dict()
    return state


def same(theirs: Any, mine: Any, model: nn.Module) -> None:
    """All floating tensors are equal, in the same order; counters are the model's, which V1 and V2 truncate."""
    expected, found, now = state_of(theirs), state_of(mine), model.state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name] if tensor.is_floating_point() else now[name.removeprefix("module.")]), name


def exchange(theirs: Any, mine: Any, path: Path) -> None:
    """Each takes the other's state, out of a file."""
    states = [copy.deepcopy(state_of(theirs)), copy.deepcopy(state_of(mine))]
    for average, state in ((mine, states[0]), (theirs, states[1])):
        torch.save(state, path)
        for tensor in state_of(average).values():
            tensor.zero_()
        (average.ema if hasattr(average, "ema") else average).load_state_dict(torch.load(path))


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_bit_equal_and_states_cross(name: str, tmp_path: Path) -> None:
    model = walks.model(name)
    pairs = [(getattr(origin, cls)(model, **options), getattr(ours, cls)(model, **options), steps) for cls, options, steps in CASES]
    for step in walks.walk(model, name):
        for theirs, mine, steps in pairs:
            for average in (theirs, mine):
                average.update(model, step) if steps else average.update(model)
        if step in (1, 300, walks.STEPS):
            for theirs, mine, _ in pairs:
                same(theirs, mine, model)
        if step == 300:
            for theirs, mine, _ in pairs:
                exchange(theirs, mine, tmp_path / "state.pt")
    x = walks.inputs(name)
    for theirs, mine, _ in pairs:
        if theirs.__class__.__name__ == "ModelEma" or getattr(theirs, "dtype", None) is not None:
            continue
        assert torch.equal(mine(x), theirs(x))
        mine.set(model)
        theirs.set(model)
        same(theirs, mine, model)


def test_low_precision_models_are_bit_equal_too_where_nothing_is_random() -> None:
    model = walks.model("mlp", torch.bfloat16)
    options: list[tuple[str, dict[str, Any]]] = [
        ("ModelEma", {"decay": 0.9}),
        ("ModelEmaV2", {"decay": 0.99}),
        ("ModelEmaV3", {"decay": 0.9, "stochastic_rounding": False}),
        ("ModelEmaV3", {"decay": 0.999, "dtype": torch.float32}),
        ("ModelEmaV3", {"decay": 0.999, "dtype": torch.float32, "foreach": False}),
    ]
    made = []
    for cls, given in options:
        if given.get("dtype") is None:
            with pytest.warns(RuntimeWarning, match="rounded to nearest"):
                made.append((getattr(origin, cls)(model, **given), getattr(ours, cls)(model, **given)))
        else:
            made.append((getattr(origin, cls)(model, **given), getattr(ours, cls)(model, **given)))
    for _ in walks.walk(model, "mlp", walks.STEPS if ALL else 300):
        for theirs, mine in made:
            theirs.update(model)
            mine.update(model)
    for theirs, mine in made:
        same(theirs, mine, model)


def test_a_model_that_changes_its_dtype_is_averaged_by_the_rule_for_that() -> None:
    model = walks.model("blocks")
    theirs, mine = origin.ModelEmaV3(model, 0.9), ours.ModelEmaV3(model, 0.9)
    for step in walks.walk(model, "blocks", 30):
        if step == 15:
            model.bfloat16()
        theirs.update(model)
        mine.update(model)
    same(theirs, mine, model)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_to_the_exact_average(source: torch.dtype, dtype: torch.dtype) -> None:
    """timm's noise is another, and float16 is rounded to nearest there. Each step stays within one unit in the last place, and the mean within its bound."""
    model = nn.Linear(200, 100).to(source)
    nn.init.ones_(model.weight)
    ema = ours.ModelEmaV3(model, 0.999, dtype=dtype, stochastic_rounding_seed=5)
    nn.init.constant_(model.weight, 1.75)
    weight: Any = ema.module.weight
    for _ in range(200):
        before = weight.detach().double()
        ema.update(model)
        exact = before + 0.001 * (1.75 - before)
        assert float((weight.detach().double() - exact).abs().max()) <= torch.finfo(dtype).eps
    expected = 1.75 - 0.75 * 0.999**200
    assert abs(float(weight.detach().double().mean()) - expected) < 4 * torch.finfo(dtype).eps * (200 / weight.numel()) ** 0.5


def test_the_seed_tells_the_noise() -> None:
    model = nn.Linear(200, 100).bfloat16()
    made = [ours.ModelEmaV3(model, 0.999, stochastic_rounding_seed=seed) for seed in (5, 6, 5)]
    nn.init.constant_(model.weight, 1.75)
    for ema in made:
        ema.update(model)
    weights: list[Any] = [ema.module.weight for ema in made]
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def test_stochastic_rounding_works_where_tensors_lie_otherwise_than_the_model_s() -> None:
    model = nn.Linear(100, 50).bfloat16()
    nn.init.ones_(model.weight)
    ema = ours.ModelEmaV3(model, 0.999)
    model.weight = nn.Parameter(torch.full((100, 50), 1.75, dtype=torch.bfloat16).t())
    for _ in range(200):
        ema.update(model)
    assert abs(float(ema.module.weight.detach().double().mean()) - (1.75 - 0.75 * 0.999**200)) < 5e-3  # type: ignore[union-attr, operator]


# ---- many ranks


def _shared(kind: str, replicas: str, path: str) -> None:
    plain, model = sharded.pair(kind)
    made = [
        (origin.ModelEma(plain, 0.9), ours.ModelEma(model, 0.9, replicas=replicas)),
        (origin.ModelEmaV2(plain, 0.9), ours.ModelEmaV2(model, 0.9, replicas=replicas)),
        (origin.ModelEmaV3(plain, 0.9), ours.ModelEmaV3(model, 0.9, replicas=replicas)),
        (origin.ModelEmaV3(plain, 0.9, exclude_buffers=True), ours.ModelEmaV3(model, 0.9, exclude_buffers=True, replicas=replicas)),
    ]
    assert all(isinstance(average[1].module, StandIn) == (kind != "ddp" or replicas == "split") for average in made)
    for _ in sharded.walk(plain, model, 25):
        for theirs, mine in made:
            theirs.update(plain)
            mine.update(model)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    for number, (theirs, mine) in enumerate(made):
        full = {name.replace("module.", ""): tensor for name, tensor in mine.full_state_dict().items()}
        expected = {name.removeprefix("module."): tensor for name, tensor in state_of(theirs).items()}
        if dist.get_rank() == 0 or not isinstance(mine.module, StandIn):
            assert set(full) == set(expected)
            for name, tensor in full.items():
                assert torch.equal(tensor, expected[name]) or not tensor.is_floating_point(), (number, name)
        module = theirs.ema if number == 0 else theirs.module
        torch.testing.assert_close(mine.module(x), module(x))
        if dist.get_rank() == 0:
            torch.save(
                {"epoch": 3, "ema_state_dict": {f"module.{name}": tensor for name, tensor in expected.items()}}, f"{path}/{number}.pt"
            )
            module.load_state_dict(full)
        if isinstance(mine.module, StandIn):
            with mine.module.ema.swapped():
                torch.testing.assert_close(model.eval()(x), module(x))
            model.train()
    dist.barrier()
    resumed = ours.ModelEma(model, 0.9, resume=f"{path}/1.pt", replicas=replicas)
    again = {name.replace("module.", ""): tensor for name, tensor in resumed.full_state_dict().items()}
    for name, tensor in again.items():
        assert torch.equal(tensor, made[1][0].module.state_dict()[name]) or not tensor.is_floating_point(), name
    whole = {f"module.{name}": tensor for name, tensor in made[3][0].module.state_dict().items()}
    made[2][1].load_state_dict(
        {f"module.{name}": tensor for name, tensor in whole.items()} if kind == "ddp" and replicas == "copy" else whole
    )
    torch.testing.assert_close(made[2][1](x), made[3][0](x))
    before = resumed.full_state_dict()
    state = {name: tensor for name, tensor in whole.items() if dist.get_rank() != 1 or not name.endswith("0.weight")}
    with pytest.raises((RuntimeError, ConnectionError), match=r"0\.weight"):
        ours.load_ema_state_dict(resumed.ema, {"ema_state_dict": state})
    with pytest.raises((RuntimeError, ConnectionError), match=r"none of the|rank 1"):
        ours.load_ema_state_dict(resumed.ema, {"ema_state_dict": whole if dist.get_rank() != 1 else {"x": torch.ones(1)}})
    after = resumed.full_state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == []


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kind", "replicas"), [*((kind, "copy") for kind in sharded.KINDS), ("hsdp", "split"), ("ddp", "split")])
def test_sharded_averages_are_the_plain_ones(world: int, kind: str, replicas: str, tmp_path: Path) -> None:
    if not ALL and (world, kind, replicas) not in {
        (2, "fsdp2", "copy"), (2, "ddp", "copy"), (4, "ddp", "split"), (4, "fsdp2", "copy"), (2, "fsdp1", "copy"), (4, "hsdp", "split"),
    }:  # fmt: skip
        pytest.skip("of the wider matrix: SHARDOW_ALL=1, as make test-all sets it")
    ranks.run(world, _shared, kind, replicas, str(tmp_path))


def _rounded(kind: str) -> dict[str, torch.Tensor]:
    plain, model = sharded.pair(kind, torch.bfloat16)
    with pytest.warns(UserWarning, match="noise"):
        ema = ours.ModelEmaV3(model, 0.999, stochastic_rounding_seed=3, replicas="split")
    for _ in sharded.walk(plain, model, 12):
        ema.update(model)
    return {name: tensor.float() for name, tensor in ema.full_state_dict().items()}


def test_stochastic_rounding_is_the_same_at_any_world_size() -> None:
    first = ranks.run(1, _rounded, "fsdp2")[0]
    assert first["module.0.weight"].numel() == 42
    for world, kind in ((2, "fsdp2"), (4, "fsdp2"), (2, "ddp"), (4, "hsdp")):
        found = ranks.run(world, _rounded, kind)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in first.items()), (world, kind)


# ---- checkpoints, and the defects of those who read them


def averaged(decay: float = 0.5) -> tuple[nn.Module, Any]:
    model = walks.model("mlp")
    ema = ours.ModelEma(model, decay)
    for _ in walks.walk(model, "mlp", 5):
        ema.update(model)
    return model, ema


@pytest.mark.parametrize("key", ours.KEYS)
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_checkpoints_are_read_under_the_names_of_any_wrapping(key: str, prefix: str, tmp_path: Path) -> None:
    _, ema = averaged()
    path = tmp_path / "latest.pth"
    torch.save(
        {"epoch": 1, "args": Namespace(lr=1), key: {prefix + n: t for n, t in ema.ema.state_dict().items()}, "optimizer": {"state": {}}},
        path,
    )
    resumed = ours.ModelEma(walks.model("mlp"), resume=path)
    assert all(torch.equal(tensor, ema.ema.state_dict()[name]) for name, tensor in resumed.ema.state_dict().items())
    model = nn.DataParallel(walks.model("mlp"))
    ours.load_ema_state_dict(model, path)
    assert all(torch.equal(tensor, ema.ema.state_dict()[name[7:]]) for name, tensor in model.state_dict().items())


def _resumes_wrapped(path: str) -> None:
    """Under DDP the origin's copy is of the wrapper, with ``module.`` before its names."""
    model = DistributedDataParallel(walks.model("mlp"))
    ema = ours.ModelEma(model, 0.5, resume=path)
    theirs = origin.ModelEma(model, 0.5)
    assert ema.ema_has_module
    assert list(ema.ema.state_dict()) == list(theirs.ema.state_dict())
    theirs.ema.load_state_dict(ema.ema.state_dict())
    for _ in walks.walk(model, "mlp", 3):
        ema.update(model)
        theirs.update(model)
    for name, tensor in theirs.ema.state_dict().items():
        assert torch.equal(tensor, ema.ema.state_dict()[name]) or not tensor.is_floating_point(), name
    plain = ours.ModelEma(model.module, 0.5)
    plain.update(model)
    assert not plain.ema_has_module


def test_resume_works_after_the_model_is_wrapped(tmp_path: Path) -> None:
    torch.save({"state_dict_ema": averaged()[1].ema.state_dict()}, tmp_path / "timm.pth")
    ranks.run(2, _resumes_wrapped, str(tmp_path / "timm.pth"))


def test_defect_3_of_source_002_a_mismatch_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """`except: print("no ema shadow found")` went on with averages of weights that were not resumed; timm logs, and goes on."""
    model, ema = averaged()
    state = ema.ema.state_dict()
    before = copy.deepcopy(state)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (
            KeyError,
            "has no averages: none of state_dict_ema, ema_state_dict, model_ema among 'epoch', 'model'",
            {"epoch": 1, "model": state},
        ),
        (
            RuntimeError,
            r"missing in the source: 0\.weight",
            {"ema_state_dict": {name: t for name, t in state.items() if name != "0.weight"}},
        ),
        (RuntimeError, "unexpected in the source: more", {"ema_state_dict": {**state, "more": torch.ones(1)}}),
        (RuntimeError, r"load_ema_state_dict\(\).*0\.weight.*\[2, 2\]", {"ema_state_dict": {**state, "0.weight": torch.ones(2, 2)}}),
        (ValueError, "none of the 1 names fits", {"ema_state_dict": {"x": torch.ones(1)}}),
        (AssertionError, "is a list", [state]),
    ]
    for kind, message, checkpoint in wrong:
        torch.save(checkpoint, tmp_path / "latest.pth")
        with pytest.raises(kind, match=message):
            ema._load_checkpoint(tmp_path / "latest.pth")
        with pytest.raises(kind, match=message):
            ours.ModelEma(model, resume=tmp_path / "latest.pth")
    with pytest.raises(FileNotFoundError):
        ours.ModelEma(model, resume=tmp_path / "none.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


def test_not_strict_is_not_nothing() -> None:
    """002's reader: load_state_dict(strict=False) without stripping `module.` loaded nothing, and said nothing."""
    _, ema = averaged()
    state = ema.ema.state_dict()
    model = walks.model("mlp")
    ours.load_ema_state_dict(model, {"ema_state_dict": {f"module.{n}": t for n, t in state.items() if n != "0.bias"}}, strict=False)
    now = model.state_dict()
    assert [name for name in now if not torch.equal(now[name], state[name])] == ["0.bias"]
    with pytest.raises(RuntimeError, match=r"none of the 1 names fits, nothing was loaded: there 'encoder\.weight'"):
        ours.load_ema_state_dict(model, {"ema_state_dict": {"encoder.weight": torch.ones(1)}}, strict=False)


def test_defect_4_of_source_002_counters_are_copied() -> None:
    model = nn.BatchNorm1d(3)
    model.num_batches_tracked = torch.tensor(100)
    theirs, v1, v2 = origin.ModelEma(model, 0.999), ours.ModelEma(model, 0.999), ours.ModelEmaV2(model, 0.999)
    model.num_batches_tracked = torch.tensor(200)
    for average in (theirs, v1, v2):
        average.update(model)
    assert [int(state["num_batches_tracked"]) for state in (theirs.ema.state_dict(), v1.ema.state_dict(), v2.module.state_dict())] == [
        100, 200, 200,
    ]  # fmt: skip


# ---- the surface itself


@pytest.mark.parametrize("cls", ["ModelEma", "ModelEmaV2", "ModelEmaV3"])
def test_signatures_and_attributes_are_the_origin_s(cls: str) -> None:
    theirs, mine = (list(inspect.signature(getattr(module, cls)).parameters.values()) for module in (origin, ours))
    assert [(p.name, p.default, p.kind) for p in mine[:-1]] == [(p.name, p.default, p.kind) for p in theirs]
    assert (mine[-1].name, mine[-1].default, mine[-1].kind) == ("replicas", "copy", inspect.Parameter.KEYWORD_ONLY)
    model = walks.model("mlp")
    a, b = getattr(origin, cls)(model), getattr(ours, cls)(model)
    for name in vars(a):
        if not name.startswith("_"):
            assert getattr(a, name) == getattr(b, name) or name == "ema"
    assert not b.module.training
    assert cls != "ModelEma" or not any(p.requires_grad for p in b.ema.parameters())


def test_get_decay_is_the_origin_s() -> None:
    model = nn.Linear(2, 2)
    for options in (
        {},
        {"update_after_step": 5},
        {"use_warmup": True},
        {"use_warmup": True, "warmup_gamma": 25.0, "warmup_power": 1.0, "min_decay": 0.3, "update_after_step": 3, "decay": 0.9},
    ):
        theirs, mine = origin.ModelEmaV3(model, **options), ours.ModelEmaV3(model, **options)  # type: ignore[arg-type]
        for step in (None, -1, 0, 1, 2, 5, 6, 7, 100, 10**6):
            assert theirs.get_decay(step) == mine.get_decay(step)


def test_a_decay_that_is_changed_counts() -> None:
    model = walks.model("blocks")
    made = [(getattr(origin, cls)(model), getattr(ours, cls)(model)) for cls in ("ModelEma", "ModelEmaV2", "ModelEmaV3")]
    for step in walks.walk(model, "blocks", 10):
        for pair in made:
            for average in pair:
                average.decay = step / 20
                average.update(model)
    for theirs, mine in made:
        same(theirs, mine, model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_averaged_once() -> None:
    """state_dict() has them twice, and the origin averages them twice at each update."""
    model = Tied()
    made = [getattr(module, cls)(model, 0.9) for module in (origin, ours) for cls in ("ModelEma", "ModelEmaV2", "ModelEmaV3")]
    before = model.embed.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    for average in made:
        average.update(model)
    moved = [float((state_of(average)[name] - before).mean()) for average in made for name in state_of(average) if "head" in name]
    assert moved == pytest.approx([0.19] * 3 + [0.1] * 3, abs=1e-5)


def test_other_models_are_refused_before_anything_changes() -> None:
    model = walks.model("mlp")
    for cls in ("ModelEma", "ModelEmaV2", "ModelEmaV3"):
        average = getattr(ours, cls)(model, 0.5)
        before = copy.deepcopy(state_of(average))
        wider = nn.Sequential(*list(model)[:-1], nn.Linear(19, 4, bias=False))
        fewer = nn.Sequential(*list(model)[:-1])
        for kind, other in (
            (RuntimeError, wider),
            (ValueError, wider),
            (KeyError, fewer),
            (RuntimeError, nn.Sequential(*model, nn.Linear(3, 3))),
        ):
            with pytest.raises(kind, match=r"'5\.weight'|'6\.weight'"):
                average.update(other)
        assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(average).items())
        with pytest.raises(ValueError, match="replicas='both'"):
            getattr(ours, cls)(model, replicas="both")


class Engine(nn.Module):
    """A wrapper that nobody knows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_are_looked_through_by_their_module() -> None:
    model = walks.model("mlp")
    theirs, mine = origin.ModelEmaV2(model, 0.5), ours.ModelEmaV2(model, 0.5)
    for step in walks.walk(model, "mlp", 6):
        theirs.update(Engine(model))
        mine.update([Engine(Engine(model)), nn.DataParallel(model), model][step % 3])
    same(theirs, mine, model)


def test_a_copy_and_a_pickle_go_on_by_themselves() -> None:
    model = walks.model("blocks")
    first = ours.ModelEmaV3(model, 0.9)
    theirs = origin.ModelEmaV3(model, 0.9)
    for step in walks.walk(model, "blocks", 20):
        if step == 7:
            first = copy.deepcopy(first)
        if step == 14:
            first = pickle.loads(pickle.dumps(first))
        if step == 18:
            first.module = copy.deepcopy(first.module)
        first.update(model)
        theirs.update(model)
    same(theirs, first, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_are_averaged() -> None:
    model = torch.jit.script(walks.model("mlp"))
    made = [(getattr(origin, cls)(model, 0.9), getattr(ours, cls)(model, 0.9)) for cls in ("ModelEmaV2", "ModelEmaV3")]
    for _ in walks.walk(model, "mlp", 10):
        for theirs, mine in made:
            theirs.update(model)
            mine.update(model)
    for theirs, mine in made:
        same(theirs, mine, model)
    with pytest.raises(RuntimeError, match=r"'0\.weight' is \(37, 6\) in the average and \(37, 5\)"):
        made[0][1].update(torch.jit.script(nn.Sequential(nn.Linear(5, 37))))


def test_timm_finds_the_average_to_save() -> None:
    """timm.utils.unwrap_model() asks what is no ModelEma of its own for `module`."""
    model, ema = averaged()
    assert ema.module is ema.ema
    assert not hasattr(model, "module")


def test_what_is_not_finite_is_held() -> None:
    model = nn.Linear(2, 1, bias=False)
    ema = ours.ModelEmaV3(model, 0.5)
    before = ema.module.weight.detach().clone()  # type: ignore[union-attr, operator]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[float("nan"), 3.0]]))
    with pytest.warns(RuntimeWarning, match="1 weights are NaN or Inf"):
        ema.update(model)
    weight: Any = ema.module.weight
    assert weight[0, 0] == before[0, 0]
    assert weight[0, 1] == before[0, 1].lerp(torch.tensor(3.0), 0.5)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    average = ours.ModelEmaV2(torch.nn.Linear(4, 3), 0.5)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for wrong in ({**state, "module.bias": torch.zeros(7)}, {**state, "other": torch.zeros(1)}, {"module.weight": state["module.weight"]}):
        with pytest.raises(RuntimeError, match="nothing was loaded"):
            average.load_state_dict(wrong)
        assert all(torch.equal(tensor, before[name]) for name, tensor in average.state_dict().items())


def _complex_weights() -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.scale = nn.Parameter(torch.ones(4))

    model = DistributedDataParallel(Wave())
    with pytest.raises(NotImplementedError, match=r"'phase' is torch\.complex64"):
        ours.ModelEmaV2(model, replicas="split")


def test_complex_weights_are_refused_where_ranks_share_averages() -> None:
    ranks.run(2, _complex_weights)


@pytest.mark.parametrize("exclude", [False, True])
def test_updates_by_name_average_or_copy_buffers(exclude: bool) -> None:
    model = walks.model("mlp")
    averages = [module.ModelEmaV3(model, 0.9, exclude_buffers=exclude) for module in (ours, origin)]
    for step in walks.walk(model, "mlp", 4):
        for average in averages:
            with torch.no_grad():  # timm's update() sees to it
                (average.apply_update_ if step % 2 else average.apply_update_no_buffers_)(model, 0.7)
        mine, theirs = (dict(average.module.state_dict()) for average in averages)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    split = ours.ModelEmaV3(model, 0.9, exclude_buffers=exclude, replicas="split")
    (split.apply_update_no_buffers_ if exclude else split.apply_update_)(model, 0.7)
    with pytest.raises(NotImplementedError, match=f"exclude_buffers={exclude}"):
        (split.apply_update_ if exclude else split.apply_update_no_buffers_)(model, 0.7)
