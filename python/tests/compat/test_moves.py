"""Memory that moves, is cast, replaced or swapped under the averages of every surface: each follows, or raises a typed error with its averages as they were. None averages what was there before."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import shardow
from shardow.compat import automodel, bagel, causal_forcing, diffusers, dist_ema, ema_pytorch, swa_utils, timm, torch_ema
from shardow.model.names import clean_file_key

Averages = Callable[[], dict[str, torch.Tensor]]
Surface = tuple[Callable[[], object], Averages]  # (update, averages by name)
Make = Callable[[nn.Module, Callable[[], nn.Module]], Surface]  # of a model, and what makes it again


def _made() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.LayerNorm(5))


def _of(module: Callable[[], nn.Module]) -> Averages:
    return lambda: dict(module().named_parameters())


def _in_order(model: nn.Module, found: Callable[[], list[torch.Tensor]]) -> Averages:
    names = [name for name, _ in model.named_parameters()]
    return lambda: dict(zip(names, found(), strict=True))


def _core(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = shardow.EMA(model, 0.5)
    return ema.update, lambda: dict(ema.state_dict()["averages"])


def _manager(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = automodel.EMAManager(model, 0.5)
    return lambda: ema.update(model), ema.state_dict


def _second_model(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = automodel.ShardedModelEMAManager(again(), model, 0.5)
    return lambda: ema.update(model), lambda: {name: tensor.clone() for name, tensor in ema.state_dict().items()}


def _bagel(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    second = again()
    bagel.fsdp_ema_update(second, model, 0.0)
    return lambda: bagel.fsdp_ema_update(second, model, 0.5), _of(lambda: second)


def _ema_fsdp(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = causal_forcing.EMA_FSDP(model, 0.5)
    return lambda: ema.update(model), lambda: dict(ema.shadow)


def _dist_ema(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    ema = dist_ema.DistEMA(model, world, rank, decay=0.5)
    return lambda: ema.update(model), lambda: dict(zip(ema.name_list, ema.ema_param_list, strict=True))


def _torch_ema(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = torch_ema.ExponentialMovingAverage(model.parameters(), 0.5, use_num_updates=False)
    return ema.update, _in_order(model, lambda: ema.shadow_params)


def _torch_ema_given(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
    ema = torch_ema.ExponentialMovingAverage(model.parameters(), 0.5, use_num_updates=False)
    return lambda: ema.update(model.parameters()), _in_order(model, lambda: ema.shadow_params)


def _diffusers(foreach: bool) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        ema = diffusers.EMAModel(model.parameters(), 0.5, min_decay=0.5, foreach=foreach)
        return lambda: ema.step(model.parameters()), _in_order(model, lambda: ema.shadow_params)

    return make


def _ema_pytorch(replicas: str) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        ema = ema_pytorch.EMA(model, beta=0.5, min_value=0.5, update_after_step=0, update_every=1, replicas=replicas)
        return ema.update, _of(lambda: ema.ema_model)

    return make


def _timm(cls: type, replicas: str) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        ema = cls(model, decay=0.5, replicas=replicas)
        return lambda: ema.update(model), _of(lambda: ema.module)

    return make


def _swa(replicas: str, ours: bool) -> Make:
    def make(model: nn.Module, again: Callable[[], nn.Module]) -> Surface:
        function = swa_utils.get_ema_avg_fn(0.5) if ours else lambda e, p, _: 0.5 * e + 0.5 * p
        averaged = swa_utils.AveragedModel(model, avg_fn=function, replicas=replicas)
        return lambda: averaged.update_parameters(model), _of(lambda: averaged.module)

    return make


SURFACES: dict[str, Make] = {
    "shardow.EMA": _core,
    "EMAManager": _manager,
    "ShardedModelEMAManager": _second_model,
    "fsdp_ema_update": _bagel,
    "EMA_FSDP": _ema_fsdp,
    "DistEMA": _dist_ema,
    "torch_ema": _torch_ema,
    "torch_ema, parameters given": _torch_ema_given,
    "diffusers": _diffusers(False),
    "diffusers foreach": _diffusers(True),
    "ema_pytorch": _ema_pytorch("copy"),
    "ema_pytorch split": _ema_pytorch("split"),
    "ModelEma": _timm(timm.ModelEma, "copy"),
    "ModelEma split": _timm(timm.ModelEma, "split"),
    "ModelEmaV2": _timm(timm.ModelEmaV2, "copy"),
    "ModelEmaV3": _timm(timm.ModelEmaV3, "copy"),
    "AveragedModel": _swa("copy", True),
    "AveragedModel split": _swa("split", True),
    "AveragedModel, own function": _swa("copy", False),
    "AveragedModel split, own function": _swa("split", False),
}

# ---- what happens to a model


def _data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def _to_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def _vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clone(), model.parameters())


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def _replaced(model: nn.Module) -> None:
    linear = model.get_submodule("2")
    linear.weight = nn.Parameter(linear.weight.detach().clone())


@contextmanager
def _swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _swapped_tensors(model: nn.Module) -> None:
    with _swapping():
        _to_and_back(model)


def _swapped_load(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with _swapping():
        model.load_state_dict(state)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "weight.data = ...": _data,
    "double(), float()": _to_and_back,
    "vector_to_parameters()": _vector,
    "share_memory()": lambda model: model.share_memory(),
    "load_state_dict(assign=True)": _assigned,
    "a new Parameter": _replaced,
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "swap_tensors(), double() and float()": _swapped_tensors,
    "swap_tensors(), load_state_dict()": _swapped_load,
}


REPLACING = ("load_state_dict(assign=True)", "a new Parameter")
FORM = (*REPLACING, "to(bfloat16)")
#: What each surface cannot follow: the message names the parameter and the way out.
REFUSED = {
    "shardow.EMA": FORM, "EMA_FSDP": FORM, "torch_ema": REPLACING, "ema_pytorch split": FORM, "ModelEma split": FORM, "AveragedModel split": FORM, "AveragedModel split, own function": FORM,
}  # fmt: skip
STAND_INS = ("ema_pytorch", "ModelEma", "AveragedModel")  # where the model is sharded


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds, 1-D."""
    for name in ("_local_tensor", "local"):
        tensor = getattr(tensor, name, tensor)
    return tensor.detach().reshape(-1)


