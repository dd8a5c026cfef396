"""What is compared bit for bit, and what must be refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

import shardow
from programs.story import Tensors


@contextlib.contextmanager
def refused() -> Iterator[None]:
    try:
        yield
    except shardow.Error:
        return
    raise AssertionError("this must be refused")


def same(found: Tensors, wanted: Tensors, what: str) -> None:
    assert sorted(found) == sorted(wanted), (what, sorted(found), sorted(wanted))
    wrong = [
        name
        for name in wanted
        if not torch.equal(found[name].contiguous().view(torch.uint8), wanted[name].contiguous().view(torch.uint8))
    ]
    assert not wrong, f"{what}: {wrong} differ"
