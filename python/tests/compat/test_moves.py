"""Memory that moves, is cast, replaced or swapped under the averages of every surface: each follows, or raises a typed
error with its averages as they were. None averages what was there before."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import models
import pytest
import ranks
import surfaces
import torch
import torch.distributed as dist
from moves import CHANGES, data, swapping
from surfaces import SURFACES, made
from torch import nn

import shardow
from shardow import compat
from shardow.compat import automodel, diffusers

REPLACING = ("load_state_dict(assign=True)", "a new Parameter")
FORM = (*REPLACING, "to(bfloat16)")
#: What each surface cannot follow: the message names the parameter and the way out.
REFUSED = {
    "shardow.EMA": FORM, "EMA_FSDP": FORM, "torch_ema": REPLACING, "ema_pytorch split": FORM, "ModelEma split": FORM,
    "AveragedModel split": FORM, "AveragedModel split, own function": FORM,
}  # fmt: skip
STAND_INS = ("ema_pytorch", "ModelEma", "AveragedModel")  # where the model is sharded


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds, 1-D."""
    for name in ("_local_tensor", "local"):
        tensor = getattr(tensor, name, tensor)
    return tensor.detach().reshape(-1)


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _flat(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in tensors]
    return {name: _memory(tensor).clone() for name, tensor in zip(names, tensors.values(), strict=True)}


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
    with swapping() if change.startswith("swap_tensors()") else nullcontext():
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
            torch.testing.assert_close(
                average.float(), 0.5 * before[name].float() + 0.5 * weights[name].float(), rtol=1e-5, atol=1e-5
            )
        before = now
    del others


@pytest.mark.filterwarnings("ignore:averages in torch.bfloat16")
def test_every_origin_has_a_surface_here_and_its_place_in_the_docs() -> None:
    page = Path(__file__).parents[3].joinpath("docs", "migration.md").read_text()
    assert [name for name in compat.__all__ if f"`shardow.compat.{name}" not in page] == []
    assert [name for name in compat.__all__ if not hasattr(surfaces, name)] == [
        "twinkle"
    ]  # which starts models and averages none


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("surface", SURFACES)
def test_memory_that_moves_is_followed_or_refused(surface: str, change: str) -> None:
    _follows(surface, change, made(), made, change in REFUSED.get(surface, ()))


def _of_ranks(changes: Sequence[str]) -> None:
    def again() -> nn.Module:
        return models.PARALLEL["fsdp2"](made(), dist.get_world_size())

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
    """share_memory() of DTensors ends the interpreter, in torch itself; and torch makes no vector of shards of unequal
    size.
    """
    some = ("double(), float()", "load_state_dict(assign=True)", "to(bfloat16)")
    if os.environ.get("SHARDOW_ALL"):
        left_out = ("share_memory()", "vector_to_parameters()")
        ranks.run(2, _of_ranks, tuple(change for change in CHANGES if change not in left_out), timeout=600.0)
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
    model = made().requires_grad_(not frozen)
    ema = diffusers.EMAModel(model.parameters())
    ema.step(model.parameters())
    storage = weakref.ref(model.get_parameter("0.weight").untyped_storage())
    assert storage() is not None
    del model
    assert storage() is None


def test_what_is_read_of_the_weights_is_read_where_they_lie_now(tmp_path: Path) -> None:
    model = made()
    model.get_submodule("2").requires_grad_(False)
    ema, manager = shardow.EMA(model, 0.5), automodel.EMAManager(model, 0.5)
    distance = ema.distance()
    data(model)
    _wander(model, 1)
    expected = model.get_parameter("2.weight").detach()
    other = made()
    ema.copy_to(other)
    for whole in (
        ema.full_state_dict(complete=True),
        dict(other.named_parameters()),
        torch.load(manager.export_shadow(tmp_path)),
    ):
        torch.testing.assert_close(whole["2.weight"], expected, rtol=0, atol=0, check_dtype=False)
    assert ema.distance() > distance == 0.0
