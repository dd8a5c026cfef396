"""EMA.snapshot(): what is due, what is there, and what a resumed run goes on with."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import models
import pytest
import ranks
import snapshot_runs as runs
import torch
import torch.distributed as dist

import shardow
from shardow import posthoc
from shardow.files.background import SaveHandle

TWO = (0.05, 0.1)


def terms(directory: Path, sigma_rel: float = 0.08, **asked: Any) -> list[tuple[str, int, float]]:
    return [(one.key, one.step, one.coefficient) for one in posthoc.plan(directory, sigma_rel, **asked).terms]


def record_of(directory: Path, step: int) -> Any:
    (file, *_) = sorted((directory / f"snapshot-{step:09}").glob("*.safetensors"))
    with shardow.open(file) as opened:
        return json.loads(opened.metadata["shardow.snapshot"])


def test_a_decay_that_was_set_while_the_run_went_on_is_not_known_afterwards(tmp_path: Path) -> None:
    model, ema = runs.started(shardow.schedules.settable(0.5))
    for step in (1, 2):
        ema.set_decay(step / 4)
        runs.put(model, step)
        ema.update()
        ema.snapshot(tmp_path, every=1)
    with pytest.raises(NotImplementedError, match=r"set_decay\(\).*other schedules"):
        posthoc.plan(tmp_path, 0.1)


def test_what_is_due_is_saved_once(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    told = []
    for step in range(1, 26):
        runs.put(model, step)
        ema.update()
        told.append(ema.snapshot(tmp_path, 10))
        assert ema.snapshot(tmp_path, 10) is None  # of the same step again
    assert runs.steps_there(tmp_path) == [10, 20]
    assert [n for n, one in enumerate(told, 1) if one is not None] == [10, 20]
    assert told[9]["files"] == [
        str(tmp_path / "snapshot-000000010" / f"ema-power-sigma_rel={one}.safetensors") for one in TWO
    ]


def test_averages_beyond_the_range_of_the_stored_dtype_are_refused(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    with torch.no_grad():
        model.weight.view(-1)[0] = 7e4
        model.weight.view(-1)[1] = torch.inf
    ema.reset()
    ema.update()
    with pytest.raises(ValueError, match=r"1 averages of 'weight' are beyond the largest torch.float16"):
        ema.snapshot(tmp_path, 1, dtype=torch.float16)
    assert not list(tmp_path.iterdir())
    assert ema.snapshot(tmp_path, 1, dtype=torch.bfloat16)


def test_a_snapshot_is_the_averages_of_its_step(tmp_path: Path) -> None:
    model, ema = runs.started([0.9, 0.99])
    runs.go_on(model, ema, range(1, 21), tmp_path, 20)
    for key, average in ema.state_dict()["averages"].items():
        with shardow.open(tmp_path / "snapshot-000000020" / f"ema-{key}.safetensors") as there:
            assert torch.equal(there["weight"], average["weight"])
    other = runs.started([0.9, 0.99])[1]
    other.load(tmp_path / "snapshot-000000020")
    assert other.step == 20


def test_one_average_and_its_dtype(tmp_path: Path) -> None:
    model, ema = runs.started(0.9)
    runs.go_on(model, ema, range(1, 11), tmp_path, 5, dtype=torch.bfloat16)
    with shardow.open(tmp_path / "snapshot-000000010" / "ema-0.9.safetensors") as there:
        assert torch.equal(there["weight"], ema.state_dict()["averages"]["weight"].bfloat16())


def test_in_the_background(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    handles = []
    for step in range(1, 31):
        runs.put(model, step)
        ema.update()
        handles.append(ema.snapshot(tmp_path / "background", 10, asynchronous=True))
    last = handles[-1]
    assert isinstance(last, SaveHandle)
    last.wait()
    runs.run(tmp_path / "at once", runs.powers(*TWO), range(1, 31), every=10)
    assert runs.steps_there(tmp_path / "background") == [10, 20, 30]
    assert terms(tmp_path / "background") == terms(tmp_path / "at once")


def test_several_directories_at_once(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    for step in range(1, 13):
        runs.put(model, step)
        ema.update()
        ema.snapshot(tmp_path / "a", 4)
        ema.snapshot(tmp_path / "b", 6)
    assert runs.steps_there(tmp_path / "a") == [4, 8, 12]
    assert runs.steps_there(tmp_path / "b") == [6, 12]


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "snapshot-000000010").mkdir()
    (tmp_path / "snapshot-000000010" / "mine.txt").write_text("mine too")
    runs.run(tmp_path, runs.powers(*TWO), range(1, 21), every=10)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "snapshot-000000010" / "mine.txt").read_text() == "mine too"
    assert len(terms(tmp_path)) == 4


@pytest.mark.parametrize("stop", [60, 77, 90, 91])
@pytest.mark.parametrize("called", [True, False], ids=["each step", "after the resume alone"])
def test_a_resumed_run_has_neither_gaps_nor_duplicates(tmp_path: Path, stop: int, called: bool) -> None:
    runs.run(tmp_path / "whole", runs.powers(*TWO))
    model, ema = runs.started(runs.powers(*TWO))
    for step in range(1, stop + 1):
        runs.put(model, step)
        ema.update()
        if called or step <= 45:
            ema.snapshot(tmp_path / "resumed", 30)
    ema.save(tmp_path / "ema.safetensors")
    model, ema = runs.started(runs.powers(*TWO))
    ema.load(tmp_path / "ema.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.go_on(model, ema, range(stop + 1, 241), tmp_path / "resumed", 30)
    assert set(runs.steps_there(tmp_path / "resumed")) >= {30, 120, 150, 180, 210, 240}
    if called:
        assert runs.steps_there(tmp_path / "resumed") == runs.steps_there(tmp_path / "whole")
        assert terms(tmp_path / "resumed") == terms(tmp_path / "whole")
    segments = record_of(tmp_path / "resumed", 240)["segments"]
    assert [sum(count for _, _, count in one["updates"]) for one in segments][-1] >= 240 - stop
    assert sum(count for one in segments for _, _, count in one["updates"]) == 240
    assert len({one["run"] for one in segments}) == 2


def test_a_snapshot_that_was_lost_is_made_up_for(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    runs.go_on(model, ema, range(1, 58), tmp_path, 30)
    for step in (58, 59, 60, 61):  # the process dies before it has saved that of step 60
        runs.put(model, step)
        ema.update()
    ema.save(tmp_path / "ema.safetensors")
    model, ema = runs.started(runs.powers(*TWO))
    ema.load(tmp_path / "ema.safetensors")
    runs.go_on(model, ema, range(62, 91), tmp_path, 30)
    assert runs.steps_there(tmp_path) == [30, 62, 90]


def test_a_future_that_was_given_up_is_left_out(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    runs.go_on(model, ema, range(1, 101), tmp_path, 20)
    ema.save(tmp_path / "ema.safetensors")
    runs.go_on(model, ema, range(101, 201), tmp_path, 20)
    model, ema = runs.started(runs.powers(*TWO))
    ema.load(tmp_path / "ema.safetensors")
    runs.go_on(model, ema, range(101, 231), tmp_path, 30)
    assert runs.steps_there(tmp_path) == [20, 40, 60, 80, 100, 120, 140, 150, 160, 180, 200, 210]
    found = posthoc.plan(tmp_path, 0.08)
    assert sorted({one.step for one in found.terms}) == [20, 40, 60, 80, 100, 120, 150, 180, 210]
    assert [int(text.partition(":")[0][-9:]) for text in found.left_out] == [140, 160, 200]
    assert "left out" in str(found)


def test_a_resume_with_other_schedules_is_recorded(tmp_path: Path) -> None:
    """The average is a mixture then, and its profile is that mixture's."""
    model, ema = runs.started([0.9, 0.98])
    runs.go_on(model, ema, range(1, 101), tmp_path, 50)
    ema.save(tmp_path / "saved")
    model, ema = runs.started([0.95, 0.99])
    ema.load(tmp_path / "saved", options="own")
    runs.go_on(model, ema, range(101, 151), tmp_path, 50)
    schedules = [list(one["schedules"].items()) for one in record_of(tmp_path, 150)["segments"]]
    assert [[(key, one["decay"]) for key, one in part] for part in schedules] == [
        [("0.95", 0.9), ("0.99", 0.98)],
        [("0.95", 0.95), ("0.99", 0.99)],
    ]
    found = posthoc.plan(tmp_path, schedule=0.95)
    assert found.residual > 1e-6  # a decay of 0.95 from the start is not what was tracked


