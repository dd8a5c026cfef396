"""A rank that is killed, stopped, late, interrupted or in another call, in each round of each verb: errors of ours on
all ranks, within the deadline and two seconds, and the next call works where the rank is alive."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import faults
import pytest
import ranks
from outcomes import Outcome

TIMEOUT = 2.0
TYPED = ("DeadlineError", "PeerFailedError")
BUSY = 1.0  # seconds that a machine with other work may take
#: By kind of sharding and verb: its rounds.
ROUNDS = {
    ("fsdp2", "EMA"): 1, ("fsdp2", "full_state_dict"): 2, ("fsdp2", "swapped"): 2, ("ddp", "swapped"): 4,
    ("fsdp2", "save"): 4, ("fsdp2", "async_save"): 4, ("fsdp2", "load"): 3, ("fsdp2", "materialize"): 3,
    ("fsdp2", "EMA.save"): 4, ("fsdp2", "EMA.load"): 3, ("fsdp2", "merge"): 6, ("fsdp2", "Checkpoints.save"): 6,
    ("fsdp2", "Checkpoints.restore"): 4,
}  # fmt: skip
#: A verb of each fault, and one round of it, where not all are tried.
SAMPLE = {
    "late": ("fsdp2", "load", 2), "stopped": ("fsdp2", "EMA.save", 3), "stopped after": ("ddp", "swapped", 2),
    "interrupted": ("fsdp2", "Checkpoints.save", 4), "another call": ("fsdp2", "save", 1),
    "killed": ("ddp", "swapped", 2), "killed after": ("fsdp2", "materialize", 2),
}  # fmt: skip
ALL = bool(os.environ.get("SHARDOW_ALL"))


def is_cut_off(outcome: Outcome) -> bool:
    """Gloo closes the connection of two ranks where a transfer between them passes its deadline."""
    return re.search("did not (all )?arrive", outcome[1]) is not None


def check(fault: str, zero: list[Outcome], other: list[Outcome]) -> None:
    (kind, _, seconds), (its_kind, _, its_seconds) = zero[0], other[0]
    assert seconds < TIMEOUT + 2 + BUSY
    if fault == "interrupted":
        assert (kind, its_kind) in (("PeerFailedError", "KeyboardInterrupt"), ("none", "KeyboardInterrupt"))
        assert its_seconds < 0.5 + BUSY
    elif fault == "another call":
        assert kind == its_kind == "InvalidArgumentError"
        assert seconds < BUSY
    else:
        assert (kind in TYPED and its_kind in TYPED) or kind == its_kind == "none"
    later = [outcome[0] for outcome in (*zero[1:], *other[1:])]
    if any(map(is_cut_off, zero + other)):
        assert {*later} <= {"none", "InvalidArgumentError", *TYPED}
    else:
        assert later == ["none"] * 6


def series(kind: str, verb: str, fault: str, rounds: list[int], folder: Path) -> None:
    may_die = fault.startswith("killed")
    while rounds:
        tried, pool = rounds[:1] if may_die else rounds, ranks.Pool()
        try:
            zero, other = pool.run(2, faults.meet, kind, verb, fault, tried, TIMEOUT, folder, may_die=may_die)
        finally:
            pool.stop()
        if may_die:
            (((own, message, seconds), *_),) = zero
            assert own in TYPED or (own == "none" and fault == "killed after"), message
            assert seconds < TIMEOUT + 2 + BUSY
            rounds = rounds[1:]
            continue
        for its, others in zip(zero, other, strict=True):
            check(fault, its, others)
        rounds = rounds[len(zero) :]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "verb", "fault"), [
    (*case, fault) for case, fault in itertools.product(ROUNDS, faults.FAULTS)
    if fault != "another call" or case[1] != "async_save"  # which does not meet the calls of a foreground
] if ALL else [(*case[:2], fault) for fault, case in SAMPLE.items()])  # fmt: skip
def test_a_fault_in_any_round_of_any_verb_is_an_error_on_all_ranks_and_the_next_call_works(
    kind: str, verb: str, fault: str, tmp_path: Path
) -> None:
    whole = [1] if fault == "another call" else [*range(1, ROUNDS[kind, verb] + 1)]
    series(kind, verb, fault, whole if ALL else [SAMPLE[fault][2]], tmp_path)


def test_a_verb_has_as_many_rounds_as_are_tried(tmp_path: Path) -> None:
    for kind, verb in [*ROUNDS] if ALL else [("fsdp2", "save")]:
        folder = tmp_path / f"{kind}-{verb}"
        folder.mkdir()
        for last, happens in ((ROUNDS[kind, verb], True), (ROUNDS[kind, verb] + 1, False)):
            _, other = ranks.run(2, faults.meet, kind, verb, "interrupted", [last], 60.0, folder)
            assert (other[0][0][0] == "KeyboardInterrupt") is happens, (kind, verb)
