"""Each argument of each public call takes numbers of Python's, numpy's and torch's alike, and refuses what is wrong
with an error of Shardow's."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardow
from shardow import memory, posthoc, schedules

#: The same value as Python has it, and as others do.
TWINS: list[tuple[Any, tuple[Any, ...]]] = [
    (3, (np.int64(3), np.uint8(3), torch.tensor(3))),
    (0.5, (np.float64(0.5), np.float32(0.5), torch.tensor(0.5))),
]
WRONG: tuple[Any, ...] = (
    "8", b"8", object(), nn.Linear(2, 2), torch.ones(2), np.ones(2), [1.5], {1: 2}, 2**70, -(2**70), 1.9, float("nan"),
    True, lambda: None, 1j,
)  # fmt: skip
#: Where a function is asked for, which may raise what it likes.
FUNCTIONS = {"params", "buffers", "progress", "source", "units", "samples", "loss", "activation_checkpointing"}
#: What a call may do with anything: Python's own truth values.
ANY_TRUTH = {
    "verify", "strict", "asynchronous", "per_step", "normalize", "complete", "overlap", "random", "bf16", "warmup",
    "memory_efficient_init", "reshard_after_forward", "use_warmup", "use_ema_warmup",
}  # fmt: skip


class Calls:
    """Calls that succeed, with a model and files of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Linear(2, 3)
        self.ema = shardow.EMA(self.model, 0.5)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for step in (1, 2, 3):
            self.ema.update(step)
            self.ema.snapshot(folder / "snapshots", every=1)
        self.steps = shardow.Checkpoints(folder / "run")
        self.steps.save(1, self.model, self.ema)
        self.state = self.ema.state_dict()
        self.ema.save(folder / "ema.safetensors")
        shardow.save(self.model, folder / "model.safetensors")

    def table(self) -> dict[Callable[..., Any], dict[str, Any]]:
        model, folder, ema, steps = self.model, self.folder, self.ema, self.steps
        saved, snapshots = folder / "model.safetensors", folder / "snapshots"
        return {
            shardow.EMA: {"model": model},
            ema.update: {}, ema.swap_in: {}, ema.copy_to: {"model": nn.Linear(2, 3)}, ema.feed_back: {},
            ema.attach: {"optimizer": self.optimizer}, ema.prepare_replay: {},
            ema.save: {"path": folder / "ema.safetensors"}, ema.async_save: {"path": folder / "ema.safetensors"},
            ema.load: {"path": folder / "ema.safetensors"}, ema.export: {"path": folder / "exported"},
            ema.snapshot: {"directory": folder / "others", "every": 7}, ema.load_state_dict: {"state": self.state},
            ema.full_state_dict: {}, ema.distance: {}, ema.restore: {},
            shardow.Checkpoints: {"directory": folder / "run"},
            steps.save: {"step": 1, "model": model}, steps.restore: {"model": model, "averages": "skip"},
            shardow.save: {"state": model, "path": saved}, shardow.async_save: {"state": model, "path": saved},
            shardow.full_state_dict: {"model": model}, shardow.load: {"target": model, "path": saved},
            shardow.materialize: {"model": model, "source": saved}, shardow.to_empty: {"module": nn.Linear(2, 2)},
            shardow.merge: {"inputs": [saved], "out": folder / "merged.safetensors"},
            shardow.merged: {"inputs": [saved]},
            shardow.open: {"path": saved}, shardow.open(saved).get_slice("weight").__getitem__: {"index": 1},
            shardow.wrap: {"model": model, "mesh": None},
            posthoc.plan: {"directory": snapshots, "sigma_rel": 0.2}, posthoc.sweep: {"directory": snapshots},
            posthoc.synthesize: {"directory": snapshots, "sigma_rel": 0.2, "out": folder / "after.safetensors"},
            memory.plan: {"model_or_shapes": model, "optimizer": "adamw"}, memory.apply: {"model": model},
            **{getattr(schedules, name): {} for name in schedules.__all__},
        }  # fmt: skip


REQUIRED = {"decay": 0.9, "sigma_rel": 0.1, "steps": 9, "samples": 9, "fraction": 0.1, "start": 0.5, "end": 0.9,
            "first": 1, "last": 9}  # fmt: skip


def outcome(call: Callable[[], Any]) -> str:
    """Returns the name of the error, or that there was none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = call()
        if isinstance(made, (shardow.Handle, memory.Switches)):
            made.remove()
        if isinstance(made, shardow.SaveHandle):
            made.wait()
    except shardow.Error as error:
        assert str(error), repr(error)
        return type(error).__name__
    return "fine"


def test_every_argument_takes_numbers_of_all_kinds_and_refuses_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = Calls(tmp_path)
    raw: list[str] = []

    def ended(function: Callable[..., Any], fixed: dict[str, Any], name: str, value: Any) -> str:
        try:
            return outcome(lambda: function(value) if name == "index" else function(**{**fixed, name: value}))
        except Exception as error:
            raw.append(f"{function.__qualname__}({name}={value!r}): {error!r}"[:300])
            return "raw"
        finally:
            calls.ema.restore()

    for function, fitting in calls.table().items():
        parameters = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind != parameter.VAR_KEYWORD
        ]
        needed = {
            parameter.name: REQUIRED[parameter.name]
            for parameter in parameters
            if parameter.default is parameter.empty and parameter.name in REQUIRED
        }
        for name in [parameter.name for parameter in parameters]:
            for value in () if name in ANY_TRUTH else WRONG:
                if not (callable(value) and name in FUNCTIONS):
                    ended(function, {**needed, **fitting}, name, value)
            for value, twins in TWINS:
                expected = ended(function, {**needed, **fitting}, name, value)
                for twin in twins:
                    if (ending := ended(function, {**needed, **fitting}, name, twin)) not in (expected, "raw"):
                        raw.append(f"{function.__qualname__}({name}={twin!r}): {ending}, where {value} is {expected}")
    assert not raw, "\n".join(["", *raw])


def test_a_model_that_is_no_step_is_said_to_be_known(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(shardow.Error, match=r"the EMA knows its own"):
        shardow.EMA(model).update(model)  # type: ignore[arg-type]
    with pytest.raises(shardow.Error, match=r"DeviceMesh"):
        shardow.wrap(model, None)  # type: ignore[arg-type]
    with pytest.raises(shardow.Error, match=r"materialize\(\)"):
        shardow.load(model, model.state_dict())  # type: ignore[arg-type]
    with pytest.raises(shardow.Error, match=r"a tensor's name is a int"):
        shardow.save({1: torch.ones(1)}, tmp_path / "a.safetensors")  # type: ignore[dict-item]


def test_numbers_of_numpy_are_those_of_python() -> None:
    made = shardow.EMA(nn.Linear(2, 2), [np.float32(0.5), 0.75], dtype="float64")  # type: ignore[list-item]
    assert made.decays == ("0.5", "0.75")
    assert made.state_dict()["averages"]["0.5"]["weight"].dtype == torch.float64
    assert schedules.constant(np.float32(0.5)) == schedules.constant(0.5)
    assert schedules.linear(0.5, 0.75, np.int64(7)) == schedules.linear(0.5, 0.75, 7)
