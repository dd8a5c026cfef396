"""What people do to checkpoints, and give to them: right, or an error that says what to do, never something else in
silence.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import random
import shutil
import time
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import Run, at, equal, tensors_of

import shardow


def test_a_relative_directory_is_where_it_was_wherever_the_program_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoints = shardow.Checkpoints("run")
    checkpoints.save(1, state={"a": 1})
    handle = checkpoints.save(2, state={"a": 2}, asynchronous=True)
    os.chdir("elsewhere")
    handle.wait()
    checkpoints.save(3, state={"a": 3})
    assert checkpoints.restore() == {"a": 3}
    assert sorted(os.listdir(tmp_path / "run")) == [f"step-{step:09}" for step in (1, 2, 3)]


@pytest.mark.parametrize("how", ["renamed", "copied"])
def test_a_step_under_another_step_s_name_is_not_that_step(
    how: str, run: Run, checkpoints: shardow.Checkpoints
) -> None:
    for step in (10, 20):
        checkpoints.save(step, state={"step": step})
    (shutil.move if how == "renamed" else shutil.copytree)(at(checkpoints, 10), at(checkpoints, 30))
    with pytest.warns(RuntimeWarning, match="step 30 is passed over.*holds step 10: it was renamed, or is a copy"):
        assert checkpoints.restore() == {"step": 20}
    with pytest.raises(shardow.errors.CorruptError, match="its name is step-000000010"):
        checkpoints.restore(step=30)
    shutil.copytree(at(checkpoints, 20), at(checkpoints, 5))
    with pytest.raises(shardow.errors.CorruptError, match="its name is step-000000020"):
        checkpoints.restore(step=5)


def test_plain_values_that_were_changed_are_found(checkpoints: shardow.Checkpoints) -> None:
    """A digit of the manifest, which no checksum of a file covers."""
    for step in (1, 2):
        checkpoints.save(step, state={"lr": 0.125})
    path = at(checkpoints, 2) / "checkpoint.json"
    text = path.read_text()
    path.write_text(text.replace("0.125", "0.165"))
    with pytest.warns(RuntimeWarning, match="step 2 is passed over.*checksum differs"):
        assert checkpoints.latest() == 1
    with pytest.raises(shardow.errors.CorruptError, match="without its last key, crc32, it is taken as it is"):
        checkpoints.restore(step=2)
    by_hand = json.loads(path.read_text())
    del by_hand["crc32"]
    path.write_text(json.dumps(by_hand, indent=2))
    assert checkpoints.restore() == {"lr": 0.165}


def test_keys_that_a_later_version_may_add_are_passed_over(checkpoints: shardow.Checkpoints) -> None:
    checkpoints.save(1, state={"lr": 0.5})
    path = at(checkpoints, 1) / "checkpoint.json"
    text = json.loads(path.read_text())
    del text["crc32"]
    path.write_text(json.dumps({**text, "machine": {"name": "x"}, "later": [1]}))
    assert checkpoints.restore() == {"lr": 0.5}
    path.write_text(json.dumps({key: value for key, value in text.items() if key != "files"}))
    with pytest.raises(shardow.errors.CorruptError, match="files"):
        checkpoints.restore(step=1)


def mutated(node: Any, rng: random.Random) -> Any:
    """Of a manifest: a key less, one of another name, or a value of another kind, somewhere."""
    odd = [None, -1, "x", [], {}, True, {"$tensor": "random"}, {"$tensor": 1}, {"$tuple": 3}, [[1]], "../x.safetensors",
           {"$dict": [[[1], 2]]}, {"$float": "x"}, {"$bytes": "%"}, {"$part": "state.0.weight.exp_avg"}]  # fmt: skip
    if isinstance(node, dict) and node and rng.random() < 0.8:
        node, key, how = dict(node), rng.choice(list(node)), rng.random()
        if how < 0.25:
            del node[key]
        elif how < 0.5:
            node[rng.choice(["x", "$tuple", "$tensor"])] = node.pop(key)
        else:
            node[key] = mutated(node[key], rng)
        return node
    if isinstance(node, list) and node and rng.random() < 0.8:
        i = rng.randrange(len(node))
        return [*node[:i], mutated(node[i], rng), *node[i + 1 :]]
    return rng.choice(odd)


def test_a_manifest_that_somebody_wrote_is_taken_or_refused_by_an_error_of_ours(
    checkpoints: shardow.Checkpoints,
) -> None:
    run = Run("plain")
    run.train(2)
    # The scheduler's load_state_dict() is torch's.
    parts = {name: one for name, one in run.parts().items() if name != "scheduler"}
    checkpoints.save(2, **parts, state={"a": (1, float("inf")), "t": torch.ones(3)})
    path = at(checkpoints, 2) / "checkpoint.json"
    whole, rng, refused = json.loads(path.read_text()), random.Random(5), 0
    del whole["crc32"]
    for _ in range(300 if os.environ.get("SHARDOW_ALL") else 60):
        path.write_text(json.dumps(mutated(whole, rng)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                checkpoints.restore(**parts, step=2, random=False)
            except shardow.Error:
                refused += 1
    assert refused > 30


@pytest.mark.parametrize("part", ["optimizer", "scheduler"])
def test_values_of_another_class_are_taken_with_a_warning(
    part: str, run: Run, checkpoints: shardow.Checkpoints
) -> None:
    run.save(checkpoints)
    other = {
        "optimizer": torch.optim.RMSprop([{"params": group["params"]} for group in run.optimizer.param_groups], lr=0.1),
        "scheduler": torch.optim.lr_scheduler.StepLR(run.optimizer, 3),
    }[part]
    was, now = {"optimizer": ("AdamW", "RMSprop"), "scheduler": ("CosineAnnealingLR", "StepLR")}[part]
    with pytest.warns(UserWarning, match=f"{part} was of class {was}, and is a {now}"):
        checkpoints.restore(**{**run.parts(), part: other})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.restore(checkpoints)


def test_averages_of_another_model_are_refused_both_ways(run: Run, checkpoints: shardow.Checkpoints) -> None:
    """Of a copy, most often, which nobody trains."""
    other = shardow.EMA(copy.deepcopy(run.model), decay=[0.5, 0.9])
    with pytest.raises(ValueError, match="averages= are those of another model"):
        checkpoints.save(1, run.model, other)
    run.save(checkpoints)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.train(1)
    now = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    with pytest.raises(ValueError, match="averages= are those of another model"):
        checkpoints.restore(**{**run.parts(), "averages": other})
    assert equal(now, run.model.state_dict())
    assert not equal(now, before)


@pytest.mark.parametrize(
    "value",
    [
        True, -0.0, 5e-324, -math.inf, 2**200, -(10**4000), (), ((), []), {}, None, "ü\u2028\0𝄞", b"\xff\0",
        {"$tuple": 1}, {"": {"$": 0}},
        {1: 2, "1": 3}, {(1, "a"): [None]}, {None: True}, {True: False}, {1.5: {2: {}}}, OrderedDict(b=1, a=2),
        Counter("aab"),
    ],
    ids=range(21),
)  # fmt: skip
def test_plain_values_come_back_as_they_were(value: Any, checkpoints: shardow.Checkpoints) -> None:
    checkpoints.save(0, state={"value": value})
    found = checkpoints.restore(step=0)["value"]
    assert found == value
    assert list(found) == list(value) if isinstance(value, dict) else repr(found) == repr(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.float32(0.1), r"value.item\(\)"),
        (np.arange(3), r"value.tolist\(\)"),
        (10**5000, "give a text"),
        ({1}, "a builtins.set"),
        (1j, "a builtins.complex"),
        ("\ud800", "no character"),
        (torch.Size([1]), "a torch.Size"),
        ({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "'state.value.a.b' is there twice"),
    ],
    ids=range(8),
)
def test_what_can_t_come_back_as_it_was_is_refused(value: Any, says: str, checkpoints: shardow.Checkpoints) -> None:
    with pytest.raises(ValueError, match=says) as error:
        checkpoints.save(0, state={"value": value})
    assert isinstance(error.value, shardow.Error)
    assert checkpoints.latest() is None


def test_a_file_in_place_of_the_directory_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for call in (
        shardow.Checkpoints(tmp_path / "run").latest,
        lambda: shardow.Checkpoints(tmp_path / "run").save(1, state={}),
    ):
        with pytest.raises(shardow.Error, match="run"):
            call()


def test_a_save_that_fails_leaves_the_only_step(run: Run, tmp_path: Path) -> None:
    checkpoints = shardow.Checkpoints(tmp_path / "run", keep=1)
    run.save(checkpoints)
    before = tensors_of(at(checkpoints, 2))
    (at(checkpoints, 3) / "model.safetensors").mkdir(parents=True)  # which no file replaces
    run.train(1)
    with pytest.raises(ValueError, match=r"has a directory model\.safetensors"):
        run.save(checkpoints)
    assert checkpoints.latest() == 2
    assert equal(tensors_of(at(checkpoints, 2)), before)


def save_all(directory: Path, job: int) -> None:
    checkpoints = shardow.Checkpoints(directory, keep=2)
    for step in range(1, 10):
        checkpoints.save(step, state={"step": step, "job": job, "values": torch.full((1000,), float(job))})


def test_two_jobs_that_save_the_same_steps_at_once_leave_whole_ones(tmp_path: Path) -> None:
    """As where a scheduler starts a job anew before the old one has ended."""
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=save_all, args=(tmp_path, job)) for job in (1, 2)]
    for job in jobs:
        job.start()
    reader, seen = shardow.Checkpoints(tmp_path), 0
    while any(job.is_alive() for job in jobs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step that is removed meanwhile may be passed over
            try:
                state = reader.restore(random=False)
            except FileNotFoundError:  # none yet, or it has gone since
                time.sleep(0.001)
                continue
        assert (state["values"] == state["job"]).all()
        seen += 1
    assert [job.exitcode for job in jobs] == [0, 0]
    assert seen
    assert reader.restore()["step"] == 9
