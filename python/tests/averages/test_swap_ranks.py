"""A swap among ranks that something happens to: a block that raises, a rank that dies, memory that moves, replicas that
differ.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from own_averages import averages_of

import shardow

Weights = dict[str, torch.Tensor]
Outcome = tuple[str, str]

KINDS = [("ddp", 2), ("fsdp2", 2), ("fsdp1", 2), ("hsdp", 4)]
MOVED = KINDS if os.environ.get("SHARDOW_ALL") else KINDS[:2]
SPLIT = ("ddp", "hsdp")


LINGER = 2.5  # seconds in the block


class _Broken(RuntimeError):
    pass


def trained(kind: str, timeout: float = 20.0, **options: Any) -> tuple[torch.nn.Module, shardow.EMA]:
    model = models.build(kind, dist.get_world_size())
    ema = shardow.EMA(model, 0.5, timeout=timeout, **options)
    for at, one in enumerate(averages_of(ema).view.parameters):
        one.tensor.add_(0.5 + at)
    ema.update()
    return model, ema


def local(ema: shardow.EMA) -> Weights:
    averages_of(ema).view.reshard()
    return {one.name: one.tensor.clone() for one in averages_of(ema).view.as_it_is_now()}


def averages(ema: shardow.EMA) -> Weights:
    return {name: tensor.clone() for name, tensor in averages_of(ema).averages().items()}


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def outcome(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except Exception as error:
        return type(error).__name__, f"{error}{''.join(getattr(error, '__notes__', []))}"
    return "none", ""


def raises(ema: shardow.EMA, ranks_: tuple[int, ...], linger: float = 0.0) -> None:
    with ema.swapped():
        if dist.get_rank() in ranks_:
            raise _Broken(f"on rank {dist.get_rank()}")
        time.sleep(linger)


def block_that_raises(kind: str, timeout: float) -> list[Any]:
    """``timeout``: less than the others stay inside after rank 1 has raised, or more."""
    model, ema = trained(kind, timeout)
    weights, held = local(ema), averages(ema)

    all_raise = outcome(lambda: raises(ema, tuple(range(dist.get_world_size()))))
    assert same(local(ema), weights)

    began = time.monotonic()
    one_raises = outcome(lambda: raises(ema, (1,), linger=LINGER))
    seconds = time.monotonic() - began
    there = averages_of(ema).engine.swapped
    refused = [outcome(call) for call in (ema.update, ema.state_dict, ema.swap_out)] if there else []
    assert there == (kind in SPLIT and timeout < LINGER)
    if there:
        ema.restore()
    assert same(local(ema), weights)
    assert same(averages(ema), held)

    ema.swap_in()
    assert not same(local(ema), weights)
    model.eval()(torch.ones(5, models.INPUTS)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was written
        ema.swap_out()
    assert same(local(ema), weights)
    ema.restore()
    ema.update()
    return [all_raise, one_raises, seconds, refused]


@pytest.mark.parametrize(
    ("kind", "world", "timeout"),
    [(*case, 20.0) for case in KINDS] + [(*case, 1.5) for case in KINDS if case[0] in SPLIT],
)
def test_a_rank_whose_block_raises_waits_for_replicas_that_hold_its_parts_and_the_others_learn_of_it_when_they_leave(
    kind: str, world: int, timeout: float
) -> None:
    for rank, outcomes in enumerate(ranks.run(world, block_that_raises, kind, timeout)):
        all_raise, one_raises, seconds, refused = outcomes
        assert all_raise == ("_Broken", f"on rank {rank}")
        if rank == 1:
            assert one_raises[0] == "_Broken"
            assert one_raises[1].startswith("on rank 1")
            assert (seconds < LINGER) == (kind not in SPLIT or timeout < LINGER)
        else:
            assert one_raises[0] == "PeerFailedError"
            assert "rank 1 left swapped() with _Broken: on rank 1" in one_raises[1]
            assert "rank == 0" not in one_raises[1]
        if kind in SPLIT and timeout < LINGER:
            assert "restore()" in one_raises[1]
            for error, message in refused:
                assert error == "InvalidArgumentError"
                assert "restore()" in message


def one_is_late_and_raises(kind: str) -> tuple[Outcome, bool]:
    _, ema = trained(kind)
    weights = local(ema)

    def block() -> None:
        with ema.swapped():
            if dist.get_rank() == 1:
                time.sleep(0.5)
                raise _Broken("late")

    return outcome(block), same(local(ema), weights)


def test_ranks_that_have_left_already_learn_of_one_that_raises_later() -> None:
    (first, weights_are_back), (second, _) = ranks.run(2, one_is_late_and_raises, "fsdp2")
    assert first[0] == "PeerFailedError"
    assert "rank 1 left swapped() with _Broken: late. The weights are back on this rank" in first[1]
    assert weights_are_back
    assert second == ("_Broken", "late")


def dies_before_the_exchange(kind: str) -> tuple[Outcome, bool, bool]:
    from shardow.averaging import replicas as _replicas

    _, ema = trained(kind, timeout=5.0)
    weights = local(ema)
    if dist.get_rank() == 1:
        _replicas.ReplicaExchange.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment]
    found = outcome(ema.swap_in)
    return found, averages_of(ema).engine.swapped, same(local(ema), weights)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_a_rank_that_dies_before_the_exchange_leaves_the_others_with_their_weights(kind: str, world: int) -> None:
    answers = ranks.run(world, dies_before_the_exchange, kind, may_die=True)
    assert answers[1] is None
    found, swapped, back = answers[(1 + world // 2) % world]  # its replica
    assert found[0] in ("PeerFailedError", "DeadlineError")
    assert not swapped
    assert back


def fails_before_it_overwrites(kind: str) -> list[Any]:
    """Rank 1 fails when it has all parts of the averages, and has written none. Rank 0 leaves once that is over."""
    from shardow.averaging import replicas as _replicas

    _, ema = trained(kind)
    weights, held, run = local(ema), averages(ema), _replicas.ReplicaExchange.run

    def refuse() -> None:
        _replicas.ReplicaExchange.run = run  # type: ignore[method-assign]
        raise _Broken("at the first part")

    if dist.get_rank() == 1:
        _replicas.ReplicaExchange.run = lambda exchange, seconds, *_: run(exchange, seconds, refuse)  # type: ignore[method-assign]
    if dist.get_rank() == 0:
        ema.swap_in()
        swapped = averages_of(ema).engine.swapped
        time.sleep(1.0)
        failed = outcome(ema.swap_out)
    else:
        failed = outcome(ema.swap_in)
        swapped = averages_of(ema).engine.swapped
    ema.restore()
    return [failed[0], swapped, same(local(ema), weights), same(averages(ema), held)]


def test_what_one_rank_has_overwritten_and_the_other_has_not_comes_back_when_both_leave() -> None:
    first, second = ranks.run(2, fails_before_it_overwrites, "ddp")
    assert first == ["PeerFailedError", True, True, True]
    assert second == ["_Broken", False, True, True]


def dies_inside(kind: str) -> list[Any]:
    _, ema = trained(kind, timeout=4.0)
    weights = local(ema)
    ema.swap_in()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        outcome(ema.swap_out),
        averages_of(ema).engine.swapped,
        same(local(ema), weights),
        outcome(ema.update),
        outcome(ema.restore),
    ]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"] if os.environ.get("SHARDOW_ALL") else ["fsdp2"])
def test_a_rank_that_dies_inside_is_named_and_its_averages_pass_for_no_weights(kind: str) -> None:
    left, swapped, back, updated, restored = ranks.run(2, dies_inside, kind, may_die=True)[0]
    assert left[0] in ("DeadlineError", "PeerFailedError")
    assert "[1]" in left[1]
    assert "rank == 0" not in left[1]
    if kind == "fsdp2":
        assert back
        assert updated[0] == "none"
        return
    assert swapped
    assert updated[0] == "InvalidArgumentError"
    assert "restore()" in updated[1]
    assert restored[0] in ("DeadlineError", "PeerFailedError")
    assert "load the last checkpoint" in restored[1]


def clone_memory(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def there_and_back(model: torch.nn.Module) -> None:
    model.double()
    model.float()


def assign(model: torch.nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def moved_inside(ema: shardow.EMA, model: torch.nn.Module, move: Callable[[torch.nn.Module], None]) -> None:
    with ema.swapped():
        if dist.get_rank() == 1 or move is not clone_memory:
            move(model)


def moves(kind: str) -> list[str]:
    """Cast last: nothing can be averaged after that. Memory moves on one rank alone where the way to move it is
    local."""
    wrong = []
    for move in (clone_memory, there_and_back, assign):
        model, ema = trained(kind)
        weights, held = local(ema), averages(ema)
        found = outcome(lambda ema=ema, model=model, move=move: moved_inside(ema, model, move))
        # FSDP1 takes such memory over in its next forward: nothing is lost until then.
        kept = kind == "fsdp1" and move is clone_memory
        if found[0] != (("PeerFailedError", "InvalidArgumentError")[dist.get_rank()] if kept else "none"):
            wrong.append(f"{move.__name__} of {kind}: {found}")
        if kept:
            model.eval()(torch.ones(5, models.INPUTS))
            ema.restore()
        if not (same(local(ema), weights) and same(averages(ema), held)):
            wrong.append(f"{move.__name__} of {kind}")
    model, ema = trained(kind)
    weights, held = local(ema), averages(ema)
    with warnings.catch_warnings(record=True) as caught, ema.swapped():
        warnings.simplefilter("always")
        model.to(torch.bfloat16)
    now = local(ema)
    if not all(torch.equal(now[name], weights[name].to(torch.bfloat16)) for name in weights) or not same(
        averages(ema), held
    ):
        wrong.append(f"cast of {kind}")
    if not any("was cast inside" in str(one.message) for one in caught):
        wrong.append(f"no warning of a cast of {kind}")
    found = outcome(ema.update)
    if found[0] != "InvalidArgumentError" or "bfloat16" not in found[1]:
        wrong.append(f"update after a cast of {kind}: {found}")
    return wrong


@pytest.mark.parametrize(("kind", "world"), MOVED)
def test_weights_come_back_to_memory_that_moved(kind: str, world: int) -> None:
    assert ranks.run(world, moves, kind) == [[]] * world


def gone_on_one_rank() -> list[Any]:
    model, ema = trained("ddp")
    weights = local(ema)
    kept = model.module[3]

    def block() -> None:
        with ema.swapped():
            if dist.get_rank() == 1:
                model.module[3] = torch.nn.Identity()

    left = outcome(block)
    model.module[3] = kept
    there = averages_of(ema).engine.swapped
    ema.restore()
    return [left, there, same(local(ema), weights)]


def test_a_weight_without_a_place_on_one_rank_keeps_the_averages_on_all_until_it_has_one() -> None:
    (zero, there0, back0), (one, there1, back1) = ranks.run(2, gone_on_one_rank)
    assert zero[0] == "PeerFailedError"
    assert one[0] == "InvalidArgumentError"
    assert "'3.weight' is gone" in zero[1]
    assert "'3.weight' is gone" in one[1]
    assert (there0, there1, back0, back1) == (True, True, True, True)


def differing(replicas: str) -> list[Any]:
    _, ema = trained("ddp", replicas=replicas)
    rank = dist.get_rank()
    with torch.no_grad():
        averages_of(ema).view.parameters[2].tensor.add_(rank)  # as LocalSGD's do between two of its meetings
    weights = local(ema)
    found = outcome(ema.swap_in)
    if found[0] == "none":
        ema.swap_out()
    return [found, same(local(ema), weights), averages_of(ema).view.parameters[2].name]


def test_replicas_that_differ_are_not_overwritten() -> None:
    for (error, message), unchanged, name in ranks.run(2, differing, "split"):
        assert error == "InvalidArgumentError"
        assert f"'{name}'" in message
        assert 'replicas="copy"' in message
        assert unchanged
    for (error, _), unchanged, _ in ranks.run(2, differing, "copy"):
        assert error == "none"
        assert unchanged


def interrupted_in_the_exchange(kind: str) -> list[Any]:
    _, ema = trained(kind)
    weights, held = local(ema), averages(ema)
    written = averages_of(ema).view.written

    def interrupted() -> None:
        averages_of(ema).view.written = written  # type: ignore[method-assign]
        written()
        os.kill(os.getpid(), signal.SIGINT)

    if dist.get_rank() == 1:
        averages_of(ema).view.written = interrupted  # type: ignore[method-assign]
    found: Outcome = ("none", "")
    try:
        with ema.swapped():
            time.sleep(3.0)
    except KeyboardInterrupt:
        found = ("KeyboardInterrupt", "")
    except shardow.Error as error:
        found = (type(error).__name__, str(error))
    ema.restore()
    return [found, same(local(ema), weights), same(averages(ema), held)]


def test_an_interrupt_on_one_rank_after_the_exchange_is_told_to_the_other_and_undone() -> None:
    (zero, *back0), (one, *back1) = ranks.run(2, interrupted_in_the_exchange, "ddp")
    assert one[0] == "KeyboardInterrupt"
    assert zero[0] == "PeerFailedError"
    assert "rank 1 left swapped() with KeyboardInterrupt" in zero[1]
    assert [*back0, *back1] == [True] * 4
