"""compat.ema_pytorch beside ema-pytorch: 1,000 steps bit for bit under every option, states both ways, what went wrong there, and shards."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import walks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardow.compat.ema_pytorch import EMA

origin = pytest.importorskip("ema_pytorch")

SOON: dict[str, Any] = {"update_after_step": 5, "update_every": 3}
NAMES: dict[str, tuple[str, str, str]] = {  # a parameter, a buffer or another parameter, a prefix
    "mlp": ("0.weight", "1.running_mean", "4"),
    "conv": ("0.bias", "1.running_var", "6"),
    "blocks": ("scale", "positions", "block.self_attn"),
}


def options(name: str) -> list[dict[str, Any]]:
    one, other, prefix = NAMES[name]
    return [
        {},
        {**SOON},
        {**SOON, "update_every": 1, "beta": 0.9, "inv_gamma": 2.0, "power": 0.75},
        {**SOON, "min_value": 0.9, "use_foreach": True, "include_online_model": False},
        {**SOON, "param_or_buffer_names_no_ema": {one, other}},
        {**SOON, "ignore_names": {one, other}, "ignore_startswith_names": {prefix}},
        {**SOON, "beta": 1.0},
        {**SOON, "lazy_init_ema": True, "allow_different_devices": True, "coerce_dtype": True, "move_ema_to_online_device": True},
        {"update_after_step": 0, "update_every": 1, "power": 1.0},
    ]


def _floats(ema: Any) -> dict[str, torch.Tensor]:
    """Counters and everything that the origin averages; it never touches integer buffers."""
    state = dict(ema.ema_model.state_dict())
    state.update({f"temporary {name}": b for name, b in ema.ema_model.named_buffers() if name not in state})
    return {name: t for name, t in state.items() if t.is_floating_point()} | {"step": ema.step, "initted": ema.initted}


def _same(ours: Any, theirs: Any) -> bool:
    a, b = _floats(ours), _floats(theirs)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", walks.NAMES)
def test_a_thousand_steps_are_the_origins_bit_for_bit(name: str) -> None:
    model = walks.model(name)
    ours = [EMA(model, **some) for some in options(name)]
    theirs = [origin.EMA(model, **some) for some in options(name)]
    for step in walks.walk(model, name):
        for a, b in zip(ours, theirs, strict=True):
            a.update()
            b.update()
            assert a.get_current_decay() == b.get_current_decay()
        if step in (1, 2, 6, 7, 10, 101, 111, 112, walks.STEPS):
            assert all(map(_same, ours, theirs)), step
    x = walks.inputs(name)
    for a, b in zip(ours, theirs, strict=True):
        assert list(a.state_dict()) == list(b.state_dict())
        assert torch.equal(a.eval()(x), b.eval()(x))
        assert (a.parameter_names, a.buffer_names) == (b.parameter_names, b.buffer_names)
        assert [n for n, _ in a.get_params_iter(a.ema_model)] == [n for n, _ in b.get_params_iter(b.ema_model)]
        assert [n for n, _ in a.get_buffers_iter(a.ema_model)] == [n for n, _ in b.get_buffers_iter(b.ema_model)]
        assert not any(p.requires_grad for p in a.ema_model.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.7])
@pytest.mark.parametrize("name", walks.NAMES)
def test_the_model_goes_on_from_its_averages_as_in_the_origin(name: str, beta: float) -> None:
    """From hare to tortoise, where the weights depend on the averages."""
    one, other, _ = NAMES[name]
    some = {
        **SOON,
        "update_model_with_ema_every": 10,
        "update_model_with_ema_beta": beta,
        "ignore_names": {one},
        "param_or_buffer_names_no_ema": {other},
    }
    models = [walks.model(name) for _ in range(2)]
    emas = [cls(model, **some) for cls, model in zip((EMA, origin.EMA), models, strict=True)]
    for step in zip(*(walks.walk(model, name, 200) for model in models), strict=True):
        for ema in emas:
            ema.update()
        if step[0] % 25 == 0:
            assert _same(*emas)
            floats = [{k: v for k, v in model.state_dict().items() if v.is_floating_point()} for model in models]
            assert all(torch.equal(value, floats[1][key]) for key, value in floats[0].items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:averages in torch")
def test_other_dtypes_too(dtype: torch.dtype) -> None:
    model = walks.model("mlp", dtype)
    some: list[dict[str, Any]] = [{**SOON}]
    if dtype == torch.bfloat16:
        some.append({**SOON, "coerce_dtype": True, "ema_model": lambda: copy.deepcopy(model).float()})
    ours, theirs = ([cls(model, **one) for one in some] for cls in (EMA, origin.EMA))
    for _ in walks.walk(model, "mlp", 100):
        for ema in (*ours, *theirs):
            ema.update()
    assert all(map(_same, ours, theirs))


def test_sixteen_bit_averages_are_rounded_to_nearest_with_a_warning() -> None:
    ema = EMA(walks.model("mlp", torch.bfloat16))
    with pytest.warns(RuntimeWarning, match="rounded to nearest.*ema_model="):
        ema.update()


@pytest.mark.parametrize("file", [False, True])
def test_states_go_both_ways_and_the_training_goes_on(file: bool) -> None:
    model = walks.model("blocks")
    ours, theirs = EMA(model, **SOON), origin.EMA(model, **SOON)
    for step in walks.walk(model, "blocks", 60):
        if step == 30:
            states = [copy.deepcopy(ema.state_dict()) for ema in (ours, theirs)]
            theirs, ours = (cls(model, **SOON) for cls in (origin.EMA, EMA))
            for ema, state in zip((theirs, ours), states, strict=True):
                ema.load_state_dict(walks.through_a_file(state) if file else state)
        ours.update()
        theirs.update()
    assert _same(ours, theirs)


def test_methods_hooks_and_other_models() -> None:
    model: Any = walks.model("mlp")
    model.describe = None  # an attribute is no method, but is forwarded
    ours, theirs = (cls(model, **SOON, forward_method_names=("extra_repr", "state_dict_of_none")[:1]) for cls in (EMA, origin.EMA))
    assert ours.extra_repr.__self__ is ours.ema_model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles = [ema.add_to_optimizer_post_step_hook(optimizer) for ema in (ours, theirs)]
    for _ in range(12):
        model(walks.inputs("mlp")).sum().backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert int(ours.step) == 12
    assert _same(ours, theirs)
    ours.update_moving_average(ours.ema_model, model, 0.5)
    theirs.update_moving_average(theirs.ema_model, model, 0.5)
    assert _same(ours, theirs)
    a, b = walks.model("mlp"), walks.model("mlp")
    ours.update_moving_average(a, model, 0.25)
    theirs.update_moving_average(b, model, 0.25)
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    ours.restore_ema_model_device()


def test_wrapped_models_are_known_by_either_name() -> None:
    model = walks.model("mlp")
    wrapped = torch.compile(model, backend="eager")
    for ignored in ("_orig_mod.0.weight", "0.weight"):
        ema = EMA(wrapped, update_after_step=0, update_every=1, ignore_names={ignored})  # type: ignore[arg-type]
        first = model[0].weight.detach().clone()  # type: ignore[index, operator, union-attr]
        for _ in walks.walk(model, "mlp", 5):
            ema.update()
        assert "_orig_mod.0.weight" in ema.ema_model.state_dict()
        averaged = ema.ema_model.state_dict()["_orig_mod.0.weight"]
        assert not torch.equal(averaged, first)  # the first update copies
        held = averaged.clone()
        for _ in walks.walk(model, "mlp", 5):
            ema.update()
        assert torch.equal(averaged, held)


def test_sets_of_names_are_each_emas_own() -> None:
    """The origin's defaults are one set for all."""
    model = walks.model("mlp")
    a, b = EMA(model, update_after_step=0, update_every=1), EMA(model, update_after_step=0, update_every=1)
    assert origin.EMA(model).ignore_names is origin.EMA(model).ignore_names
    for step in walks.walk(model, "mlp", 10):
        if step == 3:
            a.ignore_names.add("0.weight")
        if step == 2:
            held = a.ema_model[0].weight.clone()
        a.update()
        b.update()
        if step == 2:
            held = a.ema_model[0].weight.clone()
    assert not b.ignore_names
    assert torch.equal(a.ema_model[0].weight, held)
    assert not torch.equal(b.ema_model[0].weight, held)


