"""Which parts a step has, what becomes of those that are missing, and what does not fit, in one process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import Run, at, equal
from safetensors import safe_open
from torch import nn

import shardow


def test_there_is_no_step_at_first(run: Run, checkpoints: shardow.Checkpoints) -> None:
    assert checkpoints.latest() is None
    with pytest.raises(FileNotFoundError, match="has no whole checkpoint"):
        run.restore(checkpoints)


def test_a_step_is_files_that_others_read(run: Run, checkpoints: shardow.Checkpoints) -> None:
    report = run.save(checkpoints)
    names = {
        "model.safetensors",
        "ema-0.5.safetensors",
        "ema-0.9.safetensors",
        "optimizer.safetensors",
        "state.safetensors",
    }
    assert {Path(file).name for file in report["files"]} == names
    assert {path.name for path in at(checkpoints, 2).iterdir()} == {*names, "checkpoint.json"}
    manifest = json.loads((at(checkpoints, 2) / "checkpoint.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["step"]) == ("shardow.checkpoint", 1, 2)
    for name in names:
        with safe_open(at(checkpoints, 2) / name, "pt") as file:
            assert (file.metadata()["shardow.save"], file.metadata()["shardow.step"]) == (manifest["save"], "2")
    model = Run("plain", seed=1).model
    shardow.load(model, at(checkpoints, 2) / "model.safetensors")
    assert torch.equal(model[0].weight, run.model[0].weight)
    assert shardow.open(at(checkpoints, 2), decay=0.9)["0.weight"].shape == run.model[0].weight.shape


def test_state_comes_back_as_it_was(checkpoints: shardow.Checkpoints) -> None:
    state = {
        "step": 7,
        "loss": 0.1,
        "best": float("inf"),
        "seen": (1, "two", None),
        "by": {3: [True]},
        "mean": torch.arange(3.0),
    }
    checkpoints.save(7, state=state)
    found = checkpoints.restore()
    assert torch.equal(found.pop("mean"), state.pop("mean"))  # type: ignore[arg-type]
    assert found == state
    assert type(found["seen"]) is tuple


@pytest.mark.parametrize("state", [{"model": nn.Linear(1, 1)}, {"f": print}, {"when": {1, 2}}, ["a"], {1: 2}])
def test_what_would_need_a_pickle_is_refused_and_nothing_is_written(
    state: Any, checkpoints: shardow.Checkpoints
) -> None:
    with pytest.raises(ValueError, match=r"state|needed"):
        checkpoints.save(1, state=state)
    assert not checkpoints.directory.exists()


@pytest.mark.parametrize("part", ["averages", "optimizer", "scheduler"])
def test_a_part_that_is_not_there_is_an_error_or_a_choice(
    part: str, run: Run, checkpoints: shardow.Checkpoints
) -> None:
    checkpoints.save(2, **{name: one for name, one in run.parts().items() if name != part}, state={"step": 2})
    other = Run("plain", seed=1)
    other.train(1)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(ValueError, match=f"has no {part}") as error:
        other.restore(checkpoints)
    assert equal(before, other.model.state_dict())
    how = "from_model" if part == "averages" else "keep"
    assert f'absent={{"{part}": "{how}"}}' in str(error.value)
    with pytest.raises(ValueError, match="may have"):
        other.restore(checkpoints, absent={part: "whatever"})
    other.restore(checkpoints, absent={part: how})
    assert equal(run.model.state_dict(), other.model.state_dict())
    if part == "averages":
        assert torch.equal(other.ema.full_state_dict(decay=0.9)["0.weight"], run.model[0].weight)
        assert other.ema.stats()["step"] == 0


@pytest.mark.parametrize("part", ["model", "averages", "optimizer", "scheduler"])
def test_a_part_that_is_there_is_given_or_said_to_be_left(
    part: str, run: Run, checkpoints: shardow.Checkpoints
) -> None:
    run.save(checkpoints)
    other = Run("plain", seed=1)
    parts = other.parts()
    if part == "model":
        parts |= {"optimizer": "skip"}  # which needs the model
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(ValueError, match=f"has {part}, and {part}= was not given"):
        checkpoints.restore(**{**parts, part: None})
    assert equal(before, other.model.state_dict())
    assert checkpoints.restore(**{**parts, part: "skip"})["step"] == 2
    assert equal(before, other.model.state_dict()) == (part == "model")
    assert (other.scheduler.last_epoch == 0) == (part == "scheduler")
    assert (not other.optimizer.state) == (part in ("model", "optimizer"))


def test_averages_of_a_model_that_was_restored_are_a_choice(run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    other = Run("plain", seed=1)
    checkpoints.restore(**{**other.parts(), "averages": "from_model"})
    ema = shardow.EMA(other.model, decay=0.9)
    assert torch.equal(ema.full_state_dict()["0.weight"], run.model[0].weight)


@pytest.mark.parametrize(
    "wrong", [{"optimizer": "keep"}, {"averages": "none"}, {"model": "from_model"}, {"model": "skip"}]
)
def test_other_words_are_refused(wrong: dict[str, str], run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    with pytest.raises(ValueError, match=r"must be one of|needs model="):
        checkpoints.restore(**{**run.parts(), **wrong})


def test_random_generators_go_on(run: Run, checkpoints: shardow.Checkpoints) -> None:
    def drawn() -> list[float]:
        return [*torch.rand(3).tolist(), random.random(), random.gauss(), *np.random.rand(3), np.random.randn()]

    random.gauss()  # leaves a second one for later
    np.random.randn()
    run.save(checkpoints)
    expected = drawn()
    drawn()
    run.restore(checkpoints)
    assert drawn() == expected
    drawn()
    run.restore(checkpoints, random=False)
    assert drawn() != expected


def test_saving_draws_nothing_and_changes_nothing(run: Run, checkpoints: shardow.Checkpoints) -> None:
    before = torch.get_rng_state(), random.getstate(), run.scheduler.state_dict(), run.ema.stats()["step"]
    run.save(checkpoints)
    checkpoints.save(3, **Run("plain").parts())  # of an optimizer that took no step
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    run.save(checkpoints)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), run.scheduler.state_dict(), run.ema.stats()["step"]) == before[1:]


def test_an_optimizer_that_took_no_step_takes_none(checkpoints: shardow.Checkpoints) -> None:
    """torch's own get_optimizer_state_dict() takes one, and an EMA that is attached averages then."""
    run = Run("plain")
    run.ema.attach(run.optimizer)
    run.save(checkpoints)
    other = Run("plain", seed=1)
    other.ema.attach(other.optimizer)
    other.restore(checkpoints)
    for one in (run, other):
        assert one.ema.stats()["step"] == 0
        assert not one.optimizer.state


