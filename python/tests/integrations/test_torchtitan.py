"""torchtitan's Trainer with averages, on CPUs: killed and resumed, validated, and what its checkpoints hold."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import framework_ranks as ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launched import equal, launched
from safetensors.torch import load_file

import shardow

pytest.importorskip("torchtitan")
pytest.importorskip("spmd_types")
from titan import HuggingFaceNames, config_of, torchtitan_run, without_averages
from torchtitan.components.validate import Validator


def trained(
    out: Path, steps: int = 4, dies_at: int | None = None, checkpoint: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """Averages at the first step and in the end, and the step that they began with."""
    with launched():
        config = config_of(out, steps)
        for name, value in (checkpoint or {}).items():
            setattr(config.checkpoint, name, value)
        trainer = config.build()
        averages, begun = trainer.ema.averages, []
        trainer.optimizers.register_step_pre_hook(
            lambda *_: begun.append((averages.step, averages.full_state_dict())) if not begun else None
        )
        trainer.optimizers.register_step_post_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL) if trainer.step == dies_at else None
        )
        trainer.train()
        return *begun[0], averages.full_state_dict(), averages.step


def test_killed_and_resumed_the_averages_are_those_of_a_run_that_nothing_stopped(tmp_path: Path) -> None:
    straight = ranks.run(2, trained, tmp_path / "straight")[0]
    ranks.run(2, trained, tmp_path / "killed", 4, 3, may_die=True)
    assert [one.name for one in (tmp_path / "killed" / "checkpoint").iterdir()] == ["step-2"]
    step, _, averages, last = ranks.run(2, trained, tmp_path / "killed")[0]
    assert (step, last) == (2, 4)
    assert equal(averages, straight[2])


@pytest.mark.parametrize("world", [1, 3] if os.environ.get("SHARDOW_ALL") else [3])
def test_at_another_world_size_the_averages_resumed_are_those_that_were_saved(world: int, tmp_path: Path) -> None:
    there = ranks.run(2, trained, tmp_path)[0][2]
    step, here, *_ = ranks.run(world, trained, tmp_path, 5)[0]
    assert step == 4
    assert equal(here, there)


def test_a_checkpoint_has_the_keys_of_torchtitan_s_own_averages(tmp_path: Path) -> None:
    averages = ranks.run(2, trained, tmp_path)[0][2]
    there = dcp.FileSystemReader(tmp_path / "checkpoint" / "step-4").read_metadata().state_dict_metadata
    found = {name: torch.empty(there[f"ema_optimizer.state.{name}.ema_params"].size) for name in averages}
    dcp.load(
        {f"ema_optimizer.state.{name}.ema_params": one for name, one in found.items()},
        checkpoint_id=tmp_path / "checkpoint" / "step-4",
    )
    assert equal(found, averages)


def test_what_was_saved_without_averages_is_loaded_where_that_is_said(tmp_path: Path) -> None:
    ranks.run(2, plain, tmp_path)
    with pytest.raises(ranks.RankError, match="Missing key in checkpoint state_dict: ema_optimizer"):
        ranks.run(2, trained, tmp_path, 5)
    step, _, _, last = ranks.run(2, trained, tmp_path, 5, None, {"exclude_from_loading": ["ema_optimizer"]})[0]
    assert (step, last) == (0, 1)


def plain(out: Path) -> None:
    with launched():
        config_of(out, enable=False).build().train()


def weights_and_averages(out: Path, ema: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of one matrix, at the beginning and after each step."""
    with launched():
        trainer = config_of(out, 8, **ema).build()
        weights, averages = [], []

        def note() -> None:
            weights.append(trainer.model_parts[0].head.weight.detach().full_tensor().double())
            averages.append(
                trainer.ema.averages.full_state_dict(complete=False).get("head.weight", torch.zeros(0)).double()
            )

        trainer.optimizers.register_step_pre_hook(lambda *_: note() if not weights else None)
        trainer.optimizers.register_step_post_hook(lambda *_: note())
        trainer.train()
        return weights, averages


@pytest.mark.parametrize(
    "ema",
    [
        {"decay": 0.7},
        {"half_life_fraction": 0.6, "update_every_n_steps": 2},
        {"decay": 0.7, "start_step": 3, "update_every_n_steps": 2},
    ],
    ids=str,
)
def test_the_numbers_are_those_of_torchtitan_s_rule(ema: dict[str, Any], tmp_path: Path) -> None:
    weights, averages = ranks.run(2, weights_and_averages, tmp_path, ema)[0]
    first, every = ema.get("start_step", 0), ema.get("update_every_n_steps", 1)
    by_hand = weights[0]
    for step in range(1, 9):
        if step == first:
            by_hand = weights[step]  # where torchtitan would mix in a (1 - decay)th of them
        elif step > first and (step - first) % every == 0:
            number = (step - first) // every
            by_hand = by_hand.lerp(
                weights[step],
                1 - (ema["decay"] if "decay" in ema else 2 ** (-1 / (ema["half_life_fraction"] * number))),
            )
        torch.testing.assert_close(averages[step], by_hand, rtol=0, atol=1e-6)


def recipe(out: Path, steps: int) -> dict[str, float]:
    with launched():
        return torchtitan_run.train(without_averages(out, adapter=HuggingFaceNames), steps, out, save_every=2)


def test_the_recipe_goes_on_after_a_stop_and_exports_under_both_names(tmp_path: Path) -> None:
    assert ranks.run(2, recipe, tmp_path / "straight", 4)[0]["updates"] == 4
    shutil.copytree(tmp_path / "straight" / "checkpoint" / "step-2", tmp_path / "parts" / "checkpoint" / "step-2")
    assert ranks.run(2, recipe, tmp_path / "parts", 4)[0]["updates"] == 4
    straight, parts = (load_file(tmp_path / one / "model" / "model.safetensors") for one in ("straight", "parts"))
    assert equal(parts, straight)
    assert equal(
        load_file(tmp_path / "parts" / "hf" / "model.safetensors"),
        {f"model.{name}": one for name, one in straight.items()},
    )


class Watching(Validator):
    """What a validation computes with."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        self.config, self.seen = config, []

    def validate(self, model_parts: Any, step: int) -> None:
        self.seen.append(model_parts[0].head.weight.detach().full_tensor())


def validated(out: Path, validate: bool) -> tuple[bool, bool]:
    with launched():
        config = config_of(out, decay=0.9, validate=validate)
        config.validator = Watching.Config(enable=True, freq=4)
        trainer = config.build()
        trainer.train()
        seen = trainer.validator.seen[-1]
        weights = trainer.model_parts[0].head.weight.detach().full_tensor()
        with trainer.ema.averages.swapped():
            averages = trainer.model_parts[0].head.weight.detach().full_tensor()
        return torch.equal(seen, averages), torch.equal(seen, weights)


@pytest.mark.parametrize("validate", [True, False])
def test_validation_is_of_the_averages_unless_asked_otherwise(validate: bool, tmp_path: Path) -> None:
    assert ranks.run(2, validated, tmp_path, validate) == [(validate, not validate)] * 2


def test_what_cannot_be_is_refused() -> None:
    from shardow.integrations.torchtitan import EMAWeights

    with pytest.raises(shardow.errors.UnsupportedError, match="2 model parts"):
        EMAWeights.Config(enable=True).build(model_parts=[torch.nn.Linear(1, 1)] * 2)
    with pytest.raises(ValueError, match=r"ema.update_every_n_steps=0"):
        EMAWeights.Config(enable=True, update_every_n_steps=0).build(model_parts=[torch.nn.Linear(1, 1)])