def test_integer_buffers_follow_the_model() -> None:
    """In the origin a count of batches stays what it was at the start."""
    model = walks.model("mlp")
    ours, theirs = (cls(model, update_after_step=0, update_every=1) for cls in (EMA, origin.EMA))
    for _ in walks.walk(model, "mlp", 5):
        ours.update()
        theirs.update()
    assert int(theirs.ema_model[1].num_batches_tracked) == 0
    assert int(ours.ema_model[1].num_batches_tracked) == 5
    ours.ema_model[1].num_batches_tracked.fill_(99)
    ours.copy_params_from_ema_to_model()
    assert int(model[1].num_batches_tracked) == 5  # type: ignore[index, arg-type, union-attr]


def test_forward_eval_evaluates() -> None:
    """The origin's calls the averages in whatever mode they are, and changes their statistics."""
    ema = EMA(walks.model("mlp"))
    ema.ema_model[1].eval()
    x = torch.randn(4, 6)
    before = copy.deepcopy(ema.ema_model.state_dict())
    out = ema.forward_eval(x)
    assert not out.requires_grad
    assert all(torch.equal(value, before[key]) for key, value in ema.ema_model.state_dict().items())
    assert [module.training for module in ema.ema_model] == [True, False, True, True, True, True]
    assert torch.equal(out, ema.eval()(x))
    with pytest.raises(RuntimeError):
        ema.forward_eval(torch.randn(4, 5))


