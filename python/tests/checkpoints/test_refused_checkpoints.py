"""What does not fit, is damaged, or is no checkpoint: refused before anything changes, and older steps are there."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Run, at, equal, tensors_of
from torch import nn

import shardow
from shardow.files.background import SaveHandle


@pytest.mark.parametrize("lost", ["0.weight", "6.bias"])
def test_a_model_that_lacks_a_tensor_is_refused_before_anything_changes(
    lost: str, run: Run, checkpoints: shardow.Checkpoints
) -> None:
    run.save(checkpoints)
    other = Run("plain", seed=1)
    module, _, key = lost.partition(".")
    setattr(other.model[int(module)], key, None)
    before = {name: tensor.clone() for name, tensor in other.model.state_dict().items()}
    with pytest.raises(ValueError, match=lost):
        checkpoints.restore(model=other.model, averages="skip", optimizer="skip", scheduler="skip")
    assert equal(before, other.model.state_dict())


def test_a_model_with_other_shapes_changes_nothing_not_even_averages(
    run: Run, checkpoints: shardow.Checkpoints
) -> None:
    run.save(checkpoints)
    other = Run("plain", seed=1)
    other.model[6] = nn.Linear(1, 4, bias=False)
    before = {
        **other.model.state_dict(),
        **{f"ema/{k}": v for k, v in other.ema.full_state_dict(decay=0.9, complete=False).items()},
    }
    before = {name: tensor.clone() for name, tensor in before.items()}
    with pytest.raises(ValueError, match=r"6\.bias"):
        checkpoints.restore(model=other.model, averages=other.ema, optimizer="skip", scheduler="skip")
    after = {
        **other.model.state_dict(),
        **{f"ema/{k}": v for k, v in other.ema.full_state_dict(decay=0.9, complete=False).items()},
    }
    assert equal(before, after)


def test_an_optimizer_of_other_groups_is_refused(run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    params = list(run.model.parameters())
    for groups, says in (
        ([{"params": params}], "were 2 groups"),
        ([{"params": params[1:]}, {"params": [*params[:1], nn.Parameter(torch.ones(2))]}], "is not in the model"),
    ):
        with pytest.raises(ValueError, match=says):
            checkpoints.restore(**{**run.parts(), "optimizer": torch.optim.AdamW(groups, lr=1e-3)})


def test_averages_in_the_model_are_not_saved_as_weights(run: Run, checkpoints: shardow.Checkpoints) -> None:
    with run.ema.swapped(0.9), pytest.raises(ValueError, match="swapped"):
        run.save(checkpoints)
    with run.ema.swapped(0.9), pytest.raises(ValueError, match="swapped"):
        checkpoints.save(1, model=run.model)
    assert checkpoints.latest() is None


@pytest.mark.parametrize(
    "name", ["model.safetensors", "ema-0.9.safetensors", "optimizer.safetensors", "state.safetensors"]
)
def test_damage_is_found_and_older_steps_are_there(name: str, run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    expected = {key: tensor.clone() for key, tensor in run.model.state_dict().items()}
    run.train(1)
    run.save(checkpoints)
    file = at(checkpoints, 3) / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    if name != "state.safetensors":
        with pytest.raises(shardow.errors.CorruptError, match="checksum"):
            run.restore(checkpoints)
    file.write_bytes(content[: len(content) // 2])
    with pytest.warns(RuntimeWarning, match="step 3 is passed over"):
        assert checkpoints.latest() == 2
    with pytest.raises(shardow.errors.CorruptError):
        run.restore(checkpoints, step=3)
    with pytest.warns(RuntimeWarning, match="step 3 is passed over"):
        assert run.restore(checkpoints)["step"] == 2
    assert equal(expected, run.model.state_dict())


def test_a_file_of_another_step_is_no_part_of_this_one(run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    run.train(1)
    run.save(checkpoints)
    shutil.copy(at(checkpoints, 2) / "optimizer.safetensors", at(checkpoints, 3))
    with pytest.raises(shardow.errors.CorruptError, match="of step 2"):
        run.restore(checkpoints, step=3)
    with pytest.warns(RuntimeWarning, match="passed over"):
        assert checkpoints.latest() == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "other"}', '{"format": "shardow.checkpoint", "version": 1}', "\0"]
)
def test_a_manifest_that_is_none_is_passed_over(text: str, run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    at(checkpoints, 9).mkdir()
    (at(checkpoints, 9) / "checkpoint.json").write_text(text)
    with pytest.warns(RuntimeWarning, match="step 9 is passed over"):
        assert checkpoints.latest() == 2


def test_a_later_version_of_the_format_says_so(run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    file = at(checkpoints, 2) / "checkpoint.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(NotImplementedError, match="newer shardow"):
        checkpoints.latest()


def test_older_steps_are_restored_and_unknown_ones_listed(run: Run, checkpoints: shardow.Checkpoints) -> None:
    for _ in range(3):
        run.save(checkpoints)
        run.train(1)
    assert run.restore(checkpoints, step=3)["step"] == 3
    with pytest.raises(FileNotFoundError, match="no checkpoint of step 7; steps there: 4, 3, 2"):
        run.restore(checkpoints, step=7)


def test_a_step_saved_twice_is_the_second_one(run: Run, checkpoints: shardow.Checkpoints) -> None:
    run.save(checkpoints)
    (at(checkpoints, 2) / "notes.txt").write_text("of a user")
    run.train(1)
    checkpoints.save(2, model=run.model, state={"step": 3})
    assert (at(checkpoints, 2) / "notes.txt").read_text() == "of a user"
    other = Run("plain", seed=1)
    assert checkpoints.restore(model=other.model) == {"step": 3}
    assert equal(run.model.state_dict(), other.model.state_dict())
    with pytest.raises(ValueError, match="has no optimizer"):  # the first one's file is still there
        checkpoints.restore(model=other.model, optimizer=other.optimizer)
    run.save(checkpoints)
    other.restore(checkpoints, step=3)
    assert equal(tensors_of(at(checkpoints, 3)), tensors_of(at(checkpoints, 3)))


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, None])
def test_a_step_is_a_whole_number(step: Any, run: Run, checkpoints: shardow.Checkpoints) -> None:
    with pytest.raises(ValueError, match="step"):
        checkpoints.save(step, model=run.model)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}, {"keep": 1.5}, {"keep_every": 0}])
def test_what_stays_is_a_whole_number(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        shardow.Checkpoints(tmp_path, **options)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "nothing to save"),
        ({"model": {}}, "of class Module"),
        ({"averages": {}}, "of class EMA"),
        ({"scheduler": object()}, "without state_dict"),
        ({"optimizer": {"": 1}}, "have names"),
    ],
)
def test_wrong_parts_are_named(parts: dict[str, Any], says: str, checkpoints: shardow.Checkpoints) -> None:
    with pytest.raises(ValueError, match=says):
        checkpoints.save(1, **parts)


def test_an_optimizer_needs_the_model_that_names_its_parameters(run: Run, checkpoints: shardow.Checkpoints) -> None:
    with pytest.raises(ValueError, match="needs model="):
        checkpoints.save(1, optimizer=run.optimizer)
    with pytest.raises(ValueError, match="is not in the model"):
        checkpoints.save(1, model=Run("plain").model, optimizer=run.optimizer)


def test_what_a_restore_has_filled_in_part_is_saved_when_another_one_has_ended(
    run: Run, checkpoints: shardow.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(checkpoints)

    def fails(_: Any) -> None:
        raise OSError("in the middle")

    monkeypatch.setattr(run.scheduler, "load_state_dict", fails)
    with pytest.raises(OSError, match="in the middle"):
        run.restore(checkpoints)
    for part in ("model", "averages"):
        with pytest.raises(ValueError, match=r"restore\(\) of this model stopped halfway"):
            checkpoints.save(9, **{part: run.parts()[part]})
    monkeypatch.undo()
    run.restore(checkpoints)
    for step, part in enumerate(("model", "averages"), 10):
        checkpoints.save(step, **{part: run.parts()[part]})
    assert checkpoints.latest() == 11


def test_a_restore_waits_for_the_step_that_is_being_written(
    checkpoints: shardow.Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SaveHandle._write
    monkeypatch.setattr(SaveHandle, "_write", lambda *args: (time.sleep(0.2), write(*args)))
    for step in (1, 2):
        checkpoints.save(step, state={"step": step}, asynchronous=True)
    assert checkpoints.restore() == {"step": 2}


def test_a_file_of_another_save_of_the_same_step_is_no_part_of_this_one(tmp_path: Path) -> None:
    first, second = (shardow.Checkpoints(tmp_path / name) for name in ("first", "second"))
    for checkpoints, value in ((first, 1.0), (second, 2.0)):
        checkpoints.save(1, state={"value": torch.tensor(value)})
    shutil.copy(at(second, 1) / "state.safetensors", at(first, 1) / "state.safetensors")
    with pytest.raises(shardow.errors.CorruptError, match="is of another save"):
        first.restore(step=1)
