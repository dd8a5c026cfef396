"""A PartialTensor is copied and moved as the tensor that it is a part of, and refuses everything else."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

import shardow
from shardow import _core
from shardow.sharding.partial_tensor import PartialTensor

SHAPE = (5, 4)


def piece(begin: int = 3, end: int = 12, dtype: torch.dtype = torch.float32) -> PartialTensor:
    local = torch.arange(begin, end).to(dtype)
    return PartialTensor(local, _core.Region.whole(list(SHAPE)).window(begin, end))


def same(a: Any, b: PartialTensor) -> bool:
    return (
        isinstance(a, PartialTensor)
        and a.region == b.region
        and a.local.dtype == b.local.dtype
        and torch.equal(a.local, b.local)
    )


def through(dump: Callable[[Any, Any], None], load: Callable[[Any], Any]) -> Callable[[PartialTensor], Any]:
    def copied(partial: PartialTensor) -> Any:
        file = io.BytesIO()
        with pytest.warns(UserWarning, match="part of sharded averages"):
            dump(partial, file)
        file.seek(0)
        return load(file)

    return copied


def staged(state: dict[str, Any]) -> Any:
    stager = pytest.importorskip(
        "torch.distributed.checkpoint._state_dict_stager", reason="torch 2.6 has no such stager"
    )
    return stager.StateDictStager().stage(state)


COPIES: dict[str, Callable[[PartialTensor], Any]] = {
    "clone": lambda one: one.clone(),
    "detach then clone": lambda one: one.detach().clone(),
    "to with copy": lambda one: one.to("cpu", copy=True),
    "copy_ into empty_like": lambda one: torch.empty_like(one).copy_(one),
    "deepcopy": copy.deepcopy,
    "deepcopy of a dict": lambda one: copy.deepcopy({"a": one})["a"],
    "pickle": through(pickle.dump, pickle.load),
    "torch.save": through(torch.save, lambda file: torch.load(file, weights_only=False)),
    "torch.save, weights only": through(torch.save, lambda file: torch.load(file, weights_only=True)),
    "torch's stager": lambda one: staged({"a": one})["a"],
    "torch's blocking stager": lambda one: _copy_state_dict({"a": one}, _create_cpu_state_dict({"a": one}))["a"],
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(("begin", "end"), [(3, 12), (7, 7), (0, 20)])
def test_a_copy_is_the_same_part_in_memory_of_its_own(how: str, begin: int, end: int) -> None:
    one = piece(begin, end)
    copied = COPIES[how](one)
    assert same(copied, one)
    one.local.add_(1)
    assert end == begin or not same(copied, one)


def test_it_has_the_shape_dtype_and_device_of_the_whole() -> None:
    one = piece(dtype=torch.float64)
    assert one.shape == one.size() == torch.Size(SHAPE)
    assert (one.dim(), one.numel(), one.size(1), one.dtype, one.device) == (
        2,
        20,
        4,
        torch.float64,
        torch.device("cpu"),
    )


def test_it_is_detached_and_aliased_without_a_copy() -> None:
    one = piece()
    for alias in (one.detach(), one.data):
        assert same(alias, one)
        alias.local[0] = -7
        assert one.local[0] == -7


def test_it_is_compared_with_other_pieces() -> None:
    assert torch.equal(piece(), piece())
    assert not torch.equal(piece(), piece(4, 13))
    assert not torch.equal(piece(), PartialTensor(piece().local + 1, piece().region))


def test_it_changes_its_dtype() -> None:
    assert same(piece().to(torch.bfloat16), piece(dtype=torch.bfloat16))
    assert same(piece().double(), piece(dtype=torch.float64))


def test_it_prints_what_it_holds_of_what() -> None:
    assert repr(piece()).startswith("PartialTensor(9 of the 20 elements")
    assert "11." in f"{piece()}"
    assert "11." in f"{piece().clone()}"


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.sum(),
        lambda one: one.norm(),
        lambda one: one[0],
        lambda one: one.view(-1),
        lambda one: one + 1,
        lambda one: one + one,
        lambda one: one.zero_(),
        lambda one: torch.equal(one, torch.ones(SHAPE)),
        lambda one: one.new_empty(3),
        lambda one: one.copy_(piece(4, 13)),
        lambda one: one.copy_(torch.ones(SHAPE)),
        lambda one: torch.ones(SHAPE).copy_(one),
        lambda one: torch._foreach_lerp_([one], [one], 1.0),
        lambda one: torch._foreach_norm([one]),
    ],
)
def test_everything_but_copies_is_refused(call: Callable[[PartialTensor], Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"(?s)part of a tensor of shape \(5, 4\).*full_state_dict") as caught:
        call(piece())
    assert isinstance(caught.value, shardow.Error)


def test_the_warning_of_a_part_is_at_the_callers_line_and_deepcopy_gives_none() -> None:
    with pytest.warns(UserWarning, match="part") as caught:
        torch.save({"averages": {"a": piece(), "b": piece()}}, io.BytesIO())
    assert {one.filename for one in caught} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(piece())


def test_regions_and_schedules_copy_and_pickle() -> None:
    for one in (piece().region, shardow.schedules.power(0.1), shardow.schedules.linear(0.9, 0.99, 100)):
        assert pickle.loads(pickle.dumps(one)) == one
        assert copy.deepcopy(one) == one
        assert copy.copy(one) == one
