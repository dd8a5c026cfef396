"""A collective verb takes no more rounds, calls of the store and files of shardow than it did: ranks wait in each
round, and a reader walks through each file.

The numbers are those of ``python -m benchmarks.paths``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.paths import Counts, measured

#: By verb and kind of sharding: rounds, calls of the store on both ranks together, files.
RECORDED = {
    "EMA(), fsdp2": Counts(4, 33, 37),
    "update(), fsdp2": Counts(0, 0, 12),
    "full_state_dict(), fsdp2": Counts(6, 58, 31),
    "swapped(), in, fsdp2": Counts(4, 37, 24),
    "swapped(), out, fsdp2": Counts(1, 11, 19),
    "EMA.save(), fsdp2": Counts(16, 145, 25),
    "EMA.load(), fsdp2": Counts(10, 100, 19),
    "save(), fsdp2": Counts(17, 155, 37),
    "load(), fsdp2": Counts(7, 72, 42),
    "materialize(), fsdp2": Counts(7, 72, 43),
    "merge(), fsdp2": Counts(25, 231, 18),
    "Checkpoints.save().wait(), fsdp2": Counts(21, 204, 45),
    "Checkpoints.restore(), fsdp2": Counts(31, 315, 47),
    "swapped(), in, ddp": Counts(5, 44, 26),
    "swapped(), out, ddp": Counts(2, 18, 21),
}
ATTEMPTS = 3  # on a machine that is busy a rank asks the store more often whether the others have come
MEANT = "Where that is meant, write the new number into RECORDED and say in the commit why"


def wrong(counts: dict[str, Counts]) -> list[str]:
    sentences = []
    for verb, recorded in RECORDED.items():
        for what in ("rounds", "operations", "files"):
            current, before = getattr(counts[verb], what), getattr(recorded, what)
            if current > before:
                sentences.append(f"{verb}: {current} {what}, {before} are recorded. {MEANT}")
            elif current < before and what == "rounds":
                sentences.append(f"{verb}: {current} rounds in place of {before}. Lower its numbers in RECORDED")
    return sentences


def test_verbs_take_no_more_rounds_calls_and_files_than_recorded() -> None:
    sentences = ["not measured"]
    for _ in range(ATTEMPTS):
        if sentences:
            counts = measured()
            assert counts.keys() == RECORDED.keys()
            sentences = wrong(counts)
    assert sentences == [], "\n".join(sentences)


def test_each_number_that_changed_is_named() -> None:
    counts = {**RECORDED, "update(), fsdp2": Counts(1, 9, 12), "load(), fsdp2": Counts(6, 60, 42)}
    assert [sentence.split(".")[0] for sentence in wrong(counts)] == [
        "update(), fsdp2: 1 rounds, 0 are recorded",
        "update(), fsdp2: 9 operations, 0 are recorded",
        "load(), fsdp2: 6 rounds in place of 7",
    ]