def _flat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {clean_file_key(name): _memory(tensor).clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _wander(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        memory = _memory(p)
        memory.add_(torch.randn(memory.shape, generator=generator).to(p.dtype))


def _taken_again() -> list[torch.Tensor]:
    """What torch has freed is somebody else's now."""
    return [torch.full((size,), torch.nan) for size in (5, 7, 35, 42) for _ in range(50)]


def _follows(surface: str, change: str, model: nn.Module, again: Callable[[], nn.Module], refused: bool) -> None:
    with _swapping() if change.startswith("swap_tensors()") else nullcontext():
        update, averages = SURFACES[surface](model, again)
        for seed in range(2):
            _wander(model, seed)
            update()
        CHANGES[change](model)
    others, before = _taken_again(), _flat(averages())
    for seed in (2, 3):
        _wander(model, seed)
        if refused:
            with pytest.raises(shardow.Error, match=r"0\.weight|2\.weight|parameters are gone"):
                update()
            torch.testing.assert_close(_flat(averages()), before, rtol=0, atol=0)
            continue
        update()
        weights, now = _flat(dict(model.named_parameters())), _flat(averages())
        assert now.keys() <= weights.keys()
        for name, average in now.items():
            torch.testing.assert_close(average.float(), 0.5 * before[name].float() + 0.5 * weights[name].float(), rtol=1e-5, atol=1e-5)
        before = now
    del others


@pytest.mark.filterwarnings("ignore:averages in torch.bfloat16")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("surface", SURFACES)
def test_memory_that_moves_is_followed_or_refused(surface: str, change: str) -> None:
    _follows(surface, change, _made(), _made, change in REFUSED.get(surface, ()))


def _of_ranks(changes: Sequence[str]) -> None:
    def again() -> nn.Module:
        return models.PARALLEL["fsdp2"](_made(), dist.get_world_size())

    for surface in SURFACES:
        for change in changes:
            if surface == "torch_ema" and change == "a new Parameter":
                continue  # FSDP2 itself goes on with the old one, and keeps it
            refused = FORM if surface.startswith(STAND_INS) else REFUSED.get(surface, ())
            try:
                _follows(surface, change, again(), again, change in refused)
            except BaseException as error:
                raise AssertionError(f"{surface}, {change}") from error


def test_memory_of_fsdp2_shards_that_moves_is_followed_or_refused() -> None:
    """share_memory() of DTensors ends the interpreter, in torch itself."""
    some = ("double(), float()", "load_state_dict(assign=True)", "to(bfloat16)")
    if os.environ.get("SHARDOW_ALL"):
        ranks.run(2, _of_ranks, tuple(change for change in CHANGES if change != "share_memory()"), timeout=600.0)
    else:
        ranks.run(1, _of_ranks, some)


def _of_fsdp1() -> None:
    """FSDP1 takes over what was put in a parameter's place in its next forward."""

    def again() -> nn.Module:
        return models.PARALLEL["fsdp1"](models.make().eval(), dist.get_world_size())

    for surface, make in SURFACES.items():
        model = again()
        update, averages = make(model, again)
        update()
        before = _flat(averages())
        p = [p for p in model.parameters() if p.numel()][-1]
        p.data = torch.full_like(p, 7.0)
        with pytest.raises(shardow.Error, match=r"put elsewhere.*Run a forward first"):
            update()
        torch.testing.assert_close(_flat(averages()), before, rtol=0, atol=0)
        with torch.no_grad():
            model(torch.ones(2, models.INPUTS))
        update()
        assert any(not torch.equal(now, before[name]) for name, now in _flat(averages()).items()), surface


def test_parameters_of_fsdp1_that_are_put_elsewhere_are_refused_until_its_next_forward() -> None:
    ranks.run(2, _of_fsdp1)


@pytest.mark.parametrize("frozen", [False, True])
def test_lists_of_parameters_keep_no_memory_of_a_model_that_is_dropped(frozen: bool) -> None:
    model = _made().requires_grad_(not frozen)
    ema = diffusers.EMAModel(model.parameters())
    ema.step(model.parameters())
    storage = weakref.ref(model.get_parameter("0.weight").untyped_storage())
    assert storage() is not None
    del model
    assert storage() is None


def test_what_is_read_of_the_weights_is_read_where_they_lie_now() -> None:
    model = _made()
    model.get_submodule("2").requires_grad_(False)
    ema, manager = shardow.EMA(model, 0.5), automodel.EMAManager(model, 0.5)
    distance = ema.distance()
    _data(model)
    _wander(model, 1)
    expected = model.get_parameter("2.weight").detach()
    other = _made()
    ema.copy_to(other)
    for whole in (
        ema.full_state_dict(complete=True),
        dict(other.named_parameters()),
        {p.name: p.flat.view(p.region.shape) for p in manager._complete()[0]},
    ):
        torch.testing.assert_close(whole["2.weight"], expected, rtol=0, atol=0, check_dtype=False)
    assert ema.distance() > distance == 0.0
