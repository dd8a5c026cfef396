"""While many objects are made that stay, Python's collector stands still; afterwards nothing is lost, and settings are
as they were.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shardow.base.collector import paused


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


class Some:
    pass


def _cycle() -> weakref.ref[Some]:
    one = Some()
    one.itself = one  # type: ignore[attr-defined]
    return weakref.ref(one)


def _collections() -> int:
    return sum(one["collections"] for one in gc.get_stats())


def test_what_was_made_is_old() -> None:
    with paused():
        before = _collections()
        made = [[i] for i in range(100_000)]
        assert _collections() == before
    assert gc.isenabled()
    assert gc.get_count()[0] < 1000
    assert sum(type(one) is list and len(one) == 1 for one in gc.get_objects(generation=2)) >= len(made)


def test_young_garbage_does_not_grow_old() -> None:
    one = _cycle()
    with paused():
        assert one() is None


def test_what_becomes_garbage_meanwhile_is_found_by_a_full_collection() -> None:
    with paused():
        one = _cycle()
        assert one() is not None
    gc.collect()
    assert one() is None


def test_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused():
        made = [[i] for i in range(1000)]
    assert gc.get_freeze_count() == frozen > 0
    assert gc.isenabled()
    assert len(made) == 1000


def test_one_that_is_off_stays_off() -> None:
    gc.disable()
    one = _cycle()
    with paused():
        pass
    assert not gc.isenabled()
    assert one() is not None
    gc.enable()
    gc.collect()


def test_within_another_and_where_it_raises() -> None:
    def within() -> None:
        with paused():
            with paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        within()
    assert gc.isenabled()