def test_a_resume_before_the_last_snapshot_with_other_schedules(tmp_path: Path) -> None:
    model, ema = runs.started([0.9, 0.98])
    runs.go_on(model, ema, range(1, 51), tmp_path, 20)
    state = ema.state_dict()
    runs.go_on(model, ema, range(51, 61), tmp_path, 20)
    model, ema = runs.started([0.95, 0.99])
    ema.load_state_dict(state, options="own")
    runs.go_on(model, ema, range(51, 81), tmp_path, 20)
    assert sorted({one.step for one in posthoc.plan(tmp_path, schedule=0.95).terms}) == [20, 40, 60, 80]


def test_a_snapshot_before_the_first_update_is_nobody_elses(tmp_path: Path) -> None:
    model, ema = runs.started(0.9, update_every=100)
    runs.go_on(model, ema, range(1, 201), tmp_path, 50)
    assert runs.steps_there(tmp_path) == [50, 100, 150, 200]


def test_a_run_that_begins_again_begins_its_record_again(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    runs.go_on(model, ema, range(1, 31), tmp_path, 10)
    ema.reset()
    runs.go_on(model, ema, range(1, 21), tmp_path, 10)
    assert len(record_of(tmp_path, 20)["segments"]) == 1
    assert record_of(tmp_path, 20)["segments"][0]["run"] != record_of(tmp_path, 30)["segments"][0]["run"]
    assert {one.step for one in posthoc.plan(tmp_path, 0.08, step=20).terms} == {10, 20}
    assert {one.step for one in posthoc.plan(tmp_path, 0.08).terms} == {10, 20}
    assert {one.step for one in posthoc.plan(tmp_path, 0.08, step=30).terms} == {30}  # which that run alone has reached


def test_called_seldom_it_takes_updates_as_even(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO), update_every=2)
    for step in range(1, 41):
        runs.put(model, step)
        ema.update()
        if step % 20 == 0:
            ema.snapshot(tmp_path / "even", 20)
    assert record_of(tmp_path / "even", 40)["segments"][0]["updates"] == [[2, 2, 20]]
    model, ema = runs.started(runs.powers(*TWO))
    for step in (1, 2, 7, 8, 20):
        runs.put(model, step)
        ema.update(step=step)
    ema.snapshot(tmp_path / "uneven", 20)
    assert record_of(tmp_path / "uneven", 20)["segments"][0]["updates"] == [[4, 4, 5]]


