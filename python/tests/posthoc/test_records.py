"""What a saved state tells of its past: in segments; also where it has no record; never half believed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import snapshot_runs as runs
from safetensors import safe_open
from safetensors.torch import save_file

import shardow
from shardow import posthoc, schedules

HALF_LIVES = [schedules.half_life_in_samples(20_000), schedules.half_life_in_samples(60_000)]


def uneven(steps: int) -> list[int]:
    """Samples seen by each step, of batches that differ."""
    rng = random.Random(0)
    seen = [0]
    for _ in range(steps):
        seen.append(seen[-1] + rng.randint(480, 512))
    return seen


def go_on(model: runs.Walk, ema: shardow.EMA, steps: range, directory: Path, seen: list[int]) -> None:
    for step in steps:
        runs.put(model, step)
        ema.update(samples=seen[step])
        ema.snapshot(directory, 250)


def record_in(ema: shardow.EMA) -> Any:
    return json.loads(ema.state_dict()["state"])["snapshots"]


def test_uneven_batches_lose_nothing(tmp_path: Path) -> None:
    seen = uneven(3000)
    whole, first = runs.started(HALF_LIVES), runs.started(HALF_LIVES)
    go_on(*whole, range(1, 3001), tmp_path / "whole", seen)
    go_on(*first, range(1, 1701), tmp_path / "parts", seen)
    second = runs.started(HALF_LIVES)
    second[1].load_state_dict(first[1].state_dict())
    go_on(*second, range(1701, 3001), tmp_path / "parts", seen)
    segments = record_in(second[1])["segments"]
    assert [sum(one[2] for one in segment["updates"]) for segment in segments] == [1700, 1300]
    assert len(json.dumps(segments)) < 3000 * 20
    found, expected = (
        posthoc.plan(tmp_path / name, schedule=schedules.half_life_in_samples(40_000)) for name in ("parts", "whole")
    )
    assert found.snapshots == expected.snapshots == 24
    assert [(one.step, one.coefficient) for one in found.terms] == [
        (one.step, one.coefficient) for one in expected.terms
    ]
    assert (found.residual, found.variation) == (expected.residual, expected.variation)
    tracked = posthoc.plan(tmp_path / "whole", schedule=HALF_LIVES[0])
    assert tracked.residual < 1e-9  # it is among them


def test_a_long_run_with_a_regular_interval_is_one_range_and_a_resume_adds_one(tmp_path: Path) -> None:
    for every in (1, 4):
        directory, state = tmp_path / str(every), None
        for last in (20_000, 25_000, 25_400):
            ema = runs.started([0.9, 0.98], update_every=every)[1]
            if state is not None:
                ema.load_state_dict(state)
            for step in range(ema.step + 1, last + 1):
                ema.update()
                ema.snapshot(directory, 1_000_000) if step % 100 == 0 else None
            state = ema.state_dict()
        assert [one["updates"] for one in record_in(ema)["segments"]] == [
            [[every, every, 20_000 // every]],
            [[20_000 + every, every, 5_000 // every]],
            [[25_000 + every, every, 400 // every]],
        ]
        assert len(state["state"]) < 2000


def test_a_state_without_a_record_is_of_the_decays_that_it_had(tmp_path: Path) -> None:
    """Also where those of the EMA that takes it are in force from then on."""
    for way in ("file", "state dict"):
        model, old = runs.started([0.9, 0.98])
        for step in range(1, 61):
            runs.put(model, step)
            old.update()
        model, new = runs.started([0.95, 0.99])
        if way == "file":
            old.save(tmp_path / way / "ema")
            new.load(tmp_path / way / "ema", options="own")
        else:
            new.load_state_dict(old.state_dict(), options="own")
        new.save(tmp_path / way / "again")  # and it goes on from there
        third = runs.started([0.95, 0.99])[1]
        third.load(tmp_path / way / "again")
        runs.go_on(model, third, range(61, 121), tmp_path / way / "snapshots", 20)
        segments = record_in(third)["segments"]
        assert [(one["run"] == "", one["updates"]) for one in segments] == [
            (True, [[1, 1, 60]]),
            (False, [[61, 1, 60]]),
        ]
        assert [[schedule["decay"] for schedule in one["schedules"].values()] for one in segments] == [
            [0.9, 0.98],
            [0.95, 0.99],
        ]
        assert [list(one["schedules"]) for one in segments] == [["0.95", "0.99"]] * 2
        assert posthoc.plan(tmp_path / way / "snapshots", schedule=0.95).snapshots == 6


def test_the_same_decays_in_another_order_are_nothing_to_tell(tmp_path: Path) -> None:
    model, old = runs.started([0.9, 0.98])
    for step in range(1, 11):
        runs.put(model, step)
        old.update()
    old.save(tmp_path / "ema")
    new = runs.started([0.98, 0.9])[1]
    new.load(tmp_path / "ema", options="own")
    runs.go_on(model, new, range(11, 21), tmp_path / "snapshots", 10)
    for one in record_in(new)["segments"]:
        assert {key: schedule["decay"] for key, schedule in one["schedules"].items()} == {"0.9": 0.9, "0.98": 0.98}


def damaged(record: str) -> dict[str, str]:
    later, other = json.loads(record), json.loads(record)
    later["format"] = 3
    other["segments"][0]["schedules"] = {"0.5": {"kind": "constant", "decay": 0.5}}
    backwards = json.loads(record)
    backwards["segments"][0]["updates"].reverse()
    return {
        "of a later version": json.dumps(later),
        "backwards": json.dumps(backwards),
        "of averages": json.dumps(other),
        "no JSON": record[:-9],
        "JSON": "",
    }


def held(ema: shardow.EMA) -> tuple[str, list[list[float]]]:
    state = ema.state_dict()
    return state["state"], [average["weight"].tolist() for average in state["averages"].values()]


@pytest.mark.parametrize("what", ["of a later version", "backwards", "of averages", "no JSON", "JSON"])
def test_what_is_damaged_or_newer_is_noticed_before_anything_changes(what: str, tmp_path: Path) -> None:
    model, ema = runs.started(HALF_LIVES)
    go_on(model, ema, range(1, 61), tmp_path, uneven(60))
    ema.snapshot(tmp_path, 1)
    at = tmp_path / "snapshot-000000060"
    for file in at.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors, told = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
        bad = damaged(told["shardow.snapshot"])[what]
        save_file(tensors, file, {key: bad if key == "shardow.snapshot" else text for key, text in told.items()})
    model, other = runs.started(HALF_LIVES)
    other.update(samples=5)
    before = held(other)
    error = NotImplementedError if what == "of a later version" else ValueError
    with pytest.raises(
        error,
        match="format 3; this version" if what == "of a later version" else "shardow.snapshot|its record of updates",
    ):
        other.load(at)
    state = ema.state_dict()
    text = json.loads(state["state"])
    if what not in ("no JSON", "JSON"):
        text["snapshots"] = json.loads(damaged(json.dumps(text["snapshots"]))[what])
        with pytest.raises(error):
            other.load_state_dict({**state, "state": json.dumps(text)})
    assert held(other) == before
