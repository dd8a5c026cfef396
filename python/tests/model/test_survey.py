"""Which of many tensors are as most are: whoever is told so looks no further, so nothing odd may pass."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from shardow.model.storage import SURVEY

_BASE = torch.arange(24.0).reshape(4, 6)


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():  # torch means to give them up
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(_BASE, 0.1, 0, torch.qint8)


class Other(torch.Tensor):
    """A subclass, which may have no memory of its own."""


USUAL = {
    "a parameter": nn.Parameter(_BASE.clone()),
    "a part in order": _BASE[1:3],
    "no dimensions": torch.tensor(3.0),
    "nothing": torch.empty(0, 3),
    "nothing, with strides": torch.empty(4, 0).t(),
    "one row": _BASE[:1, ::1],
    "a dimension of one, whose stride does not matter": torch.empty_strided((1, 3), (99, 1)),
}
ODD = {
    "transposed": _BASE.t(),
    "with gaps": _BASE[:, ::2],
    "expanded": torch.zeros(1).expand(5),
    "sparse": _BASE.to_sparse(),
    "on meta": _BASE.to("meta"),
    "quantised": _quantised(),
    "a subclass": _BASE.as_subclass(Other),
    "no tensor": None,
}


@pytest.mark.parametrize("what", USUAL)
def test_a_usual_tensor_is_plain(what: str) -> None:
    assert SURVEY.look([USUAL[what]]).plain() == b"\1"
    assert USUAL[what].is_contiguous()


@pytest.mark.parametrize("what", ODD)
def test_whatever_else_has_to_be_looked_at(what: str) -> None:
    assert SURVEY.look([_BASE, ODD[what], _BASE]).plain() == b"\1\0\1"
    assert not SURVEY.look([ODD[what]]).apart()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.float64])
def test_tensors_that_share_a_byte_are_not_apart(dtype: torch.dtype) -> None:
    memory = torch.zeros(10, dtype=dtype)
    assert SURVEY.look([memory[5:], memory[:5], memory[3:3], torch.zeros(2)]).apart()
    assert not SURVEY.look([memory[5:], torch.zeros(2), memory[:6]]).apart()
    assert not SURVEY.look([memory, memory]).apart()


def test_one_that_reaches_over_several_is_found_behind_a_small_one() -> None:
    memory = torch.zeros(30)
    assert not SURVEY.look([memory[:30], memory[2:3], memory[20:21]]).apart()


def test_alone_is_what_nothing_has_to_be_looked_at_of() -> None:
    memory, other = torch.zeros(10), torch.zeros(3)
    assert SURVEY.look([]).alone()
    assert SURVEY.look([memory[5:], other, memory[:5]]).alone()
    assert SURVEY.look([memory, torch.empty(0)]).alone()
    assert not SURVEY.look([memory, memory]).alone()
    assert not SURVEY.look([memory[5:], memory[:6]]).alone()
    nothing = torch.empty(0)
    assert not SURVEY.look([nothing, memory, nothing]).alone()
    assert not SURVEY.look([memory, ODD["transposed"]]).alone()
