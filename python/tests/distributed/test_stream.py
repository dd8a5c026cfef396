"""What rank 0 sends: the same messages as the engine cuts, and few tensors of a lazy source at a time, at a cost that
many small ones don't raise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from unittest import mock

import pytest
import torch

from shardow import _core
from shardow.distributed import stream

SHAPE = [6, 5]


def wants(count: int) -> list[stream.Want]:
    columns = _core.Region.grid(SHAPE, [[(0, 6)], [(1, 4)]])
    regions = [_core.Region.whole(SHAPE), columns, columns.window(2, 11), _core.Region.whole(SHAPE).window(7, 7)]
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    return [stream.Want(f"t{i}", regions[i % 4].encode(), dtypes[i % 3]) for i in range(count)]


def test_messages_have_each_element_of_each_want_once() -> None:
    asked = wants(40)
    reached = [0] * len(asked)
    with mock.patch.object(stream, "_MESSAGE", 64):
        for message in stream.messages(asked):
            assert message[-1].at + message[-1].bytes <= 64
            for piece in message:
                want = asked[piece.want]
                begin, end = reached[piece.want], reached[piece.want] + piece.region.size
                assert (piece.begin, piece.bytes) == (begin, piece.region.size * want.dtype.itemsize)
                assert piece.region == _core.Region.decode(want.region).window(begin, end)
                reached[piece.want] = end
    assert reached == [_core.Region.decode(want.region).size for want in asked]


def test_a_region_that_nobody_wrote_is_an_error_of_who_asks() -> None:
    bad = stream.Want("t", b"nothing", torch.float32)
    with pytest.raises(ValueError, match="region"):
        next(stream.messages([bad]))


class Lazy(Mapping[str, torch.Tensor]):
    """Tensors of ``size`` float32 that are made when they are asked for."""

    def __init__(self, count: int, size: int) -> None:
        self._count, self._size = count, size
        self.made: list[str] = []

    def __getitem__(self, key: str) -> torch.Tensor:
        self.made.append(key)
        return torch.full((self._size,), float(key))

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._count))

    def __len__(self) -> int:
        return self._count


def test_the_last_tensors_of_a_lazy_source_stay_and_no_more_than_fit() -> None:
    source = Lazy(6, 100)
    recent = stream._Recent(source)
    with mock.patch.object(stream._Recent, "_MOST", 1200):  # three of them
        for key in "0120314":
            assert recent[key][0] == float(key)
        assert source.made == ["0", "1", "2", "3", "1", "4"]  # 1 made room for 3, and came back in place of 2
        assert sorted(recent._kept) == ["1", "3", "4"]
    large = Lazy(2, 1000)
    recent = stream._Recent(large)
    with mock.patch.object(stream._Recent, "_MOST", 1200):
        assert [recent[key][0].item() for key in "00110"] == [0, 0, 1, 1, 0]
    assert large.made == ["0", "1", "0"]  # one that is larger than all stays until the next


def test_a_source_of_many_small_tensors_is_counted_once_each() -> None:
    """A sum over all that stay, at each, took 16 s for 20,000."""
    counted = 0

    class Counted:
        @property
        def nbytes(self) -> int:
            nonlocal counted
            counted += 1
            return 64

        def detach(self) -> Counted:
            return self

    recent = stream._Recent({str(i): Counted() for i in range(3000)})  # type: ignore[dict-item]
    for i in range(3000):
        recent[str(i)]
    assert counted == 3000