def test_an_ema_can_be_copied_and_pickled() -> None:
    """The origin's __new__ wants a model again."""
    model = walks.model("mlp")
    with pytest.raises(TypeError):
        copy.deepcopy(origin.EMA(model))
    ema = EMA(model, **SOON, forward_method_names=("extra_repr",))
    ema.update()
    for other in (copy.deepcopy(ema), pickle.loads(pickle.dumps(ema))):
        assert other.extra_repr.__self__ is other.ema_model
        for _ in walks.walk(other.model, "mlp", 20):
            other.update()
        assert not torch.equal(other.ema_model[0].weight, ema.ema_model[0].weight)
    assert int(ema.step) == 1


def test_a_lazy_ema_takes_a_state() -> None:
    """The origin's has no model yet that could."""
    model = walks.model("mlp")
    full = EMA(model, **SOON)
    for _ in walks.walk(model, "mlp", 20):
        full.update()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        origin.EMA(model, **SOON, lazy_init_ema=True).load_state_dict(full.state_dict())
    lazy = EMA(model, **SOON, lazy_init_ema=True)
    lazy.load_state_dict(full.state_dict())
    assert _same(lazy, full)


class _Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of this")


def test_a_model_that_cannot_be_copied_does_not_end_the_process() -> None:
    """The origin prints, and calls exit()."""
    with pytest.raises(SystemExit):
        origin.EMA(_Uncopyable())
    with pytest.raises(ValueError, match=r"no copies of this.*ema_model="):
        EMA(_Uncopyable())
    ema = EMA(_Uncopyable(), _Uncopyable)
    ema.update()


def test_what_is_not_finite_is_held() -> None:
    """The origin's average of it is NaN for ever."""
    model = walks.model("mlp")
    ema = EMA(model, update_after_step=0, update_every=1)
    ema.update()
    before = ema.ema_model[0].bias.clone()
    with torch.no_grad():
        model[0].bias[3] = float("nan")  # type: ignore[index, operator, union-attr]
    with pytest.warns(RuntimeWarning, match="NaN or Inf"):
        ema.update()
    assert torch.equal(ema.ema_model[0].bias, before)


def test_misuse_raises_what_the_origin_raises() -> None:
    model = walks.model("mlp")
    with pytest.raises(NotImplementedError, match=r"shardow.compat.torch_ema"):
        EMA({"a": torch.ones(2)})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="lazy_init_ema"):
        EMA(model, model, lazy_init_ema=True)
    with pytest.raises(AssertionError, match="as a set"):
        EMA(model, param_or_buffer_names_no_ema="0.weight")
    with pytest.raises(AssertionError, match="no hooks"):
        EMA(model).add_to_optimizer_post_step_hook(object())  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        EMA(model, forward_method_names=("nothing",))
    with pytest.raises(ValueError, match="replicas="):
        EMA(model, replicas="half")


