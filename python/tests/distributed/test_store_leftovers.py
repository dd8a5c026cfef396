"""What rounds leave behind in the store and on its connections, also where they fail or somebody leaves them:
nothing."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from emulated import Emulated, emulated, on_all

import shardow
from shardow.distributed.store_group import StoreGroup

TIMEOUT = 60.0


def refuse(_: list[bytes]) -> Any:
    raise shardow.errors.make("corrupt", "words")


def failing() -> None:
    raise shardow.errors.make("io", "no disk")


def odd_round(group: Emulated, kind: int, victim: bool) -> None:
    if kind == 1:
        group.agree("call()", TIMEOUT, failing if victim else lambda: None)
    elif kind == 2:
        group.decide(b"%d" % group.rank * 20_000, lambda everybody: (everybody[1], everybody), TIMEOUT)
    elif kind == 3:
        group.decide(b"%d" % group.rank, refuse, TIMEOUT)
    elif kind == 4:
        group.agree("other()" if victim else "call()", TIMEOUT, lambda: None)
    elif kind == 5 and victim:
        group.refuse("call()")
    elif kind == 6:
        time.sleep(0.3 if victim else 0.0)
        group.all_gather(b"%d" % group.rank, 0.05)
    elif kind == 7:
        group.decide(b"x" * 100, lambda words: (b"", words), TIMEOUT)
    elif kind == 8:
        group.all_gather(b"%d" % group.rank * (5 << 20 if victim else 1), TIMEOUT)
    else:
        group.all_gather(b"%d" % group.rank, TIMEOUT)


def test_keys_stay_flat_over_a_thousand_rounds_of_which_many_fail() -> None:
    size, keys = 8, []

    def play(group: Emulated) -> None:
        for number in range(1000):
            group.begin("call()", TIMEOUT)
            kind = number // 10 % 25 if number % 10 == 3 else 0  # each three or four times
            if 0 < kind < 9:
                victim = group.rank == number // 250 * 2
                with contextlib.suppress(shardow.Error, KeyboardInterrupt):
                    odd_round(group, kind, victim)
            else:
                assert group.all_gather(b"%d" % number, TIMEOUT) == [b"%d" % number] * size
            if number % 250 == 249 and group.rank == 5:
                keys.append(group.stores[0].num_keys())

    with emulated(size) as groups:
        answers, _ = on_all(groups, play)
        assert answers == [None] * size
        assert max(keys) - min(keys) <= 6, keys  # of rounds that are under way
        assert max(keys) < 20, keys


def test_what_has_left_a_round_asks_the_store_nothing_more_and_keeps_its_connection() -> None:
    with emulated(2) as groups:
        assert on_all(groups, lambda group: group.all_gather(b"", TIMEOUT))[0] == [[b""] * 2] * 2
        groups[0].settle()
        (stalled,), go_on = groups[0].stores, threading.Event()

        def stand_still(name: str, *_: Any) -> None:
            assert name == "compare_set"
            assert go_on.wait(TIMEOUT)

        stalled.before = stand_still
        answers, _ = on_all(groups, lambda group: group.all_gather(b"%d" % group.rank, 0.1))
        assert "did not answer" in str(answers[0])
        assert "did not take part" in str(answers[1])
        stalled.forget()

        def go(group: Emulated) -> list[bytes]:
            if group.rank == 0:
                go_on.set()
            return group.all_gather(b"later %d" % group.rank, TIMEOUT)

        on_all(groups, lambda group: group.all_gather(b"", TIMEOUT))
        for _ in range(3):
            assert on_all(groups, go)[0] == [[b"later 0", b"later 1"]] * 2
        assert groups[0].stores[1].operations
        assert dict(stalled.operations) == {"compare_set": 1}


def test_an_interrupted_rank_waited_for_others_not_for_itself() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with emulated(3) as groups:
            groups[1].begin("call()", TIMEOUT)
            threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
            with pytest.raises(KeyboardInterrupt, match=r"waited for rank\(s\) \[0, 2\]"):
                groups[1].all_gather(b"", TIMEOUT)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_store_that_was_silent_gets_half_a_second_for_the_next_question() -> None:
    go_on = threading.Event()
    group = StoreGroup(0, [0], lambda: SimpleNamespace(set_timeout=lambda _: go_on.wait(TIMEOUT)))
    for patience, most in ((0.1, 2.0), (10.0, 3.0)):
        began = time.monotonic()
        assert group.try_compare_set("key", "", "", patience) is None
        assert time.monotonic() - began < most
    go_on.set()


def test_a_wait_that_ends_at_its_deadline_goes_on_where_the_next_one_begins() -> None:
    """One connection waits; another one asks meanwhile."""
    with emulated(2) as groups:
        for group in groups:
            group.begin("call()", 2.5)
        late = {0: 0.0, 1: 1.5}.__getitem__
        assert on_all(groups, lambda group: group.all_gather(b"", 2.5), late)[0] == [[b""] * 2] * 2
        assert groups[0].operations["get"] == 1
        assert [store.operations["get"] for store in groups[0].stores] == [1, 0]
