"""A collective verb takes no more rounds, calls of the store and files of shardow than it did: ranks wait in each
round, and a reader walks through each file.

The numbers are those of ``python python/tests/guards/verb_counts.py``. Rounds and files are the same each time. Calls
of the store are not: which rank comes first to a round decides whose words are read again, so a call for each round may
come beside those recorded. One more of every rank is twice as many, and is noticed.
"""

from __future__ import annotations

from dataclasses import astuple

from verb_counts import Counts, measured

#: By verb and kind of sharding: rounds, calls of the store on both ranks together, files.
RECORDED = {
    "EMA(), fsdp2": Counts(1, 8, 25),
    "update(), fsdp2": Counts(0, 0, 7),
    "full_state_dict(), fsdp2": Counts(2, 23, 21),
    "swapped(), in, fsdp2": Counts(1, 8, 9),
    "swapped(), out, fsdp2": Counts(1, 9, 6),
    "EMA.save(), fsdp2": Counts(4, 41, 20),
    "EMA.load(), fsdp2": Counts(3, 34, 14),
    "save(), fsdp2": Counts(4, 42, 29),
    "load(), fsdp2": Counts(3, 32, 32),
    "materialize(), fsdp2": Counts(3, 32, 32),
    "merge(), fsdp2": Counts(6, 59, 15),
    "Checkpoints.save().wait(), fsdp2": Counts(6, 62, 38),
    "Checkpoints.restore(), fsdp2": Counts(4, 46, 36),
    "swapped(), in, ddp": Counts(2, 19, 12),
    "swapped(), out, ddp": Counts(2, 18, 9),
}
ATTEMPTS = (
    5  # on a machine that is busy a rank asks the store more often whether the others have come: the least counts
)
MEANT = "Where that is meant, write the new number into RECORDED and say in the commit why"


def wrong(counts: dict[str, Counts]) -> list[str]:
    sentences = []
    for verb, recorded in RECORDED.items():
        for what in ("rounds", "operations", "files"):
            current, before = getattr(counts[verb], what), getattr(recorded, what)
            by_chance = recorded.rounds if what == "operations" else 0
            if current > before + by_chance:
                sentences.append(f"{verb}: {current} {what}, {before} are recorded. {MEANT}")
            elif current < before and what == "rounds":
                sentences.append(f"{verb}: {current} rounds in place of {before}. Lower its numbers in RECORDED")
    return sentences


def least(counts: Counts, again: Counts) -> Counts:
    return Counts(*map(min, astuple(counts), astuple(again)))


def test_verbs_take_no_more_rounds_calls_and_files_than_recorded() -> None:
    counts = measured()
    for _ in range(ATTEMPTS - 1):
        if wrong(counts):
            counts = {verb: least(counts[verb], again) for verb, again in measured().items()}
    assert counts.keys() == RECORDED.keys()
    assert wrong(counts) == [], "\n".join(wrong(counts))


def test_what_was_late_once_counts_by_the_other_attempt() -> None:
    assert least(Counts(4, 34, 32), Counts(4, 33, 33)) == Counts(4, 33, 32)


def test_who_comes_first_changes_a_call_for_each_round() -> None:
    rounds, operations, files = astuple(RECORDED["load(), fsdp2"])
    assert wrong({**RECORDED, "load(), fsdp2": Counts(rounds, operations + rounds, files)}) == []
    assert wrong({**RECORDED, "load(), fsdp2": Counts(rounds, operations + 2 * rounds, files)}) != []


def test_each_number_that_changed_is_named() -> None:
    counts = {**RECORDED, "update(), fsdp2": Counts(1, 9, 7), "load(), fsdp2": Counts(2, 20, 32)}
    assert [sentence.split(".")[0] for sentence in wrong(counts)] == [
        "update(), fsdp2: 1 rounds, 0 are recorded",
        "update(), fsdp2: 9 operations, 0 are recorded",
        "load(), fsdp2: 2 rounds in place of 3",
    ]
