"""The Group of a torch process group: what the engine asks of any, through the store and through blocks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from core_modules import HOOKS
from outcomes import Outcome, outcome

import shardow
from shardow import _core
from shardow.ranks import store_group


def judged() -> list[object]:
    from shardow._core import hooks  # type: ignore[attr-defined]

    group = store_group.store_group(dist.group.WORLD)
    wrong = hooks.group_checks(group)
    group.moves_blocks = False
    return [*wrong, *hooks.group_checks(group)]


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_what_every_group_must_be(world: int) -> None:
    assert HOOKS.run(world, judged) == [[]] * world


def long_texts() -> bool:
    """Longer than a value of the store may be, of different lengths, some at the edges of its parts."""
    group, most = store_group.store_group(dist.group.WORLD), 4 << 20
    for lengths in [(0, 3 * most + 1, 7), (most, most - 1, most + 1), (1, 2 * most, 0)]:
        expected = [bytes([65 + i]) * length for i, length in enumerate(lengths)]
        assert group.all_gather(expected[dist.get_rank()], 60) == expected
    return True


def reductions() -> bool:
    group, rank = store_group.store_group(dist.group.WORLD), dist.get_rank()
    for op, expected in [
        ("sum", [3, 2**64 - 1 + 3 - 2**64]),
        ("max", [2, 2**64 - 1]),
        ("xor", [3, (2**64 - 1) ^ 1 ^ 2]),
    ]:
        values = np.array([rank, 2**64 - 1 if rank == 0 else rank], dtype=np.uint64)
        group.all_reduce(memoryview(values), op, 60)  # type: ignore[arg-type]
        assert values.tolist() == expected, op
    return True


def long_reductions() -> bool:
    """A rank's words of a checkpoint's checksums: along the tree, and through the store where no blocks move."""
    group, rank, size = store_group.store_group(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    told: list[int] = []
    everybody = np.arange(5000, dtype=np.uint64) * np.array(
        [[2**60 + 7 * one + 1] for one in range(size)], dtype=np.uint64
    )
    for op, combine in [("sum", np.add), ("max", np.maximum), ("xor", np.bitwise_xor)]:
        for moves_blocks in (True, False):
            group.moves_blocks = moves_blocks
            values, before = everybody[rank].copy(), group.rounds
            group.all_reduce(memoryview(values), op, 60)  # type: ignore[arg-type]
            told.append(group.rounds - before)
            assert (values == combine.reduce(everybody)).all(), (op, moves_blocks)
    assert told == [2, 1] * 3
    return True


def a_block_that_fails(interrupted: bool) -> list[Any]:
    """On rank 2. Its parent waits for it in vain."""
    group, rank, found = store_group.store_group(dist.group.WORLD), dist.get_rank(), []
    if rank == 2:

        def send(data: memoryview, to: int, seconds: float) -> None:
            raise (
                KeyboardInterrupt if interrupted else shardow.errors.make("peer_failed", "rank 2 has no way to rank 0")
            )

        group.send = send  # type: ignore[method-assign]
    values = np.full(1000, rank, dtype=np.uint64)
    group.begin("a reduction", 2.0)
    try:
        group.all_reduce(memoryview(values), "sum", 2.0)  # type: ignore[arg-type]
    except (shardow.Error, KeyboardInterrupt) as error:
        found = [type(error).__name__, str(error)]
    assert (values == rank).all()
    return [*found, group.all_gather(b"in step", 60)]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_reduction_that_fails_on_one_rank_fails_on_all_and_changes_nothing(interrupted: bool) -> None:
    answers = ranks.run(4, a_block_that_fails, interrupted, may_die=True)  # a process group is of no more use after it
    if interrupted:
        assert answers.pop(2)[:2] == ["KeyboardInterrupt", ""]
    said = "rank 2 was interrupted in all_reduce(sum)" if interrupted else "rank 2 has no way to rank 0"
    late = "did not take part within 2 s"  # who waits for a block comes at the deadline, and may come after it
    for kind, message, together in answers:
        assert (kind, message) == ("PeerFailedError", said) or (kind == "DeadlineError" and late in message)
        assert [kind, message] == answers[0][:2]
        assert together == [b"in step"] * 4


def a_block_that_fails_on_the_way_back() -> tuple[Outcome, bool]:
    """Rank 1 has its sum by then."""
    group, rank = store_group.store_group(dist.group.WORLD), dist.get_rank()
    own = group.send

    def send(data: memoryview, to: int, seconds: float) -> None:
        if (rank, to) == (0, 2):
            raise shardow.errors.make("peer_failed", "rank 0 has no way to rank 2")
        own(data, to, seconds)

    group.send = send  # type: ignore[method-assign]
    values = np.full(1000, rank + 1, dtype=np.uint64)
    ended = outcome(lambda: group.all_reduce(memoryview(values), "sum", 1.0))  # type: ignore[arg-type]
    return ended, bool((values == rank + 1).all())


def test_reduction_that_fails_late_changes_nothing_on_ranks_that_had_their_sum() -> None:
    for (kind, message, _), unchanged in ranks.run(3, a_block_that_fails_on_the_way_back, may_die=True):
        assert (kind, message) == ("PeerFailedError", "rank 0 has no way to rank 2") or kind == "DeadlineError"
        assert unchanged


def blocks_and_broadcasts() -> bool:
    rank = dist.get_rank()
    for channel in (0, 1):
        group = store_group.store_group(dist.group.WORLD, channel)
        data = np.full(10_000, rank, dtype=np.uint8)
        for has_cpu in (True, False):
            group.moves_blocks = has_cpu
            group.broadcast(memoryview(data), 1, 60)  # type: ignore[arg-type]
            assert (data == 1).all()
        if rank < 2:
            mine, theirs = np.full(1000, 5 + rank, dtype=np.uint8), np.zeros(1000, dtype=np.uint8)
            for sender in (0, 1):
                if rank == sender:
                    group.send(memoryview(mine), 1 - rank, 60)  # type: ignore[arg-type]
                else:
                    group.recv(memoryview(theirs), 1 - rank, 60)  # type: ignore[arg-type]
            assert (theirs == 6 - rank).all()
    return True


def two_channels_at_once() -> bool:
    """In opposite orders on the two ranks: one waits for nothing of the other."""
    rank, done = dist.get_rank(), []

    def gather(channel: int) -> None:
        done.append(store_group.store_group(dist.group.WORLD, channel).all_gather(b"x", 60))

    if rank == 0:
        thread = threading.Thread(target=gather, args=(1,))
        thread.start()
        gather(0)
        thread.join()
    else:
        gather(0)
        gather(1)
    return done == [[b"x", b"x"]] * 2


@pytest.mark.parametrize(
    ("case", "world"),
    [
        (long_texts, 3),
        (reductions, 3),
        (long_reductions, 1),
        (long_reductions, 5),
        (blocks_and_broadcasts, 3),
        (two_channels_at_once, 2),
    ],
)
def test_does_what_a_group_does(case: object, world: int) -> None:
    assert ranks.run(world, case) == [True] * world  # type: ignore[arg-type]


def save_without_blocks(path: str) -> str:
    store_group.store_group(dist.group.WORLD).moves_blocks = False
    model = models.build("tp+fsdp2", dist.get_world_size())
    shardow.save(model, path)
    shardow.load(model, path)
    return "saved"


def test_a_process_group_without_a_way_for_cpu_tensors_saves_and_loads(tmp_path: Path) -> None:
    shardow.save(models.make_even(), tmp_path / "reference.safetensors")
    assert ranks.run(4, save_without_blocks, str(tmp_path / "a.safetensors")) == ["saved"] * 4
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "reference.safetensors").read_bytes()


def hidden_values() -> bool:
    """What a mapping holds on one rank alone is everybody's error, at once."""
    state = {"a": torch.ones(3), **({"b": object()} if dist.get_rank() == 1 else {})}
    with pytest.raises((ValueError, ConnectionError), match=r"'b' is a builtins\.object"):
        shardow.save(state, "never.safetensors", group=dist.group.WORLD, timeout=60)  # type: ignore[arg-type]
    return True


