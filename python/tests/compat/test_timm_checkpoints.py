"""timm's checkpoints of averages, and the defects of those who read them."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import walks
from timm_averages import averaged, origin
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardow.compat import timm as ours


@pytest.mark.parametrize("key", ours.KEYS)
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_checkpoints_are_read_under_the_names_of_any_wrapping(key: str, prefix: str, tmp_path: Path) -> None:
    _, ema = averaged()
    path = tmp_path / "latest.pth"
    torch.save(
        {
            "epoch": 1,
            "args": Namespace(lr=1),
            key: {prefix + n: t for n, t in ema.ema.state_dict().items()},
            "optimizer": {"state": {}},
        },
        path,
    )
    resumed = ours.ModelEma(walks.model("mlp"), resume=path)
    assert all(torch.equal(tensor, ema.ema.state_dict()[name]) for name, tensor in resumed.ema.state_dict().items())
    model = nn.DataParallel(walks.model("mlp"))
    ours.load_ema_state_dict(model, path)
    assert all(torch.equal(tensor, ema.ema.state_dict()[name[7:]]) for name, tensor in model.state_dict().items())


def _resumes_wrapped(path: str) -> None:
    """Under DDP the origin's copy is of the wrapper, with ``module.`` before its names."""
    model = DistributedDataParallel(walks.model("mlp"))
    ema = ours.ModelEma(model, 0.5, resume=path)
    theirs = origin.ModelEma(model, 0.5)
    assert ema.ema_has_module
    assert list(ema.ema.state_dict()) == list(theirs.ema.state_dict())
    theirs.ema.load_state_dict(ema.ema.state_dict())
    for _ in walks.walk(model, "mlp", 3):
        ema.update(model)
        theirs.update(model)
    for name, tensor in theirs.ema.state_dict().items():
        assert torch.equal(tensor, ema.ema.state_dict()[name]) or not tensor.is_floating_point(), name
    plain = ours.ModelEma(model.module, 0.5)
    plain.update(model)
    assert not plain.ema_has_module


def test_resume_works_after_the_model_is_wrapped(tmp_path: Path) -> None:
    torch.save({"state_dict_ema": averaged()[1].ema.state_dict()}, tmp_path / "timm.pth")
    ranks.run(2, _resumes_wrapped, str(tmp_path / "timm.pth"))


def test_defect_3_of_source_002_a_mismatch_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    """`except: print("no ema shadow found")` went on with averages of weights that were not resumed; timm logs, and
    goes on.
    """
    model, ema = averaged()
    state = ema.ema.state_dict()
    before = copy.deepcopy(state)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (
            KeyError,
            "has no averages: none of state_dict_ema, ema_state_dict, model_ema among 'epoch', 'model'",
            {"epoch": 1, "model": state},
        ),
        (
            RuntimeError,
            r"missing in the source: 0\.weight",
            {"ema_state_dict": {name: t for name, t in state.items() if name != "0.weight"}},
        ),
        (RuntimeError, "unexpected in the source: more", {"ema_state_dict": {**state, "more": torch.ones(1)}}),
        (
            RuntimeError,
            r"load_ema_state_dict\(\).*0\.weight.*\[2, 2\]",
            {"ema_state_dict": {**state, "0.weight": torch.ones(2, 2)}},
        ),
        (ValueError, "none of the 1 names fits", {"ema_state_dict": {"x": torch.ones(1)}}),
        (AssertionError, "is a list", [state]),
    ]
    for kind, message, checkpoint in wrong:
        torch.save(checkpoint, tmp_path / "latest.pth")
        with pytest.raises(kind, match=message):
            ours.load_ema_state_dict(ema.ema, tmp_path / "latest.pth")
        with pytest.raises(kind, match=message):
            ours.ModelEma(model, resume=tmp_path / "latest.pth")
    with pytest.raises(FileNotFoundError):
        ours.ModelEma(model, resume=tmp_path / "none.pth")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.items())


def test_not_strict_is_not_nothing() -> None:
    """002's reader: load_state_dict(strict=False) without stripping `module.` loaded nothing, and said nothing."""
    _, ema = averaged()
    state = ema.ema.state_dict()
    model = walks.model("mlp")
    ours.load_ema_state_dict(
        model, {"ema_state_dict": {f"module.{n}": t for n, t in state.items() if n != "0.bias"}}, strict=False
    )
    now = model.state_dict()
    assert [name for name in now if not torch.equal(now[name], state[name])] == ["0.bias"]
    with pytest.raises(RuntimeError, match=r"none of the 1 names fits, nothing was loaded: there 'encoder\.weight'"):
        ours.load_ema_state_dict(model, {"ema_state_dict": {"encoder.weight": torch.ones(1)}}, strict=False)


def test_defect_4_of_source_002_counters_are_copied() -> None:
    model = nn.BatchNorm1d(3)
    model.num_batches_tracked = torch.tensor(100)
    theirs, v1, v2 = origin.ModelEma(model, 0.999), ours.ModelEma(model, 0.999), ours.ModelEmaV2(model, 0.999)
    model.num_batches_tracked = torch.tensor(200)
    for average in (theirs, v1, v2):
        average.update(model)
    assert [int(state["num_batches_tracked"]) for state in (theirs.ema.state_dict(), v1.ema.state_dict(),
     v2.module.state_dict())] == [
        100, 200, 200,
    ]  # fmt: skip


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    average = ours.ModelEmaV2(torch.nn.Linear(4, 3), 0.5)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for wrong in (
        {**state, "module.bias": torch.zeros(7)},
        {**state, "other": torch.zeros(1)},
        {"module.weight": state["module.weight"]},
    ):
        with pytest.raises(RuntimeError, match="nothing was loaded"):
            average.load_state_dict(wrong)
        assert all(torch.equal(tensor, before[name]) for name, tensor in average.state_dict().items())
