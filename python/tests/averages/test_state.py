"""What an EMA gives away and takes back: which options are in force afterwards, whole models, copies, a new
beginning."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small import equal
from torch import nn

import shardow

mean = shardow.schedules.mean


def make(
    decay: Any = 0.9, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, shardow.EMA]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)).to(dtype)
    return model, shardow.EMA(model, decay, **options)


def wander(model: nn.Module, *emas: shardow.EMA, steps: int = 3) -> None:
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape))
        for ema in emas:
            ema.update()


def averages(ema: shardow.EMA) -> list[dict[str, torch.Tensor]]:
    return [ema.full_state_dict(key, complete=False) for key in ema.decays]


def same(a: list[dict[str, torch.Tensor]], b: list[dict[str, torch.Tensor]]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def through(how: str, source: shardow.EMA, target: shardow.EMA, path: Path, **options: Any) -> Any:
    if how == "file":
        source.save(path / "ema")
        return target.load(path / "ema", **options)
    return target.load_state_dict(copy.deepcopy(source.state_dict()), **options)


@pytest.fixture(params=["file", "dict"])
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_other_options_there_are_said_and_in_force(how: str, tmp_path: Path) -> None:
    model, old = make(0.9, update_every=2)
    wander(model, old, steps=4)
    other, new = make(0.99, seed=1, rule="mul_add")
    with pytest.warns(
        UserWarning, match=r"(?s)0\.9.*there and was .*0\.99.* here.*mul_add.*update_every is 2.*options='own'"
    ) as caught:
        through(how, old, new, tmp_path)
    assert [one.filename for one in caught] == [__file__]
    assert (new.decays, new.step) == (("0.9",), 4)
    assert "decay=[0.9], rule=lerp, update_every=2" in repr(new)
    assert new.stats()["decay"] == pytest.approx(old.stats()["decay"])
    other.load_state_dict(model.state_dict())
    for p in [*model.parameters(), *other.parameters()]:
        p.data.fill_(2.0)
    for ema in (old, new):
        ema.update()
        ema.update()
    assert same(averages(old), averages(new))


def test_ones_own_options_can_be_kept(how: str, tmp_path: Path) -> None:
    model, old = make([0.9, 0.5])
    wander(model, old)
    _, new = make([0.99, mean()], seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(how, old, new, tmp_path, options="own")
    assert (new.decays, new.step) == (("0.99", "mean()"), 3)
    assert same(averages(old), averages(new))


@pytest.mark.parametrize("options", ["file", "own"])
def test_a_decay_that_is_set_holds_from_the_next_update_and_is_resumed(how: str, options: str, tmp_path: Path) -> None:
    settable = shardow.schedules.settable
    model, old = make([settable(0.5), 0.9])
    expected = model[0].weight.detach().clone()
    for decay in (0.5, 0.75, 1, 0):
        if decay != 0.5:
            old.set_decay(decay)
        wander(model, old, steps=2)
        assert [old.stats()[f"decay/{k}"] for k in (0, 1)] == [decay, 0.9]
        if decay == 0:
            expected = model[0].weight.detach()
            assert torch.equal(averages(old)[0]["0.weight"], expected)
    old.set_decay(0.75)
    _, new = make([settable(0.25), 0.9], seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(how, old, new, tmp_path, options=options)
    assert (new.decays, new.stats()["decay/0"], new.stats()["decay/1"]) == (("settable", "0.9"), 0.75, 0.9)
    with torch.no_grad():
        model[0].weight.add_(1)
    new.load_state_dict(old.state_dict())
    old.update()
    torch.testing.assert_close(averages(old)[0]["0.weight"], expected - 0.75)


def test_a_decay_is_set_where_the_schedule_lets_it_be_and_in_its_range() -> None:
    _, ema = make(0.9)
    with pytest.raises(shardow.Error, match=r"set_decay\(0\.99\): the schedule 0\.9 says .*settable\(0\.99\)"):
        ema.set_decay(0.99)
    _, ema = make(shardow.schedules.settable(0.9))
    for wrong in (1.5, -0.1, float("nan"), "0.9x"):
        with pytest.raises(shardow.Error, match=r"decay"):
            ema.set_decay(wrong)  # type: ignore[arg-type]
    assert ema.stats()["decay"] == 0.9
    with pytest.raises(shardow.Error, match=r"settable is given twice"):
        make([shardow.schedules.settable(0.9), shardow.schedules.settable(0.99)])


def test_the_same_options_say_nothing(how: str, tmp_path: Path) -> None:
    model, old = make([0.9, 0.5])
    wander(model, old)
    _, new = make([0.9, 0.5], seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(how, old, new, tmp_path)


@pytest.mark.parametrize("options", ["file", "own"])
def test_averages_go_with_their_decays_in_whatever_order_they_are(options: Any, how: str, tmp_path: Path) -> None:
    model, old = make([0.9, 0.5])
    wander(model, old)
    _, new = make([0.5, 0.9], seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        through(how, old, new, tmp_path, options=options)
    for decay in (0.9, 0.5):
        assert same([old.full_state_dict(decay)], [new.full_state_dict(decay)])
    wander(model, old)
    assert new.stats()["decay/0"] == (0.9 if options == "file" else 0.5)


@pytest.mark.parametrize(("there", "here"), [(0.9, [0.9, 0.99]), ([0.9, 0.99], 0.9), ([0.9, 0.99, 0.5], [0.9, 0.99])])
def test_another_number_of_averages_is_refused_with_both(there: Any, here: Any, how: str, tmp_path: Path) -> None:
    model, old = make(there)
    wander(model, old)
    _, new = make(here, seed=1)
    before, kept = averages(new), new.decays
    with pytest.raises(
        ValueError, match=r"(?s)has (one average|the averages of).*this EMA keeps.*Make the EMA with decay="
    ):
        through(how, old, new, tmp_path)
    assert same(averages(new), before)
    assert new.decays == kept


def test_options_from_elsewhere_are_refused(how: str, tmp_path: Path) -> None:
    _, old = make()
    with pytest.raises(ValueError, match="'file', 'own'"):
        through(how, old, make()[1], tmp_path, options="mine")


def test_a_file_says_what_it_lacks(tmp_path: Path) -> None:
    model, old = make(params=lambda name, _: name != "2.weight")
    wander(model, old)
    old.save(tmp_path / "a.safetensors", metadata={"run": "7"})
    assert shardow.open(tmp_path / "a.safetensors").metadata["run"] == "7"
    _, new = make(seed=1)
    start = averages(new)[0]["2.weight"]
    with pytest.raises(ValueError, match=r"2\.weight"):
        new.load(tmp_path / "a.safetensors")
    report = new.load(tmp_path / "a.safetensors", strict=False, verify=False)
    assert (report["missing"], report["unexpected"]) == (["2.weight"], [])
    assert report["bytes_read"] > 0
    assert torch.equal(averages(new)[0]["2.weight"], start)
    assert torch.equal(averages(new)[0]["0.weight"], averages(old)[0]["0.weight"])


def test_it_saves_in_several_files_with_progress(tmp_path: Path) -> None:
    model, ema = make()
    wander(model, ema)
    told: list[tuple[int, int]] = []
    report = ema.save(tmp_path / "ema", max_shard_size=64, progress=lambda done, total: told.append((done, total)))
    assert len(report["files"]) > 2
    assert told[-1][0] == told[-1][1] > 0
    _, other = make(seed=1)
    other.load(tmp_path / "ema", progress=lambda done, total: told.append((done, total)))
    assert same(averages(ema), averages(other))
    with pytest.raises(ValueError, match="one decay"):
        make([0.5, 0.9])[1].save(tmp_path / "several", max_shard_size=64)
    with pytest.raises(ValueError, match=r"shardow\.state"):
        ema.save(tmp_path / "x.safetensors", metadata={"shardow.state": "mine"})


def test_a_full_state_is_a_model_unless_the_averages_alone_are_asked_for() -> None:
    model, ema = make()
    model[2].weight.requires_grad_(False)
    wander(model, ema)
    full = ema.full_state_dict()
    make(seed=1)[0].load_state_dict(full, strict=True)
    assert "1.running_mean" in full
    assert "1.running_mean" not in ema.full_state_dict(complete=False)


def test_a_models_own_full_state_is_handed_out_alike() -> None:
    model, _ = make(seed=3)
    full = shardow.full_state_dict(model)
    assert full.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in full.items())
    assert full["0.weight"].data_ptr() != model[0].weight.data_ptr()


def exported(ema: shardow.EMA, path: Path, **options: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    ema.export(path, **options)
    return load_file(path)


@pytest.mark.parametrize("mixed", [False, True])
def test_an_export_has_the_weights_own_dtypes(mixed: bool, tmp_path: Path) -> None:
    model, _ = make(dtype=torch.bfloat16)
    if mixed:
        model[1].float()
    ema = shardow.EMA(model, 0.9)
    wander(model, ema)
    found = exported(ema, tmp_path / "a.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }
    assert torch.equal(found["0.weight"], averages(ema)[0]["0.weight"].bfloat16())


def test_an_export_may_be_float8(tmp_path: Path) -> None:
    model, ema = make()
    found = exported(ema, tmp_path / "a.safetensors", dtype="float8_e4m3fn")
    assert found["0.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["0.weight"].float(), model[0].weight.detach().to(torch.float8_e4m3fn).float())
    assert found["1.num_batches_tracked"].dtype == torch.int64


def test_a_reset_begins_again() -> None:
    model, ema = make([0.9, mean()])
    wander(model, ema)
    ema.reset()
    fresh = shardow.EMA(model, [0.9, mean()])
    assert ema.step == 0
    assert same(averages(ema), averages(fresh))
    wander(model, ema, fresh)
    assert same(averages(ema), averages(fresh))


def test_it_tells_its_names_its_step_and_its_decays() -> None:
    model, ema = make([0.9, mean()])
    wander(model, ema, steps=2)
    assert (ema.names, ema.step, ema.decays) == (tuple(dict(model.named_parameters())), 2, ("0.9", "mean()"))


COPIES: dict[str, Any] = {"deepcopy": copy.deepcopy, "pickle": lambda pair: pickle.loads(pickle.dumps(pair))}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_goes_on_with_the_copied_model_and_leaves_the_first_alone(copied: str) -> None:
    model, ema = make([0.9, 0.99999], update_every=2, seed=4)
    wander(model, ema)
    twin, other = COPIES[copied]((model, ema))
    before = averages(ema)
    assert same(averages(other), before)
    assert repr(other) == repr(ema)
    torch.manual_seed(8)
    wander(twin, other)
    assert same(averages(ema), before)
    torch.manual_seed(8)
    wander(model, ema)
    assert same(averages(ema), averages(other))


def test_a_wrong_keyword_is_a_type_error_and_momentum_says_decay() -> None:
    with pytest.raises(TypeError, match="decays"):
        shardow.EMA(nn.Linear(1, 1), decays=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"decay=0\.9"):
        shardow.EMA(nn.Linear(1, 1), momentum=0.1)  # type: ignore[arg-type]


def test_averages_made_in_inference_mode_are_loaded_outside_of_it() -> None:
    model = torch.nn.Linear(3, 2)
    with torch.inference_mode():
        ema = shardow.EMA(model, 0.5)
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in ema.state_dict().items()
    }
    ema.load_state_dict(state)
    ema.update()


def test_a_load_that_fails_at_its_last_warning_leaves_the_decays_as_they_were(how: str, tmp_path: Path) -> None:
    (_, ema), (_, other) = make(0.9), make(0.5)
    before = ema.state_dict()["state"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"schedule is 0\.5 there"):
            through(how, other, ema, tmp_path)
    assert ema.decays == ("0.9",)
    assert ema.state_dict()["state"] == before