def test_several_optimizers_and_schedulers_have_names(run: Run, checkpoints: shardow.Checkpoints) -> None:
    params = list(run.model.parameters())
    optimizers = {"first": torch.optim.SGD(params[:2], 0.1, momentum=0.9), "rest": torch.optim.AdamW(params[2:], 0.1)}
    schedulers = {name: torch.optim.lr_scheduler.StepLR(one, 2) for name, one in optimizers.items()}
    run.model(torch.ones(8, 6)).square().sum().backward()
    for one in optimizers.values():
        one.step()
    saved = checkpoints.save(1, model=run.model, optimizer=optimizers, scheduler=schedulers)
    assert "optimizer.safetensors" in saved["files"][1]
    again = {"rest": torch.optim.AdamW(params[2:], 0.1), "first": torch.optim.SGD(params[:2], 0.1, momentum=0.9)}
    checkpoints.restore(model=run.model, optimizer=again, scheduler=schedulers)
    for name, one in optimizers.items():
        for p, state in one.state.items():
            assert all(
                torch.equal(torch.as_tensor(state[key]), torch.as_tensor(again[name].state[p][key])) for key in state
            )
    with pytest.raises(ValueError, match="first, rest; given: one without a name"):
        checkpoints.restore(model=run.model, optimizer=again["rest"], scheduler=schedulers)
