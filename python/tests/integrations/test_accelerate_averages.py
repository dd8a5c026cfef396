"""accelerate's states with averages: killed and resumed, at another world size, of several models, exported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import framework_ranks as ranks
import pytest
import torch
from launched import equal, killed_after, launched, of_accelerators
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardow

pytest.importorskip("accelerate")
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from examples import accelerate_loop

from shardow.integrations.accelerate import average, last_state, save_averages, save_state


def recipe(out: Path, steps: int, dies_after: int | None = None) -> dict[str, float]:
    with launched(), killed_after(dies_after):
        return accelerate_loop.train(steps, out, save_every=10)


def exported(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


def test_the_recipe_learns_and_goes_on_after_it_was_killed_as_if_it_had_not_been(tmp_path: Path) -> None:
    found = ranks.run(2, recipe, tmp_path / "straight", 40)[0]
    assert min(found.values()) > 0.7, found
    ranks.run(2, recipe, tmp_path / "killed", 40, 25, may_die=True)
    assert last_state(tmp_path / "killed") == str(tmp_path / "killed" / "step-000020")
    assert ranks.run(2, recipe, tmp_path / "killed", 40)[0] == found
    assert equal(exported(tmp_path / "killed"), exported(tmp_path / "straight"))


@contextmanager
def accelerated(kind: str = "ddp", **more: Any) -> Iterator[Accelerator]:
    with launched():
        of_accelerators(kind == "fsdp2")
        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
        plugin = (
            FullyShardedDataParallelPlugin(2, state_dict_type="SHARDED_STATE_DICT", **wrapped)
            if kind == "fsdp2"
            else None
        )
        yield Accelerator(fsdp_plugin=plugin, **more)


def prepared(accelerator: Accelerator, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    return accelerator.prepare(network, torch.optim.Adam(network.parameters(), 0.1))


def steps(accelerator: Accelerator, model: nn.Module, optimizer: Any, count: int = 3) -> None:
    for step in range(count):
        with accelerator.accumulate(model):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + accelerator.process_index))
            accelerator.backward(1000 * model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def saved(kind: str, out: Path) -> dict[str, torch.Tensor]:
    with accelerated(kind) as accelerator:
        model, optimizer = prepared(accelerator)
        assert any(isinstance(weight, DTensor) for weight in model.parameters()) == (kind == "fsdp2")
        ema = average(accelerator, model, optimizer, 0.9)
        steps(accelerator, model, optimizer)
        save_state(accelerator, out / "step-3")
        found = ema.full_state_dict()
        steps(accelerator, model, optimizer)  # what is saved stays as it was
        return found


def resumed(kind: str, out: Path) -> tuple[int, dict[str, torch.Tensor]]:
    with accelerated(kind) as accelerator:
        model, optimizer = prepared(accelerator, seed=1)
        ema = average(accelerator, model, optimizer, 0.9)
        accelerator.load_state(last_state(out))
        found = ema.step, ema.full_state_dict()
        steps(accelerator, model, optimizer)
        assert ema.step == 6
        return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 3), ("fsdp2", 3), ("fsdp2", 1)])
def test_at_another_world_size_the_averages_resumed_are_those_that_were_saved(
    kind: str, world: int, tmp_path: Path
) -> None:
    there = ranks.run(2, saved, kind, tmp_path)[0]
    step, here = ranks.run(world, resumed, kind, tmp_path)[0]
    assert step == 3
    assert equal(here, there)


def sharded_run(out: Path, dies_after: int | None = None) -> tuple[dict[str, torch.Tensor], bool]:
    """The averages in the end, and whether an evaluation had them."""
    with accelerated("fsdp2") as accelerator, killed_after(dies_after):
        model, optimizer = prepared(accelerator)
        ema = average(accelerator, model, optimizer, 0.9)
        if (state := last_state(out)) is not None:
            accelerator.load_state(state)
        else:
            steps(accelerator, model, optimizer)
            save_state(accelerator, out / "step-3")
        steps(accelerator, model, optimizer)
        with ema.swapped(), torch.no_grad():
            inside = model(torch.ones(1, 6))
        full = ema.full_state_dict()
        plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
        if full:
            plain.load_state_dict(full)
        return full, not full or torch.equal(plain(torch.ones(1, 6)), inside)


def test_sharded_too_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    straight = ranks.run(2, sharded_run, tmp_path / "straight")
    ranks.run(2, sharded_run, tmp_path / "killed", 5, may_die=True)
    again = ranks.run(2, sharded_run, tmp_path / "killed")
    assert equal(again[0][0], straight[0][0])
    assert [inside for _, inside in straight + again] == [True] * 4


# ---- on one rank, whose accelerator forgets what it knew


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_steps_that_accumulate_or_are_skipped_are_not_counted(accelerator: Accelerator) -> None:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-70)
    model, optimizer = prepared(accelerator)
    ema = average(accelerator, model, optimizer, 0.9)
    steps(accelerator, model, optimizer, 8)  # 4 optimizer steps, of which the first overflows
    assert optimizer.scaler.get_scale() < 2.0**127
    assert ema.step == 3


def test_each_of_several_models_has_its_own_averages(accelerator: Accelerator, tmp_path: Path) -> None:
    one, other = prepared(accelerator, 1), prepared(accelerator, 2)
    first = average(accelerator, *one, 0.9)
    with pytest.raises(ValueError, match="name='averages' is taken"):
        average(accelerator, *other, 0.9)
    second = average(accelerator, *other, [0.5, 0.9], name="discriminator")
    steps(accelerator, *one, 4)
    accelerator.save_state(str(tmp_path / "state"))
    kept = first.full_state_dict(), second.full_state_dict(0.5)
    steps(accelerator, *one, 4)
    steps(accelerator, *other, 4)
    accelerator.load_state(str(tmp_path / "state"))
    assert (first.step, second.step) == (2, 0)
    assert equal(first.full_state_dict(), kept[0])
    assert equal(second.full_state_dict(0.5), kept[1])


def test_a_state_without_averages_is_an_error_that_says_how_to_begin_from_its_weights(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    model, optimizer = prepared(accelerator)
    accelerator.save_state(str(tmp_path / "state"))
    ema = average(accelerator, model, optimizer, 0.9)
    steps(accelerator, model, optimizer, 4)
    with pytest.raises(
        shardow.errors.NotFoundError, match=r"state has no averages.safetensors.*call load_state\(\) before average\(\)"
    ):
        accelerator.load_state(str(tmp_path / "state"))
    assert ema.step == 2


def test_a_state_is_whole_or_not_there(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert last_state(tmp_path) is None
    for step in (9, 10):
        save_state(accelerator, tmp_path / f"step-{step}")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("accelerate.accelerator.save_accelerator_state", fails)
    with pytest.raises(OSError, match="disk full"):
        save_state(accelerator, tmp_path / "step-11")
    assert last_state(tmp_path) == str(tmp_path / "step-10")
    (tmp_path / ".step-11.saving" / "of another state").touch()
    monkeypatch.undo()
    save_state(accelerator, tmp_path / "step-11")  # over what the failed one left
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-10", "step-11", "step-9"]
    assert not (tmp_path / "step-11" / "of another state").exists()
    with pytest.raises(ValueError, match="step-11 exists"):
        save_state(accelerator, tmp_path / "step-11")


def test_what_cannot_be_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    prepared(accelerator)
    with pytest.raises(ValueError, match=r"average\(\) takes what accelerator.prepare\(\) returned"):
        average(accelerator, nn.Linear(2, 2), None)
    accelerator.project_configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with pytest.raises(ValueError, match="leave out ProjectConfiguration"):
        save_state(accelerator, tmp_path / "step-1")


def test_a_model_of_diffusers_is_exported_as_its_from_pretrained_expects(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    diffusers = pytest.importorskip("diffusers")
    network = diffusers.UNet2DModel(
        8,
        1,
        1,
        block_out_channels=(8,),
        down_block_types=["DownBlock2D"],
        up_block_types=["UpBlock2D"],
        layers_per_block=1,
        norm_num_groups=4,
    )
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), 0.1))
    ema = average(accelerator, model, optimizer, 0.9)
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 1, 8, 8), 1).sample.square().mean())
            optimizer.step()
            optimizer.zero_grad()
    save_averages(accelerator, ema, model, tmp_path)
    opened = diffusers.UNet2DModel.from_pretrained(tmp_path, local_files_only=True)
    assert equal(opened.state_dict(), ema.full_state_dict())
    assert not equal(opened.state_dict(), network.state_dict())