def test_another_model_is_refused_before_anything_changes() -> None:
    """The origin pairs parameters in their order, whatever they are called."""
    model, other = walks.model("mlp"), nn.Sequential(nn.Linear(6, 37), nn.BatchNorm1d(37))
    ema = EMA(model, other, **SOON)
    before = copy.deepcopy(ema.state_dict())
    with pytest.raises(RuntimeError, match=r"which its average has not"):
        ema.update()
    assert all(torch.equal(value, before[key]) for key, value in ema.state_dict().items())


# ---- ranks


def _shard(kind: str, model: Any) -> Any:
    if kind == "fsdp2":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        return fully_shard(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return DistributedDataParallel(model)


SHARDED: list[dict[str, Any]] = [
    {"ignore_names": {"0.weight"}, "param_or_buffer_names_no_ema": {"3.weight", "1.running_mean"}},
    {"update_model_with_ema_every": 4},
    {
        "update_model_with_ema_every": 4,
        "update_model_with_ema_beta": 0.5,
        "ignore_names": {"0.weight"},
        "param_or_buffer_names_no_ema": {"3.weight"},
    },
]


def _on_ranks(kind: str, some: dict[str, Any]) -> None:
    """The same wandering on a plain model with the origin's EMA, on every rank."""
    plain = walks.model("mlp")
    model = _shard(kind, copy.deepcopy(plain))
    made = {
        **SOON,
        **some,
        "replicas": "split" if kind == "ddp-split" else "copy",
        "forward_method_names": ("forward",),
        "include_online_model": False,
    }
    ours = EMA(model, **made)
    theirs = origin.EMA(plain, **SOON, **some)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))
    for _ in range(30):
        with torch.no_grad():
            for tensor in (*model.parameters(), *plain.parameters()):
                getattr(tensor, "_local_tensor", tensor).mul_(1.03125)
            for tensor in (*model.buffers(), *plain.buffers()):
                tensor.copy_(tensor + 1)
        ours.update()
        theirs.update()
    if kind != "ddp":
        whole = ours.ema_model._ema.full_state_dict(complete=False)
        expected = {k: v for k, v in theirs.ema_model.state_dict().items() if v.is_floating_point()}
        assert not whole or all(torch.equal(whole[key], value) for key, value in expected.items())
        assert not list(ours.ema_model.children())
    full = ours.full_state_dict()
    assert not full or torch.equal(
        full["ema_model.0.bias" if kind != "ddp" else "ema_model.module.0.bias"], theirs.ema_model.state_dict()["0.bias"]
    )
    assert bool(full) == (dist.get_rank() == 0 or kind == "ddp")
    resumed = EMA(model, **made)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert int(resumed.step) == 30
    with torch.no_grad():
        for a, b in ((ours.forward_eval(x), theirs.eval()(x)), (model.eval()(x), plain.eval()(x))):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        ours.eval()
        assert torch.equal(resumed.eval()(x), ours(x))
        if kind != "fsdp2":  # FSDP2 wants methods to be registered, as for training
            assert torch.equal(ours.forward(x), ours(x))


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("ddp-split", 2), ("fsdp1", 2), ("fsdp2", 2), ("fsdp2", 4)])
def test_sharded_models_are_averaged_as_the_origin_averages_whole_ones(kind: str, world: int) -> None:
    for some in SHARDED if world == 2 or os.environ.get("SHARDOW_ALL") else SHARDED[:1]:
        ranks.run(world, _on_ranks, kind, some)


def _refuses_copies() -> None:
    model = _shard("fsdp2", walks.model("mlp"))
    ema = EMA(model)
    with pytest.raises(NotImplementedError, match=r"save state_dict\(\)"):
        copy.deepcopy(ema)
    with pytest.raises(ValueError, match="of another model"):
        ema.update_moving_average(ema.ema_model, walks.model("mlp"))


def test_averages_of_a_sharded_model_stay_with_it() -> None:
    """The origin exits, since FSDP's modules cannot be copied."""
    ranks.run(2, _refuses_copies)
