"""Rounds of many ranks over a real store: what they cost, and that they tell the same however many lanes there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from emulated import Emulated, emulated, on_all

import shardow

TIMEOUT = 60.0


def agree(group: Emulated, fn: Callable[[], Any] = lambda: None, timeout: float = TIMEOUT) -> Any:
    return group.agree("call()", timeout, fn)


def failing(message: str) -> None:
    raise shardow.errors.make("io", message)


@pytest.mark.parametrize("size", [2, 3, 4, 31, 32, 33, 100])
def test_agree_costs_at_most_four_operations_and_few_bytes_at_any_number_of_ranks(size: int) -> None:
    with emulated(size) as groups:
        for _ in range(3):
            assert on_all(groups, agree)[0] == [None] * size
        for group in groups:
            group.settle()
        keys = groups[0].stores[0].num_keys()
        for _ in range(3):
            for group in groups:
                group.forget()
            assert on_all(groups, agree)[0] == [None] * size
            for group in groups:
                assert group.operations.total() <= 4, dict(group.operations)
                assert group.moved < 200
        for group in groups:
            group.settle()
        assert groups[0].stores[0].num_keys() == keys, "rounds leave nothing behind"


@pytest.mark.parametrize("size", [3, 33, 70])
def test_a_failure_is_everybodys_and_costs_the_others_no_more(size: int) -> None:
    with emulated(size) as groups:
        bad = {size - 1, size // 2}
        for group in groups:
            group.forget()
        answers, _ = on_all(
            groups, lambda group: agree(group, lambda: failing("no disk") if group.rank in bad else None)
        )
        first = min(bad)
        for rank, answer in enumerate(answers):
            assert isinstance(answer, OSError), answer
            assert "no disk" in str(answer)
            assert rank in bad or f"of {size} failed; rank {first}: IoError: no disk" in str(answer)
        spent = sorted(group.operations.total() for group in groups)
        assert all(one <= 5 for one in spent[:-1]), "but for one that reads what they say"
        assert on_all(groups, agree)[0] == [None] * size


def test_many_that_failed_are_counted_not_listed() -> None:
    with emulated(100) as groups:
        answers, _ = on_all(groups, lambda group: agree(group, lambda: failing("no disk") if group.rank else None))
        assert str(answers[0]).startswith("ranks 1, 2, 3")
        assert "64 and 35 more of 100 failed; rank 1: IoError: no disk" in str(answers[0])


def gathered(size: int, words: Callable[[int], bytes]) -> None:
    with emulated(size) as groups:
        expected = [words(rank) for rank in range(size)]
        for _ in range(2):
            assert on_all(groups, lambda group: group.all_gather(words(group.rank), TIMEOUT))[0] == [expected] * size
            answers, _ = on_all(groups, lambda group: group.decide(words(group.rank), joined, TIMEOUT))
            assert answers == [
                (b";".join(expected), b"for " + one) if any(expected) else (b"", b"") for one in expected
            ]
            assert on_all(groups, agree)[0] == [None] * size


def joined(everybody: list[bytes]) -> tuple[bytes, list[bytes]]:
    return b";".join(everybody), [b"for " + one for one in everybody]


@pytest.mark.parametrize("size", [2, 5, 40])
@pytest.mark.parametrize(
    "words",
    [
        lambda rank: b"",
        lambda rank: b"all the same",
        lambda rank: b"%d" % rank,
        lambda rank: b"only one" if rank == 1 else b"",
        lambda rank: b"l" * 20_000 if rank else b"short",
        lambda rank: b"l" * 20_000,
        lambda rank: bytes(range(256)) * (rank % 3) * 2,
    ],
)
def test_everybodys_words_arrive_whether_they_are_alike_short_or_long(size: int, words: Callable[[int], bytes]) -> None:
    gathered(size, words)


def test_calls_that_differ_are_told_apart_on_all_ranks_at_once() -> None:
    for odd in (0, 1, 39):

        def call(group: Emulated, odd: int = odd) -> Any:
            return group.agree("load()" if group.rank == odd else "save()", TIMEOUT, lambda: None)

        with emulated(40) as groups:
            answers, seconds = on_all(groups, call)
            other = (
                "rank 1 calls save() where rank 0 calls load()"
                if odd == 0
                else f"rank {odd} calls load() where rank 0 calls save()"
            )
            assert all(isinstance(one, ValueError) and other in str(one) for one in answers), answers[:3]
            assert seconds < TIMEOUT / 4
            assert on_all(groups, agree)[0] == [None] * 40


@pytest.mark.parametrize("missing", [[0], [1, 2, 39], list(range(1, 40))])
def test_missing_ranks_are_named_cost_one_timeout_and_meet_the_verdict_when_they_come(missing: list[int]) -> None:
    with emulated(40) as groups:
        there = [group for group in groups if group.rank not in missing]
        for group in groups:
            group.begin("call()", 1.0)
        answers, seconds = on_all(there, lambda group: agree(group, timeout=1.0))
        named = f"rank(s) {missing}" if len(missing) < 32 else f"rank(s) {missing[:32]} and 7 more"
        assert all(
            isinstance(one, TimeoutError) and f"{named} did not take part within 1 s" in str(one) for one in answers
        ), answers[0]
        assert seconds < 2.5
        late, seconds = on_all([groups[rank] for rank in missing], agree)
        assert all(isinstance(one, TimeoutError) for one in late)
        assert seconds < 2.5
        assert on_all(groups, agree)[0] == [None] * 40


@pytest.mark.parametrize("alike", [True, False])
def test_who_dies_before_it_gives_the_verdict_is_replaced(alike: bool) -> None:
    """All have come, and nobody is missing: another one says what everybody's words come to."""
    died: list[int] = []

    def dies(rank: int) -> Callable[..., None]:
        def before(name: str, *args: Any) -> None:
            if name == "compare_set" and args[:2] == ("0/verdict", b"") and not died:
                died.append(rank)
                raise SystemExit

        return before

    with emulated(40) as groups:
        for group in groups:
            group.stores[0].before = dies(group.rank)

        def call(group: Emulated) -> bytes:
            return group.decide(b"alike" if alike else b"%d" % group.rank, lambda everybody: (everybody[7], ()), 1.0)[0]

        answers, seconds = on_all(groups, call)
        assert isinstance(answers[died[0]], SystemExit)
        assert [one for rank, one in enumerate(answers) if rank != died[0]] == [b"alike" if alike else b"7"] * 39
        assert seconds < 2.5


def test_a_rank_that_left_a_round_finds_its_verdict_before_it_goes_on() -> None:
    with emulated(3) as groups:
        assert on_all(groups, agree)[0] == [None] * 3
        groups[2].refuse("call()")
        begin = time.monotonic()
        others, _ = on_all(groups[:2], agree)
        assert all("rank 2 was interrupted in call()" in str(one) for one in others)
        assert time.monotonic() - begin < TIMEOUT / 4
        for _ in range(3):
            assert on_all(groups, agree)[0] == [None] * 3


def test_what_is_made_of_words_may_fail_on_one_rank_and_then_does_on_all() -> None:
    def refuse(everybody: list[bytes]) -> Any:
        raise shardow.errors.make("corrupt", f"{len(everybody)} words")

    with emulated(33) as groups:
        answers, _ = on_all(groups, lambda group: group.decide(b"x", refuse, TIMEOUT))
        assert all(isinstance(one, shardow.errors.CorruptError) and str(one) == "33 words" for one in answers)
        assert on_all(groups, agree)[0] == [None] * 33
