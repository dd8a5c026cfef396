"""The Group of a torch process group: what the engine asks of any, through the store and through blocks."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

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
from shardow.distributed import store_group
from shardow.distributed.rank_group import Comparison, RankGroup, Step


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


def blocks_and_broadcasts() -> bool:
    rank = dist.get_rank()
    for channel in (0, 1):
        group = store_group.store_group(dist.group.WORLD, channel)
        data = np.full(10_000, rank, dtype=np.uint8)
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
    steps = SimpleNamespace(look=list, find=lambda: [tmp_path / "a.safetensors"], opened=list)
    with pytest.raises(FileNotFoundError):
        _core.open_checkpoints(_Raising(0, [0, 1], lambda: None), steps, 5.0)


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


class _Interrupted(Comparison):
    def words(self) -> bytes:
        return b"words"

    def sum_up(self, by_rank: list[bytes]) -> bytes:
        raise KeyboardInterrupt(f"among {len(by_rank)}")


def interrupted_in_a_comparison() -> str:
    for group, size in ((None, 1), (dist.group.WORLD, 2)):
        ranks_ = RankGroup(group, 60)
        with pytest.raises((KeyboardInterrupt, ConnectionError)) as error:
            ranks_.step("call()", lambda: Step(None, [_Interrupted()]))
        assert size == 2 or (type(error.value), str(error.value)) == (KeyboardInterrupt, "among 1")
    return type(error.value).__name__


def test_what_interrupts_a_comparison_is_raised_on_its_rank_and_the_others_learn_of_it() -> None:
    assert sorted(ranks.run(2, interrupted_in_a_comparison)) == ["KeyboardInterrupt", "PeerFailedError"]