def test_a_wrong_value_on_one_rank_is_an_error_on_all() -> None:
    assert ranks.run(2, hidden_values, timeout=30) == [True, True]


class _Raising(_core.StoreGroup):
    """As an interrupt between two lines of Python would."""

    @property
    def rank(self) -> int:
        raise LookupError("rank")

    @property
    def size(self) -> int:
        raise LookupError("size")


def test_the_engine_asks_no_python_for_rank_and_size(tmp_path: Path) -> None:
    """There they cannot fail: an exception would end the process."""
    with pytest.raises(FileNotFoundError):
        _core.Checkpoint.open(_Raising(0, [0, 1], *[lambda: None] * 3), tmp_path / "a.safetensors", 5.0)


def late_to_the_rest() -> str:
    """Half a second of a minute was left when rank 0 came to this round, and rank 1 came after that."""
    group = store_group.store_group(dist.group.WORLD)
    group.begin("call()", 60.0)
    if dist.get_rank() == 1:
        time.sleep(2)
    with pytest.raises(TimeoutError) as error:
        group.all_gather(b"", 0.5)
    return str(error.value)


def test_messages_give_the_timeout_that_was_asked_for_whatever_was_left_of_it() -> None:
    for said in ranks.run(2, late_to_the_rest):
        assert "[1] did not take part within 60 s" in said


def late_for_a_broadcast() -> tuple[Outcome, float]:
    group, data = store_group.store_group(dist.group.WORLD), np.zeros(10, dtype=np.uint8)
    time.sleep(1.5 * dist.get_rank())
    late = outcome(lambda: group.broadcast(memoryview(data), 0, 0.3))  # type: ignore[arg-type]
    total = torch.ones(1)
    dist.all_reduce(total)
    return late, total.item()


def test_rank_that_is_late_for_a_broadcast_is_an_error_on_all_and_leaves_the_process_group() -> None:
    for (kind, message, _), total in ranks.run(2, late_for_a_broadcast):
        assert kind == "DeadlineError"
        assert "rank(s) [1] did not take part before the deadline" in message
        assert total == 2