def test_updates_are_recorded_in_runs(tmp_path: Path) -> None:
    model, ema = runs.started(shardow.schedules.half_life_in_samples(100))
    runs.go_on(model, ema, [1, 2, 3, 5, 7, 9, 10, 11], tmp_path, 11, samples=8)
    assert record_of(tmp_path, 11)["segments"][0]["updates"] == [[1, 1, 3, 8, 8], [5, 2, 3, 40, 16], [10, 1, 2, 80, 8]]


def test_what_is_refused(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    runs.go_on(model, ema, range(1, 11), tmp_path, 5)
    for wrong in ({"every": 0}, {"every": 2.5}, {"every": 5, "dtype": "float8_e4m3fn"}, {"every": 5, "dtype": "int8"}):
        with pytest.raises(ValueError, match=r"every|dtype"):
            ema.snapshot(tmp_path, **wrong)  # type: ignore[arg-type]
    other = runs.started([0.5, 0.6, 0.7])[1]
    other.update(step=10)
    with pytest.raises(ValueError, match="give another directory"):
        other.snapshot(tmp_path, 5)
    with ema.swapped(decay=ema.decays[0]):
        assert ema.snapshot(tmp_path, 5) is None  # not due
    runs.put(model, 11)
    ema.update(step=15)
    with ema.swapped(decay=ema.decays[0]), pytest.raises(ValueError, match="swap"):
        ema.snapshot(tmp_path, 5)
    assert ema.snapshot(tmp_path, 5) is not None  # it is due still
    assert runs.steps_there(tmp_path) == [5, 10, 15]


def test_a_save_that_fails_is_made_up_for(tmp_path: Path) -> None:
    model, ema = runs.started(runs.powers(*TWO))
    runs.go_on(model, ema, range(1, 10), tmp_path, 10)
    (tmp_path / "snapshot-000000010").write_text("in the way")
    runs.put(model, 10)
    ema.update()
    with pytest.raises(ValueError, match="is a file"):
        ema.snapshot(tmp_path, 10)
    runs.go_on(model, ema, range(11, 21), tmp_path, 10)
    os.remove(tmp_path / "snapshot-000000010")
    assert runs.steps_there(tmp_path) == [11, 20]


def _on_ranks(directory: str, stop: int) -> list[int]:
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, decay=runs.powers(*TWO))
    if stop > 20:
        ema.load(f"{directory}/ema")
    for step in range(ema.step + 1, stop + 1):
        runs.put_everywhere(model, step)
        ema.update()
        ema.snapshot(directory, 10, asynchronous=True)
    ema.save(f"{directory}/ema")
    dist.barrier()
    return runs.steps_there(Path(directory))


def test_ranks_save_together_and_another_number_of_them_goes_on(tmp_path: Path) -> None:
    assert ranks.run(2, _on_ranks, str(tmp_path), 20) == [[10, 20]] * 2
    assert ranks.run(3, _on_ranks, str(tmp_path), 40) == [[10, 20, 30, 40]] * 3
    assert [one["updates"] for one in record_of(tmp_path, 40)["segments"]] == [[[1, 1, 20]], [[21, 1, 20]]]
    assert {one.step for one in posthoc.plan(tmp_path, 0.08).terms} == {10, 20, 30, 40}


def _on_ranks_that_differ(directory: str) -> str:
    model = models.build("fsdp2", dist.get_world_size())
    ema = shardow.EMA(model, decay=runs.powers(*TWO), timeout=5)
    ema.update()
    if dist.get_rank() == 1:
        ema.update()
    try:
        ema.snapshot(directory, 1)
    except (ValueError, TimeoutError) as error:
        return type(error).__name__
    return "saved"


def test_ranks_that_have_made_other_updates(tmp_path: Path) -> None:
    assert "saved" not in ranks.run(2, _on_ranks_that_differ, str(tmp_path))
    assert runs.steps_there(tmp_path) == []
